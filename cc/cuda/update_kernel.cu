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
// AnalyzeAndUpdate is for small trees too, with the statistics of their gradients.
#include "cuda/analyze_and_update.cuh"
#include "cuda/table.h"
#include "cuda/tuning.h"
#include "cuda/update_chunk.cuh"

namespace jfa::cuda {
namespace {

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

// What a block's threads share.
template <typename Real>
struct SharedScalars {
  HyperTerms<Real> terms;
  GradientClip<Real> clip;
  BlockNoise noise;
};

template <typename Kernel, typename Arguments, typename AnySpan, typename Real>
__device__ __forceinline__ void SetScalars(const Arguments& args, const ChunkPlace<AnySpan>& place,
                                           const HyperInput& hyper, SharedScalars<Real>* shared) {
  // Each by a warp of its own, beside the others' work.
  constexpr int kClipThread = 32;
  constexpr int kNoiseThread = 64;
  static_assert(kNoiseThread < Kernel::kBlockThreads);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kNumHyper) {
    args.step.template SetTerms<Kernel::kNesterov>(thread, hyper.raw, hyper.count,
                                                   args.options.maximize, args.LrScale(place.leaf),
                                                   &shared->terms);
  }
  if (args.options.clip != Clip::kOff && thread == kClipThread) {
    shared->clip = args.step.template ReadClip<Real>(args.options.clip, place.chunk.member);
  }
  if (!Kernel::kHasNoise || !HasNoise(args.options)) return;
  if (thread == 0) shared->noise.noise.step = static_cast<Word32>(NextCount(hyper.count));
  if (thread == kNoiseThread) SetBlockNoise(args, place, &shared->noise);
}

template <typename Kernel, typename DTypes, typename Arguments, typename AnySpan, typename Real>
__device__ __forceinline__ void UpdateChunk(const Arguments& args, const ChunkPlace<AnySpan>& place,
                                            HyperInput hyper, DTypes dtypes,
                                            SharedScalars<Real>* shared) {
  constexpr int kAtOnce = AnySpan::kWhole ? Kernel::kAtOnce : 1;
  const auto load = [&](int i) {
    return LoadElements<Kernel>(args, place.leaf, dtypes, SpanOf<Kernel>(place, i));
  };
  const auto update = [&](int i, const RawElements<Real>& raw) {
    UpdateElements<Kernel>(args, place, i, dtypes, raw, shared->noise, shared->terms, shared->clip);
  };
  RawElements<Real> raw[kAtOnce];
  const auto load_from = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) raw[i] = load(first + i);
  };
  load_from(0);
  Arrival arrival{};
  if (Kernel::kSmallGrid) {
    arrival = Arrive(args, hyper.count);
    hyper.count = __shfl_sync(0xffffffffu, hyper.count, 0);
  } else {
    hyper = ReadHyperInput(args, place.chunk.member);
  }
  SetScalars<Kernel>(args, place, hyper, shared);
  __syncthreads();
#pragma unroll 1
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) update(first + i, raw[i]);
    first += kAtOnce;
    if (first >= VectorsOf<Kernel>(args.options)) break;
    load_from(first);
  }
  if (Kernel::kSmallGrid) CountStepIfLast<Kernel>(args, arrival, false);
}

template <typename Kernel, typename Arguments>
__device__ __forceinline__ void UpdateOneChunk(const Arguments& args) {
  __shared__ __align__(16) SharedScalars<typename Kernel::Real> shared;
  const ChunkPlace<Span> place = LocateChunk<Kernel>(args);
  FirstReads first{};
  if (Kernel::kSmallGrid) first = ReadScalarsFirst(args, place.chunk.member);
  const bool skip = Kernel::kSmallGrid ? first.skip : args.step.Skips(place.chunk.member);
  const HyperInput& hyper = first.hyper;
  if (skip) {
    SkipChunk<Kernel>(args, place);
    if (Kernel::kSmallGrid) CountStepIfLast<Kernel>(args, Arrive(args, hyper.count), true);
    return;
  }
  WithSpans<Kernel>(args.options, place, [&](const auto& spans, auto dtypes) {
    UpdateChunk<Kernel>(args, spans, hyper, dtypes, &shared);
  });
}

}  // namespace

