// The CUDA kernel: one launch for as many leaves as the table holds. Compiled by nvcc at build
// time and by NVRTC at run time from this same source, without CUDA headers.
//
// A block takes one chunk of one leaf: find the leaf, decide on skipping, issue the loads, compute
// the step's scalars while they are under way, update, store.
//
// A small grid is bound by latency. There a block reads the scalars first of all, and the block
// that is last to have read the counters moves them on. A large one is bound by bandwidth, where
// reading first was slower; a kernel of its own counts after it.
//
// AnalyzeAndUpdate is a small grid whose blocks first make the rows of the gradients' statistics,
// wait until all rows are there, merge them, each block for itself, and then clip or skip.
#include "core/adamw.h"
#include "core/chunks.h"
#include "cuda/io.cuh"
#include "cuda/stats_tile.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

// How many blocks of a launch have read the step's counters, by LaunchOptions::arrival_counter,
// after the rows that an analysis has written. Zero between launches; launches that could run at
// the same time have different ones.
__device__ Word32 arrivals[kNumArrivalCounters];

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

// What a lane reads that works out one hyperparameter.
struct HyperInput {
  RawHyper raw;
  int count;
};

template <typename Arguments>
__device__ __forceinline__ HyperInput ReadHyperInput(const Arguments& args, long long member) {
  if (threadIdx.x >= kNumHyper) return {};
  return {args.step.ReadRaw(static_cast<int>(threadIdx.x), member), args.step.count.Read(member)};
}

// In a small grid: all scalars at once, and the count by the one thread that then arrives.
struct FirstReads {
  bool skip;
  HyperInput hyper;
};

