// What stochastic rounding does, against definitions of its own: the generator by its published
// vectors, the conversions by all random bits, the indices by plain division, and the CPU kernel's
// new state by what it computes in float32. Exits with 1 on a failure.
#include "core/noise.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/update.h"
#include "tests/buffers.h"
#include "tests/cases.h"
#include "tests/check.h"
#include "tests/pools.h"
#include "tests/step_scalars.h"
#include "tests/update_cases.h"

namespace jfa::cpu {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

// Of philox4x32 with 7 rounds, in Random123's kat_vectors.
void TestPhilox() {
  struct Vector {
    PhiloxWords counter;
    PhiloxKey key;
    PhiloxWords expected;
  };
  const Vector vectors[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}}};
  for (const Vector& vector : vectors) {
    const PhiloxWords words = Philox(vector.key, vector.counter);
    for (Word32 i = 0; i < kQuad; ++i) {
      Check(words.word[i] == vector.expected.word[i], "Philox");
      Check(words.Select(i) == words.word[i], "selection of a word");
    }
  }
}

// What tells the 16-bit dtypes apart.
struct Format {
  int mantissa_bits;
  int min_exponent;  // of normal numbers
  double largest;
  double overflow;  // from here on infinite
};
constexpr Format kBfloat16Format{7, -126, 0x1.fep127, 0x1p128};
constexpr Format kFloat16Format{10, -14, 65504.0, 65536.0};

// How many of the 2^16 random numbers must round the magnitude up, and from what.
struct Expected {
  double below;
  double above;
  int ups;
};

Expected ExpectRounding(double magnitude, const Format& format) {
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, format.min_exponent);
  const double step = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double below = std::floor(magnitude / step) * step;
  // float16 drops 13 bits of a normal number, and takes as many random ones.
  const bool takes_13 = format.mantissa_bits == 10 && magnitude >= 0x1p-14;
  const double fraction = (magnitude - below) / step;
  const int ups = static_cast<int>(takes_13 ? std::floor(fraction * 0x1p13) * 8
                                            : std::floor(fraction * 0x1p16));
  return {below, std::min(below + step, format.largest), ups};
}

template <typename T>
void CheckRounding(float value, const Format& format) {
  const std::string name = "stochastic rounding of " + std::to_string(FloatToBits(value));
  const T nearest = Store<T>(value);
  const double magnitude = value < 0 ? -value : value;
  const bool is_special = !(magnitude < format.overflow);
  const Expected expected = is_special ? Expected{} : ExpectRounding(magnitude, format);
  const bool is_negative = FloatToBits(value) >> 31 != 0;
  int ups = 0;
  bool is_right = true;
  for (Word32 random = 0; random <= 0xffff; ++random) {
    const T stored = StoreStochastic<T>(value, random);
    if (is_special) {  // NaN as Store has it, and infinity
      is_right = is_right && stored.bits == nearest.bits;
      continue;
    }
    const double result = is_negative ? -Load(stored) : Load(stored);
    is_right = is_right && stored.bits >> 15 == (is_negative ? 1 : 0) &&
               (result == expected.below || result == expected.above);
    ups += result != expected.below ? 1 : 0;
  }
  Check(is_right, name);
  const bool has_above = expected.above != expected.below;
  Check(is_special || ups == (has_above ? expected.ups : 0), name + ": share");
}

void TestRounding() {
  const Word32 patterns[] = {
      0x00000000, 0x00000001, 0x00007fff, 0x0000ffff, 0x007fffff, 0x00800000,  // subnormals
      0x3f800000, 0x3f800001, 0x3f80ffff, 0x3f810000, 0x3fffffff, 0x40490fdb,  // near 1, pi
      0x33000000, 0x33800000, 0x33c00000, 0x2b800000, 0x2b7fffff, 0x33ffffff,  // 2^-25 and on
      0x387fc000, 0x387fe000, 0x387fffff, 0x38800000, 0x38800001, 0x38801fff,  // around 2^-14
      0x477fe000, 0x477fe001, 0x477fffff, 0x47800000, 0x47ffffff, 0x7f7f0000,  // around 65504
      // Of NaN the quiet ones: what is rounded is a result of arithmetic.
      0x7f7f0001, 0x7f7fffff, 0x7f800000, 0x7fc00001, 0x7fc00000, 0x7fffffff};
  for (const Word32 pattern : patterns) {
    for (const Word32 sign : {0u, 0x80000000u}) {
      CheckRounding<Bfloat16>(BitsToFloat(pattern | sign), kBfloat16Format);
      CheckRounding<Float16>(BitsToFloat(pattern | sign), kFloat16Format);
    }
  }
  for (Word32 pattern = 12345; pattern < 0x7f800000; pattern += 0x01234567) {
    CheckRounding<Bfloat16>(BitsToFloat(pattern), kBfloat16Format);
    CheckRounding<Float16>(BitsToFloat(pattern), kFloat16Format);
  }
  // A value that the dtype has keeps its bits.
  for (Word32 bits = 0; bits <= 0xffff; ++bits) {
    const Bfloat16 brain{static_cast<Word16>(bits)};
    const Float16 half{static_cast<Word16>(bits)};
    for (const Word32 random : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
      if ((bits & 0x7fffu) <= 0x7f80u) {
        Check(StoreStochastic<Bfloat16>(Load(brain), random).bits == bits, "bfloat16 kept");
      }
      if ((bits & 0x7fffu) <= 0x7c00u) {
        Check(StoreStochastic<Float16>(Load(half), random).bits == bits, "float16 kept");
      }
    }
  }
}

