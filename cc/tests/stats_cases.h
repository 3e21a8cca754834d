// What both harnesses of the statistics test: gradients and rows, in Buffers of the host or a
// device.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_STATS_CASES_H_
#define JAX_FUSED_ADAMW_CC_TESTS_STATS_CASES_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/stats_operands.h"
#include "tests/buffers.h"
#include "tests/check.h"

namespace jfa::tests {

inline unsigned NextRandom(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

// Which exponents the elements have, of those that their dtype has.
// kOverflow and kUnderflow are of float64: near float32's largest and smallest numbers.
enum class Magnitude {
  kOrdinary,
  kAny,
  kLargest,
  kSmallest,
  kSubnormal,
  kZero,
  kOverflow,
  kUnderflow
};
inline constexpr Magnitude kMagnitudes[] = {Magnitude::kOrdinary,  Magnitude::kAny,
                                            Magnitude::kLargest,   Magnitude::kSmallest,
                                            Magnitude::kSubnormal, Magnitude::kZero};

// A dtype's bits: sign, exponent, mantissa.
struct Format {
  unsigned mantissa_bits;
  unsigned infinity;  // the exponent of infinities and NaNs
  Word64 sign;

  Word64 RandomBits(Magnitude magnitude, unsigned* state) const {
    const unsigned middle = infinity / 2;
    const auto between = [&](unsigned low, unsigned high) {
      return low + NextRandom(state) % (high - low + 1);
    };
    const unsigned exponent =
        magnitude == Magnitude::kOrdinary    ? between(middle - 6, middle)
        : magnitude == Magnitude::kAny       ? between(0, infinity - 1)
        : magnitude == Magnitude::kLargest   ? between(infinity - 2, infinity - 1)
        : magnitude == Magnitude::kSmallest  ? between(0, 2)
        : magnitude == Magnitude::kOverflow  ? between(middle + 125, middle + 129)
        : magnitude == Magnitude::kUnderflow ? between(middle - 151, middle - 125)
                                             : 0;
    const Word64 random_sign = NextRandom(state) % 2 * sign;
    if (magnitude == Magnitude::kZero) return random_sign;
    Word64 mantissa = NextRandom(state);
    if (mantissa_bits > 24) {
      mantissa |= static_cast<Word64>(NextRandom(state)) << 24;
      mantissa |= static_cast<Word64>(NextRandom(state)) << 48;
    }
    return random_sign | static_cast<Word64>(exponent) << mantissa_bits |
           mantissa % (Word64{1} << mantissa_bits);
  }

  // Quiet and signalling NaNs, infinities.
  std::vector<Word64> Nonfinite() const {
    const Word64 bits = static_cast<Word64>(infinity) << mantissa_bits;
    const Word64 quiet = bits | Word64{1} << (mantissa_bits - 1);
    return {quiet, sign | quiet, bits | 1u, sign | bits | 1u, bits, sign | bits};
  }
};

inline Format FormatOf(DType dtype) {
  if (dtype == DType::kFloat64) return {52, 2047, Word64{1} << 63};
  if (dtype == DType::kFloat32) return {23, 255, 0x80000000u};
  return dtype == DType::kBfloat16 ? Format{7, 255, 0x8000u} : Format{10, 31, 0x8000u};
}

inline void SetBits(DType dtype, std::vector<unsigned char>* array, std::size_t i, Word64 bits) {
  const auto size = static_cast<std::size_t>(SizeOf(dtype));
  for (std::size_t byte = 0; byte < size; ++byte) {
    (*array)[i * size + byte] = static_cast<unsigned char>(bits >> (8 * byte));
  }
}

// A number of elements that takes the place of others.
struct Planted {
  unsigned kind;  // an index of Format::Nonfinite
  std::vector<std::size_t> places;
};

struct StatsCase {
  std::vector<std::size_t> sizes;  // of the leaves, in elements of a member
  std::size_t offset;              // elements
  DType dtype;                     // of the first leaf; those of the others take turns
  std::int64_t members;
  std::int64_t chunk_tiles;
  std::vector<float> scales;  // one, or one for each member
  Magnitude magnitude;
  Planted planted = {0, {}};  // in the first leaf, whose members lie one after another

  DType LeafDType(std::size_t leaf) const {
    if (dtype == DType::kFloat64 && leaf % 2 == 0) return dtype;
    return kDTypes[(static_cast<std::size_t>(dtype) + leaf) % 3];
  }
  float Scale(std::int64_t member) const {
    return scales[static_cast<std::size_t>(member) % scales.size()];
  }
  std::int64_t RowsPerMember() const {
    const auto chunk = static_cast<std::size_t>(chunk_tiles) * kStatsTileElements;
    std::size_t rows = 0;
    for (const std::size_t size : sizes) rows += (size + chunk - 1) / chunk;
    return static_cast<std::int64_t>(rows);
  }

  std::vector<unsigned char> Gradient(std::size_t leaf) const {
    const DType leaf_dtype = LeafDType(leaf);
    const Format format = FormatOf(leaf_dtype);
    const std::size_t n = sizes[leaf] * static_cast<std::size_t>(members);
    std::vector<unsigned char> bytes(n * static_cast<std::size_t>(SizeOf(leaf_dtype)));
    unsigned state = static_cast<unsigned>(leaf * 977 + n);
    for (std::size_t i = 0; i < n; ++i) {
      SetBits(leaf_dtype, &bytes, i, format.RandomBits(magnitude, &state));
    }
    if (leaf > 0) return bytes;
    for (const std::size_t place : planted.places) {
      SetBits(leaf_dtype, &bytes, place, format.Nonfinite()[planted.kind]);
    }
    return bytes;
  }

  std::string Name(const char* kernel) const {
    return std::string(kernel) + " leaves=" + std::to_string(sizes.size()) +
           " first=" + std::to_string(sizes.empty() ? 0 : sizes[0]) +
           " offset=" + std::to_string(offset) +
           " dtype=" + std::to_string(static_cast<int>(dtype)) +
           " members=" + std::to_string(members) + " tiles=" + std::to_string(chunk_tiles) +
           " scale=" + std::to_string(scales[0]) +
           " magnitude=" + std::to_string(static_cast<int>(magnitude)) +
           " planted=" + std::to_string(planted.kind) + " at " +
           std::to_string(planted.places.size()) + " places";
  }
};

// The gradients and the rows of a case. Rows begin as canaries.
template <typename Buffer>
class StatsArrays {
 public:
  explicit StatsArrays(const StatsCase& c)
      : case_(c),
        scales_(c.scales.size() * sizeof(float), 0),
        rows_(static_cast<std::size_t>(c.members * c.RowsPerMember()) * sizeof(StatsRow), 0) {
    scales_.Write(BytesOf(c.scales.data(), c.scales.size()));
    for (std::size_t i = 0; i < c.sizes.size(); ++i) {
      const std::vector<unsigned char> gradient = c.Gradient(i);
      const auto element = static_cast<std::size_t>(SizeOf(c.LeafDType(i)));
      gradients_.emplace_back(gradient.size(), c.offset * element).Write(gradient);
    }
  }

  AnalyzeOperands Operands() const {
    AnalyzeOperands operands;
    operands.gradient_scale = {scales_.template As<float>(), case_.scales.size() > 1};
    for (std::size_t i = 0; i < case_.sizes.size(); ++i) {
      operands.leaves.push_back({gradients_[i].template As<void>(),
                                 static_cast<long long>(case_.sizes[i]) * case_.members,
                                 case_.LeafDType(i)});
    }
    operands.rows = rows_.template As<StatsRow>();
    operands.members = case_.members;
    operands.chunk_elements = case_.chunk_tiles * kStatsTileElements;
    return operands;
  }

  // Checks the canaries and the gradients too.
  std::vector<unsigned char> ReadRows(const char* kernel) const {
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      Check(gradients_[i].Read() == case_.Gradient(i), "gradient, " + case_.Name(kernel));
      Check(gradients_[i].Intact(), "canary of a gradient, " + case_.Name(kernel));
    }
    const std::vector<unsigned char> rows = rows_.Read();
    Check(rows_.Intact(), "canary of the rows, " + case_.Name(kernel));
    return rows;
  }

 private:
  StatsCase case_;
  Buffer scales_;
  Buffer rows_;
  std::deque<Buffer> gradients_;
};

// Around a vector of 4 elements, a round, a tile, three tiles.
inline constexpr std::size_t kStatsSizes[] = {
    0,    1,    2,    3,    4,    5,    7,    127,  128,  129,  511,   512,   513,   516,
    1023, 2050, 4092, 4095, 4096, 4097, 4100, 8191, 8192, 8193, 12287, 12288, 12289, 20001};

// Valid and not: those make every gradient NaN.
inline std::vector<float> StatsScales() {
  const float inf = BitsToFloat(kInfinityBits);
  return {1.0f,
          0x1p-3f,
          3.0f,
          1.0f,
          65536.0f,
          0.0f,
          0x1p-127f,
          1e-3f,
          1.0f,
          -1.0f,
          0x1p127f,
          inf,
          BitsToFloat(kNanBits)};
}

// Each dtype and size at each offset; the other options are drawn.
inline std::vector<StatsCase> ShapeCases() {
  const std::vector<float> scales = StatsScales();
  std::vector<StatsCase> cases;
  unsigned state = 1;
  const auto draw = [&](const auto& from) { return from[NextRandom(&state) % std::size(from)]; };
  for (const DType dtype : kAllDTypes) {
    for (std::size_t offset = 0; offset < 16; ++offset) {
      for (const std::size_t n : kStatsSizes) {
        StatsCase c{{n}, offset, dtype, 1, 1, {draw(scales)}, draw(kMagnitudes)};
        if (NextRandom(&state) % 4 == 0) c.members = 3;
        if (NextRandom(&state) % 2 == 0) c.chunk_tiles = 3;
        if (NextRandom(&state) % 4 == 0) c.sizes = {n, 0, 5, draw(kStatsSizes)};
        if (c.members > 1 && offset % 2 == 0) c.scales = {draw(scales), 4.0f, draw(scales)};
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// float64 gradients around what float32 can hold.
inline std::vector<StatsCase> Float64StatsCases() {
  std::vector<StatsCase> cases;
  for (const Magnitude magnitude : {Magnitude::kOverflow, Magnitude::kUnderflow}) {
    for (const std::size_t offset : {0, 1, 2}) {
      for (const std::size_t n : {1, 3, 515, 4096, 8193}) {
        for (const float scale : StatsScales()) {
          cases.push_back({{n, 5}, offset, DType::kFloat64, 1, 1, {scale}, magnitude});
        }
      }
    }
  }
  return cases;
}

// Each NaN and infinity at the first, a middle and the last place, and at all three.
inline std::vector<StatsCase> NonfiniteCases() {
  std::vector<StatsCase> cases;
  for (const DType dtype : kAllDTypes) {
    for (unsigned kind = 0; kind < FormatOf(dtype).Nonfinite().size(); ++kind) {
      for (const std::size_t n : {3, 515, 9001}) {
        for (const float scale : {1.0f, 4.0f, 3.0f}) {
          StatsCase c{{n, 5}, kind, dtype, 1, 1, {scale}, Magnitude::kOrdinary};
          c.planted.kind = kind;
          const std::vector<std::size_t> places = {0, n / 2, n - 1};
          for (const std::size_t place : places) {
            c.planted.places = {place};
            cases.push_back(c);
          }
          c.planted.places = places;
          cases.push_back(c);
          c.chunk_tiles = 3;
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_STATS_CASES_H_
