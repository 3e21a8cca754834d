// Gradient statistics on the CPU. Knows neither XLA nor Python, as cpu/update.h.
#ifndef JAX_FUSED_ADAMW_CC_CPU_STATS_H_
#define JAX_FUSED_ADAMW_CC_CPU_STATS_H_

#include <cstdint>
#include <vector>

#include "core/stats_operands.h"
#include "cpu/float_env.h"
#include "cpu/kernels.h"
#include "cpu/parallel_for.h"

namespace jfa::cpu {

// Rows that a thread draws at a time: 64 Ki elements, as in cpu/update.h.
inline constexpr std::int64_t kRowsPerDraw = 16;

// Fewer rows than this are not worth a second thread.
inline constexpr std::int64_t kParallelRows = 16;

// Where the rows of each leaf begin, and their number.
std::vector<std::int64_t> FirstRows(const AnalyzeOperands& operands);

// One row, by its number among all members' rows.
StatsRow AnalyzeRow(const InstructionSet& isa, const AnalyzeOperands& operands,
                    const std::vector<std::int64_t>& first_rows, std::int64_t index);

template <typename Pool>
void AnalyzeGradient(Pool& pool, std::int64_t num_threads, const InstructionSet& isa,
                     const AnalyzeOperands& operands) {
  const std::vector<std::int64_t> first_rows = FirstRows(operands);
  const std::int64_t num_rows = operands.members * first_rows.back();
  const std::int64_t num_draws = (num_rows + kRowsPerDraw - 1) / kRowsPerDraw;
  const auto analyze = [&](std::int64_t draw) {
    const std::int64_t begin = draw * kRowsPerDraw;
    const std::int64_t end = begin + kRowsPerDraw < num_rows ? begin + kRowsPerDraw : num_rows;
    for (std::int64_t i = begin; i < end; ++i) {
      operands.rows[i] = AnalyzeRow(isa, operands, first_rows, i);
    }
  };
  std::int64_t num_helpers = num_rows < kParallelRows ? 0 : num_threads - 1;
  if (num_helpers > num_draws - 1) num_helpers = num_draws - 1;
  ParallelFor<ScopedDefaultFloatEnv>(pool, num_helpers, num_draws, analyze);
}

void MergeGradientStats(const MergeOperands& operands);

}  // namespace jfa::cpu

#endif  // JAX_FUSED_ADAMW_CC_CPU_STATS_H_
