// Drives the CUDA update without JAX and compares its bits with the CPU's. In the tests of one leaf
// each array is one exact device allocation, so that compute-sanitizer finds the first byte beyond
// it; a pooled allocator would hide it. Exits with 1 on a failure.
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/update.h"
#include "cuda/table.h"
#include "cuda/tuning.h"
#include "cuda/update.h"
#include "ladder/cuda_launch.h"
#include "tests/cases.h"
#include "tests/device.h"
#include "tests/leaf_set.h"
#include "tests/pools.h"
#include "tests/step_scalars.h"
#include "tests/update_cases.h"

namespace jfa::cuda {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

// `steps` calls, more than one only in place.
void UpdateOnCpu(const std::vector<LeafOperands>& leaves, const Case& c, int steps = 1) {
  const StepScalars<GuardedBuffer> scalars(c, leaves.size());
  InlinePool pool;
  for (int i = 0; i < steps; ++i) {
    cpu::Update(pool, 1, *cpu::SelectInstructionSet(), scalars.Operands(), leaves, c.Options());
  }
  scalars.CheckCounters("cpu", steps);
}

void Prepare(const std::vector<LeafOperands>& leaves, const Case& c) {
  const std::string error = PrepareUpdate(leaves, c.Options());
  Check(error.empty(), error);
}

void Submit(CuStream stream, const StepScalars<DeviceBuffer>& scalars,
            const std::vector<LeafOperands>& leaves, const Case& c) {
  const std::string error = Update(stream, scalars.Operands(), leaves, c.Options());
  Check(error.empty(), error);
}

void UpdateOnGpu(const std::vector<LeafOperands>& leaves, const Case& c) {
  const StepScalars<DeviceBuffer> scalars(c, leaves.size());
  Prepare(leaves, c);
  Submit(nullptr, scalars, leaves, c);
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  scalars.CheckCounters("cuda");
}

void CheckCase(const Case& c) {
  const LeafArrays<GuardedBuffer> host(c.Plain());
  UpdateOnCpu({host.Operands()}, c.Plain());
  const LeafArrays<DeviceBuffer> device(c);
  UpdateOnGpu({device.Operands()}, c);
  Check(device.ReadOutputs("cuda") == host.ReadOutputs("cpu"), "bits, " + c.Name("cuda"));
}

// Around a thread's 4 elements and a block's 512.
constexpr std::size_t kSizes[] = {0,   1,   2,   3,   4,   5,   7,    8,    31,   127, 128,
                                  129, 509, 511, 512, 513, 516, 1023, 1024, 1027, 2049};

// Some calls of each kernel do not count the step. Those of no element are among them: a launch
// only to count is for TestCounters.
Counting CountingOf(std::size_t n) { return n % 2 == 0 ? Counting::kNone : Counting::kShared; }

// Every rule and pair of dtypes at every element offset.
void TestShapesAndOffsets() {
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const bool nesterov : {false, true}) {
      for (const DType param : kDTypes) {
        for (const DType grad : kDTypes) {
          for (std::size_t offset = 0; offset < 16; ++offset) {
            const std::size_t n = kSizes[next++ % std::size(kSizes)];
            CheckCase({n, offset, param, grad, amsgrad, nesterov, true, false, true, 1,
                       ZeroMoments::kNo, CountingOf(n)});
          }
          for (const std::size_t n : kSizes) {
            CheckCase({n, next++ % 3, param, grad, amsgrad, nesterov, next % 2 == 0, false,
                       next % 3 != 0, 1, ZeroMoments::kNo, CountingOf(n)});
          }
        }
      }
    }
  }
}

// The same for a first step. The other options take turns, with a period that is prime to those of
// offset and n.
void TestZeroMoments() {
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType param : kDTypes) {
      for (const DType grad : kDTypes) {
        for (std::size_t offset = 0; offset < 8; ++offset, ++next) {
          const std::size_t flags = next % 17;
          const std::size_t n = kSizes[next % std::size(kSizes)];
          CheckCase({n, offset, param, grad, amsgrad, (flags & 1) != 0, (flags & 2) != 0,
                     (flags & 4) != 0, (flags & 8) != 0, 1, ZeroMoments::kNull, CountingOf(n)});
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
          for (const ZeroMoments zero : {ZeroMoments::kNo, ZeroMoments::kNull}) {
            CheckCase({1001, 0, dtype, dtype, amsgrad, false, (flags & 1) != 0, (flags & 2) != 0,
                       (flags & 4) != 0, members, zero});
          }
        }
      }
    }
  }
}

