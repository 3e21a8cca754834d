// Statistics of gradients: what a row is, how a tile of elements becomes a row, and how rows are
// merged. One fixed tree of additions, which every platform follows, so all give the same bits.
//
//   tile    4096 elements, as a block of 256 lanes reads them: in each of 4 rounds a lane takes 4
//           neighbours, and adds their squares to 4 sums. The 4 sums of a lane are added, then the
//           lanes: 128 to 128, 64 to 64, .. 1 to 1.
//   chunk   one tile, in trees beyond 2^34 elements several: their sums are added in order.
//   row     of one chunk, or of up to 1024 rows: lane l of 32 adds up rows l, l + 32, ..., then the
//           lanes are added, 16 to 16, .. 1 to 1. Rows of rows are merged again, up to one.
//
// Squares are taken of elements divided by a power of two near the tile's largest one, so they
// neither overflow nor vanish: float32 serves for each element, and float64, which is slow on many
// GPUs, is needed only once a tile and in merges, where it holds any sum of squares.
#ifndef JAX_FUSED_ADAMW_CC_CORE_STATS_H_
#define JAX_FUSED_ADAMW_CC_CORE_STATS_H_

#include "core/dtype.h"
#include "core/macros.h"

namespace jfa {

constexpr int kTileLanes = 256;
constexpr int kTileVector = 4;
constexpr int kTileRounds = 4;
constexpr int kTileRoundElements = kTileLanes * kTileVector;
constexpr int kStatsTileElements = kTileRounds * kTileRoundElements;

constexpr int kMergeFanIn = 1024;
constexpr int kMergeLanes = 32;

// 12 bytes, uint32[3] to JAX. A row of zeros is that of no elements.
struct StatsRow {
  float sum;        // of squares, relative to the square of StatsScale(max_bits); 0 if not finite
  Word32 max_bits;  // of the largest magnitude: NaN, always kNanBits, > infinity > finite
  int nonfinite;    // NaN and infinite elements, saturating
};
static_assert(sizeof(StatsRow) == 12, "a row is three words");

// Sums under way, of chunks or rows.
struct StatsSums {
  double sum;  // of squares
  Word32 max_bits;
  int nonfinite;
};

struct StatsReport {
  float norm;
  float scaled_norm;  // norm * 2^-64, which no norm overflows
  float max_abs;
  int nonfinite;
};

// A gradient's element as statistics see it. float32 is all that a norm needs of a float64; what is
// finite stays so, which keeps the count of non-finite elements exact.
JFA_HOST_DEVICE float StatsElement(double gradient) {
  constexpr double kMost = kMaxFloat;
  constexpr double kMaxDouble = 0x1.fffffffffffffp1023;
  const double above = gradient > kMost && gradient <= kMaxDouble ? kMost : gradient;
  return static_cast<float>(above < -kMost && above >= -kMaxDouble ? -kMost : above);
}

JFA_HOST_DEVICE Word32 MagnitudeBits(float x) { return FloatToBits(x) & 0x7fffffffu; }
JFA_HOST_DEVICE bool IsNonfinite(Word32 magnitude_bits) { return magnitude_bits >= kInfinityBits; }
// What a NaN carries differs between platforms: rows and reports have one NaN.
JFA_HOST_DEVICE Word32 UnifyNans(Word32 magnitude_bits) {
  return magnitude_bits > kInfinityBits ? kNanBits : magnitude_bits;
}
JFA_HOST_DEVICE Word32 MaxBits(Word32 a, Word32 b) { return a > b ? a : b; }

// Of two counts that are not negative.
JFA_HOST_DEVICE int SaturatingAdd(int a, int b) {
  const Word32 sum = static_cast<Word32>(a) + static_cast<Word32>(b);
  return sum > 0x7fffffffu ? 0x7fffffff : static_cast<int>(sum);
}

// The exponent of the largest element, so that both the power of two and its inverse are normal.
JFA_HOST_DEVICE Word32 StatsExponent(Word32 max_bits) {
  const Word32 exponent = max_bits >> 23;
  return exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
}
JFA_HOST_DEVICE float StatsScale(Word32 max_bits) {
  return BitsToFloat(StatsExponent(max_bits) << 23);
}
JFA_HOST_DEVICE float InverseStatsScale(Word32 max_bits) {
  return BitsToFloat((254 - StatsExponent(max_bits)) << 23);
}

// A row's sum of squares in itself: exact.
JFA_HOST_DEVICE double AbsoluteSum(float relative_sum, Word32 max_bits) {
  if (IsNonfinite(max_bits)) return 0.0;
  const double scale = StatsScale(max_bits);
  return relative_sum * scale * scale;
}

JFA_HOST_DEVICE StatsSums AddSums(const StatsSums& a, const StatsSums& b) {
  return {a.sum + b.sum, MaxBits(a.max_bits, b.max_bits), SaturatingAdd(a.nonfinite, b.nonfinite)};
}

JFA_HOST_DEVICE StatsSums SumsOf(const StatsRow& row) {
  return {AbsoluteSum(row.sum, row.max_bits), row.max_bits, row.nonfinite};
}

JFA_HOST_DEVICE StatsRow RowOf(const StatsSums& sums) {
  if (IsNonfinite(sums.max_bits)) return {0.0f, UnifyNans(sums.max_bits), sums.nonfinite};
  const double inverse = InverseStatsScale(sums.max_bits);
  return {static_cast<float>(sums.sum * inverse * inverse), sums.max_bits, sums.nonfinite};
}

JFA_HOST_DEVICE StatsReport ReportOf(const StatsSums& sums) {
  if (IsNonfinite(sums.max_bits)) {
    const float x = BitsToFloat(UnifyNans(sums.max_bits));
    return {x, x, x, sums.nonfinite};
  }
  const double norm = SquareRoot(sums.sum);
  return {norm > kMaxFloat ? kMaxFloat : static_cast<float>(norm),
          static_cast<float>(norm * 0x1p-64), BitsToFloat(sums.max_bits), sums.nonfinite};
}

// Rows that a merge of `rows` leaves; rows of a level begin where the one before ends.
JFA_HOST_DEVICE long long RowsAfterMerge(long long rows) {
  return (rows + kMergeFanIn - 1) / kMergeFanIn;
}

// All rows between the first ones and the report.
JFA_HOST_DEVICE long long ScratchRows(long long rows) {
  long long scratch = 0;
  while (rows > kMergeFanIn) {
    rows = RowsAfterMerge(rows);
    scratch += rows;
  }
  return scratch;
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_STATS_H_
