// What the kernels of the update do with a chunk: find it, load, update, store, and count the step.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_UPDATE_CHUNK_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_UPDATE_CHUNK_CUH_

#include "core/adamw.h"
#include "core/chunks.h"
#include "cuda/io.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {

// How many blocks of a launch have read the step's counters, by LaunchOptions::arrival_counter,
// after the rows that an analysis has written. Zero between launches; launches that could run at
// the same time have different ones.
static __device__ Word32 arrivals[kNumArrivalCounters];

// What a kernel is compiled for: `Kernel` below.
template <Grid kGrid, LeafClass kLeafClass, Amsgrad kAmsgradKind, bool kNesterovMomentum>
struct Instance {
  static constexpr bool kSmallGrid = kGrid != Grid::kLarge;
  static constexpr bool kAnalyzes = kGrid == Grid::kAnalyzing;
  static constexpr int kBlockThreads = kAnalyzes ? kTileLanes : kThreads;
  static constexpr LeafClass kClass = kLeafClass;
  static constexpr bool kZeroMoments = kLeafClass == LeafClass::kFirstStep;
  static constexpr Amsgrad kAmsgrad = kAmsgradKind;
  static constexpr bool kHasMax = kAmsgradKind != Amsgrad::kOff;
  static constexpr bool kNesterov = kNesterovMomentum;
};

// The outputs' places in a leaf's row of the table; an output that is its input shares its place.
struct OutputSlots {
  int out;
  int mu;
  int nu;
  int nu_max;
};

template <typename Kernel>
__device__ __forceinline__ OutputSlots SlotsOf(const LaunchOptions& options) {
  const int first = Kernel::kZeroMoments ? 2 : Kernel::kHasMax ? 5 : 4;
  const int moments = first + (options.out_apart ? 1 : 0);
  return {options.out_apart ? first : 0, options.moments_apart ? moments : 2,
          options.moments_apart ? moments + 1 : 3, options.moments_apart ? moments + 2 : 4};
}

struct VectorUpdate {
  Vector out;
  Vector mu;
  Vector nu;
  Vector nu_max;
};

// In place. `clip` is in shared memory, and is not there unless anything is clipped.
__device__ __forceinline__ void ClipVector(Clip kind, const GradientClip& clip, Vector* grad) {
  if (kind == Clip::kNorm && clip.by_norm) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) grad->value[i] = clip.ByNorm(grad->value[i]);
  } else if (kind == Clip::kValue) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) grad->value[i] = clip.ByValue(grad->value[i]);
  }
}

template <Amsgrad kAmsgrad, bool kNesterov>
__device__ __forceinline__ VectorUpdate UpdateVector(const AdamWScalars& scalars,
                                                     float weight_decay, bool write_params,
                                                     const Vector& param, const Vector& grad,
                                                     const Vector& mu, const Vector& nu,
                                                     const Vector& nu_max) {
  const AdamW<kAmsgrad, kNesterov> adamw{scalars};
  VectorUpdate result;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const Moments old{mu.value[i], nu.value[i], nu_max.value[i]};
    const ElementUpdate next = adamw(param.value[i], grad.value[i], old, weight_decay);
    result.out.value[i] = write_params ? param.value[i] + next.update : next.update;
    result.mu.value[i] = next.moments.mu;
    result.nu.value[i] = next.moments.nu;
    result.nu_max.value[i] = next.moments.nu_max;
  }
  return result;
}

// A skipped step: state and parameters keep their bits, an update is -0.0.
template <typename Kernel, typename Arguments>
__device__ void SkipChunk(const Arguments& args, int leaf, LeafFlags flags, const Span& span) {
  const LaunchOptions& options = args.options;
  const OutputSlots slots = SlotsOf<Kernel>(options);
  const auto copy = [&](DType dtype, int from, int to) {
    StoreRaw(dtype, args.table.buffer(leaf, to), span,
             LoadRaw(dtype, args.table.buffer(leaf, from), span));
  };
  if (!options.write_params) {
    const Vector minus_zero{{-0.0f, -0.0f, -0.0f, -0.0f}};
    StoreRaw(flags.param_dtype, args.table.buffer(leaf, slots.out), span,
             FromFloat(flags.param_dtype, minus_zero));
  } else if (options.out_apart) {
    copy(flags.param_dtype, 0, slots.out);
  }
  if (!options.moments_apart) return;
  const auto keep_moment = [&](int from, int to) {
    RawVector old{};
    if (!Kernel::kZeroMoments) old = LoadRaw(DType::kFloat32, args.table.buffer(leaf, from), span);
    StoreRaw(DType::kFloat32, args.table.buffer(leaf, to), span, old);
  };
  keep_moment(2, slots.mu);
  keep_moment(3, slots.nu);
  if (Kernel::kHasMax) keep_moment(4, slots.nu_max);
}

// Where a block works, the same for all its threads.
struct ChunkPlace {
  int leaf;
  LeafFlags flags;
  Block chunk;
  Span span;  // of the thread
};

