// What both harnesses test: cases, their arrays, the step's operands.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
#define JAX_FUSED_ADAMW_CC_TESTS_CASES_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/adamw.h"
#include "core/dtype.h"
#include "core/leaf.h"
#include "core/options.h"
#include "core/scalars.h"

namespace jfa::tests {

inline int failures = 0;

inline void Check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16};

// Pseudo-random values in [-1, 1), or their magnitudes.
inline void Fill(void* array, DType dtype, std::size_t n, unsigned seed, bool positive) {
  for (std::size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    float value = static_cast<float>(static_cast<int>(seed >> 8) - (1 << 23)) / (1 << 23);
    if (positive && value < 0) value = -value;
    if (dtype == DType::kFloat32) static_cast<float*>(array)[i] = value;
    if (dtype == DType::kBfloat16) static_cast<Bfloat16*>(array)[i] = Store<Bfloat16>(value);
    if (dtype == DType::kFloat16) static_cast<Float16*>(array)[i] = Store<Float16>(value);
  }
}

// Whether the old moments are zero. kNull has no buffers for them, as UpdateOptions says, and must
// give the bits of kFilled.
enum class ZeroMoments { kNo, kFilled, kNull };

struct Case {
  std::size_t n;
  std::size_t offset;  // elements
  DType param_dtype;
  DType grad_dtype;
  Amsgrad amsgrad;
  bool nesterov;
  bool write_params;
  bool skip;
  bool in_place;  // an output takes the buffer of its input, if there is one
  std::int64_t members;
  ZeroMoments zero_moments;

  std::string Name(const char* kernel) const {
    return std::string(kernel) + " n=" + std::to_string(n) + " offset=" + std::to_string(offset) +
           " param=" + std::to_string(static_cast<int>(param_dtype)) +
           " grad=" + std::to_string(static_cast<int>(grad_dtype)) +
           " amsgrad=" + std::to_string(static_cast<int>(amsgrad)) +
           " nesterov=" + std::to_string(nesterov) +
           " write_params=" + std::to_string(write_params) + " skip=" + std::to_string(skip) +
           " in_place=" + std::to_string(in_place) + " members=" + std::to_string(members) +
           " zero_moments=" + std::to_string(static_cast<int>(zero_moments));
  }

  bool has_nu_max() const { return amsgrad != Amsgrad::kOff; }
  bool null_moments() const { return zero_moments == ZeroMoments::kNull; }
  std::size_t total() const { return n * static_cast<std::size_t>(members); }

  UpdateOptions Options() const {
    return {amsgrad, nesterov, true, write_params, null_moments(), members};
  }

  // The case that must have the same result: aligned, out of place, every input in a buffer.
  Case Plain() const {
    Case plain = *this;
    plain.offset = 0;
    plain.in_place = false;
    if (null_moments()) plain.zero_moments = ZeroMoments::kFilled;
    return plain;
  }
};

// The arrays that a leaf may have, inputs first.
enum Array { kParam, kGrad, kMu, kNu, kNuMax, kOut, kMuOut, kNuOut, kNuMaxOut, kNumArrays };

inline bool IsInput(int array) { return array < kOut; }

inline DType ArrayDType(const Case& c, int array) {
  if (array == kGrad) return c.grad_dtype;
  return array == kParam || array == kOut ? c.param_dtype : DType::kFloat32;
}

inline std::size_t ElementBytes(const Case& c, int array) {
  return static_cast<std::size_t>(SizeOf(ArrayDType(c, array)));
}

inline std::size_t ArrayBytes(const Case& c, int array) {
  return c.total() * ElementBytes(c, array);
}

// The array that takes an output: its own or its input's.
inline int ArrayOfOutput(const Case& c, int output) {
  const bool has_input = output == kOut ? c.write_params : !c.null_moments();
  if (!c.in_place || !has_input) return output;
  return output == kOut ? kParam : kMu + (output - kMuOut);
}

inline bool HasArray(const Case& c, int array) {
  if ((array == kNuMax || array == kNuMaxOut) && !c.has_nu_max()) return false;
  if (!IsInput(array)) return ArrayOfOutput(c, array) == array;
  return array == kParam || array == kGrad || !c.null_moments();
}

// The seed tells leaves apart.
inline void FillInput(void* array, const Case& c, int input, unsigned seed) {
  if (input >= kMu && c.zero_moments != ZeroMoments::kNo) {
    std::fill_n(static_cast<unsigned char*>(array), ArrayBytes(c, input), 0);
  } else {
    const unsigned array_seed = kOut * seed + static_cast<unsigned>(input) + 1;
    Fill(array, ArrayDType(c, input), c.total(), array_seed, input >= kNu);
  }
}

