// Drives steps that analyse their own gradients on a GPU, without JAX, and compares their bits with
// the CPU's: those of one launch, and those that take more. Exits with 1 on a failure.
#include <cstdio>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/stats.h"
#include "cpu/update.h"
#include "cuda/table.h"
#include "cuda/tuning.h"
#include "cuda/update.h"
#include "tests/cases.h"
#include "tests/device.h"
#include "tests/leaf_set.h"
#include "tests/merge_cases.h"
#include "tests/pools.h"
#include "tests/step_scalars.h"

namespace jfa::cuda {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

// The gradients' scale of tests/step_scalars.h.
constexpr float kGradientScale = 3.0f;

// What an analysis reads and writes beside the gradients, in Buffers of the host or a device.
template <typename Buffer>
class AnalysisArrays {
 public:
  explicit AnalysisArrays(const std::vector<LeafOperands>& leaves)
      : num_rows_(Gradients(leaves).RowsPerMember()),
        scale_(sizeof(float), 0),
        rows_(static_cast<std::size_t>(num_rows_) * sizeof(StatsRow), 0),
        report_(MergeCase{{static_cast<std::size_t>(num_rows_)}, 1, Magnitude::kZero}) {
    scale_.Write(BytesOf(&kGradientScale, 1));
  }

  StepAnalysis Operands(const std::vector<LeafOperands>& leaves, bool skip_nonfinite) const {
    StepAnalysis analysis{Gradients(leaves), report_.Operands(), skip_nonfinite};
    analysis.gradients.gradient_scale = {scale_.template As<float>()};
    analysis.gradients.rows = rows_.template As<StatsRow>();
    analysis.report.rows = analysis.gradients.rows;
    analysis.report.rows_per_member = num_rows_;
    analysis.report.segments = {{0, num_rows_}};
    return analysis;
  }

  // The rows too.
  std::vector<std::vector<unsigned char>> ReadResults(const char* kernel) const {
    std::vector<std::vector<unsigned char>> results = report_.ReadResults(kernel);
    results.push_back(rows_.Read());
    return results;
  }

 private:
  static AnalyzeOperands Gradients(const std::vector<LeafOperands>& leaves) {
    AnalyzeOperands gradients{};
    gradients.members = 1;
    gradients.chunk_elements = kStatsTileElements;
    for (const LeafOperands& leaf : leaves) {
      gradients.leaves.push_back({leaf.grad, leaf.num_elements, leaf.grad_dtype});
    }
    return gradients;
  }

  long long num_rows_;
  Buffer scale_;
  Buffer rows_;
  MergeArrays<Buffer> report_;
};

// The report takes the place of the case's own norms.
template <typename Buffer>
StepOperands StepOf(const StepScalars<Buffer>& scalars) {
  StepOperands step = scalars.Operands();
  step.norm = step.scaled_norm = {};
  step.nonfinite = {};
  return step;
}

// `steps` calls, more than one only in place. A case's `nonfinite` says that non-finite gradients
// skip, and how many there are.
void StepOnCpu(const std::vector<LeafOperands>& leaves, const Case& c,
               const AnalysisArrays<GuardedBuffer>& arrays, int steps = 1) {
  const StepScalars<GuardedBuffer> scalars(c);
  const StepAnalysis analysis = arrays.Operands(leaves, c.nonfinite.has_value());
  InlinePool pool;
  for (int i = 0; i < steps; ++i) {
    cpu::AnalyzeGradient(pool, 1, *cpu::SelectInstructionSet(), analysis.gradients);
    cpu::MergeGradientStats(analysis.report);
    cpu::Update(pool, 1, *cpu::SelectInstructionSet(), analysis.Inform(StepOf(scalars), c.clip),
                leaves, c.Options());
  }
  scalars.CheckCounters("cpu", steps);
}

// A tree whose steps are submitted to a stream of its own and compared with the CPU's at the end.
class Training {
 public:
  Training(const std::vector<Case>& cases, const Case& c)
      : set_(cases),
        indices_(cases.size()),
        case_(c),
        scalars_(c),
        device_(set_.image().size(), 0),
        leaves_(MakeLeaves()),
        arrays_(leaves_) {
    device_.Write(set_.image());
    const std::string error = PrepareAnalyzeAndUpdate(leaves_, c.Options());
    Check(error.empty(), error);
    constexpr unsigned kNonBlocking = 1;
    Require(Device().CtxSynchronize(), "cuCtxSynchronize");  // copies are not in the stream
    Require(Device().StreamCreate(&stream_, kNonBlocking), "cuStreamCreate");
  }

