// Rows and reports as the comment of core/stats.h describes them, written plainly from it.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_STATS_TWIN_H_
#define JAX_FUSED_ADAMW_CC_TESTS_STATS_TWIN_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/stats.h"

namespace jfa::tests {

// Sums under way: `largest` is NaN as soon as an element is, else the largest magnitude.
struct TwinSums {
  double sum = 0.0;
  float largest = 0.0f;
  std::int64_t nonfinite = 0;

  void Add(const TwinSums& other) {
    sum = sum + other.sum;
    const bool is_nan = std::isnan(largest) || std::isnan(other.largest);
    largest = is_nan ? std::numeric_limits<float>::quiet_NaN() : std::max(largest, other.largest);
    nonfinite = std::min<std::int64_t>(nonfinite + other.nonfinite, 0x7fffffff);
  }
};

// The power of two at or below `largest`, as far as it and its inverse are normal.
inline float TwinScale(float largest) {
  if (largest < 0x1p-126f) return 0x1p-126f;
  return std::min(std::ldexp(1.0f, std::ilogb(largest)), 0x1p126f);
}

inline StatsRow TwinRow(const TwinSums& sums) {
  const int nonfinite = static_cast<int>(sums.nonfinite);
  if (std::isnan(sums.largest)) return {0.0f, 0x7fc00000u, nonfinite};
  if (std::isinf(sums.largest)) return {0.0f, 0x7f800000u, nonfinite};
  const double scale = TwinScale(sums.largest);
  const float sum = static_cast<float>(sums.sum / (scale * scale));
  return {sum, FloatToBits(sums.largest), nonfinite};
}

inline TwinSums TwinSumsOf(const StatsRow& row) {
  TwinSums sums{0.0, BitsToFloat(row.max_bits), row.nonfinite};
  if (!std::isfinite(sums.largest)) return sums;
  const double scale = TwinScale(sums.largest);
  sums.sum = row.sum * (scale * scale);
  return sums;
}

template <typename T, typename Add>
T TwinTree(std::vector<T> lanes, const Add& add) {
  while (lanes.size() > 1) {
    const std::size_t half = lanes.size() / 2;
    for (std::size_t lane = 0; lane < half; ++lane) add(&lanes[lane], lanes[lane + half]);
    lanes.resize(half);
  }
  return lanes[0];
}

// The element that a gradient enters as.
inline float TwinElement(double gradient) {
  const double most = std::numeric_limits<float>::max();
  return static_cast<float>(std::isfinite(gradient) ? std::clamp(gradient, -most, most) : gradient);
}

// `elements` are unscaled already.
inline TwinSums TwinTile(const float* elements, std::size_t n) {
  TwinSums sums;
  for (std::size_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(elements[i]);
    sums.Add({0.0, magnitude, std::isfinite(magnitude) ? 0 : 1});
  }
  if (sums.nonfinite > 0) return sums;
  const float scale = TwinScale(sums.largest);
  std::vector<float> lanes;
  for (std::size_t lane = 0; lane < 256; ++lane) {
    float squares[4] = {};
    for (std::size_t round = 0; round < 4; ++round) {
      for (std::size_t neighbour = 0; neighbour < 4; ++neighbour) {
        const std::size_t i = round * 1024 + lane * 4 + neighbour;
        const float x = i < n ? elements[i] / scale : 0.0f;
        squares[neighbour] = squares[neighbour] + x * x;
      }
    }
    lanes.push_back((squares[0] + squares[1]) + (squares[2] + squares[3]));
  }
  const float sum = TwinTree(lanes, [](float* a, float b) { *a = *a + b; });
  sums.sum = static_cast<double>(sum) * scale * scale;
  return sums;
}

// One after another, the rows of a leaf of one member.
inline void AppendTwinRows(const std::vector<float>& elements, std::size_t chunk_tiles,
                           std::vector<StatsRow>* rows) {
  const std::size_t chunk = chunk_tiles * 4096;
  for (std::size_t begin = 0; begin < elements.size(); begin += chunk) {
    const std::size_t end = std::min(begin + chunk, elements.size());
    TwinSums sums;
    for (std::size_t tile = begin; tile < end; tile += 4096) {
      sums.Add(TwinTile(elements.data() + tile, std::min<std::size_t>(end - tile, 4096)));
    }
    rows->push_back(TwinRow(sums));
  }
}

// Appends the rows of each level to `scratch`.
inline TwinSums TwinMerge(const StatsRow* rows, std::size_t num_rows,
                          std::vector<StatsRow>* scratch) {
  std::vector<TwinSums> lanes(32);
  if (num_rows <= 1024) {
    for (std::size_t i = 0; i < num_rows; ++i) lanes[i % 32].Add(TwinSumsOf(rows[i]));
    return TwinTree(lanes, [](TwinSums* a, const TwinSums& b) { a->Add(b); });
  }
  std::vector<StatsRow> merged;
  for (std::size_t begin = 0; begin < num_rows; begin += 1024) {
    const std::size_t n = std::min<std::size_t>(num_rows - begin, 1024);
    merged.push_back(TwinRow(TwinMerge(rows + begin, n, scratch)));
  }
  scratch->insert(scratch->end(), merged.begin(), merged.end());
  return TwinMerge(merged.data(), merged.size(), scratch);
}

inline StatsReport TwinReport(const TwinSums& sums) {
  const int nonfinite = static_cast<int>(sums.nonfinite);
  const float x = sums.largest;
  if (!std::isfinite(x)) return {x, x, x, nonfinite};
  const double norm = std::sqrt(sums.sum);
  const double largest_float = std::numeric_limits<float>::max();
  return {static_cast<float>(std::min(norm, largest_float)), static_cast<float>(norm * 0x1p-64), x,
          nonfinite};
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_STATS_TWIN_H_
