// Four elements at a time between device memory and registers of the arithmetic, Real: float32, or
// float64 of float64 parameters.
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
template <typename Real>
struct Vector {
  Real value[kVector];
};

// As stored: a word an element for float32, two elements a word for the 16-bit dtypes, two words an
// element for float64, low word first.
template <typename Real>
struct RawVector {
  Word32 word[kVector * sizeof(Real) / sizeof(Word32)];
};

// Where a thread's vector lies in an array. `left` is what the chunk holds from there on, zero or
// less behind its end (not clamped: ptxas 13.0 takes max(min(left, 4), 0) == 4 for true at 0);
// `vectorised` if all kVector elements can be moved by one access, or two of 16 bytes for float64.
struct Span {
  static constexpr bool kWhole = false;
  long long begin;
  int left;
  bool vectorised;
};

// One that is known to be vectorised when the kernel is compiled: no branch lies between its loads.
struct WholeSpan {
  static constexpr bool kWhole = true;
  long long begin;
  static constexpr int left = kVector;
  static constexpr bool vectorised = true;
};

template <typename Real>
__device__ __forceinline__ RawVector<Real> RawOf(uint4 x) {
  return {{x.x, x.y, x.z, x.w}};
}

template <typename Real>
__device__ __forceinline__ RawVector<Real> RawOf(uint2 x) {
  return {{x.x, x.y}};
}

template <typename Real, typename AnySpan>
__device__ __forceinline__ RawVector<Real> LoadWords(const void* array, const AnySpan& span) {
  const Word32* p = static_cast<const Word32*>(array) + span.begin;
  if (span.vectorised) return RawOf<Real>(*reinterpret_cast<const uint4*>(p));
  RawVector<Real> raw{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < span.left) raw.word[i] = p[i];
  }
  return raw;
}

template <typename Real, typename AnySpan>
__device__ __forceinline__ RawVector<Real> LoadHalfWords(const void* array, const AnySpan& span) {
  const Word16* p = static_cast<const Word16*>(array) + span.begin;
  if (span.vectorised) return RawOf<Real>(*reinterpret_cast<const uint2*>(p));
  RawVector<Real> raw{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < span.left) raw.word[i / 2] |= static_cast<Word32>(p[i]) << (16 * (i % 2));
  }
  return raw;
}

__device__ __forceinline__ void SetDoubleBits(int i, Word64 bits, RawVector<double>* raw) {
  raw->word[2 * i] = static_cast<Word32>(bits);
  raw->word[2 * i + 1] = static_cast<Word32>(bits >> 32);
}

__device__ __forceinline__ Word64 DoubleBits(const RawVector<double>& raw, int i) {
  return raw.word[2 * i] | static_cast<Word64>(raw.word[2 * i + 1]) << 32;
}

template <typename AnySpan>
__device__ __forceinline__ RawVector<double> LoadDoubleWords(const void* array,
                                                             const AnySpan& span) {
  const Word64* p = static_cast<const Word64*>(array) + span.begin;
  if (span.vectorised) {
    const uint4 x = *reinterpret_cast<const uint4*>(p);
    const uint4 y = *(reinterpret_cast<const uint4*>(p) + 1);
    return {{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}};
  }
  RawVector<double> raw{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < span.left) SetDoubleBits(i, p[i], &raw);
  }
  return raw;
}

template <typename AnySpan>
__device__ __forceinline__ void StoreWords(void* array, const AnySpan& span,
                                           const RawVector<float>& raw) {
  Word32* p = static_cast<Word32*>(array) + span.begin;
  if (span.vectorised) {
    __stcg(reinterpret_cast<uint4*>(p),
           make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]));
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < span.left) __stcg(p + i, raw.word[i]);
    }
  }
}

template <typename AnySpan>
__device__ __forceinline__ void StoreHalfWords(void* array, const AnySpan& span,
                                               const RawVector<float>& raw) {
  Word16* p = static_cast<Word16*>(array) + span.begin;
  if (span.vectorised) {
    __stcg(reinterpret_cast<uint2*>(p), make_uint2(raw.word[0], raw.word[1]));
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < span.left) __stcg(p + i, static_cast<Word16>(raw.word[i / 2] >> (16 * (i % 2))));
    }
  }
}

template <typename AnySpan>
__device__ __forceinline__ void StoreDoubleWords(void* array, const AnySpan& span,
                                                 const RawVector<double>& raw) {
  Word64* p = static_cast<Word64*>(array) + span.begin;
  if (span.vectorised) {
    uint4* const pairs = reinterpret_cast<uint4*>(p);
    __stcg(pairs, make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]));
    __stcg(pairs + 1, make_uint4(raw.word[4], raw.word[5], raw.word[6], raw.word[7]));
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < span.left) __stcg(p + i, DoubleBits(raw, i));
    }
  }
}

// Branches on a dtype are uniform over a block: a leaf has one dtype. The arithmetic in float32
// knows no float64.
template <typename Real, typename AnySpan>
__device__ __forceinline__ RawVector<Real> LoadRaw(DType dtype, const void* array,
                                                   const AnySpan& span) {
  if constexpr (RealTraits<Real>::kDType == DType::kFloat64) {
    if (dtype == DType::kFloat64) return LoadDoubleWords(array, span);
  }
  return dtype == DType::kFloat32 ? LoadWords<Real>(array, span) : LoadHalfWords<Real>(array, span);
}

template <typename AnySpan>
__device__ __forceinline__ void StoreRaw(DType dtype, void* array, const AnySpan& span,
                                         const RawVector<float>& raw) {
  if (dtype == DType::kFloat32) {
    StoreWords(array, span, raw);
  } else {
    StoreHalfWords(array, span, raw);
  }
}
// The arithmetic in float64 stores nothing else.
template <typename AnySpan>
__device__ __forceinline__ void StoreRaw(DType, void* array, const AnySpan& span,
                                         const RawVector<double>& raw) {
  StoreDoubleWords(array, span, raw);
}

template <typename T, typename Real>
__device__ __forceinline__ float HalfWordToFloat(const RawVector<Real>& raw, int i) {
  return Load(T{static_cast<Word16>(raw.word[i / 2] >> (16 * (i % 2)))});
}

template <typename Real>
__device__ __forceinline__ Vector<Real> ToReal(DType dtype, const RawVector<Real>& raw) {
  Vector<Real> v;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if constexpr (RealTraits<Real>::kDType == DType::kFloat64) {
      if (dtype == DType::kFloat64) {
        v.value[i] = BitsToDouble(DoubleBits(raw, i));
        continue;
      }
    }
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

__device__ __forceinline__ RawVector<float> FromReal(DType dtype, const Vector<float>& v) {
  RawVector<float> raw{};
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

// As StoreRaw.
__device__ __forceinline__ RawVector<double> FromReal(DType, const Vector<double>& v) {
  RawVector<double> raw;
#pragma unroll
  for (int i = 0; i < kVector; ++i) SetDoubleBits(i, DoubleToBits(v.value[i]), &raw);
  return raw;
}

// In place, with one branch for all.
template <typename Real>
__device__ __forceinline__ void UnscaleVector(const GradientUnscale<Real>& unscale,
                                              Vector<Real>* vector) {
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
