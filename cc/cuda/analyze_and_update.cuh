// A step that analyses its own gradients, in one launch of blocks that run at the same time: the
// first block of a tile makes its row, every block waits for all rows and merges them for itself,
// and then clips or skips.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_ANALYZE_AND_UPDATE_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_ANALYZE_AND_UPDATE_CUH_

#include "core/clip.h"
#include "core/stats.h"
#include "cuda/stats_tile.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"
#include "cuda/update_chunk.cuh"

namespace jfa::cuda {

// A call of its own, so that the update keeps its registers. Its trees have no float16.
__device__ __noinline__ StatsRow AnalyzeRow(RowPlace place, ScalarOperand<float> gradient_scale,
                                            SharedStats* shared) {
  const float scale = gradient_scale.Read(0);
  if (place.flags.grad_dtype == DType::kFloat32) {
    return AnalyzeChunk<DType::kFloat32>(place, scale, shared);
  }
  return AnalyzeChunk<DType::kBfloat16>(place, scale, shared);
}

// By one thread. All blocks of the grid run at the same time, so every row is on its way.
__device__ __forceinline__ void WaitForRows(const Word32* counter, Word32 num_rows) {
  while (*const_cast<const volatile Word32*>(counter) < num_rows) {
  }
  __threadfence();
}

// By the whole block, of the first block of a tile.
template <typename Arguments>
__device__ __forceinline__ void MakeRowOfTile(const Arguments& args,
                                              const ChunkPlace<Span>& place) {
  if (blockIdx.x % kTileBlocks != 0) return;
  __shared__ SharedStats shared;
  const RowPlace row_place{args.table.buffer(place.leaf, 1), place.flags, place.chunk, 0};
  const StatsRow row = AnalyzeRow(row_place, args.analysis.gradient_scale, &shared);
  if (threadIdx.x != 0) return;
  PublishRow(args.analysis.rows + blockIdx.x / kTileBlocks, row,
             &arrivals[args.options.arrival_counter]);
}

// What the report means for the step.
struct Decision {
  GradientClip<float> clip;
  bool skip;
};

// By the first warp, right in its lane 0: merges all rows; the first block writes the report.
template <typename Arguments>
__device__ __forceinline__ Decision Decide(const Arguments& args) {
  const auto& analysis = args.analysis;
  const float limit = args.step.template ReadClipLimit<float>(0);
  const bool skips = args.step.Skips(0);
  const Word32 num_rows = gridDim.x / kTileBlocks;
  if (threadIdx.x == 0) WaitForRows(&arrivals[args.options.arrival_counter], num_rows);
  __syncwarp();
  const StatsSums sums = MergeRows<true>(analysis.rows, num_rows);
  if (threadIdx.x != 0) return {};
  if (blockIdx.x == 0) WriteReport(analysis.merge, 0, sums);
  const StatsReport report = ReportOf(sums);
  const GradientClip<float> clip = args.options.clip == Clip::kValue
                                       ? ClipByValue(limit)
                                       : ClipByNorm(report.norm, report.scaled_norm, limit);
  return {clip, skips || (analysis.skip_nonfinite && report.nonfinite != 0)};
}

// While the first warp waits for rows, the second one works out the step's scalars; chunks are
// loaded after that, since loading before it was slower: 9.0 us instead of 8.5 for 12 leaves in 12
// tiles, where two launches took 10.2 (H200, CUDA graph, 2026-11-29).
template <typename Kernel, typename Arguments>
__device__ __forceinline__ void AnalyzeAndUpdateOneChunk(const Arguments& args) {
  const ChunkPlace<Span> place = LocateChunk<Kernel>(args);
  MakeRowOfTile(args, place);
  __shared__ __align__(16) HyperTerms<float> terms;
  __shared__ Decision decision;
  const int count = args.step.count.Read(0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x / 32 == 0) {
    const Decision own = Decide(args);
    if (lane == 0) decision = own;
  } else if (threadIdx.x / 32 == 1 && lane < kNumHyper) {
    args.step.template SetTerms<Kernel::kNesterov>(lane, args.step.ReadRaw(lane, 0), count,
                                                   args.options.maximize, args.LrScale(place.leaf),
                                                   &terms);
  }
  __syncthreads();
  const bool skip = decision.skip;
  if (skip) {
    SkipChunk<Kernel>(args, place);
    return CountStepIfLast<Kernel>(args, Arrive(args, count), skip);
  }
  WithDTypes<Kernel>(args.options, place.flags, [&](auto dtypes) {
    const RawElements<float> raw = LoadElements<Kernel>(args, place.leaf, dtypes, place.span);
    const Arrival arrival = Arrive(args, count);
    UpdateElements<Kernel>(args, place, 0, dtypes, raw, {}, terms, decision.clip);
    CountStepIfLast<Kernel>(args, arrival, skip);
  });
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_ANALYZE_AND_UPDATE_CUH_
