// Drives the gradient statistics of the CPU without JAX: every instruction set against the twin,
// bit for bit, and norms against sums in long double. Exits with 1 on a failure.
#include "cpu/stats.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/buffers.h"
#include "tests/check.h"
#include "tests/merge_cases.h"
#include "tests/pools.h"
#include "tests/stats_cases.h"
#include "tests/stats_twin.h"

namespace jfa::cpu {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

std::vector<unsigned char> Analyze(const InstructionSet& isa, const StatsCase& c) {
  const StatsArrays<GuardedBuffer> arrays(c);
  InlinePool pool;
  AnalyzeGradient(pool, 1, isa, arrays.Operands());
  return arrays.ReadRows(isa.name);
}

// What statistics see of a leaf's member.
std::vector<float> Unscaled(const StatsCase& c, std::size_t leaf, std::int64_t member) {
  const std::vector<unsigned char> gradient = c.Gradient(leaf);
  const float scale = c.Scale(member);
  const bool valid = scale > 0.0f && std::isfinite(scale);
  std::vector<float> elements;
  for (std::size_t i = 0; i < c.sizes[leaf]; ++i) {
    const std::size_t place = static_cast<std::size_t>(member) * c.sizes[leaf] + i;
    const float element = TwinElement(LoadAs(c.LeafDType(leaf), gradient.data(), place));
    elements.push_back(valid ? element / scale : std::nanf(""));
  }
  return elements;
}

std::vector<StatsRow> TwinRows(const StatsCase& c) {
  std::vector<StatsRow> rows;
  for (std::int64_t member = 0; member < c.members; ++member) {
    for (std::size_t leaf = 0; leaf < c.sizes.size(); ++leaf) {
      AppendTwinRows(Unscaled(c, leaf, member), static_cast<std::size_t>(c.chunk_tiles), &rows);
    }
  }
  return rows;
}

std::vector<StatsRow> CheckRows(const InstructionSet* sets, int num_sets, const StatsCase& c) {
  const std::vector<StatsRow> expected = TwinRows(c);
  for (int i = 0; i < num_sets; ++i) {
    Check(Analyze(sets[i], c) == BytesOf(expected.data(), expected.size()),
          "rows, " + c.Name(sets[i].name));
  }
  return expected;
}

void TestRows(const InstructionSet* sets, int num_sets) {
  for (const StatsCase& c : ShapeCases()) CheckRows(sets, num_sets, c);
  for (const StatsCase& c : Float64StatsCases()) CheckRows(sets, num_sets, c);
  for (const StatsCase& c : NonfiniteCases()) {
    std::size_t nonfinite = 0;
    for (const StatsRow& row : CheckRows(sets, num_sets, c)) {
      nonfinite += static_cast<std::size_t>(row.nonfinite);
    }
    Check(nonfinite == c.planted.places.size(), "number of non-finite elements, " + c.Name("twin"));
  }
}

void TestThreads(const InstructionSet& isa) {
  const StatsCase c{{40 * kStatsTileElements + 17, 3, 0, 30 * kStatsTileElements},
                    1,
                    DType::kBfloat16,
                    3,
                    1,
                    {1.0f, 3.0f, 8.0f},
                    Magnitude::kOrdinary};
  const std::vector<unsigned char> expected = Analyze(isa, c);
  for (const std::int64_t num_threads : {1, 2, 16}) {
    const StatsArrays<GuardedBuffer> arrays(c);
    {
      ThreadPool pool;
      AnalyzeGradient(pool, num_threads, isa, arrays.Operands());
    }
    Check(arrays.ReadRows(isa.name) == expected, "threads " + std::to_string(num_threads));
  }
  const StatsArrays<GuardedBuffer> arrays(c);
  BusyPool pool;
  AnalyzeGradient(pool, 4, isa, arrays.Operands());
  Check(arrays.ReadRows(isa.name) == expected, "a pool that is busy until the loop has returned");
}

template <typename T, typename Field>
std::vector<unsigned char> FieldBytes(const std::vector<StatsReport>& reports, Field field) {
  std::vector<T> values;
  for (const StatsReport& report : reports) values.push_back(report.*field);
  return BytesOf(values.data(), values.size());
}

void TestMerges() {
  for (const MergeCase& c : MergeCases()) {
    const MergeArrays<GuardedBuffer> arrays(c);
    MergeGradientStats(arrays.Operands());
    const std::vector<StatsRow> rows = c.Rows();
    std::vector<StatsRow> merged;
    std::vector<StatsRow> scratch;
    std::vector<StatsReport> reports;
    for (std::size_t member = 0; member < static_cast<std::size_t>(c.members); ++member) {
      for (const MergeSegment& segment : c.Segments()) {
        const StatsRow* first = rows.data() + member * c.RowsPerMember() + segment.first_row;
        const auto num_rows = static_cast<std::size_t>(segment.num_rows);
        const TwinSums sums = TwinMerge(first, num_rows, &scratch);
        merged.push_back(TwinRow(sums));
        reports.push_back(TwinReport(sums));
      }
    }
    const auto results = arrays.ReadResults("cpu");
    const std::string name = c.Name("cpu");
    Check(results[0] == BytesOf(merged.data(), merged.size()), "merged rows, " + name);
    Check(results[1] == FieldBytes<float>(reports, &StatsReport::norm), "norm, " + name);
    Check(results[2] == FieldBytes<float>(reports, &StatsReport::scaled_norm), "scaled, " + name);
    Check(results[3] == FieldBytes<float>(reports, &StatsReport::max_abs), "max_abs, " + name);
    Check(results[4] == FieldBytes<int>(reports, &StatsReport::nonfinite), "nonfinite, " + name);
    Check(results[5] == BytesOf(scratch.data(), scratch.size()), "scratch rows, " + name);
  }
}

StatsReport MergeToReport(const std::vector<StatsRow>& rows) {
  std::vector<StatsRow> scratch(static_cast<std::size_t>(ScratchRows(rows.size())));
  StatsRow merged;
  StatsReport report;
  const auto num_rows = static_cast<long long>(rows.size());
  MergeGradientStats({rows.data(),
                      1,
                      num_rows,
                      {{0, num_rows}},
                      &merged,
                      &report.norm,
                      &report.scaled_norm,
                      &report.max_abs,
                      &report.nonfinite,
                      scratch.data()});
  return report;
}

// Each sum's error is near half an ulp of the ten or so that an element passes through.
constexpr float kMostUlp = 4.0f;

float UlpApart(float actual, long double expected) {
  const float rounded = static_cast<float>(expected);
  const float ulp = std::nextafterf(rounded, BitsToFloat(kInfinityBits)) - rounded;
  return static_cast<float>(std::fabs(actual - expected) / ulp);
}

void TestNorms(const InstructionSet& isa) {
  float most = 0.0f;
  for (const Magnitude magnitude : kMagnitudes) {
    for (const DType dtype : kDTypes) {
      for (const std::size_t n : {1, 2, 100, 4096, 100000}) {
        for (const float scale : {1.0f, 3.0f}) {
          const StatsCase c{{n, n / 3}, 0, dtype, 1, 1, {scale}, magnitude};
          long double sum = 0.0L;
          for (const std::size_t leaf : {0, 1}) {
            for (const long double x : Unscaled(c, leaf, 0)) sum += x * x;
          }
          const std::vector<unsigned char> bytes = Analyze(isa, c);
          std::vector<StatsRow> rows(bytes.size() / sizeof(StatsRow));
          std::memcpy(rows.data(), bytes.data(), bytes.size());
          const StatsReport report = MergeToReport(rows);
          const long double norm = std::sqrt(sum);
          const bool fits = norm < static_cast<long double>(kMaxFloat);
          const float apart =
              fits ? UlpApart(report.norm, norm) : UlpApart(report.scaled_norm, norm * 0x1p-64L);
          Check(apart <= kMostUlp, "norm, " + c.Name(isa.name));
          Check(fits || report.norm == kMaxFloat, "norm beyond float32, " + c.Name(isa.name));
          most = std::fmax(most, apart);
        }
      }
    }
  }
  std::printf("norms are at most %.2f ulp apart\n", static_cast<double>(most));
}

void TestSaturation() {
  const int most = 0x7fffffff;
  const auto count = [](const std::vector<int>& counts) {
    std::vector<StatsRow> rows;
    for (const int n : counts) rows.push_back({0.0f, kInfinityBits, n});
    return MergeToReport(rows).nonfinite;
  };
  Check(count({most, 1}) == most, "a saturated count and one more");
  Check(count({most - 1, 1}) == most, "a count that just saturates");
  Check(count({most - 2, 1}) == most - 1, "a count that does not saturate");
  Check(count({most, most, most}) == most, "saturated counts");
  Check(count(std::vector<int>(5000, 0x40000000)) == most, "counts of several levels");
}

int Main() {
  int num_sets = 0;
  const InstructionSet* sets = SupportedInstructionSets(&num_sets);
  for (int i = 0; i < num_sets; ++i) std::printf("instruction set: %s\n", sets[i].name);
  TestRows(sets, num_sets);
  TestThreads(sets[0]);
  TestMerges();
  TestNorms(sets[0]);
  TestSaturation();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jfa::cpu

int main() { return jfa::cpu::Main(); }
