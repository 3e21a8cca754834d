// The CUDA kernels of gradient statistics, by the tree of core/stats.h. Compiled as
// update_kernel.cu is.
//
// AnalyzeGradient: a block makes one row of one chunk: loads a tile, finds its largest magnitude,
// adds squares relative to that; the tile stays in registers between the two. The last block
// merges the rows, where one merge is enough. MergeGradientStats: a block makes one report, each
// of its warps merges 1024 rows at a time.
#include "core/adamw.h"
#include "core/chunks.h"
#include "core/stats.h"
#include "cuda/io.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

static_assert(kThreads == kTileLanes && kVector == kTileVector, "the tile of core/stats.h");

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = kThreads / 32;

// How many blocks of a launch have written their rows, by AnalyzeArguments::arrival_counter. Zero
// between launches; launches that could run at the same time have different ones.
__device__ Word32 arrivals[kNumArrivalCounters];

// Where a block works.
struct RowPlace {
  const char* grad;
  LeafFlags flags;
  Block chunk;
  long long row;  // among all members'
};

template <typename Arguments>
__device__ __forceinline__ RowPlace LocateRow(const Arguments& args) {
  const auto& table = args.table;
  const Word32 block = blockIdx.x;
  const int leaf = FindLeaf(table.first_block(), table.num_leaves, block);
  const Word32 first_block = table.first_block()[leaf];
  const Word64 size = table.sizes()[leaf];
  const long long member_elements = static_cast<long long>(size >> 8);
  RowPlace place;
  place.grad = table.buffer(leaf, 0);
  place.flags = LeafFlags::Unpack(size);
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

struct Tile {
  Vector round[kTileRounds];
};

// Elements behind the chunk's end are zero.
template <DType kDType>
__device__ __forceinline__ Tile LoadTile(const RowPlace& place, long long tile_begin,
                                         int tile_elements, const GradientUnscale& unscale) {
  RawVector raw[kTileRounds];
  Span spans[kTileRounds];
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    const int offset = (r * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    spans[r].begin = tile_begin + offset;
    spans[r].left = tile_elements - offset;
    spans[r].vectorised = place.flags.aligned && spans[r].left >= kVector;
    raw[r] = LoadRaw(kDType, place.grad, spans[r]);
  }
  Tile tile;
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    const Vector stored = ToFloat(kDType, raw[r]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x = unscale.exact_reciprocal ? unscale.Multiply(stored.value[i])
                                               : unscale.Divide(stored.value[i]);
      tile.round[r].value[i] = i < spans[r].left ? x : 0.0f;
    }
  }
  return tile;
}

struct Magnitudes {
  Word32 max_bits;
  int nonfinite;
};

// Of the whole block, to every thread.
__device__ __forceinline__ Magnitudes MeasureTile(const Tile& tile, Magnitudes* of_warps) {
  Magnitudes own{0, 0};
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const Word32 bits = MagnitudeBits(tile.round[r].value[i]);
      own.max_bits = MaxBits(own.max_bits, bits);
      own.nonfinite += IsNonfinite(bits) ? 1 : 0;
    }
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    own.max_bits = MaxBits(own.max_bits, __shfl_xor_sync(kAllLanes, own.max_bits, half));
    own.nonfinite += __shfl_xor_sync(kAllLanes, own.nonfinite, half);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  Magnitudes all = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    all.max_bits = MaxBits(all.max_bits, of_warps[warp].max_bits);
    all.nonfinite += of_warps[warp].nonfinite;
  }
  return all;
}

// Relative to the square of the inverse scale; right in thread 0.
__device__ __forceinline__ float SumSquares(const Tile& tile, float inverse_scale, float* lanes) {
  float sums[kVector] = {};
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x = tile.round[r].value[i] * inverse_scale;
      sums[i] = sums[i] + x * x;
    }
  }
  lanes[threadIdx.x] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  __syncthreads();
  if (threadIdx.x >= 32) return 0.0f;
  const float* own = lanes + threadIdx.x;
  float sum = (own[0] + own[64]) + (own[32] + own[96]);
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    sum = sum + __shfl_down_sync(kAllLanes, sum, half);
  }
  return sum;
}

