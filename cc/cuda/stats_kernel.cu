// The CUDA kernels of gradient statistics, by the tree of core/stats.h. Compiled as
// update_kernel.cu is.
//
// AnalyzeGradient: a block makes one row of one chunk: loads a tile, finds its largest magnitude,
// adds squares relative to that; the tile stays in registers between the two. Blocks begin with
// the last row, so that what they leave in the cache is what an update reads first. The last block
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

static_assert(kVector == kTileVector, "the tile of core/stats.h");

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = kTileLanes / 32;

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
  const Word32 block = gridDim.x - 1 - blockIdx.x;
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

// Not a streaming access: what stays in the cache, the update reads from there.
template <DType kDType>
__device__ __forceinline__ RawVector LoadWhole(const void* array, long long begin) {
  if (kDType == DType::kFloat32) {
    const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const Word32*>(array) + begin);
    return {{x.x, x.y, x.z, x.w}};
  }
  const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const Word16*>(array) + begin);
  return {{x.x, x.y, 0, 0}};
}

__device__ __forceinline__ int OffsetOfRound(int round) {
  return (round * kTileLanes + static_cast<int>(threadIdx.x)) * kVector;
}

// Of a power of two, by its bits: a division would keep the compiler from issuing loads before it.
__device__ __forceinline__ float ReciprocalOfPowerOfTwo(float x) {
  return BitsToFloat((254u << 23) - FloatToBits(x));
}

// All elements are there and aligned, and the scale is a power of two.
template <DType kDType>
__device__ __forceinline__ Tile LoadWholeTile(const RowPlace& place, float gradient_scale) {
  RawVector raw[kTileRounds];
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    raw[r] = LoadWhole<kDType>(place.grad, place.chunk.begin + OffsetOfRound(r));
  }
  const float reciprocal = ReciprocalOfPowerOfTwo(gradient_scale);
  Tile tile;
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    tile.round[r] = ToFloat(kDType, raw[r]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) tile.round[r].value[i] *= reciprocal;
  }
  return tile;
}

// Any tile and scale; elements behind the chunk's end are zero.
template <DType kDType>
__device__ __forceinline__ Tile LoadAnyTile(const RowPlace& place, long long tile_begin,
                                            int tile_elements, const GradientUnscale& unscale) {
  Tile tile;
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    const int left = tile_elements - OffsetOfRound(r);
    const bool vectorised = place.flags.aligned && left >= kVector;
    const Span span{tile_begin + OffsetOfRound(r), left, vectorised};
    tile.round[r] = ToFloat(kDType, LoadRaw(kDType, place.grad, span));
    UnscaleVector(unscale, &tile.round[r]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i >= left) tile.round[r].value[i] = 0.0f;
    }
  }
  return tile;
}

// What the threads of a block tell each other.
struct SharedStats {
  float maxima[kWarps];
  float lanes[kTileLanes];
  StatsRow rows[kWarps];
};

// The largest finite magnitude or infinity, of the whole block, to every thread. Takes no notice
// of a NaN.
__device__ __forceinline__ float FindMaximum(const Tile& tile, SharedStats* shared) {
  float maximum = 0.0f;
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) maximum = fmaxf(maximum, fabsf(tile.round[r].value[i]));
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, half));
  }
  if (threadIdx.x % 32 == 0) shared->maxima[threadIdx.x / 32] = maximum;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) maximum = fmaxf(maximum, shared->maxima[warp]);
  return maximum;
}

// Of the lane's elements, relative to the square of the inverse scale.
__device__ __forceinline__ float SumSquaresOfLane(const Tile& tile, float inverse_scale) {
  float sums[kVector] = {};
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x = tile.round[r].value[i] * inverse_scale;
      sums[i] = sums[i] + x * x;
    }
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// By the first warp; right in its lane 0.
__device__ __forceinline__ float AddLanes(const float* lanes) {
  float sums[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sums[warp] = lanes[32 * warp + threadIdx.x];
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
    for (int warp = 0; warp < half; ++warp) sums[warp] = sums[warp] + sums[warp + half];
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    sums[0] = sums[0] + __shfl_down_sync(kAllLanes, sums[0], half);
  }
  return sums[0];
}

// The row of a tile with a NaN or an infinity; right in thread 0.
__device__ __forceinline__ StatsRow CountNonfinite(const Tile& tile, SharedStats* shared) {
  StatsRow own{};
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
    own.max_bits = MaxBits(own.max_bits, __shfl_down_sync(kAllLanes, own.max_bits, half));
    own.nonfinite += __shfl_down_sync(kAllLanes, own.nonfinite, half);
  }
  if (threadIdx.x % 32 == 0) shared->rows[threadIdx.x / 32] = own;
  __syncthreads();
  for (int warp = 1; warp < kWarps; ++warp) {
    own.max_bits = MaxBits(own.max_bits, shared->rows[warp].max_bits);
    own.nonfinite += shared->rows[warp].nonfinite;
  }
  own.max_bits = UnifyNans(own.max_bits);
  return own;
}

// What a block makes of a tile: a row, right in thread 0, if all elements are finite.
struct TileResult {
  bool is_finite;
  StatsRow row;
};

