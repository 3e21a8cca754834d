// What handlers pass to the kernels of gradient statistics.
#ifndef JAX_FUSED_ADAMW_CC_CORE_STATS_OPERANDS_H_
#define JAX_FUSED_ADAMW_CC_CORE_STATS_OPERANDS_H_

#include <vector>

#include "core/chunks.h"
#include "core/dtype.h"
#include "core/scalars.h"
#include "core/stats.h"

namespace jfa {

struct GradLeaf {
  const void* grad;
  long long num_elements;  // of all members
  DType dtype;
};

// Gradients to first rows. Each member of a vmap has rows of its own, in the order of the leaves.
struct AnalyzeOperands {
  ScalarOperand<float> gradient_scale;
  std::vector<GradLeaf> leaves;
  StatsRow* rows;            // [members][RowsPerMember()]
  long long members;         // slices of each leaf; 1 unless vmap made more
  long long chunk_elements;  // a multiple of kStatsTileElements

  long long RowsOfLeaf(const GradLeaf& leaf) const {
    return CeilDivide(leaf.num_elements / members, chunk_elements);
  }
  long long RowsPerMember() const {
    long long rows = 0;
    for (const GradLeaf& leaf : leaves) rows += RowsOfLeaf(leaf);
    return rows;
  }
};

// Rows that become one report.
struct MergeSegment {
  long long first_row;
  long long num_rows;
};

// Rows to reports. Results have one value for each member and segment.
struct MergeOperands {
  const StatsRow* rows;  // [members][rows_per_member]
  long long members;
  long long rows_per_member;
  std::vector<MergeSegment> segments;
  StatsRow* merged;
  float* norm;
  float* scaled_norm;
  float* max_abs;
  int* nonfinite;
  StatsRow* scratch;  // [members][ScratchPerMember()]

  long long ScratchPerMember() const {
    long long scratch = 0;
    for (const MergeSegment& segment : segments) scratch += ScratchRows(segment.num_rows);
    return scratch;
  }
};

// The statistics that a step makes of its own gradients: one report of all leaves.
struct StepAnalysis {
  AnalyzeOperands gradients;
  MergeOperands report;
  bool skip_nonfinite;

  // The step, which reads the report.
  StepOperands Inform(StepOperands step, Clip clip) const {
    if (clip == Clip::kNorm) {
      step.norm = {report.norm};
      step.scaled_norm = {report.scaled_norm};
    }
    if (skip_nonfinite) step.nonfinite = {report.nonfinite};
    return step;
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_STATS_OPERANDS_H_
