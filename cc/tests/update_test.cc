// Drives the CPU update without JAX: any alignment, exact allocations, every instruction set.
//
// Each buffer is one exact heap allocation with canaries on both sides, so that an access out of
// bounds is found here by the canary and in a sanitizer build by the allocator. Exits with the
// number of failures.
#include "cpu/update.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cases.h"

namespace jfa::cpu {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

constexpr std::size_t kCanaryBytes = 64;
constexpr unsigned char kCanary = 0xa5;

// `bytes` at an address that is `offset` bytes behind a 64-byte boundary.
class GuardedBuffer {
 public:
  GuardedBuffer(std::size_t bytes, std::size_t offset)
      : bytes_(bytes), storage_(64 + offset + 2 * kCanaryBytes + bytes, kCanary) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data() + kCanaryBytes);
    data_ = reinterpret_cast<unsigned char*>((address + 63) / 64 * 64 + offset);
    std::memset(data_, 0, bytes);
  }

  template <typename T>
  T* As() {
    return reinterpret_cast<T*>(data_);
  }
  const unsigned char* bytes() const { return data_; }
  std::size_t size() const { return bytes_; }

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
  std::size_t bytes_;
  std::vector<unsigned char> storage_;
  unsigned char* data_;
};

// A pool with the interface that ParallelFor needs; num_threads 0 runs tasks only when joined.
struct ThreadPool {
  std::vector<std::thread> threads;

  template <typename Task>
  void Schedule(Task&& task) {
    threads.emplace_back(std::forward<Task>(task));
  }
  ~ThreadPool() {
    for (std::thread& thread : threads) thread.join();
  }
};

// A pool that never starts anything before the loop has returned: the deadlock of a handler that
// occupies the only thread.
struct BusyPool {
  std::vector<std::function<void()>> tasks;

  template <typename Task>
  void Schedule(Task&& task) {
    tasks.emplace_back(std::forward<Task>(task));
  }
  ~BusyPool() {
    for (const auto& task : tasks) task();
  }
};

std::vector<unsigned char> Run(const InstructionSet& isa, const Case& c, std::int64_t num_threads) {
  const std::size_t total = c.n * static_cast<std::size_t>(c.members);
  const auto make = [&](DType dtype) {
    const std::size_t size = static_cast<std::size_t>(SizeOf(dtype));
    return GuardedBuffer(total * size, c.offset * size);
  };
  std::vector<GuardedBuffer> in;
  for (int i = 0; i < 5; ++i) {
    in.push_back(make(InputDType(c, i)));
    FillInput(in.back().As<void>(), c, i);
  }
  std::vector<GuardedBuffer> out;
  out.push_back(make(c.param_dtype));
  for (int i = 0; i < 3; ++i) out.push_back(make(DType::kFloat32));
  const auto result = [&](std::size_t i, std::size_t input) -> GuardedBuffer& {
    const bool aliased = c.in_place && (i > 0 || c.write_params);
    return aliased ? in[input] : out[i];
  };

  const bool has_max = c.amsgrad != Amsgrad::kOff;
  LeafOperands leaf;
  leaf.param = in[0].bytes();
  leaf.grad = in[1].bytes();
  leaf.mu = in[2].As<float>();
  leaf.nu = in[3].As<float>();
  leaf.nu_max = has_max ? in[4].As<float>() : nullptr;
  leaf.out = result(0, 0).As<void>();
  leaf.mu_out = result(1, 2).As<float>();
  leaf.nu_out = result(2, 3).As<float>();
  leaf.nu_max_out = has_max ? result(3, 4).As<float>() : nullptr;
  leaf.num_elements = static_cast<long long>(total);
  leaf.param_dtype = c.param_dtype;
  leaf.grad_dtype = c.grad_dtype;
  leaf.decays = true;

  const HostScalars scalars(c.skip);
  StepOperands operands;
  operands.step = {&scalars.step, false};
  operands.skip_update = {&scalars.skip, false};
  operands.hyper_bits = scalars.hyper_bits;

  const UpdateOptions options{c.amsgrad, c.nesterov, true, c.write_params, c.members};
  if (num_threads == 0) {
    BusyPool pool;
    Update(pool, 4, isa, operands, {leaf}, options);
  } else {
    ThreadPool pool;
    Update(pool, num_threads, isa, operands, {leaf}, options);
  }

  for (const GuardedBuffer& buffer : in) Check(buffer.Intact(), "canary, " + c.Name(isa.name));
  for (const GuardedBuffer& buffer : out) Check(buffer.Intact(), "canary, " + c.Name(isa.name));
  std::vector<unsigned char> bytes;
  for (std::size_t i = 0; i < (has_max ? 4u : 3u); ++i) {
    const GuardedBuffer& buffer = result(i, i == 0 ? 0 : i + 1);
    bytes.insert(bytes.end(), buffer.bytes(), buffer.bytes() + buffer.size());
  }
  return bytes;
}

