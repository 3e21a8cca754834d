// Four elements at a time between device memory and float32 registers.
//
// Loading and converting are two steps, so that a kernel can issue all its loads before the first
// conversion waits for one: converting bfloat16 gradients on arrival cost a fifth of the bandwidth
// (H200, 2026-11-29). Loads have no cache hint and stores go to the L2 cache: GPT-2's update took
// 825 us, with streaming hints (.cs) on both 837, on loads alone 847, on stores alone 838 (H200,
// random data, 2026-11-30). All are coherent accesses, so in-place updates are safe.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_IO_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_IO_CUH_

#include "core/adamw.h"
#include "core/dtype.h"
#include "cuda/tuning.h"

namespace jfa::cuda {

static_assert(kVector == 4, "one 16-byte access of float32, as the vector types below have it");

// Values of the arithmetic.
struct Vector {
  float value[kVector];
};

// As stored: a word an element for float32, two elements a word for the 16-bit dtypes.
struct RawVector {
  Word32 word[kVector];
};

// Where a thread's elements lie in an array. `left` is what the chunk holds from there on, zero or
// less behind its end (not clamped: ptxas 13.0 takes max(min(left, 4), 0) == 4 for true at 0);
// `vectorised` if all kVector elements can be moved by one access.
struct Span {
  long long begin;
  int left;
  bool vectorised;
};

__device__ __forceinline__ RawVector LoadWords(const void* array, const Span& span) {
  const Word32* p = static_cast<const Word32*>(array) + span.begin;
  if (span.vectorised) {
    const uint4 x = *reinterpret_cast<const uint4*>(p);
    return {{x.x, x.y, x.z, x.w}};
  }
  RawVector raw{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < span.left) raw.word[i] = p[i];
  }
  return raw;
}

__device__ __forceinline__ RawVector LoadHalfWords(const void* array, const Span& span) {
  const Word16* p = static_cast<const Word16*>(array) + span.begin;
  if (span.vectorised) {
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    return {{x.x, x.y, 0, 0}};
  }
  RawVector raw{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < span.left) raw.word[i / 2] |= static_cast<Word32>(p[i]) << (16 * (i % 2));
  }
  return raw;
}

__device__ __forceinline__ void StoreWords(void* array, const Span& span, const RawVector& raw) {
  Word32* p = static_cast<Word32*>(array) + span.begin;
  if (span.vectorised) {
    __stcg(reinterpret_cast<uint4*>(p),
           make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < span.left) __stcg(p + i, raw.word[i]);
  }
}

__device__ __forceinline__ void StoreHalfWords(void* array, const Span& span,
                                               const RawVector& raw) {
  Word16* p = static_cast<Word16*>(array) + span.begin;
  if (span.vectorised) {
    __stcg(reinterpret_cast<uint2*>(p), make_uint2(raw.word[0], raw.word[1]));
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < span.left) __stcg(p + i, static_cast<Word16>(raw.word[i / 2] >> (16 * (i % 2))));
  }
}

// Branches on a dtype are uniform over a block: a leaf has one dtype.
__device__ __forceinline__ RawVector LoadRaw(DType dtype, const void* array, const Span& span) {
  return dtype == DType::kFloat32 ? LoadWords(array, span) : LoadHalfWords(array, span);
}

__device__ __forceinline__ void StoreRaw(DType dtype, void* array, const Span& span,
                                         const RawVector& raw) {
  if (dtype == DType::kFloat32) {
    StoreWords(array, span, raw);
  } else {
    StoreHalfWords(array, span, raw);
  }
}

template <typename T>
__device__ __forceinline__ float HalfWordToFloat(const RawVector& raw, int i) {
  return Load(T{static_cast<Word16>(raw.word[i / 2] >> (16 * (i % 2)))});
}

__device__ __forceinline__ Vector ToFloat(DType dtype, const RawVector& raw) {
  Vector v;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (dtype == DType::kFloat32) {
      v.value[i] = BitsToFloat(raw.word[i]);
    } else if (dtype == DType::kBfloat16) {
      v.value[i] = HalfWordToFloat<Bfloat16>(raw, i);
    } else {
      v.value[i] = HalfWordToFloat<Float16>(raw, i);
    }
  }
  return v;
}

__device__ __forceinline__ RawVector FromFloat(DType dtype, const Vector& v) {
  RawVector raw{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (dtype == DType::kFloat32) {
      raw.word[i] = FloatToBits(v.value[i]);
      continue;
    }
    const Word32 half = dtype == DType::kBfloat16 ? Store<Bfloat16>(v.value[i]).bits
                                                  : Store<Float16>(v.value[i]).bits;
    raw.word[i / 2] |= half << (16 * (i % 2));
  }
  return raw;
}

// In place, with one branch for all.
__device__ __forceinline__ void UnscaleVector(const GradientUnscale& unscale, Vector* vector) {
  if (unscale.exact_reciprocal) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) vector->value[i] = unscale.Multiply(vector->value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) vector->value[i] = unscale.Divide(vector->value[i]);
  }
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_IO_CUH_
