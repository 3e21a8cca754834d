// The elements of a thread: where they lie, and their way between memory and registers.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_ELEMENTS_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_ELEMENTS_CUH_

#include "core/adamw.h"
#include "core/chunks.h"
#include "cuda/instance.cuh"
#include "cuda/io.cuh"
#include "cuda/noise.cuh"
#include "cuda/table.h"

namespace jfa::cuda {

// Where a block works: `span` is of the thread's first vector, the rest is the same for all
// threads.
template <typename AnySpan>
struct ChunkPlace {
  int leaf;
  LeafFlags flags;
  Block chunk;
  AnySpan span;
};

// Of a thread's vector `index`: a block's threads have neighbouring ones.
template <typename Kernel>
__device__ __forceinline__ Span SpanOf(const ChunkPlace<Span>& place, int index) {
  const int offset = index * Kernel::kBlockThreads * kVector;
  const int left = place.span.left - offset;
  return {place.span.begin + offset, left, place.flags.aligned && left >= kVector};
}
template <typename Kernel>
__device__ __forceinline__ WholeSpan SpanOf(const ChunkPlace<WholeSpan>& place, int index) {
  return {place.span.begin + index * Kernel::kBlockThreads * kVector};
}

// Vectors of a thread in this launch.
template <typename Kernel>
__device__ __forceinline__ int VectorsOf(const LaunchOptions& options) {
  return Kernel::kHasVectors ? options.vectors : 1;
}

template <typename Kernel>
__device__ __forceinline__ int BlockElements(const LaunchOptions& options) {
  return Kernel::kBlockThreads * kVector * VectorsOf<Kernel>(options);
}

// A grid without an analysis has a block for each chunk, one with it kTileBlocks for each tile.
template <typename Kernel, typename Arguments>
__device__ __forceinline__ ChunkPlace<Span> LocateChunk(const Arguments& args) {
  const auto& table = args.table;
  constexpr int kBlocks = Kernel::kAnalyzes ? kTileBlocks : 1;
  const Word32 entry = blockIdx.x / kBlocks;
  ChunkPlace<Span> place;
  place.leaf = FindLeaf(table.first_block(), table.num_leaves, entry);
  const Word64 size = table.sizes()[place.leaf];
  place.flags = LeafFlags::Unpack(static_cast<Word32>(size));
  place.chunk =
      LocateBlock(entry - table.first_block()[place.leaf], static_cast<long long>(size >> 8),
                  table.members, kBlocks * BlockElements<Kernel>(args.options));
  const int thread = static_cast<int>(blockIdx.x % kBlocks * Kernel::kBlockThreads + threadIdx.x);
  const int offset = thread * kVector;
  place.span.begin = place.chunk.begin + offset;
  place.span.left = static_cast<int>(place.chunk.elements) - offset;
  place.span.vectorised = place.flags.aligned && place.span.left >= kVector;
  return place;
}

// Calls `work` with the place and the dtypes of the leaf. A kernel with code for whole chunks knows
// the dtypes there, and where the block's vectors are not all whole it has one body for all.
template <typename Kernel, typename Work>
__device__ __forceinline__ void WithSpans(const LaunchOptions& options,
                                          const ChunkPlace<Span>& place, const Work& work) {
  if constexpr (Kernel::kHasWholeChunks) {
    const ChunkPlace<WholeSpan> whole{place.leaf, place.flags, place.chunk, {place.span.begin}};
    if (place.flags.aligned && place.chunk.elements == BlockElements<Kernel>(options)) {
      WithDTypes<Kernel>(options, place.flags, [&](auto dtypes) { work(whole, dtypes); });
    } else {
      work(place, PartDTypes<Kernel::kMoment>{place.flags.grad_dtype});
    }
  } else {
    WithDTypes<Kernel>(options, place.flags, [&](auto dtypes) { work(place, dtypes); });
  }
}

// Places in a leaf's row of the table that depend on the launch; an output that is its input
// shares its place.
struct Slots {
  int copy;
  int ema;
  int out;
  int mu;
  int nu;
  int nu_max;
  int copy_out;
  int ema_out;
};

// Whether the old moments are zero and in no buffer: the class says so, except of float64.
template <typename Kernel>
__device__ __forceinline__ bool MomentsAreZero(const LaunchOptions& options) {
  return Kernel::kZeroMoments || (Kernel::kIsFloat64 && options.zero_moments);
}

template <typename Kernel>
__device__ __forceinline__ Slots SlotsOf(const LaunchOptions& options) {
  Slots slots;
  slots.copy = MomentsAreZero<Kernel>(options) ? 2 : Kernel::kHasMax ? 5 : 4;
  slots.ema = slots.copy + (Kernel::kHasCopies && options.has_copies ? 1 : 0);
  const int first = slots.ema + (Kernel::kHasExtras && options.has_ema ? 1 : 0);
  const int moments = first + (options.out_apart ? 1 : 0);
  slots.out = options.out_apart ? first : 0;
  slots.mu = options.moments_apart ? moments : 2;
  slots.nu = options.moments_apart ? moments + 1 : 3;
  slots.nu_max = options.moments_apart ? moments + 2 : 4;
  const int extras = moments + (options.moments_apart ? (Kernel::kHasMax ? 3 : 2) : 0);
  slots.copy_out = options.extras_apart ? extras : slots.copy;
  slots.ema_out = options.extras_apart ? extras + (options.has_copies ? 1 : 0) : slots.ema;
  return slots;
}

// As loaded; what is not loaded is zero.
template <typename Real>
struct RawElements {
  RawVector<Real> param;
  RawVector<Real> grad;
  RawVector<Real> mu;
  RawVector<Real> nu;
  RawVector<Real> nu_max;
  RawVector<Real> ema;
};

// What only some launches have comes last: the code behind its branch waits for it, and a load
// after that would be issued late.
template <typename Kernel, typename DTypes, typename Arguments, typename AnySpan>
__device__ __forceinline__ RawElements<typename Kernel::Real> LoadElements(const Arguments& args,
                                                                           int leaf, DTypes dtypes,
                                                                           const AnySpan& span) {
  using Real = typename Kernel::Real;
  const auto load = [&](DType dtype, int buffer) {
    return LoadRaw<Real>(dtype, args.table.buffer(leaf, buffer), span);
  };
  RawElements<Real> raw{};
  raw.param = load(dtypes.param, 0);
  raw.grad = load(dtypes.grad, 1);
  if (!MomentsAreZero<Kernel>(args.options)) {
    raw.mu = load(dtypes.mu, 2);
    raw.nu = load(dtypes.nu, 3);
    if (Kernel::kHasMax) raw.nu_max = load(dtypes.nu, 4);
  }
  if (Kernel::kHasExtras && args.options.has_ema) {
    raw.ema = load(Kernel::kRealDType, SlotsOf<Kernel>(args.options).ema);
  }
  return raw;
}

// A skipped step: state and parameters keep their bits, an update is -0.0.
template <typename Kernel, typename DTypes, typename Arguments>
__device__ __forceinline__ void SkipElements(const Arguments& args, int leaf, DTypes dtypes,
                                             const Span& span) {
  using Real = typename Kernel::Real;
  const LaunchOptions& options = args.options;
  const Slots slots = SlotsOf<Kernel>(options);
  const auto copy = [&](DType dtype, int from, int to) {
    StoreRaw(dtype, args.table.buffer(leaf, to), span,
             LoadRaw<Real>(dtype, args.table.buffer(leaf, from), span));
  };
  if (!options.write_params) {
    const Vector<Real> minus_zero{{-0.0f, -0.0f, -0.0f, -0.0f}};
    StoreRaw(dtypes.param, args.table.buffer(leaf, slots.out), span,
             FromReal(dtypes.param, minus_zero));
  } else if (options.out_apart) {
    copy(dtypes.param, 0, slots.out);
  }
  if (Kernel::kHasExtras && options.extras_apart) {
    if (Kernel::kHasCopies && options.has_copies) copy(dtypes.copy, slots.copy, slots.copy_out);
    if (options.has_ema) copy(Kernel::kRealDType, slots.ema, slots.ema_out);
  }
  if (!options.moments_apart) return;
  const auto keep_moment = [&](DType dtype, int from, int to) {
    RawVector<Real> old{};
    if (!MomentsAreZero<Kernel>(options)) {
      old = LoadRaw<Real>(dtype, args.table.buffer(leaf, from), span);
    }
    StoreRaw(dtype, args.table.buffer(leaf, to), span, old);
  };
  keep_moment(dtypes.mu, 2, slots.mu);
  keep_moment(dtypes.nu, 3, slots.nu);
  if (Kernel::kHasMax) keep_moment(dtypes.nu, 4, slots.nu_max);
}

// As SkipElements, which needs no dtype of a gradient.
template <typename Kernel, typename Arguments>
__device__ void SkipChunk(const Arguments& args, const ChunkPlace<Span>& place) {
  LeafFlags flags = place.flags;
  flags.grad_dtype = DType::kFloat32;
  WithDTypes<Kernel>(args.options, flags, [&](auto dtypes) {
#pragma unroll 1
    for (int i = 0; i < VectorsOf<Kernel>(args.options); ++i) {
      SkipElements<Kernel>(args, place.leaf, dtypes, SpanOf<Kernel>(place, i));
    }
  });
}

template <typename Real>
struct VectorUpdate {
  Vector<Real> out;
  Vector<Real> mu;
  Vector<Real> nu;
  Vector<Real> nu_max;
};

// Of the new parameters as they are stored, or will be when the stored updates are added to them.
template <typename Real>
__device__ __forceinline__ Vector<Real> UpdateEma(const Ema<Real>& next_ema, DType param_dtype,
                                                  bool write_params, const RawVector<Real>& out,
                                                  const Vector<Real>& old_param,
                                                  const RawVector<Real>& ema) {
  Vector<Real> param = ToReal(param_dtype, out);
  if (!write_params) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) param.value[i] = old_param.value[i] + param.value[i];
    param = ToReal(param_dtype, FromReal(param_dtype, param));
  }
  const Vector<Real> old = ToReal(RealTraits<Real>::kDType, ema);
  Vector<Real> next;