// Reference of each case: the portable kernel, aligned, out of place, on one thread.
void CheckCase(const InstructionSet* sets, int num_sets, const Case& c) {
  Case plain = c;
  plain.offset = 0;
  plain.in_place = false;
  const auto expected = Run(sets[num_sets - 1], plain, 1);
  for (int i = 0; i < num_sets; ++i) {
    Check(Run(sets[i], c, 1) == expected, "bits, " + c.Name(sets[i].name));
  }
}

void TestAlignments(const InstructionSet* sets, int num_sets) {
  for (const std::size_t n : {1, 3, 15, 16, 17, 33, 1023, 1024, 1025, 4099}) {
    for (std::size_t offset = 0; offset < 16; ++offset) {
      for (const DType param : kDTypes) {
        for (const DType grad : kDTypes) {
          CheckCase(sets, num_sets,
                    {n, offset, param, grad, Amsgrad::kUncorrected, true, true, false, true, 1});
        }
      }
    }
  }
}

void TestOptions(const InstructionSet* sets, int num_sets) {
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType dtype : kDTypes) {
      for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
        for (const std::int64_t members : {1, 3}) {
          CheckCase(sets, num_sets,
                    {1000, 1, dtype, dtype, amsgrad, members == 1, (flags & 1) != 0,
                     (flags & 2) != 0, (flags & 4) != 0, members});
        }
      }
    }
  }
}

void TestThreads(const InstructionSet& isa) {
  const std::size_t many = 5 * kBlockElements + 17;
  const Case c{many, 0, DType::kFloat32, DType::kBfloat16, Amsgrad::kOff, false, true, false,
               true, 1};
  const auto expected = Run(isa, c, 1);
  for (const std::int64_t num_threads : {2, 4, 16}) {
    Check(Run(isa, c, num_threads) == expected, "threads " + std::to_string(num_threads));
  }
  Check(Run(isa, c, 0) == expected, "a pool that is busy until the loop has returned");
}

// Every float32 whose 13 low bits vary the rounding, and every 16-bit pattern both ways.
void TestConversions() {
  for (Word32 bits = 0; bits <= 0xffff; ++bits) {
    const Float16 half{static_cast<Word16>(bits)};
    const Bfloat16 brain{static_cast<Word16>(bits)};
    const bool half_nan = (bits & 0x7fffu) > 0x7c00u;
    const bool brain_nan = (bits & 0x7fffu) > 0x7f80u;
    Check(half_nan ? Load(half) != Load(half) : Store<Float16>(Load(half)).bits == bits, "float16");
    Check(brain_nan ? Load(brain) != Load(brain) : Store<Bfloat16>(Load(brain)).bits == bits,
          "bfloat16");
  }
#if defined(__FLT16_MAX__)
  for (std::uint64_t word = 0; word <= 0xffffffffu; word += 997) {
    const float value = BitsToFloat(static_cast<Word32>(word));
    if (value != value) continue;
    const _Float16 expected = static_cast<_Float16>(value);
    Word16 expected_bits;
    std::memcpy(&expected_bits, &expected, sizeof(expected_bits));
    Check(Store<Float16>(value).bits == expected_bits, "rounding to float16");
  }
#endif
}

int Main() {
  int num_sets = 0;
  const InstructionSet* sets = SupportedInstructionSets(&num_sets);
  for (int i = 0; i < num_sets; ++i) std::printf("instruction set: %s\n", sets[i].name);
  TestConversions();
  TestAlignments(sets, num_sets);
  TestOptions(sets, num_sets);
  TestThreads(sets[0]);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jfa::cpu

int main() { return jfa::cpu::Main(); }
