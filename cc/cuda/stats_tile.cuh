// What a block does for gradient statistics, by the tree of core/stats.h: makes the row of a chunk,
// merges rows, writes a report. For blocks of kTileLanes threads.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_STATS_TILE_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_STATS_TILE_CUH_

#include "core/adamw.h"
#include "core/chunks.h"
#include "core/stats.h"
#include "cuda/io.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {

static_assert(kVector == kTileVector, "the tile of core/stats.h");

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = kTileLanes / 32;

// Where a block works.
struct RowPlace {
  const char* grad;
  LeafFlags flags;
  Block chunk;
  long long row;  // among all members'
};

struct Tile {
  Vector<float> round[kTileRounds];
};

// Not a streaming access: what stays in the cache, the update reads from there.
template <DType kDType>
__device__ __forceinline__ RawVector<float> LoadWhole(const void* array, long long begin) {
  if (kDType == DType::kFloat32) {
    const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const Word32*>(array) + begin);
    return {{x.x, x.y, x.z, x.w}};
  }
  const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const Word16*>(array) + begin);
  return {{x.x, x.y}};
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
  RawVector<float> raw[kTileRounds];
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    raw[r] = LoadWhole<kDType>(place.grad, place.chunk.begin + OffsetOfRound(r));
  }
  const float reciprocal = ReciprocalOfPowerOfTwo(gradient_scale);
  Tile tile;
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    tile.round[r] = ToReal(kDType, raw[r]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) tile.round[r].value[i] *= reciprocal;
  }
  return tile;
}

// As statistics see the elements.
template <DType kDType>
__device__ __forceinline__ Vector<float> LoadStatsVector(const void* array, const Span& span) {
  if constexpr (kDType == DType::kFloat64) {
    const RawVector<double> raw = LoadDoubleWords(array, span);
    Vector<float> v;
#pragma unroll
    for (int i = 0; i < kVector; ++i) v.value[i] = StatsElement(BitsToDouble(DoubleBits(raw, i)));
    return v;
  } else {
    return ToReal(kDType, LoadRaw<float>(kDType, array, span));
  }
}

// Any tile and scale; elements behind the chunk's end are zero.
template <DType kDType>
__device__ __forceinline__ Tile LoadAnyTile(const RowPlace& place, long long tile_begin,
                                            int tile_elements,
                                            const GradientUnscale<float>& unscale) {
  Tile tile;
#pragma unroll
  for (int r = 0; r < kTileRounds; ++r) {
    const int left = tile_elements - OffsetOfRound(r);
    const bool vectorised = place.flags.aligned && left >= kVector;
    const Span span{tile_begin + OffsetOfRound(r), left, vectorised};
    tile.round[r] = LoadStatsVector<kDType>(place.grad, span);
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
  const GradientUnscale<float> unscale = MakeUnscale(gradient_scale);
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

// By a whole block; right in thread 0.
__device__ __forceinline__ StatsRow AnalyzeChunk(const RowPlace& place, float gradient_scale,
                                                 SharedStats* shared) {
  const DType grad_dtype = place.flags.grad_dtype;
  if (grad_dtype == DType::kFloat32) {
    return AnalyzeChunk<DType::kFloat32>(place, gradient_scale, shared);
  }
  if (grad_dtype == DType::kBfloat16) {
    return AnalyzeChunk<DType::kBfloat16>(place, gradient_scale, shared);
  }
  // The registers of a whole float64 tile would cost the other dtypes blocks (cuda/tuning.h).
  if (grad_dtype == DType::kFloat64) {
    return AnalyzeAnyChunk<DType::kFloat64>(place, gradient_scale, shared);
  }
  return AnalyzeChunk<DType::kFloat16>(place, gradient_scale, shared);
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

// By one thread: writes a row, and then counts it. Returns how many were counted before.
__device__ __forceinline__ Word32 PublishRow(StatsRow* target, const StatsRow& row,
                                             Word32* counter) {
  *target = row;
  __threadfence();
  return atomicAdd(counter, 1u);
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_STATS_TILE_CUH_