#pragma unroll
  for (int i = 0; i < kVector; ++i) next.value[i] = next_ema(old.value[i], param.value[i]);
  return next;
}

// To memory, rounded as the launch says.
template <typename Kernel, typename DTypes, typename Arguments, typename AnySpan, typename Real>
__device__ __forceinline__ void StoreElements(const Arguments& args, int leaf, DTypes dtypes,
                                              const AnySpan& span, const Vector<Real>& param,
                                              const RawVector<Real>& ema, const VectorNoise& noise,
                                              const HyperTerms<Real>& terms,
                                              const VectorUpdate<Real>& next) {
  const LaunchOptions& options = args.options;
  const Slots slots = SlotsOf<Kernel>(options);
  const auto store = [&](DType dtype, int slot, const RawVector<Real>& raw) {
    StoreRaw(dtype, args.table.buffer(leaf, slot), span, raw);
  };
  const auto round = [&](bool stochastic, DType dtype, const Vector<Real>& vector,
                         const PhiloxWords& words, int shift) {
    if constexpr (Kernel::kHasNoise) {
      if (stochastic && dtype != DType::kFloat32) {
        return FromFloatStochastic(dtype, vector, words, shift);
      }
    }
    return FromReal(dtype, vector);
  };
  const bool stochastic_param =
      Kernel::kIsGeneral && options.stochastic_params && dtypes.param == DType::kBfloat16;
  const RawVector<Real> out =
      round(stochastic_param, dtypes.param, next.out, noise.param, kParamNoiseShift);
  store(dtypes.param, slots.out, out);
  const bool stochastic = options.stochastic_moments;
  store(dtypes.mu, slots.mu, round(stochastic, dtypes.mu, next.mu, noise.moments, kMuNoiseShift));
  store(dtypes.nu, slots.nu, round(stochastic, dtypes.nu, next.nu, noise.moments, kNuNoiseShift));
  if (Kernel::kHasMax) store(dtypes.nu, slots.nu_max, FromReal(dtypes.nu, next.nu_max));
  if (!Kernel::kHasExtras) return;
  if (Kernel::kHasCopies && options.has_copies) {
    store(dtypes.copy, slots.copy_out, FromReal(dtypes.copy, next.out));
  }
  if (options.has_ema) {
    const Vector<Real> average =
        UpdateEma(MakeEma(terms), dtypes.param, options.write_params, out, param, ema);
    store(Kernel::kRealDType, slots.ema_out, FromReal(Kernel::kRealDType, average));
  }
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_ELEMENTS_CUH_
