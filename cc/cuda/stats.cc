#include "cuda/stats.h"

#include <algorithm>
#include <cstddef>
#include <memory>

#include "cuda/arrivals.h"
#include "cuda/embedded.h"
#include "cuda/fill_table.h"
#include "cuda/kernels.h"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

Kernel GetStatsKernel(const char* name) {
  return GetKernel(EntryPoint{&embedded::stats_kernel, "Stats", {}, name});
}

Kernel GetAnalyze(bool small) {
  return GetStatsKernel(small ? "AnalyzeGradientSmall" : "AnalyzeGradientLarge");
}

Kernel GetMerge(bool small) {
  return GetStatsKernel(small ? "MergeGradientStatsSmall" : "MergeGradientStatsLarge");
}

// What the last block of an analysis is to do.
struct LastBlock {
  MergeBuffers merge{};
  int arrival_counter = -1;
};

// Launches one table of leaves from *next on, whose rows begin at *first_row; advances both.
template <int kWords>
std::string LaunchAnalyze(CuStream stream, const AnalyzeOperands& operands,
                          const LastBlock& last_block, std::size_t* next, long long* first_row) {
  const Kernel kernel = GetAnalyze(kWords == kSmallTableWords);
  if (!kernel.ok()) return kernel.error;
  const auto size_of = [&](std::size_t i) { return operands.leaves[i].num_elements; };
  const auto describe = [&](std::size_t i) {
    const GradLeaf& leaf = operands.leaves[i];
    const bool aligned =
        IsAligned(leaf.grad, leaf.dtype) && MembersAreAligned(leaf.num_elements, operands.members);
    const LeafFlags flags{DType::kFloat32, leaf.dtype, false, aligned};
    return TableLeaf{{PointerWord(leaf.grad)}, leaf.num_elements, flags};
  };
  auto args = std::make_unique<AnalyzeArguments<kWords>>();
  args->gradient_scale = operands.gradient_scale;
  args->merge = last_block.merge;
  args->arrival_counter = last_block.arrival_counter;
  args->rows = operands.rows;
  args->rows_per_member = operands.RowsPerMember();
  args->first_row = *first_row;
  args->chunk_elements = operands.chunk_elements;
  const unsigned blocks = FillTable(operands.leaves.size(), 1, operands.members,
                                    operands.chunk_elements, size_of, describe, next, &args->table);
  if (blocks == 0) return EmptyTableError(operands.leaves.size(), *next);
  *first_row += blocks / operands.members;
  void* parameters[] = {args.get()};
  return Launch(stream, kernel, blocks, parameters, kTileLanes);
}

template <int kEntries>
std::string LaunchMerge(CuStream stream, const MergeOperands& operands, std::size_t* next,
                        long long* first_scratch) {
  const Kernel kernel = GetMerge(kEntries == kSmallMergeEntries);
  if (!kernel.ok()) return kernel.error;
  auto args = std::make_unique<MergeArguments<kEntries>>();
  args->buffers = MergeBuffersOf(operands);
  args->num_segments = static_cast<int>(operands.segments.size());
  args->first_segment = static_cast<int>(*next);
  long long most_rows = 0;
  int entries = 0;
  for (; *next < operands.segments.size() && entries < kEntries; ++*next, ++entries) {
    const MergeSegment& segment = operands.segments[*next];
    args->entries[entries] = {segment.first_row, segment.num_rows, *first_scratch};
    *first_scratch += ScratchRows(segment.num_rows);
    most_rows = std::max(most_rows, segment.num_rows);
  }
  args->num_entries = entries;
  const unsigned threads = most_rows > kMergeFanIn ? kMergeThreads : kMergeLanes;
  void* parameters[] = {args.get()};
  return Launch(stream, kernel, operands.members * entries, parameters, threads);
}

constexpr std::size_t kSmallLeaves = LeafTable<kSmallTableWords>::Capacity(1);
constexpr std::size_t kLargeLeaves = LeafTable<kLargeTableWords>::Capacity(1);

std::string LaunchAnalysis(CuStream stream, const AnalyzeOperands& operands,
                           const LastBlock& last_block) {
  const std::size_t num_leaves = operands.leaves.size();
  std::string error;
  long long first_row = 0;
  for (std::size_t next = 0; next < num_leaves && error.empty();) {
    const auto launch = num_leaves <= kSmallLeaves ? LaunchAnalyze<kSmallTableWords>
                                                   : LaunchAnalyze<kLargeTableWords>;
    error = launch(stream, operands, last_block, &next, &first_row);
  }
  return error;
}

}  // namespace

MergeBuffers MergeBuffersOf(const MergeOperands& operands) {
  return {operands.rows,        operands.rows_per_member,
          operands.scratch,     operands.ScratchPerMember(),
          operands.merged,      operands.norm,
          operands.scaled_norm, operands.max_abs,
          operands.nonfinite};
}

std::string PrepareStats() {
  for (const bool small : {false, true}) {
    for (const Kernel& kernel : {GetAnalyze(small), GetMerge(small)}) {
      if (!kernel.ok()) return kernel.error;
    }
  }
  return "";
}

std::string AnalyzeAndMerge(CuStream stream, const AnalyzeOperands& analyze,
                            const MergeOperands& merge) {
  const long long num_rows = analyze.RowsPerMember();
  LastBlock last_block;
  const bool one_report = merge.segments.size() == 1 && merge.segments[0].num_rows == num_rows;
  if (analyze.members == 1 && one_report && 0 < num_rows && num_rows <= kMergeFanIn &&
      analyze.leaves.size() <= kLargeLeaves) {
    last_block = {MergeBuffersOf(merge), ArrivalCounterOf(merge.merged)};
  }
  const std::string error = LaunchAnalysis(stream, analyze, last_block);
  if (!error.empty() || last_block.arrival_counter >= 0) return error;
  return MergeGradientStats(stream, merge);
}

std::string MergeGradientStats(CuStream stream, const MergeOperands& operands) {
  const std::size_t num_segments = operands.segments.size();
  const bool small = num_segments <= kSmallMergeEntries;
  std::string error;
  long long first_scratch = 0;
  for (std::size_t next = 0; next < num_segments && error.empty();) {
    error = small ? LaunchMerge<kSmallMergeEntries>(stream, operands, &next, &first_scratch)
                  : LaunchMerge<kLargeMergeEntries>(stream, operands, &next, &first_scratch);
  }
  return error;
}

}  // namespace jfa::cuda