// The last case has more members than the kernel that counts for them has threads in a block.
void TestCounters() {
  std::vector<Case> cases = CounterCases();
  cases.push_back(CommonCase(1));
  cases.back().members = kThreads + 1;
  cases.back().counting = Counting::kPerMember;
  for (const Case& c : cases) CheckCase(c);
}

void TestClip() {
  for (const Case& c : ClipCases()) CheckCase(c);
}

void TestLrScales() {
  for (const Case& c : LrScaleCases()) CheckCase(c);
}

void TestLowPrecision() {
  for (const std::size_t n : {6, 514, 1028}) {
    for (const Case& c : LowPrecisionCases(n)) CheckCase(c);
  }
}

// bfloat16 moments, which have kernels of their own, at every element offset and place.
void TestBf16Moments() {
  const std::vector<Place> places = Places();
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType grad : {DType::kFloat32, DType::kBfloat16}) {
      for (const std::size_t n : kSizes) {
        Case c = CommonCase(n);
        c.mu_dtype = c.nu_dtype = DType::kBfloat16;
        c.amsgrad = amsgrad;
        c.grad_dtype = grad;
        c.offset = next % 3 == 0 ? next % 16 : 0;
        c.stochastic_moments = next % 5 != 0;
        c.nesterov = next % 2 == 0;
        c.write_params = next % 7 != 0;
        c.in_place = next % 4 != 0;
        c.place = places[next++ % places.size()];
        CheckCase(c);
      }
    }
  }
}

void TestFloat64() {
  for (const std::size_t n : {2, 4, 6, 129, 512, 514, 1028}) {
    for (const Case& c : Float64Cases(n)) CheckCase(c);
  }
}

// Every element offset of a vector and of a 16-byte access, with every gradient dtype.
void TestFloat64Offsets() {
  std::size_t next = 0;
  for (const DType grad : kAllDTypes) {
    for (std::size_t offset = 0; offset < 8; ++offset) {
      for (const std::size_t n : kSizes) {
        Case c = Float64Case(n);
        c.grad_dtype = grad;
        c.offset = offset;
        c.in_place = next++ % 2 == 0;
        c.has_ema = next % 3 == 0;
        c.counting = CountingOf(n);
        CheckCase(c);
      }
    }
  }
}

void CheckLeaves(const LeafSet& set, const std::vector<std::size_t>& indices, const Case& c) {
  std::vector<unsigned char> host = set.image();
  DeviceBuffer device(host.size(), 0);
  device.Write(host);
  UpdateOnCpu(set.Leaves(indices, host.data()), c);
  UpdateOnGpu(set.Leaves(indices, device.As<unsigned char>()), c);
  Check(device.Read() == host,
        "bits of " + std::to_string(indices.size()) + " leaves, " + c.Name("cuda"));
}

// Calls of as many leaves as fill a table and of more: without an empty leaf, and with an empty one
// before, among and after them.
void CheckLeafCounts(const Case& c, bool any_dtype) {
  int row_words = c.lr_scale != 1.0 ? 1 : 0;
  for (int array = 0; array < kNumArrays; ++array) row_words += HasArray(c, array) ? 1 : 0;
  if (c.has_noise()) {
    row_words += 1 + (c.place.strides.empty() ? 0 : kIndexStrides * kStrideWords);
  }
  const std::size_t small = LeafTable<kSmallTableWords>::Capacity(row_words);
  const std::size_t large = LeafTable<kLargeTableWords>::Capacity(row_words);
  const std::size_t most = 2 * large + 3;
  const LeafSet set = MakeLeafSet(c, most, any_dtype);
  for (const std::size_t count : {small - 3, small, small + 1, large, large + 1, most}) {
    std::vector<std::size_t> indices(count);
    std::iota(indices.begin(), indices.end(), 0);
    CheckLeaves(set, indices, c);
    const std::size_t empty = most;
    for (const std::size_t place : {std::size_t{0}, count / 2, count + 2}) {
      indices.insert(indices.begin() + static_cast<std::ptrdiff_t>(place), empty);
    }
    CheckLeaves(set, indices, c);
  }
}

void TestManyLeaves() {
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kCorrected}) {
    const bool any_dtype = amsgrad != Amsgrad::kOff;
    for (const bool in_place : {false, true}) {
      for (const ZeroMoments zero : {ZeroMoments::kNo, ZeroMoments::kNull}) {
        CheckLeafCounts({0, 0, DType::kFloat32, DType::kFloat32, amsgrad, false, true, false,
                         in_place, 1, zero},
                        any_dtype);
      }
    }
  }
}

