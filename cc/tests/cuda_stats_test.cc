// Drives the gradient statistics of CUDA without JAX and compares their bits with the CPU's. Each
// array is one exact device allocation, as in cuda_update_test.cc. Exits with 1 on a failure.
#include <cstdio>
#include <string>
#include <vector>

#include "cpu/stats.h"
#include "cuda/stats.h"
#include "cuda/table.h"
#include "cuda/tuning.h"
#include "tests/buffers.h"
#include "tests/check.h"
#include "tests/device.h"
#include "tests/merge_cases.h"
#include "tests/pools.h"
#include "tests/stats_cases.h"

namespace jfa::cuda {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

// Of some rows of an analysis.
template <typename Buffer>
MergeOperands MergeOf(const AnalyzeOperands& analyze, const MergeArrays<Buffer>& arrays,
                      MergeSegment segment) {
  MergeOperands merge = arrays.Operands();
  merge.rows = analyze.rows;
  merge.rows_per_member = analyze.RowsPerMember();
  merge.segments = {segment};
  return merge;
}

// Rows and the report of some. Twice in a row: the second call finds what the first one left.
void CheckRows(const StatsCase& c, MergeSegment segment) {
  const MergeCase merge{{static_cast<std::size_t>(segment.num_rows)}, c.members, Magnitude::kZero};
  const StatsArrays<GuardedBuffer> host(c);
  const MergeArrays<GuardedBuffer> host_merge(merge);
  const StatsArrays<DeviceBuffer> device(c);
  const MergeArrays<DeviceBuffer> device_merge(merge);
  InlinePool pool;
  cpu::AnalyzeGradient(pool, 1, *cpu::SelectInstructionSet(), host.Operands());
  cpu::MergeGradientStats(MergeOf(host.Operands(), host_merge, segment));
  const AnalyzeOperands analyze = device.Operands();
  for (int i = 0; i < 2; ++i) {
    const std::string error =
        AnalyzeAndMerge(nullptr, analyze, MergeOf(analyze, device_merge, segment));
    Check(error.empty(), error);
  }
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  Check(device.ReadRows("cuda") == host.ReadRows("cpu"), "rows, " + c.Name("cuda"));
  Check(device_merge.ReadResults("cuda") == host_merge.ReadResults("cpu"),
        "report, " + c.Name("cuda"));
}

void CheckRows(const StatsCase& c) { CheckRows(c, {0, c.RowsPerMember()}); }

void CheckMerge(const MergeCase& c) {
  const MergeArrays<GuardedBuffer> host(c);
  cpu::MergeGradientStats(host.Operands());
  const MergeArrays<DeviceBuffer> device(c);
  const std::string error = MergeGradientStats(nullptr, device.Operands());
  Check(error.empty(), error);
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  Check(device.ReadResults("cuda") == host.ReadResults("cpu"), "reports, " + c.Name("cuda"));
}

// As many leaves as fill a table and more; empty ones are among them.
void TestManyLeaves() {
  constexpr std::size_t kSmall = LeafTable<kSmallTableWords>::Capacity(1);
  constexpr std::size_t kLarge = LeafTable<kLargeTableWords>::Capacity(1);
  constexpr std::size_t kSizes[] = {1, 5, 0, 128, 513, 4097};
  for (const std::size_t count : {kSmall, kSmall + 1, kLarge, kLarge + 1, 2 * kLarge + 3}) {
    for (const std::int64_t members : {1, 3}) {
      StatsCase c{{}, 1, DType::kFloat32, members, 1, {3.0f, 4.0f, 1.0f}, Magnitude::kAny};
      for (std::size_t i = 0; i < count; ++i) c.sizes.push_back(kSizes[i % std::size(kSizes)]);
      CheckRows(c);
    }
  }
}

// As many rows as one merge takes, and one more.
void TestMergeLimit() {
  for (const std::size_t count : {kMergeFanIn, kMergeFanIn + 1}) {
    StatsCase c{{}, 0, DType::kFloat32, 1, 1, {1.0f}, Magnitude::kAny};
    c.sizes.assign(count, 3);
    CheckRows(c);
    c.sizes = {count * kStatsTileElements};
    CheckRows(c);
  }
}

void TestPartOfTheRows() {
  const StatsCase c{{9, 4097, 100, 7}, 0, DType::kFloat32, 1, 1, {1.0f}, Magnitude::kOrdinary};
  CheckRows(c, {0, 2});
  CheckRows(c, {1, 3});
  CheckRows(c, {4, 1});
  CheckRows(c, {5, 0});
}

// Trees without a row, of no leaf and of more empty ones than a small table holds.
void TestEmptyTrees() {
  StatsCase c{{}, 0, DType::kFloat32, 1, 1, {1.0f}, Magnitude::kOrdinary};
  CheckRows(c);
  c.sizes.assign(kSmallTableWords, 0);
  CheckRows(c);
}

// As many segments as fill a table and more. Those that are merged in two levels take turns with
// others, so that scratch rows of a later launch begin behind those of an earlier one.
void TestManySegments() {
  constexpr std::size_t kCounts[] = {1, 0, 40, 3};
  constexpr std::size_t kTable = kLargeMergeEntries;
  for (const std::size_t count : {kTable, kTable + 1, 2 * kTable + 3}) {
    for (const std::int64_t members : {1, 3}) {
      MergeCase c{{}, members, Magnitude::kOrdinary};
      for (std::size_t i = 0; i < count; ++i) c.segments.push_back(kCounts[i % std::size(kCounts)]);
      for (std::size_t i = 5; i < count; i += 500) c.segments[i] = 1025 + i;
      CheckMerge(c);
    }
  }
  CheckMerge({{}, 1, Magnitude::kOrdinary});
}

}  // namespace
}  // namespace jfa::cuda

int main() {
  using namespace jfa::cuda;  // NOLINT: the tests
  Device();
  const std::string error = PrepareStats();
  Check(error.empty(), error);
  TestManyLeaves();
  TestMergeLimit();
  TestPartOfTheRows();
  TestEmptyTrees();
  for (const jfa::tests::StatsCase& c : jfa::tests::ShapeCases()) CheckRows(c);
  for (const jfa::tests::StatsCase& c : jfa::tests::NonfiniteCases()) CheckRows(c);
  for (const jfa::tests::StatsCase& c : jfa::tests::Float64StatsCases()) CheckRows(c);
  for (const jfa::tests::MergeCase& c : jfa::tests::MergeCases()) CheckMerge(c);
  TestManySegments();
  std::printf("%d failures\n", jfa::tests::failures);
  return jfa::tests::failures == 0 ? 0 : 1;
}
