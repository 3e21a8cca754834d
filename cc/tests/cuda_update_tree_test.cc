// Drives the CUDA update without JAX, of trees that fill a table or a grid, and compares its bits
// with the CPU's. Exits with 1 on a failure.
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/table.h"
#include "cuda/tuning.h"
#include "tests/cuda_update.h"
#include "tests/leaf_set.h"
#include "tests/update_cases.h"

namespace jfa::cuda {
namespace {

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

// What has code of its own for whole chunks; with bfloat16 moments by any number of vectors.
std::vector<Case> ClassesOfWholeChunks() {
  std::vector<Case> classes(5, CommonCase(0));
  classes[0].has_ema = true;
  classes[0].copies = DType::kBfloat16;
  for (const int i : {1, 2, 3}) {
    classes[i].mu_dtype = classes[i].nu_dtype = DType::kBfloat16;
    classes[i].stochastic_moments = true;
    classes[i].vectors = 1 << i;
  }
  return classes;
}

// Whole chunks in a large grid: aligned and not, whatever lies apart, is
// skipped, or has noise that begins inside a quad or jumps.
void TestWholeChunks() {
  for (const Case& of_class : ClassesOfWholeChunks()) {
    std::vector<Case> cases(11, of_class);
    cases[0].grad_dtype = DType::kBfloat16;
    cases[1].in_place = false;
    cases[2].offset = 3;
    cases[3].skip = true;
    cases[3].in_place = false;
    cases[4].write_params = false;
    cases[5].place = {3, 2, {}};
    cases[6].place = {5, 1, {MakeStride(5, 2), MakeStride(0, 0), MakeStride(0, 0)}};
    cases[7].stochastic_moments = false;
    cases[8].clip = Clip::kNorm;
    cases[9].clip = Clip::kValue;
    cases[10].lr_scale = 0.3;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      cases[i].amsgrad = static_cast<Amsgrad>(i % 3);
      cases[i].nesterov = i % 2 == 1;
      CheckLeaves(MakeGridLimit(cases[i]), {0, 1, 2}, cases[i]);
    }
  }
}

// Members that end with a chunk, and one element after it: then they are not aligned.
void TestMembersInWholeChunks() {
  for (Case c : ClassesOfWholeChunks()) {
    c.members = 3;
    c.counting = Counting::kPerMember;
    for (const std::size_t more : {0, 1}) {
      c.n = 54 * 8 * kChunk + more;
      CheckCase(c);
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

}  // namespace
}  // namespace jfa::cuda

int main(int argc, char** argv) {
  using namespace jfa::cuda;  // NOLINT: the tests
  return jfa::tests::RunTests(
      {TestManyLeaves, TestManyLeavesOfLowPrecision, TestManyLeavesOfLrScales,
       TestManyLeavesOfFloat64, TestEmptyTrees, TestGridLimit, TestWholeChunks,
       TestMembersInWholeChunks, TestManySteps},
      argc, argv);
}