  void Step() {
    const std::string error = AnalyzeAndUpdate(
        stream_, StepOf(scalars_), arrays_.Operands(leaves_, case_.nonfinite.has_value()), leaves_,
        case_.Options());
    Check(error.empty(), error);
    ++steps_;
  }

  void CheckResult() const {
    std::vector<unsigned char> host = set_.image();
    const std::vector<LeafOperands> leaves = set_.Leaves(indices_, host.data());
    const AnalysisArrays<GuardedBuffer> arrays(leaves);
    StepOnCpu(leaves, case_, arrays, steps_);
    const std::string name = std::to_string(leaves.size()) + " leaves, " + std::to_string(steps_) +
                             " steps, " + case_.Name("cuda");
    scalars_.CheckCounters("cuda", steps_);
    Check(device_.Read() == host, "bits of " + name);
    Check(arrays_.ReadResults("cuda") == arrays.ReadResults("cpu"), "report of " + name);
  }

 private:
  std::vector<LeafOperands> MakeLeaves() {
    std::iota(indices_.begin(), indices_.end(), 0);
    return set_.Leaves(indices_, device_.As<unsigned char>());
  }

  LeafSet set_;
  std::vector<std::size_t> indices_;
  Case case_;
  StepScalars<DeviceBuffer> scalars_;
  DeviceBuffer device_;
  std::vector<LeafOperands> leaves_;
  AnalysisArrays<DeviceBuffer> arrays_;
  CuStream stream_ = nullptr;
  int steps_ = 0;
};

void CheckTree(const std::vector<Case>& cases, const Case& c) {
  Training training(cases, c);
  training.Step();
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  training.CheckResult();
}

// One leaf, each array an exact allocation; a NaN is a NaN.
void CheckLeaf(const Case& c) {
  const LeafArrays<GuardedBuffer> host(c.Plain());
  const AnalysisArrays<GuardedBuffer> host_arrays({host.Operands()});
  StepOnCpu({host.Operands()}, c.Plain(), host_arrays);
  const LeafArrays<DeviceBuffer> device(c);
  const std::vector<LeafOperands> leaves = {device.Operands()};
  const AnalysisArrays<DeviceBuffer> arrays(leaves);
  const StepScalars<DeviceBuffer> scalars(c);
  std::string error = PrepareAnalyzeAndUpdate(leaves, c.Options());
  Check(error.empty(), error);
  error = AnalyzeAndUpdate(nullptr, StepOf(scalars),
                           arrays.Operands(leaves, c.nonfinite.has_value()), leaves, c.Options());
  Check(error.empty(), error);
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  scalars.CheckCounters("cuda");
  Check(device.ReadOutputs("cuda") == host.ReadOutputs("cpu"), "bits, " + c.Name("cuda"));
  Check(arrays.ReadResults("cuda") == host_arrays.ReadResults("cpu"), "report, " + c.Name("cuda"));
}

// Around a vector, a block's 1024 elements and a tile's 4096.
constexpr std::size_t kSizes[] = {0,    1,    3,    4,    5,    255,  1023, 1024, 1025,
                                  3071, 4091, 4095, 4096, 4097, 5121, 8192, 12291};

// Every rule and gradient dtype at element offsets 0 to 15; the options take turns with prime
// periods.
void TestShapesAndOffsets() {
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const bool nesterov : {false, true}) {
      for (const DType grad : kDTypes) {
        for (std::size_t i = 0; i < std::size(kSizes); ++i, ++next) {
          Case c = CommonCase(kSizes[i]);
          c.offset = i % 16;
          c.grad_dtype = grad;
          c.amsgrad = amsgrad;
          c.nesterov = nesterov;
          c.write_params = next % 5 != 0;
          c.in_place = next % 3 != 0;
          c.skip = next % 7 == 0;
          c.clip = static_cast<Clip>(next % 3);
          if (c.clip != Clip::kNorm || next % 2 == 0) c.nonfinite = 0;
          if (next % 11 == 0) c.lr_scale = 1.0 / 3.0;
          CheckLeaf(c);
        }
      }
    }
  }
}