Word64 GlobalIndex(const Place& place, Word64 index) {
  for (const IndexStride& stride : place.strides) {
    if (stride.divisor > 0) index += index / stride.divisor * stride.extra;
  }
  return place.first_index + index;
}

void CheckRun(const Place& place, Word64 index) {
  const bool has_strides = !place.strides.empty();
  const GlobalRun run =
      FindRun(place.first_index, has_strides ? place.strides.data() : nullptr, index);
  const std::string name = "index " + std::to_string(index);
  Check(run.first == GlobalIndex(place, index), name);
  const Word64 last = index + run.length - 1;
  if (run.length > 1 && has_strides) {
    Check(GlobalIndex(place, last) == run.first + run.length - 1, name + ": run");
  }
  if (has_strides) {
    Check(GlobalIndex(place, last + 1) != run.first + run.length, name + ": end of the run");
  }
}

void TestIndices() {
  for (const Place& place : Places()) {
    for (Word64 index = 0; index < 5000; ++index) CheckRun(place, index);
    for (int bit = 13; bit < 40; ++bit) {
      for (const int near : {-1, 0, 1}) {
        CheckRun(place, (Word64{1} << bit) + static_cast<Word64>(near));
      }
    }
  }
  // Divisors at which a rounded reciprocal may give one less.
  for (const Word64 divisor : {Word64{1}, Word64{3}, (Word64{1} << 32) - 1, Word64{267516031746}}) {
    const IndexStride none = MakeStride(0, 0);
    const Place place{0, 0, {MakeStride(static_cast<long long>(divisor), 5), none, none}};
    for (const Word64 times : {Word64{1}, Word64{2}, (Word64{1} << 60) / divisor}) {
      for (const int near : {-1, 0, 1}) {
        CheckRun(place, times * divisor + static_cast<Word64>(near));
      }
    }
  }
}

// The values of an array as float32.
std::vector<float> ValuesOf(DType dtype, const void* array, std::size_t n) {
  std::vector<float> values;
  for (std::size_t i = 0; i < n; ++i) {
    values.push_back(static_cast<float>(LoadAs(dtype, array, i)));
  }
  return values;
}

float Rounded(DType dtype, float value) {
  Word64 storage = 0;
  StoreAs(dtype, &storage, 0, value);
  return static_cast<float>(LoadAs(dtype, &storage, 0));
}

float RoundedStochastically(DType dtype, float value, Word32 random) {
  if (dtype == DType::kBfloat16) return Load(StoreStochastic<Bfloat16>(value, random));
  return Load(StoreStochastic<Float16>(value, random));
}

// What a case must give, from an update in float32 of a leaf with the same values.
class Twin {
 public:
  Twin(const InstructionSet& isa, const Case& c, const LeafOperands& low) : case_(c) {
    old_param_ = ValuesOf(c.param_dtype, low.param, c.total());
    old_ema_ = ValuesOf(DType::kFloat32, low.ema, c.total());
    Case twin = c;
    twin.param_dtype = twin.mu_dtype = twin.nu_dtype = DType::kFloat32;
    twin.copies = {};
    twin.has_ema = twin.stochastic_moments = twin.stochastic_params = false;
    const LeafArrays<GuardedBuffer> arrays(twin);
    const LeafOperands leaf = arrays.Operands();
    CopyValues(c.param_dtype, low.param, leaf.param);
    CopyValues(c.mu_dtype, low.mu, leaf.mu);
    CopyValues(c.nu_dtype, low.nu, leaf.nu);
    const StepScalars<GuardedBuffer> scalars(twin);
    InlinePool pool;
    Update(pool, 1, isa, scalars.Operands(), {leaf}, twin.Options());
    out_ = ValuesOf(DType::kFloat32, leaf.out, c.total());
    mu_ = ValuesOf(DType::kFloat32, leaf.mu_out, c.total());
    nu_ = ValuesOf(DType::kFloat32, leaf.nu_out, c.total());
  }

