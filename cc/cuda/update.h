// The whole step on a GPU: leaf tables and launches. Knows neither XLA nor Python.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_UPDATE_H_
#define JAX_FUSED_ADAMW_CC_CUDA_UPDATE_H_

#include <string>
#include <vector>

#include "core/leaf.h"
#include "core/options.h"
#include "core/scalars.h"
#include "core/stats_operands.h"
#include "cuda/driver.h"

namespace jfa::cuda {

// Compiles and loads what Update will launch for leaves of these dtypes. Returns an error text,
// empty on success. Not while a stream is being captured.
std::string PrepareUpdate(const std::vector<LeafOperands>& leaves, const UpdateOptions& options);

// Submits the step to the stream; as few launches as the tables allow, none for empty leaves.
// One that counts the step does so last, with a launch of its own unless the grid is small.
// Returns an error text, empty on success. Neither synchronises nor reads device memory. `vectors`,
// a multiple of kVectorsAtOnce, are those of a thread in kernels that have several; 0 leaves them
// to the size of the tree.
std::string Update(CuStream stream, const StepOperands& operands,
                   const std::vector<LeafOperands>& leaves, const UpdateOptions& options,
                   int vectors = 0);

// The same two for a step that analyses its gradients first: one launch for a small tree of
// float32 parameters, else those of AnalyzeAndMerge and of Update.
std::string PrepareAnalyzeAndUpdate(const std::vector<LeafOperands>& leaves,
                                    const UpdateOptions& options);
std::string AnalyzeAndUpdate(CuStream stream, const StepOperands& operands,
                             const StepAnalysis& analysis, const std::vector<LeafOperands>& leaves,
                             const UpdateOptions& options);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_UPDATE_H_
