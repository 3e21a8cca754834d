// Arrays of any dtype, and host memory that tells whether something was written beside it.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_BUFFERS_H_
#define JAX_FUSED_ADAMW_CC_TESTS_BUFFERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/dtype.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

namespace jfa::tests {

// Those of float32 arithmetic, and with float64 all.
inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16};
inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16,
                                       DType::kFloat64};

// By way of float32, except of float64.
inline void StoreAs(DType dtype, void* array, std::size_t i, double value) {
  const float rounded = static_cast<float>(value);
  if (dtype == DType::kFloat64) static_cast<double*>(array)[i] = value;
  if (dtype == DType::kFloat32) static_cast<float*>(array)[i] = rounded;
  if (dtype == DType::kBfloat16) static_cast<Bfloat16*>(array)[i] = Store<Bfloat16>(rounded);
  if (dtype == DType::kFloat16) static_cast<Float16*>(array)[i] = Store<Float16>(rounded);
}

inline double LoadAs(DType dtype, const void* array, std::size_t i) {
  if (dtype == DType::kFloat64) return static_cast<const double*>(array)[i];
  if (dtype == DType::kFloat32) return static_cast<const float*>(array)[i];
  if (dtype == DType::kBfloat16) return Load(static_cast<const Bfloat16*>(array)[i]);
  return Load(static_cast<const Float16*>(array)[i]);
}

inline void UnifyNans(DType dtype, std::vector<unsigned char>* bytes) {
  const std::size_t n = bytes->size() / static_cast<std::size_t>(SizeOf(dtype));
  for (std::size_t i = 0; i < n; ++i) {
    const double value = LoadAs(dtype, bytes->data(), i);
    if (value != value) StoreAs(dtype, bytes->data(), i, BitsToFloat(kNanBits));
  }
}

template <typename T>
std::vector<unsigned char> BytesOf(const T* values, std::size_t n) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(values);
  return {bytes, bytes + n * sizeof(T)};
}

inline constexpr unsigned char kCanary = 0xa5;

// `bytes` of host memory at an address that is `offset` bytes behind a 64-byte boundary, between
// canaries. In a build with the address sanitizer reading a canary is an error too.
class GuardedBuffer {
 public:
  GuardedBuffer(std::size_t bytes, std::size_t offset)
      : bytes_(bytes), storage_(64 + offset + 2 * kCanaryBytes + bytes, kCanary) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data() + kCanaryBytes);
    data_ = reinterpret_cast<unsigned char*>((address + 63) / 64 * 64 + offset);
    ASAN_POISON_MEMORY_REGION(storage_.data(), FrontBytes());
    ASAN_POISON_MEMORY_REGION(data_ + bytes_, BackBytes());
  }
  ~GuardedBuffer() { Unpoison(); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }
  void Write(const std::vector<unsigned char>& host) { std::copy(host.begin(), host.end(), data_); }
  std::vector<unsigned char> Read() const { return {data_, data_ + bytes_}; }

  bool Intact() const {
    Unpoison();
    const auto is_canary = [](unsigned char byte) { return byte == kCanary; };
    return std::all_of(storage_.data(), storage_.data() + FrontBytes(), is_canary) &&
           std::all_of(data_ + bytes_, data_ + bytes_ + BackBytes(), is_canary);
  }

 private:
  static constexpr std::size_t kCanaryBytes = 64;
  std::size_t FrontBytes() const { return static_cast<std::size_t>(data_ - storage_.data()); }
  std::size_t BackBytes() const { return storage_.size() - FrontBytes() - bytes_; }
  void Unpoison() const { ASAN_UNPOISON_MEMORY_REGION(storage_.data(), storage_.size()); }

  std::size_t bytes_;
  std::vector<unsigned char> storage_;
  unsigned char* data_;
};

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_BUFFERS_H_
