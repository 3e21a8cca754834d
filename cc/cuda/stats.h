// Gradient statistics on a GPU: tables and launches. Knows neither XLA nor Python.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_STATS_H_
#define JAX_FUSED_ADAMW_CC_CUDA_STATS_H_

#include <string>

#include "core/stats_operands.h"
#include "cuda/driver.h"

namespace jfa::cuda {

// Compiles and loads what the two below launch. Returns an error text, empty on success. Not while
// a stream is being captured.
std::string PrepareStats();

// Submit to the stream: one launch for as many leaves as the table holds, and one for the merges
// of as many segments. Return an error text, empty on success. Neither synchronise nor read device
// memory.
std::string AnalyzeGradient(CuStream stream, const AnalyzeOperands& operands);
std::string MergeGradientStats(CuStream stream, const MergeOperands& operands);

// Both, `merge` reading the rows that `analyze` writes: a single launch where these are few and
// become one report.
std::string AnalyzeAndMerge(CuStream stream, const AnalyzeOperands& analyze,
                            const MergeOperands& merge);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_STATS_H_
