// The CUDA kernels of gradient statistics, by the tree of core/stats.h. Compiled as
// update_kernel.cu is.
//
// AnalyzeGradient: a block makes one row of one chunk: loads a tile, finds its largest magnitude,
// adds squares relative to that; the tile stays in registers between the two. Blocks begin with
// the last row, so that what they leave in the cache is what an update reads first. The last block
// merges the rows, where one merge is enough. MergeGradientStats: a block makes one report, each
// of its warps merges 1024 rows at a time.
#include "core/chunks.h"
#include "core/stats.h"
#include "cuda/stats_tile.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

// How many blocks of a launch have written their rows, by AnalyzeArguments::arrival_counter. Zero
// between launches; launches that could run at the same time have different ones.
__device__ Word32 arrivals[kNumArrivalCounters];

template <typename Arguments>
__device__ __forceinline__ RowPlace LocateRow(const Arguments& args) {
  const auto& table = args.table;
  const Word32 block = gridDim.x - 1 - blockIdx.x;
  const int leaf = FindLeaf(table.first_block(), table.num_leaves, block);
  const Word32 first_block = table.first_block()[leaf];
  const Word64 size = table.sizes()[leaf];
  const long long member_elements = static_cast<long long>(size >> 8);
  RowPlace place;
  place.grad = table.buffer(leaf, 0);
  place.flags = LeafFlags::Unpack(static_cast<Word32>(size));
  place.chunk =
      LocateBlock(block - first_block, member_elements, table.members, args.chunk_elements);
  place.row = args.first_row + block;
  if (table.members > 1) {
    const long long rows = CeilDivide(member_elements, args.chunk_elements);
    const long long row_in_leaf = (block - first_block) - place.chunk.member * rows;
    place.row = args.first_row + first_block / table.members + row_in_leaf +
                place.chunk.member * args.rows_per_member;
  }
  return place;
}

// By the first warp of a block whose row is `row`: merges all rows if it is the last.
template <typename Arguments>
__device__ __forceinline__ void MergeIfLast(const Arguments& args, long long place,
                                            const StatsRow& row) {
  Word32* counter = &arrivals[args.arrival_counter];
  Word32 before = 0;
  if (threadIdx.x == 0) {
    before = PublishRow(args.rows + place, row, counter);
    if (before == gridDim.x - 1) *counter = 0;
    __threadfence();  // the last block reads what the others have written
  }
  __syncwarp();
  if (__shfl_sync(kAllLanes, before, 0) != gridDim.x - 1) return;
  const StatsSums sums = MergeRows<true>(args.rows, gridDim.x);
  if (threadIdx.x == 0) WriteReport(args.merge, 0, sums);
}

template <typename Arguments>
__device__ __forceinline__ void AnalyzeOneRow(const Arguments& args) {
  const RowPlace place = LocateRow(args);
  const float gradient_scale = args.gradient_scale.Read(place.chunk.member);
  __shared__ SharedStats shared;
  const StatsRow row = AnalyzeChunk(place, gradient_scale, &shared);
  if (args.arrival_counter < 0) {
    if (threadIdx.x == 0) args.rows[place.row] = row;
  } else if (threadIdx.x < 32) {
    MergeIfLast(args, place.row, row);
  }
}

template <typename Arguments>
__device__ __forceinline__ void MergeOneSegment(const Arguments& args) {
  const MergeBuffers& buffers = args.buffers;
  const long long member = blockIdx.x / args.num_entries;
  const int entry = static_cast<int>(blockIdx.x % args.num_entries);
  const MergeEntry& segment = args.entries[entry];
  const StatsRow* rows = buffers.rows + member * buffers.rows_per_member + segment.first_row;
  StatsRow* scratch = buffers.scratch + member * buffers.scratch_per_member + segment.first_scratch;
  long long num_rows = segment.num_rows;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const bool first_lane = threadIdx.x % 32 == 0;
  while (num_rows > kMergeFanIn) {
    const long long num_merged = RowsAfterMerge(num_rows);
    for (long long i = warp; i < num_merged; i += num_warps) {
      const long long left = num_rows - i * kMergeFanIn;
      const StatsSums sums =
          MergeRows<false>(rows + i * kMergeFanIn, left < kMergeFanIn ? left : kMergeFanIn);
      if (first_lane) scratch[i] = RowOf(sums);
    }
    __syncthreads();
    rows = scratch;
    num_rows = num_merged;
    scratch += num_merged;
  }
  if (warp != 0) return;
  const StatsSums sums = MergeRows<false>(rows, num_rows);
  if (!first_lane) return;
  const long long result = member * args.num_segments + args.first_segment + entry;
  WriteReport(buffers, result, sums);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kTileLanes, kAnalyzeBlocks)
    AnalyzeGradientSmall(const __grid_constant__ AnalyzeArguments<kSmallTableWords> args) {
  AnalyzeOneRow(args);
}

extern "C" __global__ void __launch_bounds__(kTileLanes, kAnalyzeBlocks)
    AnalyzeGradientLarge(const __grid_constant__ AnalyzeArguments<kLargeTableWords> args) {
  AnalyzeOneRow(args);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    MergeGradientStatsSmall(const __grid_constant__ MergeArguments<kSmallMergeEntries> args) {
  MergeOneSegment(args);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    MergeGradientStatsLarge(const __grid_constant__ MergeArguments<kLargeMergeEntries> args) {
  MergeOneSegment(args);
}

}  // namespace jfa::cuda
