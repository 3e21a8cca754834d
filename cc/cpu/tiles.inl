// Elements as tiles of float32, or of float64, for the CPU kernels. Included by one .cc for each
// instruction set, which defines JFA_ISA, through its kernels.
//
// No function of the standard library may be called here or in a kernel: the linker could serve a
// copy of it that was compiled for another instruction set.
#ifndef JAX_FUSED_ADAMW_CC_CPU_TILES_INL_
#define JAX_FUSED_ADAMW_CC_CPU_TILES_INL_

namespace jfa::cpu::JFA_ISA {
namespace {

// Every pass over a tile is elementwise, and an output is either its input or apart from it, so
// no iteration depends on another. (OpenMP's simd would say the same, but keeps the functor's
// structs in memory, and the loop then stays scalar.)
#if defined(__clang__)
#define JFA_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define JFA_ELEMENTWISE _Pragma("GCC ivdep")
#endif

template <typename T, typename Real>
void LoadTile(const void* source, std::int64_t begin, std::int64_t n, Real* tile) {
  const T* values = static_cast<const T*>(source) + begin;
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) tile[i] = Load(values[i]);
}

template <typename T>
void StoreTile(const float* tile, void* target, std::int64_t begin, std::int64_t n) {
  T* values = static_cast<T*>(target) + begin;
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) values[i] = Store<T>(tile[i]);
}

// The tile's values: the source itself, or `buffer` filled from it. Not of a float64 source as
// float32.
template <typename Real>
const Real* TileOf(const void* source, DType dtype, std::int64_t begin, std::int64_t n,
                   Real* buffer) {
  if (dtype == RealTraits<Real>::kDType) return static_cast<const Real*>(source) + begin;
  switch (dtype) {
    case DType::kFloat32:
      LoadTile<float>(source, begin, n, buffer);
      return buffer;
    case DType::kBfloat16:
      LoadTile<Bfloat16>(source, begin, n, buffer);
      return buffer;
    default:
      LoadTile<Float16>(source, begin, n, buffer);
      return buffer;
  }
}

// Nothing of float32 and float64, which are computed where they are stored.
void StoreTileAs(DType dtype, const float* tile, void* target, std::int64_t begin, std::int64_t n) {
  if (dtype == DType::kBfloat16) StoreTile<Bfloat16>(tile, target, begin, n);
  if (dtype == DType::kFloat16) StoreTile<Float16>(tile, target, begin, n);
}

template <typename Real>
void AddTiles(const Real* a, const Real* b, std::int64_t n, Real* sums) {
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) sums[i] = a[i] + b[i];
}

template <typename T>
void RoundTile(std::int64_t n, float* tile) {
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) tile[i] = Load(Store<T>(tile[i]));
}

// To the nearest values of the dtype.
void RoundTile(DType dtype, std::int64_t n, float* tile) {
  if (dtype == DType::kBfloat16) RoundTile<Bfloat16>(n, tile);
  if (dtype == DType::kFloat16) RoundTile<Float16>(n, tile);
}
void RoundTile(DType, std::int64_t, double*) {}  // float64 is not stored in another dtype

template <typename Real>
const Real* UnscaleTile(const GradientUnscale<Real>& unscale, const Real* grad, std::int64_t n,
                        Real* buffer) {
  if (unscale.exact_reciprocal && unscale.reciprocal == 1) return grad;
  if (unscale.exact_reciprocal) {
    JFA_ELEMENTWISE
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = unscale.Multiply(grad[i]);
  } else {
    JFA_ELEMENTWISE
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = unscale.Divide(grad[i]);
  }
  return buffer;
}

template <typename Real>
const Real* ClipTile(const GradientClip<Real>& clip, const Real* grad, std::int64_t n,
                     Real* buffer) {
  if (clip.by_norm) {
    JFA_ELEMENTWISE
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = clip.ByNorm(grad[i]);
  } else if (clip.by_value) {
    JFA_ELEMENTWISE
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = clip.ByValue(grad[i]);
  } else {
    return grad;
  }
  return buffer;
}

}  // namespace
}  // namespace jfa::cpu::JFA_ISA

#endif  // JAX_FUSED_ADAMW_CC_CPU_TILES_INL_