// float64, which takes the launches of AnalyzeAndMerge and of Update.
void TestFloat64() {
  for (std::size_t i = 0; i < std::size(kSizes); ++i) {
    Case c = Float64Case(kSizes[i]);
    c.offset = i % 3;
    c.clip = static_cast<Clip>(i % 3);
    if (c.clip != Clip::kNorm || i % 2 == 0) c.nonfinite = 0;
    CheckLeaf(c);
  }
  Case c = Float64Case(4099);
  c.clip = Clip::kNorm;
  c.gradients = {1e300, 0.25, -1e-310};
  CheckLeaf(c);
  c.gradients = {0.25, BitsToFloat(kNanBits)};
  c.nonfinite = 1;
  CheckLeaf(c);
}

// One element among others, in every vector's place of a tile's first and last block.
void TestNonfinite() {
  const float inf = BitsToFloat(kInfinityBits);
  for (const float bad : {inf, -inf, BitsToFloat(kNanBits)}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{1027}, std::size_t{4094}}) {
      for (const bool skips : {false, true}) {
        Case c = CommonCase(2 * 4096 - 1);
        c.gradients.assign(4097, 0.25f);
        c.gradients[place] = bad;
        c.clip = Clip::kNorm;
        if (skips) c.nonfinite = 1;
        CheckLeaf(c);
      }
    }
  }
}

// Trees of as many tiles as a device runs at the same time, whatever that is, and of more.
void TestTiles() {
  Case c = CommonCase(0);
  c.clip = Clip::kNorm;
  for (const std::size_t tiles : {5, 7, 98, 99, 100, 131, 132, 133, 263, 265, 1025}) {
    std::vector<Case> cases(2, c);
    cases[0].n = tiles / 2 * kStatsTileElements;
    cases[1].n = (tiles - tiles / 2) * kStatsTileElements - 3;
    CheckTree(cases, c);
  }
}

// As many leaves as fill the table and more, empty ones among them, and no block at all.
void TestManyLeaves() {
  Case c = CommonCase(0);
  c.clip = Clip::kNorm;
  c.nonfinite = 0;
  for (const double lr_scale : {1.0, 0.3}) {
    c.lr_scale = lr_scale;  // a word of each row
    const std::size_t capacity = LeafTable<kSmallTableWords>::Capacity(lr_scale == 1.0 ? 4 : 5);
    for (const std::size_t count : {std::size_t{3}, capacity - 1, capacity, capacity + 1}) {
      std::vector<Case> cases(count, c);
      for (std::size_t i = 0; i < count; ++i) {
        cases[i].n = kSizes[i % 8];
        cases[i].grad_dtype = kDTypes[i % 2];
        cases[i].offset = i % 5 == 0 ? 1 : 0;
      }
      CheckTree(cases, c);
    }
  }
  CheckTree(std::vector<Case>(3, c), c);
}

// Steps in place that nothing synchronises, of two trees that may run at the same time: a block
// that counts or is waited for too early or too late, or for the other tree, changes later bits.
void TestManySteps() {
  Case c = CommonCase(40000);
  c.clip = Clip::kNorm;
  c.nonfinite = 0;
  Training often({c, CommonCase(5), CommonCase(4097)}, c);
  c.counts.count = 20;
  Training seldom({CommonCase(70000), CommonCase(1)}, c);
  for (int i = 0; i < 200; ++i) {
    often.Step();
    if (i % 5 == 0) seldom.Step();
  }
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  often.CheckResult();
  seldom.CheckResult();
}

// Two trees whose blocks do not all fit a device at the same time: one waits for the other.
void TestLargestTreesAtTheSameTime() {
  Case c = CommonCase(95 * kStatsTileElements);
  c.clip = Clip::kNorm;
  Training one({c}, c);
  Training other({c}, c);
  for (int i = 0; i < 50; ++i) {
    one.Step();
    other.Step();
  }
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  one.CheckResult();
  other.CheckResult();
}

}  // namespace
}  // namespace jfa::cuda

int main(int argc, char** argv) {
  using namespace jfa::cuda;  // NOLINT: the tests
  return jfa::tests::RunTests({TestShapesAndOffsets, TestNonfinite, TestFloat64, TestTiles,
                               TestManyLeaves, TestManySteps, TestLargestTreesAtTheSameTime},
                              argc, argv);
}
