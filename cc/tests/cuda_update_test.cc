// Drives the CUDA update without JAX and compares its bits with the CPU's. Each array is one exact
// device allocation, so that compute-sanitizer finds the first byte beyond it; a pooled allocator
// would hide it. Exits with 1 on a failure.
#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <utility>

#include "cpu/update.h"
#include "cuda/update.h"
#include "tests/cases.h"

namespace jfa::cuda {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

using DevicePointer = unsigned long long;

// The driver's functions that only a test needs.
struct Memory {
  int (*Init)(unsigned);
  int (*DevicePrimaryCtxRetain)(CuContext*, CuDevice);
  int (*CtxSetCurrent)(CuContext);
  int (*CtxSynchronize)();
  int (*MemAlloc)(DevicePointer*, std::size_t);
  int (*MemFree)(DevicePointer);
  int (*MemcpyHtoD)(DevicePointer, const void*, std::size_t);
  int (*MemcpyDtoH)(void*, DevicePointer, std::size_t);
};

void Require(int result, const char* what) {
  if (result == 0) return;
  std::printf("FAILED: %s: %s\n", what, GetDriver().Describe(result).c_str());
  std::exit(1);
}

Memory OpenDevice() {
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

const Memory& Device() {
  static const Memory memory = OpenDevice();
  return memory;
}

// `bytes` that begin `offset` bytes into an allocation which ends with them.
class DeviceBuffer {
 public:
  DeviceBuffer(std::size_t bytes, std::size_t offset) : bytes_(bytes), offset_(offset) {
    const std::size_t exact = bytes + offset;
    Require(Device().MemAlloc(&base_, exact == 0 ? 1 : exact), "cuMemAlloc");
    const std::vector<unsigned char> canary(bytes + offset, kCanary);
    Require(Device().MemcpyHtoD(base_, canary.data(), canary.size()), "cuMemcpyHtoD");
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : bytes_(other.bytes_), offset_(other.offset_), base_(std::exchange(other.base_, 0)) {}
  ~DeviceBuffer() {
    if (base_ != 0) Device().MemFree(base_);
  }

  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(base_ + offset_);
  }
  void Write(const void* host) {
    if (bytes_ > 0) Require(Device().MemcpyHtoD(base_ + offset_, host, bytes_), "cuMemcpyHtoD");
  }
  std::vector<unsigned char> Read() const {
    std::vector<unsigned char> host(bytes_ + offset_);
    Require(Device().MemcpyDtoH(host.data(), base_, host.size()), "cuMemcpyDtoH");
    for (std::size_t i = 0; i < offset_; ++i) intact_ = intact_ && host[i] == kCanary;
    return {host.begin() + static_cast<std::ptrdiff_t>(offset_), host.end()};
  }
  bool intact() const { return intact_; }

 private:
  static constexpr unsigned char kCanary = 0xa5;
  std::size_t bytes_;
  std::size_t offset_;
  DevicePointer base_ = 0;
  mutable bool intact_ = true;
};

struct Inline {  // a thread pool of none
  template <typename Task>
  void Schedule(Task&& task) {
    task();
  }
};

std::size_t Bytes(const Case& c, int input) {
  return c.n * static_cast<std::size_t>(c.members) *
         static_cast<std::size_t>(SizeOf(InputDType(c, input)));
}

LeafOperands MakeLeaf(const Case& c, void* const in[5], void* const out[4]) {
  const bool has_max = c.amsgrad != Amsgrad::kOff;
  LeafOperands leaf;
  leaf.param = in[0];
  leaf.grad = in[1];
  leaf.mu = static_cast<float*>(in[2]);
  leaf.nu = static_cast<float*>(in[3]);
  leaf.nu_max = has_max ? static_cast<float*>(in[4]) : nullptr;
  leaf.out = out[0];
  leaf.mu_out = static_cast<float*>(out[1]);
  leaf.nu_out = static_cast<float*>(out[2]);
  leaf.nu_max_out = has_max ? static_cast<float*>(out[3]) : nullptr;
  leaf.num_elements = static_cast<long long>(c.n * static_cast<std::size_t>(c.members));
  leaf.param_dtype = c.param_dtype;
  leaf.grad_dtype = c.grad_dtype;
  leaf.decays = true;
  return leaf;
}

std::vector<unsigned char> RunOnCpu(const Case& c) {
  std::vector<std::vector<unsigned char>> arrays;
  void* in[5];
  for (int i = 0; i < 5; ++i) {
    arrays.emplace_back(Bytes(c, i));
    in[i] = arrays.back().data();
    FillInput(in[i], c, i);
  }
  std::vector<unsigned char> out(Bytes(c, 0));
  void* outputs[4] = {out.data(), in[2], in[3], in[4]};
  const HostScalars scalars(c.skip);
  StepOperands operands;
  operands.step = {&scalars.step, false};
  operands.skip_update = {&scalars.skip, false};
  operands.hyper_bits = scalars.hyper_bits;
  Inline pool;
  cpu::Update(pool, 1, *cpu::SelectInstructionSet(), operands, {MakeLeaf(c, in, outputs)},
              {c.amsgrad, c.nesterov, true, c.write_params, c.members});
  std::vector<unsigned char> bytes = out;
  for (int i = 2; i < (c.amsgrad != Amsgrad::kOff ? 5 : 4); ++i) {
    bytes.insert(bytes.end(), arrays[i].begin(), arrays[i].end());
  }
  return bytes;
}

std::vector<unsigned char> RunOnGpu(const Case& c) {
  std::vector<DeviceBuffer> arrays;
  void* in[5];
  for (int i = 0; i < 5; ++i) {
    std::vector<unsigned char> host(Bytes(c, i));
    FillInput(host.data(), c, i);
    const std::size_t element = static_cast<std::size_t>(SizeOf(InputDType(c, i)));
    arrays.emplace_back(host.size(), c.offset * element);
    arrays.back().Write(host.data());
    in[i] = arrays.back().As<void>();
  }
  std::vector<DeviceBuffer> apart;
  for (const int i : {0, 2, 3, 4}) {
    const std::size_t element = static_cast<std::size_t>(SizeOf(InputDType(c, i)));
    apart.emplace_back(Bytes(c, i), c.offset * element);
  }
  const auto result = [&](std::size_t output, std::size_t input) -> DeviceBuffer& {
    const bool aliased = c.in_place && (output > 0 || c.write_params);
    return aliased ? arrays[input] : apart[output];
  };
  void* outputs[4] = {result(0, 0).As<void>(), result(1, 2).As<void>(), result(2, 3).As<void>(),
                      result(3, 4).As<void>()};

  const HostScalars scalars(c.skip);
  DeviceBuffer step(sizeof(scalars.step), 0);
  DeviceBuffer skip(sizeof(scalars.skip), 0);
  DeviceBuffer hyper_bits(sizeof(scalars.hyper_bits), 0);
  step.Write(&scalars.step);
  skip.Write(&scalars.skip);
  hyper_bits.Write(scalars.hyper_bits);
  StepOperands operands;
  operands.step = {step.As<int>(), false};
  operands.skip_update = {skip.As<unsigned char>(), false};
  operands.hyper_bits = hyper_bits.As<Word32>();

  const std::vector<LeafOperands> leaves = {MakeLeaf(c, in, outputs)};
  const UpdateOptions options{c.amsgrad, c.nesterov, true, c.write_params, c.members};
  std::string error = PrepareUpdate(leaves, options);
  if (error.empty()) error = Update(nullptr, operands, leaves, options);
  Check(error.empty(), error);
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");

  std::vector<unsigned char> bytes;
  for (std::size_t i = 0; i < (c.amsgrad != Amsgrad::kOff ? 4u : 3u); ++i) {
    const DeviceBuffer& buffer = result(i, i == 0 ? 0 : i + 1);
    const std::vector<unsigned char> part = buffer.Read();
    bytes.insert(bytes.end(), part.begin(), part.end());
    Check(buffer.intact(), "canary, " + c.Name("cuda"));
  }
  return bytes;
}

void CheckCase(const Case& c) { Check(RunOnGpu(c) == RunOnCpu(c), "bits, " + c.Name("cuda")); }

// Every rule and pair of dtypes at every element offset, sizes around a thread's 4 elements and a
// block's 512.
void TestShapesAndOffsets() {
  const std::size_t sizes[] = {0,   1,   2,   3,   4,   5,   7,    8,    31,   127, 128,
                               129, 509, 511, 512, 513, 516, 1023, 1024, 1027, 2049};
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const bool nesterov : {false, true}) {
      for (const DType param : kDTypes) {
        for (const DType grad : kDTypes) {
          for (std::size_t offset = 0; offset < 16; ++offset) {
            const std::size_t n = sizes[next++ % std::size(sizes)];
            CheckCase({n, offset, param, grad, amsgrad, nesterov, true, false, true, 1});
          }
          for (const std::size_t n : sizes) {
            CheckCase({n, next++ % 3, param, grad, amsgrad, nesterov, next % 2 == 0, false,
                       next % 3 != 0, 1});
          }
        }
      }
    }
  }
}

void TestOptions() {
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType dtype : kDTypes) {
      for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
        for (const std::int64_t members : {1, 3}) {
          CheckCase({1001, 0, dtype, dtype, amsgrad, false, (flags & 1) != 0, (flags & 2) != 0,
                     (flags & 4) != 0, members});
        }
      }
    }
  }
}

}  // namespace
}  // namespace jfa::cuda

int main() {
  jfa::cuda::TestShapesAndOffsets();
  jfa::cuda::TestOptions();
  std::printf("%d failures\n", jfa::tests::failures);
  return jfa::tests::failures == 0 ? 0 : 1;
}
