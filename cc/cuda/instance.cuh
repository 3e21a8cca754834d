// What a kernel of the update is compiled for: its registers, its rule, and its dtypes.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_INSTANCE_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_INSTANCE_CUH_

#include "core/adamw.h"
#include "core/dtype.h"
#include "core/stats.h"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {

// Blocks of an update on a multiprocessor at least, which decides registers (9 blocks have 56, each
// one fewer 8 more): as many as no rule of the class spills for, with one less for what has more to
// hold (nvcc 13.0, sm_90). 0 leaves it to the compiler.
constexpr int UpdateBlocks(Grid grid, LeafClass leaf_class, Amsgrad amsgrad) {
  if (leaf_class == LeafClass::kFloat32 || leaf_class == LeafClass::kAnyDType ||
      leaf_class == LeafClass::kFloat64) {
    return 0;
  }
  const int blocks = 9 - (grid == Grid::kLarge ? 0 : 1) - (amsgrad == Amsgrad::kOff ? 0 : 1) -
                     (leaf_class == LeafClass::kGeneral ? 1 : 0) -
                     (HasVectors(grid, leaf_class) ? 1 : 0);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  const bool is_general = leaf_class == LeafClass::kGeneral || leaf_class == LeafClass::kFirstStep;
  return blocks - (is_general ? 1 : 0);  // code for sm_120 holds more
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return blocks < 8 ? blocks : 8;  // a multiprocessor of sm_75 holds 1024 threads
#else
  return blocks;
#endif
}

// What a class computes in.
template <LeafClass kLeafClass>
struct Arithmetic {
  using Real = float;
};
template <>
struct Arithmetic<LeafClass::kFloat64> {
  using Real = double;
};

// What a kernel is compiled for: `Kernel` below.
template <Grid kGrid, LeafClass kLeafClass, Amsgrad kAmsgradKind, bool kNesterovMomentum>
struct Instance {
  static constexpr bool kSmallGrid = kGrid != Grid::kLarge;
  static constexpr bool kAnalyzes = kGrid == Grid::kAnalyzing;
  static constexpr int kBlockThreads = kAnalyzes ? kTileLanes : kThreads;
  static_assert(!kAnalyzes || kTileBlocks * kBlockThreads * kVector == kStatsTileElements);
  static constexpr bool kHasVectors = HasVectors(kGrid, kLeafClass);
  static constexpr int kAtOnce = kHasVectors ? kVectorsAtOnce : 1;
  // Code of its own for chunks whose vectors are all whole, in the kernels that most bytes go
  // through: without branches between the loads the average took 1,055 us for GPT-2 instead of
  // 1,286, a clipped step's update 825 instead of 840 (H200, 2026-11-30).
  static constexpr bool kHasWholeChunks =
      kGrid == Grid::kLarge &&
      (kLeafClass == LeafClass::kFloat32 || kLeafClass == LeafClass::kBf16Moments ||
       kLeafClass == LeafClass::kFloat32Extras);
  static constexpr LeafClass kClass = kLeafClass;
  using Real = typename Arithmetic<kLeafClass>::Real;
  static constexpr DType kRealDType = RealTraits<Real>::kDType;
  static constexpr DType kMoment =
      kLeafClass == LeafClass::kBf16Moments ? DType::kBfloat16 : DType::kFloat32;
  static constexpr bool kIsFloat64 = kLeafClass == LeafClass::kFloat64;
  static constexpr bool kZeroMoments = kLeafClass == LeafClass::kFirstStep;
  static constexpr bool kIsGeneral = kZeroMoments || kLeafClass == LeafClass::kGeneral;
  static constexpr bool kHasNoise = kIsGeneral || kLeafClass == LeafClass::kBf16Moments;
  static constexpr bool kHasCopies = kIsGeneral || kLeafClass == LeafClass::kFloat32Extras;
  static constexpr bool kHasExtras = kHasCopies || kIsFloat64;
  static constexpr Amsgrad kAmsgrad = kAmsgradKind;
  static constexpr bool kHasMax = kAmsgradKind != Amsgrad::kOff;
  static constexpr bool kNesterov = kNesterovMomentum;
};

// The dtypes of a leaf, known to the compiler or not.
template <DType kParam, DType kGrad, DType kMoment>
struct FixedDTypes {
  static constexpr DType param = kParam;
  static constexpr DType grad = kGrad;
  static constexpr DType mu = kMoment;
  static constexpr DType nu = kMoment;
  static constexpr DType copy = DType::kBfloat16;
};
// As FixedDTypes, but for the gradients.
template <DType kMoment>
struct PartDTypes {
  static constexpr DType param = DType::kFloat32;
  DType grad;
  static constexpr DType mu = kMoment;
  static constexpr DType nu = kMoment;
  static constexpr DType copy = DType::kBfloat16;
};
struct AnyDTypes {
  DType param;
  DType grad;
  static constexpr DType mu = DType::kFloat32;
  static constexpr DType nu = DType::kFloat32;
  static constexpr DType copy = DType::kBfloat16;
};
struct Float64DTypes {
  static constexpr DType param = DType::kFloat64;
  DType grad;
  static constexpr DType mu = DType::kFloat64;
  static constexpr DType nu = DType::kFloat64;
  static constexpr DType copy = DType::kBfloat16;
};
struct GeneralDTypes {
  DType param;
  DType grad;
  DType mu;
  DType nu;
  DType copy;
};

// With float32 parameters the code has a body for float32 and one for bfloat16 gradients: it then
// needs 48 registers instead of 56 (54 in a small grid), and bfloat16 gradients are 8 % faster. A
// switch over all nine pairs, compiled to an indirect jump, was 20 % slower. A run-time choice of
// zero moments cost 1-2.5 % (all on an H200, 2026-11-29).
// Calls `update` with the dtypes of a leaf.
template <typename Kernel, typename Update>
__device__ __forceinline__ void WithDTypes(const LaunchOptions& options, LeafFlags flags,
                                           const Update& update) {
  constexpr DType kF32 = DType::kFloat32;
  constexpr DType kBf16 = DType::kBfloat16;
  constexpr DType kMoment = Kernel::kMoment;
  if constexpr (Kernel::kIsGeneral) {
    update(GeneralDTypes{flags.param_dtype, flags.grad_dtype, options.mu_dtype, options.nu_dtype,
                         flags.copy_dtype});
  } else if constexpr (Kernel::kIsFloat64) {
    update(Float64DTypes{flags.grad_dtype});
  } else if constexpr (Kernel::kClass == LeafClass::kAnyDType) {
    update(AnyDTypes{flags.param_dtype, flags.grad_dtype});
  } else if (flags.grad_dtype == kF32) {
    update(FixedDTypes<kF32, kF32, kMoment>{});
  } else {
    update(FixedDTypes<kF32, kBf16, kMoment>{});
  }
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_INSTANCE_CUH_