// Counts the step alone: behind a large grid, for the members of a vmap, for a call without
// elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    CountStep(const __grid_constant__ StepOperands step, long long num_counts) {
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < num_counts) step.WriteCounts(i, step.ReadCounts(i), step.Skips(i));
}

// The entry points: one for each grid, LeafClass and rule; with an analysis for the common class
// only. A compilation at run time is for one rule, JFA_ONLY_RULE (2 * amsgrad + nesterov), one
// class, JFA_ONLY_CLASS, and JFA_ONLY_ANALYZING: 0 for the grids without an analysis, 1 for the one
// with it.
#define JFA_UPDATE_KERNEL(SIZE, CLASS, RULE, AMSGRAD, NESTEROV)                            \
  extern "C" __global__ void __launch_bounds__(                                            \
      kThreads, UpdateBlocks(Grid::k##SIZE, LeafClass::k##CLASS, AMSGRAD))                 \
      Update##SIZE##CLASS##Rule##RULE(                                                     \
          const __grid_constant__ UpdateArguments<k##SIZE##TableWords> args) {             \
    UpdateOneChunk<Instance<Grid::k##SIZE, LeafClass::k##CLASS, AMSGRAD, NESTEROV>>(args); \
  }
#define JFA_CLASS_KERNELS(...)          \
  JFA_UPDATE_KERNEL(Small, __VA_ARGS__) \
  JFA_UPDATE_KERNEL(Large, __VA_ARGS__)
#define JFA_ANALYZING_KERNEL(RULE, ...)                                                           \
  extern "C" __global__ void __launch_bounds__(kTileLanes, kAnalyzeAndUpdateBlocks)               \
      AnalyzeAndUpdateFloat32Rule##RULE(const __grid_constant__ AnalyzeAndUpdateArguments args) { \
    AnalyzeAndUpdateOneChunk<Instance<Grid::kAnalyzing, LeafClass::kFloat32, __VA_ARGS__>>(args); \
  }

#if !defined(JFA_ONLY_CLASS)
#define JFA_UPDATE_KERNELS(...)                 \
  JFA_CLASS_KERNELS(Float32, __VA_ARGS__)       \
  JFA_CLASS_KERNELS(AnyDType, __VA_ARGS__)      \
  JFA_CLASS_KERNELS(FirstStep, __VA_ARGS__)     \
  JFA_CLASS_KERNELS(Bf16Moments, __VA_ARGS__)   \
  JFA_CLASS_KERNELS(Float32Extras, __VA_ARGS__) \
  JFA_CLASS_KERNELS(General, __VA_ARGS__)       \
  JFA_CLASS_KERNELS(Float64, __VA_ARGS__)       \
  JFA_ANALYZING_KERNEL(__VA_ARGS__)
#elif JFA_ONLY_ANALYZING
#define JFA_UPDATE_KERNELS(...) JFA_ANALYZING_KERNEL(__VA_ARGS__)
#elif JFA_ONLY_CLASS == 0
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(Float32, __VA_ARGS__)
#elif JFA_ONLY_CLASS == 1
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(AnyDType, __VA_ARGS__)
#elif JFA_ONLY_CLASS == 2
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(FirstStep, __VA_ARGS__)
#elif JFA_ONLY_CLASS == 3
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(Bf16Moments, __VA_ARGS__)
#elif JFA_ONLY_CLASS == 4
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(Float32Extras, __VA_ARGS__)
#elif JFA_ONLY_CLASS == 5
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(General, __VA_ARGS__)
#else
#define JFA_UPDATE_KERNELS(...) JFA_CLASS_KERNELS(Float64, __VA_ARGS__)
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