// `address(i)` is where array i lies.
template <typename Address>
LeafOperands MakeLeaf(const Case& c, const Address& address) {
  const auto array = [&](int i) -> void* { return HasArray(c, i) ? address(i) : nullptr; };
  const auto output = [&](int i) { return array(ArrayOfOutput(c, i)); };
  LeafOperands leaf;
  leaf.param = array(kParam);
  leaf.grad = array(kGrad);
  leaf.mu = static_cast<float*>(array(kMu));
  leaf.nu = static_cast<float*>(array(kNu));
  leaf.nu_max = static_cast<float*>(array(kNuMax));
  leaf.out = output(kOut);
  leaf.mu_out = static_cast<float*>(output(kMuOut));
  leaf.nu_out = static_cast<float*>(output(kNuOut));
  leaf.nu_max_out = static_cast<float*>(output(kNuMaxOut));
  leaf.num_elements = static_cast<long long>(c.total());
  leaf.param_dtype = c.param_dtype;
  leaf.grad_dtype = c.grad_dtype;
  leaf.decays = true;
  return leaf;
}

inline constexpr unsigned char kCanary = 0xa5;

// `bytes` of host memory at an address that is `offset` bytes behind a 64-byte boundary.
class GuardedBuffer {
 public:
  GuardedBuffer(std::size_t bytes, std::size_t offset)
      : bytes_(bytes), storage_(64 + offset + 2 * kCanaryBytes + bytes, kCanary) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data() + kCanaryBytes);
    data_ = reinterpret_cast<unsigned char*>((address + 63) / 64 * 64 + offset);
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }
  void Write(const std::vector<unsigned char>& host) { std::copy(host.begin(), host.end(), data_); }
  std::vector<unsigned char> Read() const { return {data_, data_ + bytes_}; }

  bool Intact() const {
    for (const unsigned char* p = storage_.data(); p < data_; ++p) {
      if (*p != kCanary) return false;
    }
    for (const unsigned char* p = data_ + bytes_; p < storage_.data() + storage_.size(); ++p) {
      if (*p != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kCanaryBytes = 64;
  std::size_t bytes_;
  std::vector<unsigned char> storage_;
  unsigned char* data_;
};

// The arrays that a case has, each in a Buffer, of the host or a device. Outputs begin as canaries:
// one that is not written differs from the expected bits.
template <typename Buffer>
class LeafArrays {
 public:
  explicit LeafArrays(const Case& c) : case_(c) {
    for (int i = 0; i < kNumArrays; ++i) {
      if (!HasArray(c, i)) continue;
      const std::size_t bytes = ArrayBytes(c, i);
      Buffer& buffer = buffers_.try_emplace(i, bytes, c.offset * ElementBytes(c, i)).first->second;
      if (!IsInput(i)) continue;
      std::vector<unsigned char> host(bytes);
      FillInput(host.data(), c, i, 0);
      buffer.Write(host);
    }
  }

  LeafOperands Operands() const {
    return MakeLeaf(case_, [&](int i) { return buffers_.at(i).template As<void>(); });
  }

  // Checks the canaries too.
  std::vector<unsigned char> ReadOutputs(const char* kernel) const {
    std::vector<unsigned char> bytes;
    for (int output = kOut; output <= (case_.has_nu_max() ? kNuMaxOut : kNuOut); ++output) {
      const std::vector<unsigned char> part = buffers_.at(ArrayOfOutput(case_, output)).Read();
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    for (const auto& [array, buffer] : buffers_) {
      Check(buffer.Intact(), "canary, array " + std::to_string(array) + ", " + case_.Name(kernel));
    }
    return bytes;
  }

 private:
  Case case_;
  std::map<int, Buffer> buffers_;
};

// The step's scalars in host memory: nesterov's and maximize's settings are the caller's.
struct HostScalars {
  explicit HostScalars(bool skipped) : skip(skipped) {
    const double hyper[kNumHyper] = {1e-2, 0.9, 0.99, 1e-6, 1e-9, 0.1, 3.0};
    std::memcpy(hyper_bits, hyper, sizeof(hyper_bits));
  }

  StepOperands Operands() const {
    StepOperands operands;
    operands.step = {&step, false};
    operands.skip_update = {&skip, false};
    operands.hyper_bits = hyper_bits;
    return operands;
  }

  int step = 3;
  unsigned char skip;
  Word32 hyper_bits[2 * kNumHyper];
};

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
