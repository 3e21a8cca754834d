// The buffers of one leaf, as handlers pass them to kernels.
#ifndef JAX_FUSED_ADAMW_CC_CORE_LEAF_H_
#define JAX_FUSED_ADAMW_CC_CORE_LEAF_H_

#include "core/dtype.h"

namespace jfa {

// One leaf's buffers. Outputs may be the very buffers of their inputs; grad is only read.
struct LeafOperands {
  const void* param;
  const void* grad;
  const float* mu;      // null for zeros: a first step, the same for all leaves of a call
  const float* nu;      // as mu
  const float* nu_max;  // as mu, and null without AMSGrad
  void* out;            // new parameter or update, in the parameter's dtype
  float* mu_out;
  float* nu_out;
  float* nu_max_out;
  long long num_elements;
  DType param_dtype;
  DType grad_dtype;
  bool decays;
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_LEAF_H_
