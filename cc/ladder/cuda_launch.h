// The CUDA rungs of the ladder: a launch for each leaf. Knows neither XLA nor Python.
#ifndef JAX_FUSED_ADAMW_CC_LADDER_CUDA_LAUNCH_H_
#define JAX_FUSED_ADAMW_CC_LADDER_CUDA_LAUNCH_H_

#include <string>
#include <vector>

#include "core/leaf.h"
#include "core/scalars.h"
#include "cuda/driver.h"

namespace jfa::cuda {

// A kernel of ladder_kernel.cu.
enum class Rung { kNaive = 0, kVectors = 1 };

// As PrepareUpdate and Update of cuda/update.h, for leaves that the ladder takes (ladder/checks.h)
// and whose buffers allow 16-byte accesses, as XLA's do.
std::string PrepareLadder(Rung rung);
std::string LaunchLadder(CuStream stream, Rung rung, const StepOperands& operands,
                         const std::vector<LeafOperands>& leaves);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_LADDER_CUDA_LAUNCH_H_
