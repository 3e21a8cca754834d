// The counters of steps, int32, saturating.
#ifndef JAX_FUSED_ADAMW_CC_CORE_COUNTS_H_
#define JAX_FUSED_ADAMW_CC_CORE_COUNTS_H_

#include "core/macros.h"

namespace jfa {

struct StepCounts {
  int count;        // applied steps
  int skipped;      // skipped steps
  int consecutive;  // skipped steps since the last applied one
};

JFA_HOST_DEVICE int NextCount(int count) { return count < 0x7fffffff ? count + 1 : count; }

JFA_HOST_DEVICE StepCounts NextCounts(StepCounts old, bool skip) {
  if (skip) return {old.count, NextCount(old.skipped), NextCount(old.consecutive)};
  return {NextCount(old.count), old.skipped, 0};
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_COUNTS_H_
