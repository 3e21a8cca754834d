// Storage dtypes and their conversions to and from the float32 of the arithmetic, in integer and
// IEEE single operations only: the same bits on every platform, and loops over them vectorise.
// float64 is the arithmetic of its own parameters and is stored as it is.
// They rely on subnormals being kept (no flush-to-zero in the control word).
#ifndef JAX_FUSED_ADAMW_CC_CORE_DTYPE_H_
#define JAX_FUSED_ADAMW_CC_CORE_DTYPE_H_

#include "core/macros.h"

namespace jfa {

using Word32 = unsigned int;
using Word16 = unsigned short;
using Word64 = unsigned long long;
static_assert(sizeof(Word64) == 8 && sizeof(Word32) == 4 && sizeof(Word16) == 2, "storage words");

constexpr float kMaxFloat = 3.402823466e+38f;
constexpr Word32 kInfinityBits = 0x7f800000u;
constexpr Word32 kNanBits = 0x7fc00000u;

enum class DType { kFloat32, kBfloat16, kFloat16, kFloat64 };

JFA_HOST_DEVICE constexpr int SizeOf(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// The arithmetic that updates a parameter, as the averages have it too.
JFA_HOST_DEVICE constexpr DType ArithmeticOf(DType param_dtype) {
  return param_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

template <typename Real>
struct RealTraits;
template <>
struct RealTraits<float> {
  static constexpr DType kDType = DType::kFloat32;
};
template <>
struct RealTraits<double> {
  static constexpr DType kDType = DType::kFloat64;
};

struct Bfloat16 {
  Word16 bits;
};

struct Float16 {
  Word16 bits;
};

#if defined(__CUDA_ARCH__)

JFA_HOST_DEVICE float BitsToFloat(Word32 bits) { return __uint_as_float(bits); }
JFA_HOST_DEVICE Word32 FloatToBits(float value) { return __float_as_uint(value); }
JFA_HOST_DEVICE double BitsToDouble(Word64 bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}
JFA_HOST_DEVICE Word64 DoubleToBits(double value) {
  return static_cast<Word64>(__double_as_longlong(value));
}
JFA_HOST_DEVICE Word64 HighProduct(Word64 a, Word64 b) { return __umul64hi(a, b); }
JFA_HOST_DEVICE float AbsoluteValue(float x) { return fabsf(x); }
JFA_HOST_DEVICE float SquareRoot(float x) { return __fsqrt_rn(x); }
JFA_HOST_DEVICE double SquareRoot(double x) { return __dsqrt_rn(x); }

#else

JFA_HOST_DEVICE float BitsToFloat(Word32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
JFA_HOST_DEVICE Word32 FloatToBits(float value) {
  Word32 bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}
JFA_HOST_DEVICE double BitsToDouble(Word64 bits) {
  double value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
JFA_HOST_DEVICE Word64 DoubleToBits(double value) {
  Word64 bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}
JFA_HOST_DEVICE Word64 HighProduct(Word64 a, Word64 b) {
  return static_cast<Word64>(static_cast<unsigned __int128>(a) * b >> 64);
}
JFA_HOST_DEVICE float AbsoluteValue(float x) { return BitsToFloat(FloatToBits(x) & 0x7fffffffu); }
JFA_HOST_DEVICE float SquareRoot(float x) { return __builtin_sqrtf(x); }
JFA_HOST_DEVICE double SquareRoot(double x) { return __builtin_sqrt(x); }

#endif

// --- Load: storage -> float32, always exact -----------------------------------------------------

JFA_HOST_DEVICE double Load(double stored) { return stored; }
JFA_HOST_DEVICE float Load(float stored) { return stored; }

JFA_HOST_DEVICE float Load(Bfloat16 stored) {
  return BitsToFloat(static_cast<Word32>(stored.bits) << 16);
}

// The exponent and mantissa, moved into float32's places, are off by the difference of the two
// biases: one exact multiplication by 2^(127 - 15) repairs that, for subnormals too.
JFA_HOST_DEVICE float Load(Float16 stored) {
  const Word32 sign = static_cast<Word32>(stored.bits & 0x8000u) << 16;
  const Word32 magnitude = static_cast<Word32>(stored.bits & 0x7fffu) << 13;
  const Word32 finite = FloatToBits(BitsToFloat(magnitude) * 0x1p112f);
  const Word32 inf_or_nan = magnitude | 0x7f800000u;
  return BitsToFloat(sign | ((stored.bits & 0x7c00u) == 0x7c00u ? inf_or_nan : finite));
}

// --- Store: float32 -> storage, round to nearest even, NaN stays NaN -----------------------------

template <typename T>
JFA_HOST_DEVICE T Store(float value);

template <>
JFA_HOST_DEVICE float Store<float>(float value) {
  return value;
}

template <>
JFA_HOST_DEVICE Bfloat16 Store<Bfloat16>(float value) {
  const Word32 bits = FloatToBits(value);
  const Word32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Word32 quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<Word16>(value != value ? quiet_nan : rounded)};
}

template <>
JFA_HOST_DEVICE Float16 Store<Float16>(float value) {
  const Word32 bits = FloatToBits(value);
  const Word32 sign = (bits >> 16) & 0x8000u;
  const Word32 magnitude = bits & 0x7fffffffu;
  // Normal results: rebias the exponent, round the 13 dropped bits; a carry into exponent 31 is
  // the right overflow to infinity.
  const Word32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: 0.5f has an ulp of 2^-24, float16's smallest step, so the addition rounds.
  const Word32 subnormal = FloatToBits(BitsToFloat(magnitude) + 0.5f) - 0x3f000000u;
  const Word32 quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  Word32 result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? quiet_nan : result;
  return {static_cast<Word16>(sign | result)};
}

// --- StoreStochastic: float32 -> storage with 16 random bits -------------------------------------
// Up with the probability that the dropped part is of a step, to 2^-16 of it; a value that T can
// represent keeps its bits. Infinity and a NaN that arithmetic returned stay, and no finite value
// becomes infinite, except that float16 has no number near one of 65536 or more.

template <typename T>
JFA_HOST_DEVICE T StoreStochastic(float value, Word32 random);

template <>
JFA_HOST_DEVICE Bfloat16 StoreStochastic<Bfloat16>(float value, Word32 random) {
  constexpr float kLargest = 0x1.fep127f;
  const Word32 bits = FloatToBits(value);
  return {static_cast<Word16>((bits + (AbsoluteValue(value) < kLargest ? random : 0u)) >> 16)};
}

template <>
JFA_HOST_DEVICE Float16 StoreStochastic<Float16>(float value, Word32 random) {
  const Word32 bits = FloatToBits(value);
  const Word32 sign = (bits >> 16) & 0x8000u;
  const Word32 magnitude = bits & 0x7fffffffu;
  const bool is_subnormal = magnitude < (113u << 23);
  // The 13 dropped bits take as many random ones; a carry into exponent 31 is held back.
  const Word32 rounded = (magnitude - (112u << 23) + (random >> 3)) >> 13;
  const Word32 normal = rounded > 0x7bffu ? 0x7bffu : rounded;
  // In 2^-16 of the subnormals' step, 2^-24.
  const float fraction = BitsToFloat(is_subnormal ? magnitude : 0u) * 0x1p40f;
  const Word32 subnormal = (static_cast<Word32>(static_cast<int>(fraction)) + random) >> 16;
  const Word32 quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  Word32 result = is_subnormal ? subnormal : normal;
  result = magnitude >= (143u << 23) ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? quiet_nan : result;
  return {static_cast<Word16>(sign | result)};
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_DTYPE_H_