// The same of float64, where a first step is no class of its own.
void TestManyLeavesOfFloat64() {
  for (const int kind : {0, 1, 2}) {
    Case c = Float64Case(0);
    c.in_place = kind == 0;
    c.has_ema = kind != 0;
    if (kind == 2) c.zero_moments = ZeroMoments::kNull;
    CheckLeafCounts(c, /*any_dtype=*/false);
  }
}

// The same where each leaf scales the learning rate, with noise and without.
void TestManyLeavesOfLrScales() {
  for (const bool stochastic : {false, true}) {
    Case c = CommonCase(0);
    c.lr_scale = 0.7;
    if (stochastic) {
      c.mu_dtype = c.nu_dtype = DType::kBfloat16;
      c.stochastic_moments = true;
      c.place = Places()[4];
    }
    CheckLeafCounts(c, /*any_dtype=*/false);
  }
}

// The same of what a row of the table has more, with strides and without.
void TestManyLeavesOfLowPrecision() {
  for (const int kind : {0, 1, 2, 3}) {
    Case c = CommonCase(0);
    c.in_place = kind % 2 == 0;
    if (kind < 3) {
      c.mu_dtype = c.nu_dtype = DType::kBfloat16;
      c.stochastic_moments = true;
    }
    if (kind > 1) c.has_ema = true;
    if (kind > 2) c.copies = DType::kBfloat16;
    if (kind > 0) c.place = Places()[4];
    CheckLeafCounts(c, /*any_dtype=*/kind == 2);
  }
}

// Trees without a block, of no leaf and of more empty ones than a small table holds.
void TestEmptyTrees() {
  const Case c = CommonCase(0);
  const LeafSet set({c});
  CheckLeaves(set, {}, c);
  CheckLeaves(set, std::vector<std::size_t>(kSmallTableWords), c);
}

// Leaves 0 and 1 have as many blocks as a small grid may have, leaf 2 has one more.
LeafSet MakeGridLimit(const Case& c) {
  std::vector<Case> cases(3, c);
  constexpr std::size_t kFirst = 600;
  cases[0].n = kFirst * kChunk - 3;
  cases[1].n = (kSmallGridBlocks - kFirst) * kChunk;
  cases[2].n = 1;
  return LeafSet(cases);
}

void TestGridLimit() {
  std::vector<Case> cases(10, CommonCase(0));
  cases[1].skip = true;
  cases[2].nonfinite = 1;
  cases[3].nonfinite = 0;
  cases[3].clip = Clip::kNorm;
  cases[4].clip = Clip::kValue;
  cases[5].mu_dtype = cases[5].nu_dtype = DType::kBfloat16;
  cases[5].stochastic_moments = true;
  cases[6].has_ema = true;
  cases[6].copies = DType::kBfloat16;
  cases[7] = Float64Case(0);
  cases[8] = Float64Case(0);
  cases[8].skip = true;
  cases[9].lr_scale = 0.3;
  for (const Case& c : cases) {
    const LeafSet set = MakeGridLimit(c);
    CheckLeaves(set, {0, 1}, c);
    CheckLeaves(set, {0, 1, 2}, c);
  }
}

// The classes with code for whole chunks, in a large grid: aligned and not, whatever lies apart, is
// skipped, or has noise that begins inside a quad or jumps.
void TestWholeChunks() {
  std::vector<Case> classes(3, CommonCase(0));
  classes[1].mu_dtype = classes[1].nu_dtype = DType::kBfloat16;
  classes[1].stochastic_moments = true;
  classes[2].has_ema = true;
  classes[2].copies = DType::kBfloat16;
  for (const Case& of_class : classes) {
    std::vector<Case> cases(8, of_class);
    cases[0].grad_dtype = DType::kBfloat16;
    cases[1].in_place = false;
    cases[2].offset = 3;
    cases[3].skip = true;
    cases[3].in_place = false;
    cases[4].write_params = false;
    cases[5].place = {3, 2, {}};
    cases[6].place = {5, 1, {MakeStride(5, 2), MakeStride(0, 0), MakeStride(0, 0)}};
    cases[7].stochastic_moments = false;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      cases[i].amsgrad = static_cast<Amsgrad>(i % 3);
      cases[i].nesterov = i % 2 == 1;
      CheckLeaves(MakeGridLimit(cases[i]), {0, 1, 2}, cases[i]);
    }
  }
}

// A tree whose steps are submitted to a stream of its own and compared with the CPU's at the end.
class Training {
 public:
  Training(const LeafSet& set, const std::vector<std::size_t>& indices, const Case& c)
      : set_(set),
        indices_(indices),
        case_(c),
        scalars_(c, indices.size()),
        device_(set.image().size(), 0) {
    device_.Write(set.image());
    leaves_ = set.Leaves(indices, device_.As<unsigned char>());
    Prepare(leaves_, c);
    constexpr unsigned kNonBlocking = 1;
    Require(Device().StreamCreate(&stream_, kNonBlocking), "cuStreamCreate");
  }

