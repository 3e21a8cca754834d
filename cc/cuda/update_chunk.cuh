// What the kernels of the update do with a chunk: find it, load, update, store, and count the step.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_UPDATE_CHUNK_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_UPDATE_CHUNK_CUH_

#include "core/adamw.h"
#include "cuda/elements.cuh"
#include "cuda/instance.cuh"
#include "cuda/io.cuh"
#include "cuda/noise.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {

// How many blocks of a launch have read the step's counters, by LaunchOptions::arrival_counter,
// after the rows that an analysis has written. Zero between launches; launches that could run at
// the same time have different ones.
static __device__ Word32 arrivals[kNumArrivalCounters];

// In place. `clip` is in shared memory, and is not there unless anything is clipped.
template <typename Real>
__device__ __forceinline__ void ClipVector(Clip kind, const GradientClip<Real>& clip,
                                           Vector<Real>* grad) {
  if (kind == Clip::kNorm && clip.by_norm) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) grad->value[i] = clip.ByNorm(grad->value[i]);
  } else if (kind == Clip::kValue) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) grad->value[i] = clip.ByValue(grad->value[i]);
  }
}

template <Amsgrad kAmsgrad, bool kNesterov, typename Real>
__device__ __forceinline__ VectorUpdate<Real> UpdateVector(
    const AdamWScalars<Real>& scalars, Real weight_decay, bool write_params,
    const Vector<Real>& param, const Vector<Real>& grad, const Vector<Real>& mu,
    const Vector<Real>& nu, const Vector<Real>& nu_max) {
  const AdamW<Real, kAmsgrad, kNesterov> adamw{scalars};
  VectorUpdate<Real> result;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const Moments<Real> old{mu.value[i], nu.value[i], nu_max.value[i]};
    const ElementUpdate<Real> next = adamw(param.value[i], grad.value[i], old, weight_decay);
    result.out.value[i] = write_params ? param.value[i] + next.update : next.update;
    result.mu.value[i] = next.moments.mu;
    result.nu.value[i] = next.moments.nu;
    result.nu_max.value[i] = next.moments.nu_max;
  }
  return result;
}

// A block's arrival: the sum of those before it, and the counters, which are right in the last
// block only: by then another one may have read new values.
struct Arrival {
  Word32 before;
  Word32 weight;
  StepCounts counts;
};

// The block has read the count. The weight, the same for all blocks, is what orders that: it
// depends on the count, so the addition cannot be issued before the count is there.
template <typename Arguments>
__device__ __forceinline__ Arrival Arrive(const Arguments& args, int count) {
  if (threadIdx.x != 0 || args.options.arrival_counter < 0) return {};
  const StepOperands& step = args.step;
  const Word32 weight = count == -1 ? 2 : 1;
  const Word32 before = atomicAdd(&arrivals[args.options.arrival_counter], weight);
  return {before, weight, {count, step.skipped.Read(0), step.consecutive.Read(0)}};
}

template <typename Kernel, typename Arguments>
__device__ __forceinline__ void CountStepIfLast(const Arguments& args, const Arrival& arrival,
                                                bool skips) {
  if (threadIdx.x != 0 || args.options.arrival_counter < 0) return;
  const Word32 num_rows = Kernel::kAnalyzes ? gridDim.x / kTileBlocks : 0;
  if (arrival.before != num_rows + (gridDim.x - 1) * arrival.weight) return;
  args.step.WriteCounts(0, arrival.counts, skips);
  arrivals[args.options.arrival_counter] = 0;
}

__device__ __forceinline__ bool HasNoise(const LaunchOptions& options) {
  return options.stochastic_moments || options.stochastic_params;
}

// By one thread: all but the step, which belongs to the thread that reads the count.
template <typename Arguments, typename AnySpan>
__device__ __forceinline__ void SetBlockNoise(const Arguments& args,
                                              const ChunkPlace<AnySpan>& place, BlockNoise* block) {
  const LaunchOptions& options = args.options;
  const long long member = place.chunk.member;
  const Word64* const row = args.table.row(place.leaf);
  const Word64 ids = row[options.noise_slot];
  block->noise.key = args.step.ReadSeed(member);
  block->noise.stream = static_cast<Word32>(ids);
  block->first_index = args.step.ReadFirstIndex(static_cast<int>(ids >> 32), member);
  block->strides = options.strides_slot < 0
                       ? nullptr
                       : reinterpret_cast<const IndexStride*>(row + options.strides_slot);
}

// Of the vector at local index `local`.
template <typename Kernel>
__device__ __forceinline__ VectorNoise MakeNoise(const LaunchOptions& options,
                                                 const BlockNoise& block, long long local) {
  VectorNoise words{};
  const auto index = static_cast<Word64>(local);
  if (Kernel::kHasNoise && options.stochastic_moments) {
    words.moments = NoiseOfVector(block, index);
  }
  if (Kernel::kIsGeneral && options.stochastic_params) {
    words.param = NoiseOfVector({block.noise.OfParams(), block.first_index, block.strides}, index);
  }
  return words;
}

template <typename Kernel, typename DTypes, typename Arguments, typename AnySpan, typename Real>
__device__ __forceinline__ void UpdateElements(const Arguments& args,
                                               const ChunkPlace<AnySpan>& place, int index,
                                               DTypes dtypes, const RawElements<Real>& raw,
                                               const BlockNoise& block_noise,
                                               const HyperTerms<Real>& terms,
                                               const GradientClip<Real>& clip) {
  const AnySpan span = SpanOf<Kernel>(place, index);
  const VectorNoise noise = MakeNoise<Kernel>(
      args.options, block_noise, place.chunk.offset + (span.begin - place.chunk.begin));
  Vector<Real> grad = ToReal(dtypes.grad, raw.grad);
  UnscaleVector(MakeUnscale(terms), &grad);
  ClipVector(args.options.clip, clip, &grad);
  const AdamWScalars<Real> scalars = MakeScalars<Kernel::kNesterov>(terms);
  const Vector<Real> param = ToReal(dtypes.param, raw.param);
  const Real weight_decay = place.flags.decays ? scalars.weight_decay : 0;
  const VectorUpdate<Real> next = UpdateVector<Kernel::kAmsgrad, Kernel::kNesterov>(
      scalars, weight_decay, args.options.write_params, param, grad, ToReal(dtypes.mu, raw.mu),
      ToReal(dtypes.nu, raw.nu), ToReal(dtypes.nu, raw.nu_max));
  StoreElements<Kernel>(args, place.leaf, dtypes, span, param, raw.ema, noise, terms, next);
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_UPDATE_CHUNK_CUH_
