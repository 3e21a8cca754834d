// Gradient statistics on a GPU: tables and launches. Knows neither XLA nor Python.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_STATS_H_
#define JAX_FUSED_ADAMW_CC_CUDA_STATS_H_

#include <string>

#include "core/stats_operands.h"
#include "cuda/driver.h"
#include "cuda/table.h"

namespace jfa::cuda {

// What a kernel writes that merges rows.
MergeBuffers MergeBuffersOf(const MergeOperands& operands);

// Compiles and loads what the two below launch. Returns an error text, empty on success. Not while
// a stream is being captured.
std::string PrepareStats();

// Submit to the stream. Return an error text, empty on success. Neither synchronise nor read device
// memory.

// One launch for as many segments as the table holds.
std::string MergeGradientStats(CuStream stream, const MergeOperands& operands);

// One launch for as many leaves as the table holds, then MergeGradientStats of the rows that it
// writes; the same launch, where there is one report of few rows.
std::string AnalyzeAndMerge(CuStream stream, const AnalyzeOperands& analyze,
                            const MergeOperands& merge);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_STATS_H_