template <DType kDType>
__device__ __forceinline__ StatsRow AnalyzeChunk(const RowPlace& place, long long chunk_elements,
                                                 const GradientUnscale& unscale) {
  __shared__ Magnitudes of_warps[kWarps];
  __shared__ float lanes[kThreads];
  StatsSums sums{};
  for (long long begin = 0; begin < place.chunk.elements; begin += kStatsTileElements) {
    const long long left = place.chunk.elements - begin;
    const int elements = left < kStatsTileElements ? static_cast<int>(left) : kStatsTileElements;
    const Tile tile = LoadTile<kDType>(place, place.chunk.begin + begin, elements, unscale);
    const Magnitudes magnitudes = MeasureTile(tile, of_warps);
    StatsSums tile_sums{0.0, magnitudes.max_bits, magnitudes.nonfinite};
    if (magnitudes.nonfinite == 0) {
      const float sum = SumSquares(tile, InverseStatsScale(magnitudes.max_bits), lanes);
      tile_sums.sum = AbsoluteSum(sum, magnitudes.max_bits);
    }
    sums = AddSums(sums, tile_sums);
    if (chunk_elements > kStatsTileElements) __syncthreads();  // shared memory is used again
  }
  return RowOf(sums);
}

// Past the first-level cache, which does not see what other blocks write.
__device__ __forceinline__ StatsRow ReadRow(const StatsRow* row) {
  const Word32* words = reinterpret_cast<const Word32*>(row);
  return {BitsToFloat(__ldcg(words)), __ldcg(words + 1), static_cast<int>(__ldcg(words + 2))};
}

// Of up to 1024 rows by one warp; right in its lane 0.
__device__ __forceinline__ StatsSums MergeRows(const StatsRow* rows, long long num_rows) {
  static_assert(kMergeLanes == 32, "a lane of core/stats.h is one of a warp");
  StatsSums sums{};
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x % 32); i < num_rows; i += kMergeLanes) {
    sums = AddSums(sums, SumsOf(ReadRow(rows + i)));
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const StatsSums other{__shfl_down_sync(kAllLanes, sums.sum, half),
                          __shfl_down_sync(kAllLanes, sums.max_bits, half),
                          __shfl_down_sync(kAllLanes, sums.nonfinite, half)};
    sums = AddSums(sums, other);
  }
  return sums;
}

__device__ __forceinline__ void WriteReport(const MergeBuffers& buffers, long long result,
                                            const StatsSums& sums) {
  const StatsReport report = ReportOf(sums);
  buffers.merged[result] = RowOf(sums);
  buffers.norm[result] = report.norm;
  buffers.scaled_norm[result] = report.scaled_norm;
  buffers.max_abs[result] = report.max_abs;
  buffers.nonfinite[result] = report.nonfinite;
}

// Writes the row, and tells the first warp of a block whether all others have written theirs.
template <typename Arguments>
__device__ __forceinline__ bool IsLastRow(const Arguments& args, long long place,
                                          const StatsRow& row) {
  if (threadIdx.x >= 32) return false;
  Word32 before = 0;
  if (threadIdx.x == 0) {
    args.rows[place] = row;
    __threadfence();  // the row before the arrival, for whoever reads after it
    before = atomicAdd(&arrivals[args.arrival_counter], 1u);
    if (before == gridDim.x - 1) arrivals[args.arrival_counter] = 0;
    __threadfence();
  }
  return __shfl_sync(kAllLanes, before, 0) == gridDim.x - 1;
}

template <typename Arguments>
__device__ __forceinline__ void AnalyzeOneRow(const Arguments& args) {
  const RowPlace place = LocateRow(args);
  const GradientUnscale unscale = MakeUnscale(args.gradient_scale.Read(place.chunk.member));
  StatsRow row;
  if (place.flags.grad_dtype == DType::kFloat32) {
    row = AnalyzeChunk<DType::kFloat32>(place, args.chunk_elements, unscale);
  } else if (place.flags.grad_dtype == DType::kBfloat16) {
    row = AnalyzeChunk<DType::kBfloat16>(place, args.chunk_elements, unscale);
  } else {
    row = AnalyzeChunk<DType::kFloat16>(place, args.chunk_elements, unscale);
  }
  if (args.arrival_counter < 0) {
    if (threadIdx.x == 0) args.rows[place.row] = row;
  } else if (IsLastRow(args, place.row, row)) {
    const StatsSums sums = MergeRows(args.rows, gridDim.x);
    if (threadIdx.x == 0) WriteReport(args.merge, 0, sums);
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
          MergeRows(rows + i * kMergeFanIn, left < kMergeFanIn ? left : kMergeFanIn);
      if (first_lane) scratch[i] = RowOf(sums);
    }
    __syncthreads();
    rows = scratch;
    num_rows = num_merged;
    scratch += num_merged;
  }
  if (warp != 0) return;
  const StatsSums sums = MergeRows(rows, num_rows);
  if (!first_lane) return;
  const long long result = member * args.num_segments + args.first_segment + entry;
  WriteReport(buffers, result, sums);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kAnalyzeBlocks)
    AnalyzeGradientSmall(const __grid_constant__ AnalyzeArguments<kSmallTableWords> args) {
  AnalyzeOneRow(args);
}

extern "C" __global__ void __launch_bounds__(kThreads, kAnalyzeBlocks)
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