template <typename Arguments>
__device__ __forceinline__ FirstReads ReadScalarsFirst(const Arguments& args, long long member) {
  unsigned skip = args.step.Skips(member);
  HyperInput hyper{};
  if (threadIdx.x == 0) hyper.count = args.step.count.Read(member);
  if (threadIdx.x < kNumHyper) {
    hyper.raw = args.step.ReadRaw(static_cast<int>(threadIdx.x), member);
  }
  // Keeps the compiler from moving the reads behind the branch on skip.
  asm volatile("" : "+r"(skip), "+r"(hyper.raw.low), "+r"(hyper.raw.high), "+r"(hyper.count));
  return {skip != 0, hyper};
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

// What an analysis in the same launch decides.
struct Decision {
  GradientClip clip;
  bool nonfinite;
};

// A call of its own, so that the update keeps its registers.
__device__ __noinline__ StatsRow AnalyzeRow(RowPlace place, ScalarOperand<float> gradient_scale,
                                            SharedStats* shared) {
  return AnalyzeChunk(place, gradient_scale.Read(0), shared);
}

// By one thread. All blocks of the grid run at the same time, so every row is on its way.
__device__ __forceinline__ void WaitForRows(const Word32* counter, Word32 num_rows) {
  while (*const_cast<const volatile Word32*>(counter) < num_rows) {
  }
  __threadfence();
}

// By the whole block: the first block of a tile makes its row, and every block merges all rows.
// The step's scalars are read while rows are on their way.
template <typename Arguments>
__device__ __forceinline__ Decision Analyze(const Arguments& args, const ChunkPlace& place,
                                            FirstReads* first) {
  __shared__ SharedStats shared;
  __shared__ Decision decision;
  const auto& analysis = args.analysis;
  Word32* counter = &arrivals[args.options.arrival_counter];
  if (blockIdx.x % kTileBlocks == 0) {
    const RowPlace row_place{args.table.buffer(place.leaf, 1), place.flags, place.chunk, 0};
    const StatsRow row = AnalyzeRow(row_place, analysis.gradient_scale, &shared);
    if (threadIdx.x == 0) PublishRow(analysis.rows + blockIdx.x / kTileBlocks, row, counter);
  }
  *first = ReadScalarsFirst(args, 0);
  if (threadIdx.x < 32) {
    const Word32 num_rows = gridDim.x / kTileBlocks;
    const float limit = args.step.ReadClipLimit(0);
    if (threadIdx.x == 0) WaitForRows(counter, num_rows);
    __syncwarp();
    const StatsSums sums = MergeRows<true>(analysis.rows, num_rows);
    if (threadIdx.x == 0) {
      const StatsReport report = ReportOf(sums);
      if (blockIdx.x == 0) WriteReport(analysis.merge, 0, sums);
      decision.clip = args.options.clip == Clip::kValue
                          ? ClipByValue(limit)
                          : ClipByNorm(report.norm, report.scaled_norm, limit);
      decision.nonfinite = analysis.skip_nonfinite && report.nonfinite != 0;
    }
  }
  __syncthreads();
  return decision;
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

template <typename Kernel, typename DTypes, typename Arguments>
__device__ __forceinline__ void UpdateChunk(const Arguments& args, const ChunkPlace& place,
                                            HyperInput hyper, const Decision& decision,
                                            DTypes dtypes) {
  constexpr DType kMoment = DType::kFloat32;
  constexpr bool kNesterov = Kernel::kNesterov;
  constexpr bool kHasMax = Kernel::kHasMax;
  const int leaf = place.leaf;
  const Span& span = place.span;
  const RawVector raw_param = LoadRaw(dtypes.param, args.table.buffer(leaf, 0), span);
  const RawVector raw_grad = LoadRaw(dtypes.grad, args.table.buffer(leaf, 1), span);
  RawVector raw_mu{};
  RawVector raw_nu{};
  RawVector raw_max{};
  if (!Kernel::kZeroMoments) {
    raw_mu = LoadRaw(kMoment, args.table.buffer(leaf, 2), span);
    raw_nu = LoadRaw(kMoment, args.table.buffer(leaf, 3), span);
    if (kHasMax) raw_max = LoadRaw(kMoment, args.table.buffer(leaf, 4), span);
  }

  Arrival arrival{};
  if (Kernel::kSmallGrid) {
    arrival = Arrive(args, hyper.count);
    hyper.count = __shfl_sync(0xffffffffu, hyper.count, 0);
  } else {
    hyper = ReadHyperInput(args, place.chunk.member);
  }
  __shared__ __align__(16) HyperTerms terms;
  __shared__ GradientClip clip;
  if (threadIdx.x < kNumHyper) {
    args.step.template SetTerms<kNesterov>(static_cast<int>(threadIdx.x), hyper.raw, hyper.count,
                                           args.options.maximize, &terms);
  }
  // A warp of its own, beside the first one's work.
  if (args.options.clip != Clip::kOff && threadIdx.x == 32) {
    clip = Kernel::kAnalyzes ? decision.clip
                             : args.step.ReadClip(args.options.clip, place.chunk.member);
  }
  __syncthreads();
  Vector grad = ToFloat(dtypes.grad, raw_grad);
  UnscaleVector(MakeUnscale(terms), &grad);
  ClipVector(args.options.clip, clip, &grad);
  const AdamWScalars scalars = MakeScalars<kNesterov>(terms);
  const VectorUpdate next = UpdateVector<Kernel::kAmsgrad, kNesterov>(
      scalars, place.flags.decays ? scalars.weight_decay : 0.0f, args.options.write_params,
      ToFloat(dtypes.param, raw_param), grad, ToFloat(kMoment, raw_mu), ToFloat(kMoment, raw_nu),
      ToFloat(kMoment, raw_max));

  const OutputSlots slots = SlotsOf<Kernel>(args.options);
  StoreRaw(dtypes.param, args.table.buffer(leaf, slots.out), span,
           FromFloat(dtypes.param, next.out));
  StoreRaw(kMoment, args.table.buffer(leaf, slots.mu), span, FromFloat(kMoment, next.mu));
  StoreRaw(kMoment, args.table.buffer(leaf, slots.nu), span, FromFloat(kMoment, next.nu));
  if (kHasMax) {
    StoreRaw(kMoment, args.table.buffer(leaf, slots.nu_max), span, FromFloat(kMoment, next.nu_max));
  }
  if (Kernel::kSmallGrid) CountStepIfLast<Kernel>(args, arrival, false);
}

// With float32 parameters the code has a body for float32 and one for bfloat16 gradients: it then
// needs 48 registers instead of 56 (54 in a small grid), and bfloat16 gradients are 8 % faster. A
// switch over all nine pairs, compiled to an indirect jump, was 20 % slower. A run-time choice of
// zero moments cost 1-2.5 % (all on an H200, 2026-11-29).
template <typename Kernel, typename Arguments>
__device__ __forceinline__ void UpdateOneChunk(const Arguments& args) {
  const ChunkPlace place = LocateChunk<Kernel>(args);
  FirstReads first{};
  Decision decision{};
  if constexpr (Kernel::kAnalyzes) {
    decision = Analyze(args, place, &first);
  } else if (Kernel::kSmallGrid) {
    first = ReadScalarsFirst(args, place.chunk.member);
  }
  bool skip = Kernel::kSmallGrid ? first.skip : args.step.Skips(place.chunk.member);
  skip |= decision.nonfinite;
  const HyperInput& hyper = first.hyper;
  if (skip) {
    SkipChunk<Kernel>(args, place.leaf, place.flags, place.span);
    if (Kernel::kSmallGrid) CountStepIfLast<Kernel>(args, Arrive(args, hyper.count), true);
    return;
  }
  constexpr DType kF32 = DType::kFloat32;
  const DType grad = place.flags.grad_dtype;
  if (Kernel::kClass != LeafClass::kFloat32) {
    UpdateChunk<Kernel>(args, place, hyper, decision, AnyDTypes{place.flags.param_dtype, grad});
  } else if (grad == kF32) {
    UpdateChunk<Kernel>(args, place, hyper, decision, FixedDTypes<kF32, kF32>{});
  } else {
    UpdateChunk<Kernel>(args, place, hyper, decision, FixedDTypes<kF32, DType::kBfloat16>{});
  }
}

// What a kernel is compiled for.
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

}  // namespace

// Counts the step alone: behind a large grid, for the members of a vmap, for a call without
// elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    CountStep(const __grid_constant__ StepOperands step, long long num_counts) {
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < num_counts) step.WriteCounts(i, step.ReadCounts(i), step.Skips(i));
}

