#include "cpu/stats.h"

namespace jfa::cpu {
namespace {

// Up to kMergeFanIn rows.
StatsSums MergeRows(const StatsRow* rows, std::int64_t num_rows) {
  StatsSums lanes[kMergeLanes] = {};
  for (std::int64_t i = 0; i < num_rows; ++i) {
    StatsSums& lane = lanes[i % kMergeLanes];
    lane = AddSums(lane, SumsOf(rows[i]));
  }
  for (int half = kMergeLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] = AddSums(lanes[lane], lanes[lane + half]);
    }
  }
  return lanes[0];
}

// Merges level by level into `scratch`, and returns the sums of the last merge.
StatsSums MergeSegmentRows(const StatsRow* rows, std::int64_t num_rows, StatsRow* scratch) {
  while (num_rows > kMergeFanIn) {
    const std::int64_t num_merged = RowsAfterMerge(num_rows);
    for (std::int64_t i = 0; i < num_merged; ++i) {
      const std::int64_t begin = i * kMergeFanIn;
      const std::int64_t left = num_rows - begin;
      scratch[i] = RowOf(MergeRows(rows + begin, left < kMergeFanIn ? left : kMergeFanIn));
    }
    rows = scratch;
    num_rows = num_merged;
    scratch += num_merged;
  }
  return MergeRows(rows, num_rows);
}

}  // namespace

std::vector<std::int64_t> FirstRows(const AnalyzeOperands& operands) {
  std::vector<std::int64_t> first_rows = {0};
  for (const GradLeaf& leaf : operands.leaves) {
    first_rows.push_back(first_rows.back() + operands.RowsOfLeaf(leaf));
  }
  return first_rows;
}

StatsRow AnalyzeRow(const InstructionSet& isa, const AnalyzeOperands& operands,
                    const std::vector<std::int64_t>& first_rows, std::int64_t index) {
  const std::int64_t member = index / first_rows.back();
  const std::int64_t row = index % first_rows.back();
  const int i = FindLeaf(first_rows.data(), static_cast<int>(operands.leaves.size()), row);
  const GradLeaf& leaf = operands.leaves[static_cast<std::size_t>(i)];
  const std::int64_t member_elements = leaf.num_elements / operands.members;
  const std::int64_t offset =
      (row - first_rows[static_cast<std::size_t>(i)]) * operands.chunk_elements;
  const std::int64_t left = member_elements - offset;
  AnalyzeBlock block;
  block.grad = static_cast<const char*>(leaf.grad) +
               (member * member_elements + offset) * SizeOf(leaf.dtype);
  block.num_elements = left < operands.chunk_elements ? left : operands.chunk_elements;
  block.grad_dtype = leaf.dtype;
  block.unscale = MakeUnscale(operands.gradient_scale.Read(member));
  return isa.analyze_chunk(block);
}

void MergeGradientStats(const MergeOperands& operands) {
  const ScopedDefaultFloatEnv float_env;
  StatsRow* scratch = operands.scratch;
  std::size_t result = 0;
  for (std::int64_t member = 0; member < operands.members; ++member) {
    const StatsRow* rows = operands.rows + member * operands.rows_per_member;
    for (const MergeSegment& segment : operands.segments) {
      const StatsSums sums = MergeSegmentRows(rows + segment.first_row, segment.num_rows, scratch);
      scratch += ScratchRows(segment.num_rows);
      const StatsReport report = ReportOf(sums);
      operands.merged[result] = RowOf(sums);
      operands.norm[result] = report.norm;
      operands.scaled_norm[result] = report.scaled_norm;
      operands.max_abs[result] = report.max_abs;
      operands.nonfinite[result] = report.nonfinite;
      ++result;
    }
  }
}

}  // namespace jfa::cpu
