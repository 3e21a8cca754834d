// The buffers of one leaf, as handlers pass them to kernels.
#ifndef JAX_FUSED_ADAMW_CC_CORE_LEAF_H_
#define JAX_FUSED_ADAMW_CC_CORE_LEAF_H_

#include "core/dtype.h"
#include "core/noise.h"

namespace jfa {

// One leaf's buffers. Outputs may be the very buffers of their inputs; grad is only read. Moments
// have the dtypes of the call (core/options.h).
struct LeafOperands {
  const void* param;
  const void* grad;
  const void* mu;      // null for zeros: a first step, the same for all leaves of a call
  const void* nu;      // as mu
  const void* nu_max;  // as mu, and null without AMSGrad
  const void* copy;    // of the parameter; null without copies
  const void* ema;     // null without averages; float32, of float64 parameters float64
  void* out;           // new parameter or update, in the parameter's dtype
  void* mu_out;
  void* nu_out;
  void* nu_max_out;
  void* copy_out;
  void* ema_out;
  long long num_elements;
  DType param_dtype;
  DType grad_dtype;
  DType copy_dtype;
  bool decays;
  double lr_scale = 1.0;  // what the leaf's learning rate is multiplied by
  Word32 leaf_id;         // its number in the whole tree, for the noise
  IndexStride strides[kIndexStrides];

  bool has_strides() const {
    bool any = false;
    for (const IndexStride& stride : strides) any = any || stride.divisor != 0;
    return any;
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_LEAF_H_