// The entry points: one for each grid, LeafClass and rule; with an analysis for the common class
// only. A compilation at run time is for one rule, JFA_ONLY_RULE (2 * amsgrad + nesterov), and one
// class, JFA_ONLY_CLASS.
#define JFA_KERNEL(NAME, ARGUMENTS, THREADS, GRID, CLASS, AMSGRAD, NESTEROV)            \
  extern "C" __global__ void __launch_bounds__(THREADS)                                 \
      NAME(const __grid_constant__ ARGUMENTS args) {                                    \
    UpdateOneChunk<Instance<Grid::GRID, LeafClass::k##CLASS, AMSGRAD, NESTEROV>>(args); \
  }
#define JFA_CLASS_KERNELS(CLASS, RULE, ...)                                                       \
  JFA_KERNEL(UpdateSmall##CLASS##Rule##RULE, UpdateArguments<kSmallTableWords>, kThreads, kSmall, \
             CLASS, __VA_ARGS__)                                                                  \
  JFA_KERNEL(UpdateLarge##CLASS##Rule##RULE, UpdateArguments<kLargeTableWords>, kThreads, kLarge, \
             CLASS, __VA_ARGS__)
#define JFA_FLOAT32_KERNELS(RULE, ...)                                                             \
  JFA_CLASS_KERNELS(Float32, RULE, __VA_ARGS__)                                                    \
  JFA_KERNEL(AnalyzeAndUpdateFloat32Rule##RULE, AnalyzeAndUpdateArguments, kTileLanes, kAnalyzing, \
             Float32, __VA_ARGS__)

#if !defined(JFA_ONLY_CLASS)
#define JFA_UPDATE_KERNELS(...)            \
  JFA_FLOAT32_KERNELS(__VA_ARGS__)         \
  JFA_CLASS_KERNELS(AnyDType, __VA_ARGS__) \
  JFA_CLASS_KERNELS(FirstStep, __VA_ARGS__)
#elif JFA_ONLY_CLASS == 0
#define JFA_UPDATE_KERNELS(...) JFA_FLOAT32_KERNELS(__VA_ARGS__)
#elif JFA_ONLY_CLASS == 1
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(AnyDType, __VA_ARGS__)
#else
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(FirstStep, __VA_ARGS__)
#endif

#if !defined(JFA_ONLY_RULE) || JFA_ONLY_RULE == 0
JFA_UPDATE_KERNELS(0, Amsgrad::kOff, false)
#endif
#if !defined(JFA_ONLY_RULE) || JFA_ONLY_RULE == 1
JFA_UPDATE_KERNELS(1, Amsgrad::kOff, true)
#endif
#if !defined(JFA_ONLY_RULE) || JFA_ONLY_RULE == 2
JFA_UPDATE_KERNELS(2, Amsgrad::kUncorrected, false)
#endif
#if !defined(JFA_ONLY_RULE) || JFA_ONLY_RULE == 3
JFA_UPDATE_KERNELS(3, Amsgrad::kUncorrected, true)
#endif
#if !defined(JFA_ONLY_RULE) || JFA_ONLY_RULE == 4
JFA_UPDATE_KERNELS(4, Amsgrad::kCorrected, false)
#endif
#if !defined(JFA_ONLY_RULE) || JFA_ONLY_RULE == 5
JFA_UPDATE_KERNELS(5, Amsgrad::kCorrected, true)
#endif

}  // namespace jfa::cuda
