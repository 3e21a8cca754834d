// The first rung of the ladder: a plain loop on one thread, the yardstick of all others. The
// optimizer does not use it.
#ifndef JAX_FUSED_ADAMW_CC_LADDER_CPU_LOOP_H_
#define JAX_FUSED_ADAMW_CC_LADDER_CPU_LOOP_H_

#include <vector>

#include "core/leaf.h"
#include "cpu/kernels.h"

namespace jfa::cpu {

// For leaves that the ladder takes (ladder/checks.h).
void UpdateInALoop(const UpdateStep& step, const std::vector<LeafOperands>& leaves);

}  // namespace jfa::cpu

#endif  // JAX_FUSED_ADAMW_CC_LADDER_CPU_LOOP_H_