__device__ __forceinline__ TileResult AnalyzeTile(const Tile& tile, SharedStats* shared) {
  const Word32 max_bits = FloatToBits(FindMaximum(tile, shared));
  const float lane = SumSquaresOfLane(tile, InverseStatsScale(max_bits));
  shared->lanes[threadIdx.x] = lane;
  // Finite elements have a finite sum: each square is below 16.
  if (__syncthreads_or(!(lane <= kMaxFloat))) return {false, {}};
  if (threadIdx.x >= 32) return {true, {}};
  return {true, {AddLanes(shared->lanes), max_bits, 0}};
}

// Any chunk. Apart, so that its divisions and counts cost the common case no registers.
template <DType kDType>
__device__ __noinline__ StatsRow AnalyzeAnyChunk(RowPlace place, float gradient_scale,
                                                 SharedStats* shared) {
  const GradientUnscale unscale = MakeUnscale(gradient_scale);
  StatsSums sums{};
  for (long long begin = 0; begin < place.chunk.elements; begin += kStatsTileElements) {
    const long long left = place.chunk.elements - begin;
    const int elements = left < kStatsTileElements ? static_cast<int>(left) : kStatsTileElements;
    const Tile tile = LoadAnyTile<kDType>(place, place.chunk.begin + begin, elements, unscale);
    TileResult result = AnalyzeTile(tile, shared);
    if (!result.is_finite) result.row = CountNonfinite(tile, shared);
    if (threadIdx.x == 0) sums = AddSums(sums, SumsOf(result.row));
    __syncthreads();  // shared memory is used again
  }
  return RowOf(sums);
}

// A whole tile is taken for finite and its scale for a power of two until the end: no decision
// stands between a block's start and its loads.
template <DType kDType>
__device__ __forceinline__ StatsRow AnalyzeChunk(const RowPlace& place, float gradient_scale,
                                                 SharedStats* shared) {
  if (place.chunk.elements == kStatsTileElements && place.flags.aligned) {
    const TileResult result = AnalyzeTile(LoadWholeTile<kDType>(place, gradient_scale), shared);
    // Not of a negative one, which makes every gradient NaN.
    if (result.is_finite && IsPowerOfTwo(gradient_scale) && gradient_scale > 0.0f) {
      return result.row;
    }
  }
  return AnalyzeAnyChunk<kDType>(place, gradient_scale, shared);
}

// kShared: past the first-level cache, which does not see what other blocks write.
template <bool kShared>
__device__ __forceinline__ StatsRow ReadRow(const StatsRow* row) {
  if (!kShared) return *row;
  const Word32* words = reinterpret_cast<const Word32*>(row);
  return {BitsToFloat(__ldcg(words)), __ldcg(words + 1), static_cast<int>(__ldcg(words + 2))};
}

// Of up to 1024 rows by one warp; right in its lane 0.
template <bool kShared>
__device__ __forceinline__ StatsSums MergeRows(const StatsRow* rows, long long num_rows) {
  static_assert(kMergeLanes == 32, "a lane of core/stats.h is one of a warp");
  StatsSums sums{};
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x % 32); i < num_rows; i += kMergeLanes) {
    sums = AddSums(sums, SumsOf(ReadRow<kShared>(rows + i)));
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

// Writes the row, and tells the warp whether that was the last arrival of the launch, which then
// may read what the others have written.
__device__ __forceinline__ bool WriteAndArrive(StatsRow* target, const StatsRow& row,
                                               Word32* counter) {
  Word32 before = 0;
  if (threadIdx.x == 0) {
    *target = row;
    __threadfence();
    before = atomicAdd(counter, 1u);
    if (before == gridDim.x - 1) *counter = 0;
    __threadfence();
  }
  __syncwarp();
  return __shfl_sync(kAllLanes, before, 0) == gridDim.x - 1;
}

// By the first warp of a block whose row is `row`: merges all rows if it is the last.
template <typename Arguments>
__device__ __forceinline__ void MergeIfLast(const Arguments& args, long long place,
                                            const StatsRow& row) {
  Word32* counter = &arrivals[args.arrival_counter];
  if (!WriteAndArrive(args.rows + place, row, counter)) return;
  const StatsSums sums = MergeRows<true>(args.rows, gridDim.x);
  if (threadIdx.x == 0) WriteReport(args.merge, 0, sums);
}

template <typename Arguments>
__device__ __forceinline__ void AnalyzeOneRow(const Arguments& args) {
  const RowPlace place = LocateRow(args);
  const float gradient_scale = args.gradient_scale.Read(place.chunk.member);
  __shared__ SharedStats shared;
  StatsRow row;
  if (place.flags.grad_dtype == DType::kFloat32) {
    row = AnalyzeChunk<DType::kFloat32>(place, gradient_scale, &shared);
  } else if (place.flags.grad_dtype == DType::kBfloat16) {
    row = AnalyzeChunk<DType::kBfloat16>(place, gradient_scale, &shared);
  } else {
    row = AnalyzeChunk<DType::kFloat16>(place, gradient_scale, &shared);
  }
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
