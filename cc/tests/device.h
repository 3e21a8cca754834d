// A CUDA device and its memory, without CUDA headers.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_DEVICE_H_
#define JAX_FUSED_ADAMW_CC_TESTS_DEVICE_H_

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/driver.h"
#include "tests/buffers.h"

namespace jfa::cuda {

using DevicePointer = unsigned long long;

// The driver's functions that only a test needs.
struct Memory {
  int (*Init)(unsigned);
  int (*DevicePrimaryCtxRetain)(CuContext*, CuDevice);
  int (*CtxSetCurrent)(CuContext);
  int (*CtxSynchronize)();
  int (*StreamCreate)(CuStream*, unsigned);
  int (*MemAlloc)(DevicePointer*, std::size_t);
  int (*MemFree)(DevicePointer);
  int (*MemcpyHtoD)(DevicePointer, const void*, std::size_t);
  int (*MemcpyDtoH)(void*, DevicePointer, std::size_t);
};

inline void Require(int result, const char* what) {
  if (result == 0) return;
  std::printf("FAILED: %s: %s\n", what, GetDriver().Describe(result).c_str());
  std::exit(1);
}

inline Memory OpenDevice() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) Require(1, "there is no NVIDIA driver");
  Memory memory;
  const auto find = [&](auto* function, const char* name) {
    *reinterpret_cast<void**>(function) = dlsym(library, name);
    if (*function == nullptr) Require(1, name);
  };
  find(&memory.Init, "cuInit");
  find(&memory.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(&memory.CtxSetCurrent, "cuCtxSetCurrent");
  find(&memory.CtxSynchronize, "cuCtxSynchronize");
  find(&memory.StreamCreate, "cuStreamCreate");
  find(&memory.MemAlloc, "cuMemAlloc_v2");
  find(&memory.MemFree, "cuMemFree_v2");
  find(&memory.MemcpyHtoD, "cuMemcpyHtoD_v2");
  find(&memory.MemcpyDtoH, "cuMemcpyDtoH_v2");
  CuContext context = nullptr;
  Require(memory.Init(0), "cuInit");
  Require(memory.DevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
  Require(memory.CtxSetCurrent(context), "cuCtxSetCurrent");
  return memory;
}

inline const Memory& Device() {
  static const Memory memory = OpenDevice();
  return memory;
}

// `bytes` that begin `offset` bytes into an allocation which ends with them.
class DeviceBuffer {
 public:
  DeviceBuffer(std::size_t bytes, std::size_t offset) : bytes_(bytes), offset_(offset) {
    const std::vector<unsigned char> canary(bytes + offset, tests::kCanary);
    Require(Device().MemAlloc(&base_, canary.empty() ? 1 : canary.size()), "cuMemAlloc");
    Copy(base_, canary.data(), canary.size());
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { Device().MemFree(base_); }

  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(base_ + offset_);
  }
  void Write(const std::vector<unsigned char>& host) { Copy(base_ + offset_, host.data(), bytes_); }
  std::vector<unsigned char> Read() const {
    std::vector<unsigned char> host(bytes_ + offset_);
    Require(Device().MemcpyDtoH(host.data(), base_, host.size()), "cuMemcpyDtoH");
    for (std::size_t i = 0; i < offset_; ++i) intact_ = intact_ && host[i] == tests::kCanary;
    return {host.begin() + static_cast<std::ptrdiff_t>(offset_), host.end()};
  }
  bool Intact() const { return intact_; }  // as far as it was read

 private:
  static void Copy(DevicePointer to, const void* from, std::size_t bytes) {
    if (bytes > 0) Require(Device().MemcpyHtoD(to, from, bytes), "cuMemcpyHtoD");
  }

  std::size_t bytes_;
  std::size_t offset_;
  DevicePointer base_ = 0;
  mutable bool intact_ = true;
};

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_TESTS_DEVICE_H_