// A grid without an analysis has a block for each chunk, one with it kTileBlocks for each tile.
template <typename Kernel, typename Arguments>
__device__ __forceinline__ ChunkPlace LocateChunk(const Arguments& args) {
  const auto& table = args.table;
  constexpr int kBlocks = Kernel::kAnalyzes ? kTileBlocks : 1;
  const Word32 entry = blockIdx.x / kBlocks;
  ChunkPlace place;
  place.leaf = FindLeaf(table.first_block(), table.num_leaves, entry);
  const Word64 size = table.sizes()[place.leaf];
  place.flags = LeafFlags::Unpack(size);
  place.chunk =
      LocateBlock(entry - table.first_block()[place.leaf], static_cast<long long>(size >> 8),
                  table.members, Kernel::kAnalyzes ? kStatsTileElements : kChunk);
  const int thread = static_cast<int>(blockIdx.x % kBlocks * Kernel::kBlockThreads + threadIdx.x);
  const int offset = thread * kVector;
  place.span.begin = place.chunk.begin + offset;
  place.span.left = static_cast<int>(place.chunk.elements) - offset;
  place.span.vectorised = place.flags.aligned && place.span.left >= kVector;
  return place;
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

// The dtypes of a leaf, known to the compiler or not.
template <DType kParam, DType kGrad>
struct FixedDTypes {
  static constexpr DType param = kParam;
  static constexpr DType grad = kGrad;
};
struct AnyDTypes {
  DType param;
  DType grad;
};

// As loaded; what is not loaded is zero.
struct RawElements {
  RawVector param;
  RawVector grad;
  RawVector mu;
  RawVector nu;
  RawVector nu_max;
};

template <typename Kernel, typename DTypes, typename Arguments>
__device__ __forceinline__ RawElements LoadElements(const Arguments& args, const ChunkPlace& place,
                                                    DTypes dtypes) {
  const auto load = [&](DType dtype, int buffer) {
    return LoadRaw(dtype, args.table.buffer(place.leaf, buffer), place.span);
  };
  RawElements raw{};
  raw.param = load(dtypes.param, 0);
  raw.grad = load(dtypes.grad, 1);
  if (Kernel::kZeroMoments) return raw;
  raw.mu = load(DType::kFloat32, 2);
  raw.nu = load(DType::kFloat32, 3);
  if (Kernel::kHasMax) raw.nu_max = load(DType::kFloat32, 4);
  return raw;
}

template <typename Kernel, typename DTypes, typename Arguments>
__device__ __forceinline__ void UpdateElements(const Arguments& args, const ChunkPlace& place,
                                               DTypes dtypes, const RawElements& raw,
                                               const HyperTerms& terms, const GradientClip& clip) {
  constexpr DType kMoment = DType::kFloat32;
  Vector grad = ToFloat(dtypes.grad, raw.grad);
  UnscaleVector(MakeUnscale(terms), &grad);
  ClipVector(args.options.clip, clip, &grad);
  const AdamWScalars scalars = MakeScalars<Kernel::kNesterov>(terms);
  const VectorUpdate next = UpdateVector<Kernel::kAmsgrad, Kernel::kNesterov>(
      scalars, place.flags.decays ? scalars.weight_decay : 0.0f, args.options.write_params,
      ToFloat(dtypes.param, raw.param), grad, ToFloat(kMoment, raw.mu), ToFloat(kMoment, raw.nu),
      ToFloat(kMoment, raw.nu_max));

  const OutputSlots slots = SlotsOf<Kernel>(args.options);
  const auto store = [&](DType dtype, int buffer, const Vector& vector) {
    StoreRaw(dtype, args.table.buffer(place.leaf, buffer), place.span, FromFloat(dtype, vector));
  };
  store(dtypes.param, slots.out, next.out);
  store(kMoment, slots.mu, next.mu);
  store(kMoment, slots.nu, next.nu);
  if (Kernel::kHasMax) store(kMoment, slots.nu_max, next.nu_max);
}

// With float32 parameters the code has a body for float32 and one for bfloat16 gradients: it then
// needs 48 registers instead of 56 (54 in a small grid), and bfloat16 gradients are 8 % faster. A
// switch over all nine pairs, compiled to an indirect jump, was 20 % slower. A run-time choice of
// zero moments cost 1-2.5 % (all on an H200, 2026-11-29).
// Calls `update` with the dtypes of a leaf.
template <typename Kernel, typename Update>
__device__ __forceinline__ void WithDTypes(LeafFlags flags, const Update& update) {
  constexpr DType kF32 = DType::kFloat32;
  if (Kernel::kClass != LeafClass::kFloat32) {
    update(AnyDTypes{flags.param_dtype, flags.grad_dtype});
  } else if (flags.grad_dtype == kF32) {
    update(FixedDTypes<kF32, kF32>{});
  } else {
    update(FixedDTypes<kF32, DType::kBfloat16>{});
  }
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_UPDATE_CHUNK_CUH_
