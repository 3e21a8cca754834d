// Elements as float32 tiles, for the CPU kernels. Included by one .cc for each instruction set,
// which defines JFA_ISA, through its kernels.
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

template <typename T>
void LoadTile(const void* source, std::int64_t begin, std::int64_t n, float* tile) {
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

// The tile's float32 values: the source itself, or `buffer` filled from it.
const float* TileOf(const void* source, DType dtype, std::int64_t begin, std::int64_t n,
                    float* buffer) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(source) + begin;
    case DType::kBfloat16:
      LoadTile<Bfloat16>(source, begin, n, buffer);
      return buffer;
    default:
      LoadTile<Float16>(source, begin, n, buffer);
      return buffer;
  }
}

// Nothing of float32, which is computed where it is stored.
void StoreTileAs(DType dtype, const float* tile, void* target, std::int64_t begin, std::int64_t n) {
  if (dtype == DType::kBfloat16) StoreTile<Bfloat16>(tile, target, begin, n);
  if (dtype == DType::kFloat16) StoreTile<Float16>(tile, target, begin, n);
}

void AddTiles(const float* a, const float* b, std::int64_t n, float* sums) {
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

const float* UnscaleTile(const GradientUnscale& unscale, const float* grad, std::int64_t n,
                         float* buffer) {
  if (unscale.exact_reciprocal && unscale.reciprocal == 1.0f) return grad;
  if (unscale.exact_reciprocal) {
    JFA_ELEMENTWISE
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = unscale.Multiply(grad[i]);
  } else {
    JFA_ELEMENTWISE
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = unscale.Divide(grad[i]);
  }
  return buffer;
}

const float* ClipTile(const GradientClip& clip, const float* grad, std::int64_t n, float* buffer) {
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
