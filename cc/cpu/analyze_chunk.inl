// The CPU kernel of gradient statistics: one chunk to one row, by the tree of core/stats.h.
// Included by one .cc for each instruction set, which defines JFA_ISA.
//
// The 1024 sums that a GPU keeps in the registers of 256 lanes are an array here, and its lanes are
// vector lanes.
#include "cpu/tiles.inl"

namespace jfa::cpu::JFA_ISA {
namespace {

// As statistics see them.
const float* StatsTileOf(const AnalyzeBlock& block, std::int64_t begin, std::int64_t n,
                         float* buffer) {
  if (block.grad_dtype != DType::kFloat64) {
    return TileOf(block.grad, block.grad_dtype, begin, n, buffer);
  }
  const double* const elements = static_cast<const double*>(block.grad) + begin;
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) buffer[i] = StatsElement(elements[i]);
  return buffer;
}

struct Magnitudes {
  Word32 max_bits;
  int nonfinite;
};

Magnitudes MeasureTile(const float* tile, std::int64_t n) {
  // Signed integers order magnitudes as unsigned ones do, and SSE2 compares only those.
  int max_bits = 0;
  int nonfinite = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const int bits = static_cast<int>(MagnitudeBits(tile[i]));
    max_bits = bits > max_bits ? bits : max_bits;
    nonfinite += bits >= static_cast<int>(kInfinityBits);
  }
  return {static_cast<Word32>(max_bits), nonfinite};
}

// Adds each pair of halves, down to one number.
float AddHalves(float* sums, int n) {
  for (int half = n / 2; half > 0; half /= 2) {
    JFA_ELEMENTWISE
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  return sums[0];
}

// The sum of squares of `rounds` whole rounds, relative to that of the inverse scale.
float SumSquares(const float* tile, std::int64_t rounds, float inverse_scale) {
  alignas(64) float sums[kTileRoundElements] = {};
  for (std::int64_t round = 0; round < rounds; ++round) {
    const float* elements = tile + round * kTileRoundElements;
    JFA_ELEMENTWISE
    for (int i = 0; i < kTileRoundElements; ++i) {
      const float x = elements[i] * inverse_scale;
      sums[i] = sums[i] + x * x;
    }
  }
  alignas(64) float lanes[kTileLanes];
  JFA_ELEMENTWISE
  for (int lane = 0; lane < kTileLanes; ++lane) {
    const float* own = sums + lane * kTileVector;
    lanes[lane] = (own[0] + own[1]) + (own[2] + own[3]);
  }
  return AddHalves(lanes, kTileLanes);
}

}  // namespace

StatsRow AnalyzeChunk(const AnalyzeBlock& block) {
  alignas(64) float buffer[kStatsTileElements];
  StatsSums sums{};
  for (std::int64_t begin = 0; begin < block.num_elements; begin += kStatsTileElements) {
    const std::int64_t left = block.num_elements - begin;
    const std::int64_t n = left < kStatsTileElements ? left : kStatsTileElements;
    const float* tile = StatsTileOf(block, begin, n, buffer);
    tile = UnscaleTile(block.unscale, tile, n, buffer);
    const Magnitudes magnitudes = MeasureTile(tile, n);
    StatsSums tile_sums{0.0, magnitudes.max_bits, magnitudes.nonfinite};
    if (magnitudes.nonfinite == 0) {
      const std::int64_t rounds = (n + kTileRoundElements - 1) / kTileRoundElements;
      if (n < rounds * kTileRoundElements) {  // the last round is filled up with zeros
        if (tile != buffer) __builtin_memcpy(buffer, tile, static_cast<unsigned long>(4 * n));
        for (std::int64_t i = n; i < rounds * kTileRoundElements; ++i) buffer[i] = 0.0f;
        tile = buffer;
      }
      const float sum = SumSquares(tile, rounds, InverseStatsScale(magnitudes.max_bits));
      tile_sums.sum = AbsoluteSum(sum, magnitudes.max_bits);
    }
    sums = AddSums(sums, tile_sums);
  }
  return RowOf(sums);
}

}  // namespace jfa::cpu::JFA_ISA