  void Step() {
    Submit(stream_, scalars_, leaves_, case_);
    ++steps_;
  }

  void CheckResult() const {
    std::vector<unsigned char> host = set_.image();
    UpdateOnCpu(set_.Leaves(indices_, host.data()), case_, steps_);
    scalars_.CheckCounters("cuda", steps_);
    Check(device_.Read() == host, "bits of " + std::to_string(steps_) + " steps");
  }

 private:
  const LeafSet& set_;
  std::vector<std::size_t> indices_;
  Case case_;
  StepScalars<DeviceBuffer> scalars_;
  DeviceBuffer device_;
  std::vector<LeafOperands> leaves_;
  CuStream stream_ = nullptr;
  int steps_ = 0;
};

// Steps in place that nothing synchronises, of two trees that may run at the same time: a block
// that counts too early or too late, or for the other tree, changes a later step's bits.
void CheckManySteps(Case c) {
  const LeafSet set = MakeGridLimit(c);
  Training often(set, {0, 1}, c);
  c.counts.count = 20;
  Training seldom(set, {2, 1}, c);
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");  // the copies are not in these streams
  for (int i = 0; i < 200; ++i) {
    often.Step();
    if (i % 5 == 0) seldom.Step();
  }
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  often.CheckResult();
  seldom.CheckResult();
}

void TestManySteps() {
  CheckManySteps(CommonCase(0));
  CheckManySteps(Float64Case(0));
  Case c = CommonCase(0);
  c.mu_dtype = c.nu_dtype = DType::kBfloat16;
  c.stochastic_moments = true;
  CheckManySteps(c);
}

// The ladder's kernels give the bits of the CPU too, for what they take.
void TestLadder(Rung rung) {
  for (const std::size_t n : kSizes) {
    const Case c = CommonCase(n);
    UpdateOptions options = c.Options();
    options.maximize = false;
    const LeafSet set({c, CommonCase(100)});
    std::vector<unsigned char> host = set.image();
    DeviceBuffer device(host.size(), 0);
    device.Write(host);
    const auto leaves = [&](unsigned char* base) {
      std::vector<LeafOperands> both = set.Leaves({0, 1}, base);
      for (LeafOperands& leaf : both) leaf.decays = true;
      return both;
    };
    const StepScalars<GuardedBuffer> host_scalars(c);
    InlinePool pool;
    cpu::Update(pool, 1, *cpu::SelectInstructionSet(), host_scalars.Operands(), leaves(host.data()),
                options);
    const StepScalars<DeviceBuffer> scalars(c);
    std::string error = PrepareLadder(rung);
    Check(error.empty(), error);
    error = LaunchLadder(nullptr, rung, scalars.Operands(), leaves(device.As<unsigned char>()));
    Check(error.empty(), error);
    Require(Device().CtxSynchronize(), "cuCtxSynchronize");
    scalars.CheckCounters("ladder");
    Check(device.Read() == host, "bits of the ladder's rung, " + c.Name("cuda"));
  }
}

}  // namespace
}  // namespace jfa::cuda

// With arguments "k n" every n-th test from number k on, for tools that take long.
int main(int argc, char** argv) {
  using namespace jfa::cuda;  // NOLINT: the tests
  void (*const tests[])() = {
      TestShapesAndOffsets,
      TestZeroMoments,
      TestOptions,
      TestCounters,
      TestClip,
      TestLrScales,
      TestLowPrecision,
      TestBf16Moments,
      TestFloat64,
      TestFloat64Offsets,
      TestManyLeaves,
      TestManyLeavesOfLowPrecision,
      TestManyLeavesOfLrScales,
      TestManyLeavesOfFloat64,
      TestEmptyTrees,
      TestGridLimit,
      TestWholeChunks,
      TestManySteps,
      [] { TestLadder(Rung::kNaive); },
      [] { TestLadder(Rung::kVectors); },
  };
  const std::size_t first = argc == 3 ? std::strtoul(argv[1], nullptr, 10) : 0;
  const std::size_t step = argc == 3 ? std::strtoul(argv[2], nullptr, 10) : 1;
  for (std::size_t i = first; i < std::size(tests); i += step) tests[i]();
  std::printf("%d failures\n", jfa::tests::failures);
  return jfa::tests::failures == 0 ? 0 : 1;
}