  void CheckElement(std::size_t i, const LeafOperands& next) const {
    const Case& c = case_;
    const Word32 word = RandomWord(i, c.place.leaf_id);
    const std::string name = "element " + std::to_string(i) + ", " + c.Name("noise");
    Check(LoadAs(c.mu_dtype, next.mu_out, i) == Moment(c.mu_dtype, mu_[i], word & 0xffffu),
          "mu of " + name);
    Check(LoadAs(c.nu_dtype, next.nu_out, i) == Moment(c.nu_dtype, nu_[i], word >> 16),
          "nu of " + name);
    const float out = static_cast<float>(LoadAs(c.param_dtype, next.out, i));
    const bool is_stochastic =
        c.stochastic_params && c.write_params && c.param_dtype == DType::kBfloat16;
    const Word32 random = RandomWord(i, c.place.leaf_id | 0x80000000u) & 0xffffu;
    Check(out == (is_stochastic ? RoundedStochastically(c.param_dtype, out_[i], random)
                                : Rounded(c.param_dtype, out_[i])),
          "out of " + name);
    if (c.copies) {
      Check(LoadAs(*c.copies, next.copy_out, i) == Rounded(*c.copies, out_[i]), "copy of " + name);
    }
    const float param = c.write_params ? out : Rounded(c.param_dtype, old_param_[i] + out);
    const float ema =
        static_cast<float>(0.97) * old_ema_[i] + static_cast<float>(1.0 - 0.97) * param;
    Check(LoadAs(DType::kFloat32, next.ema_out, i) == ema, "average of " + name);
  }

 private:
  void CopyValues(DType dtype, const void* from, const void* to) const {
    const std::vector<float> values = ValuesOf(dtype, from, case_.total());
    std::memcpy(const_cast<void*>(to), values.data(), values.size() * sizeof(float));
  }

  float Moment(DType dtype, float value, Word32 random) const {
    if (dtype == DType::kFloat32 || !case_.stochastic_moments) return Rounded(dtype, value);
    return RoundedStochastically(dtype, value, random);
  }

  Word32 RandomWord(std::size_t i, Word32 stream) const {
    const Word64 member = i / case_.n;
    const Word64 seed = kSeed + member;
    const Word64 index = GlobalIndex(case_.place, i % case_.n);
    const Word64 quad = index / 4;
    const auto step =
        static_cast<Word32>(SaturatingSum(case_.counts.count, static_cast<int>(member) + 1));
    const PhiloxWords words =
        Philox({static_cast<Word32>(seed), static_cast<Word32>(seed >> 32)},
               {{static_cast<Word32>(quad), static_cast<Word32>(quad >> 32), stream, step}});
    return words.word[index % 4];
  }

  Case case_;
  std::vector<float> old_param_, old_ema_, out_, mu_, nu_;
};

void CheckCase(const InstructionSet& isa, const Case& c) {
  const LeafArrays<GuardedBuffer> arrays(c);
  const LeafOperands leaf = arrays.Operands();
  const Twin twin(isa, c, leaf);
  const StepScalars<GuardedBuffer> scalars(c);
  InlinePool pool;
  Update(pool, 1, isa, scalars.Operands(), {leaf}, c.Options());
  for (std::size_t i = 0; i < c.total(); ++i) {
    if (i / c.n % 2 == 0) twin.CheckElement(i, leaf);  // other members skip
  }
}

void TestElements(const InstructionSet& isa) {
  Case c = CommonCase(1001);
  c.stochastic_moments = c.stochastic_params = c.has_ema = true;
  c.members = 3;
  c.counting = Counting::kPerMember;
  for (const Place& place : Places()) {
    for (const DType mu : kDTypes) {
      for (const DType param : kDTypes) {
        for (const int count : {0, 41, 0x7fffffff}) {
          c.place = place;
          c.mu_dtype = mu;
          c.nu_dtype = mu == DType::kFloat16 ? DType::kFloat32 : DType::kBfloat16;
          c.param_dtype = param;
          c.copies = {};
          c.counts.count = count;
          c.write_params = count != 41;
          c.stochastic_moments = count != 0 || param != DType::kFloat16;
          if (param == DType::kFloat32 && c.write_params) c.copies = DType::kFloat16;
          CheckCase(isa, c);
        }
      }
    }
  }
}

int Main() {
  int num_sets = 0;
  const InstructionSet* sets = SupportedInstructionSets(&num_sets);
  for (int i = 0; i < num_sets; ++i) std::printf("instruction set: %s\n", sets[i].name);
  TestPhilox();
  TestRounding();
  TestIndices();
  for (int i = 0; i < num_sets; ++i) TestElements(sets[i]);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jfa::cpu

int main() { return jfa::cpu::Main(); }
