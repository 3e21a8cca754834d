// What both harnesses of merges test: rows and reports, in Buffers of the host or a device.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_MERGE_CASES_H_
#define JAX_FUSED_ADAMW_CC_TESTS_MERGE_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/stats_operands.h"
#include "tests/buffers.h"
#include "tests/check.h"
#include "tests/stats_cases.h"

namespace jfa::tests {

struct MergeCase {
  std::vector<std::size_t> segments;  // their numbers of rows; between them is one of none's
  std::int64_t members;
  Magnitude magnitude;
  std::size_t period = 1;  // each row that it does not divide is of zeros
  int nonfinite = 0;       // of each hundredth row

  std::size_t RowsPerMember() const {
    std::size_t rows = 0;
    for (const std::size_t n : segments) rows += n + 1;
    return rows;
  }

  std::vector<MergeSegment> Segments() const {
    std::vector<MergeSegment> result;
    long long first_row = 0;
    for (const std::size_t n : segments) {
      result.push_back({first_row, static_cast<long long>(n)});
      first_row += static_cast<long long>(n) + 1;
    }
    return result;
  }

  std::vector<StatsRow> Rows() const {
    const Format format = FormatOf(DType::kFloat32);
    std::vector<StatsRow> rows(RowsPerMember() * static_cast<std::size_t>(members));
    unsigned state = 7;
    for (std::size_t i = 0; i < rows.size(); i += period) {
      const Word32 max_bits =
          MagnitudeBits(BitsToFloat(static_cast<Word32>(format.RandomBits(magnitude, &state))));
      const float sum = static_cast<float>(NextRandom(&state)) * 0x1p-10f;
      rows[i] = {max_bits == 0 ? 0.0f : sum, max_bits, 0};
      if (nonfinite == 0 || i / period % 100 != 0) continue;
      rows[i] = {0.0f, i % 3 == 0 ? kNanBits : kInfinityBits, nonfinite};
    }
    // A row that is read although it is no segment's spoils the report.
    for (std::int64_t member = 0; member < members; ++member) {
      for (const MergeSegment& segment : Segments()) {
        const auto end = static_cast<std::size_t>(segment.first_row + segment.num_rows);
        rows[static_cast<std::size_t>(member) * RowsPerMember() + end] = {0.0f, kNanBits, 1};
      }
    }
    return rows;
  }

  std::string Name(const char* kernel) const {
    return std::string(kernel) + " segments=" + std::to_string(segments.size()) +
           " first=" + std::to_string(segments.empty() ? 0 : segments[0]) +
           " members=" + std::to_string(members) +
           " magnitude=" + std::to_string(static_cast<int>(magnitude)) +
           " nonfinite=" + std::to_string(nonfinite);
  }
};

template <typename Buffer>
class MergeArrays {
 public:
  explicit MergeArrays(const MergeCase& c)
      : case_(c),
        rows_(c.RowsPerMember() * Members() * sizeof(StatsRow), 0),
        merged_(NumReports() * sizeof(StatsRow), 0),
        norm_(NumReports() * sizeof(float), 0),
        scaled_norm_(NumReports() * sizeof(float), 0),
        max_abs_(NumReports() * sizeof(float), 0),
        nonfinite_(NumReports() * sizeof(int), 0),
        scratch_(ScratchBytes(), 0) {
    const std::vector<StatsRow> rows = c.Rows();
    rows_.Write(BytesOf(rows.data(), rows.size()));
  }

  MergeOperands Operands() const {
    return {rows_.template As<StatsRow>(),
            case_.members,
            static_cast<long long>(case_.RowsPerMember()),
            case_.Segments(),
            merged_.template As<StatsRow>(),
            norm_.template As<float>(),
            scaled_norm_.template As<float>(),
            max_abs_.template As<float>(),
            nonfinite_.template As<int>(),
            scratch_.template As<StatsRow>()};
  }

  // Checks the canaries too.
  std::vector<std::vector<unsigned char>> ReadResults(const char* kernel) const {
    std::vector<std::vector<unsigned char>> results;
    for (const Buffer* buffer :
         {&merged_, &norm_, &scaled_norm_, &max_abs_, &nonfinite_, &scratch_}) {
      results.push_back(buffer->Read());
      Check(buffer->Intact(), "canary of a merge, " + case_.Name(kernel));
    }
    return results;
  }

 private:
  std::size_t Members() const { return static_cast<std::size_t>(case_.members); }
  std::size_t NumReports() const { return case_.segments.size() * Members(); }
  std::size_t ScratchBytes() const {
    MergeOperands operands{};
    operands.segments = case_.Segments();
    return static_cast<std::size_t>(operands.ScratchPerMember()) * Members() * sizeof(StatsRow);
  }

  MergeCase case_;
  Buffer rows_;
  Buffer merged_;
  Buffer norm_;
  Buffer scaled_norm_;
  Buffer max_abs_;
  Buffer nonfinite_;
  Buffer scratch_;
};

inline std::vector<MergeCase> MergeCases() {
  std::vector<MergeCase> cases;
  const std::vector<std::size_t> counts = {0, 1, 31, 32, 33, 1023, 1024, 1025, 5000};
  for (const Magnitude magnitude : kMagnitudes) {
    for (const std::int64_t members : {1, 3}) {
      for (const std::size_t n : counts) cases.push_back({{n}, members, magnitude});
      cases.push_back({counts, members, magnitude});
      cases.push_back({{1500, 0, 2}, members, magnitude, 1, 1});
      cases.push_back({{5000}, members, magnitude, 3, 0x7fffffff});
      cases.push_back({{1024, 1025}, members, magnitude, 1, 0x10000000});
    }
  }
  constexpr std::size_t kThreeLevels = 1024 * 1024 + 1;
  cases.push_back({{kThreeLevels}, 1, Magnitude::kAny, 1000});
  cases.push_back({{kThreeLevels}, 1, Magnitude::kOrdinary, 1024 * 1024});
  return cases;
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_MERGE_CASES_H_
