// Decodes and checks the buffers of one update call, alike for every platform. Reads shapes and
// dtypes only, never contents: on a GPU the pointers are device memory.
//
//   arguments  count, skip_update, hyper_bits, traced... [, norm, scaled_norm] [, nonfinite]
//              [, gradient_scale] [, noise] [, skipped, consecutive] (core/scalars.h), then
//              num_after arrays that the call waits for and does not read, then params..., grads...
//              [, mu..., nu... [, nu_max...]] [, copies...] [, ema...]
//   results    params... (write_params) or updates..., mu..., nu... [, nu_max...] [, copies...]
//              [, ema...] [, count, skipped, consecutive]
//              [, norm, scaled_norm, max_abs, nonfinite, merged, rows]
//   attributes amsgrad, members, num_after i64, nesterov, maximize, write_params bool,
//              count_step bool: the counters are arguments and results,
//              zero_moments bool: mu, nu, nu_max are zero and no arguments,
//              decays u8[leaves]: does weight decay apply,
//              lr_scales f64[leaves]: factors of the learning rate, left out where all are 1,
//              clip i64 (core/clip.h; by the norm: norm and scaled_norm are arguments),
//              skip_nonfinite bool: nonfinite is an argument,
//              analyze bool: the call makes the report of its gradients itself: what it reads of
//              one is no argument, but gradient_scale, float32, and the report and its rows are
//              results (core/stats.h),
//              traced u8[9]: is the hyperparameter an operand of its own,
//              has_copies, has_ema bool: copies and averages of the parameters are both,
//              stochastic_moments, stochastic_params bool: with either, noise is an argument,
//              leaf_ids i64[leaves]: a leaf's number in the whole tree,
//              shard_strides i64[leaves * 6]: three pairs divisor, extra a leaf (core/noise.h)
//   dtypes     mu float32, bfloat16 or float16, nu and nu_max float32 or bfloat16, alike for all
//              leaves; copies bfloat16 or float16, of float32 parameters; ema float32.
//              float64 parameters, in all leaves of a call or in none: mu, nu, nu_max and ema
//              float64 too, gradients any; no copies and no noise
//
// Python has checked all of this with the leaves' names; these checks guard the memory.
#ifndef JAX_FUSED_ADAMW_CC_FFI_OPERANDS_H_
#define JAX_FUSED_ADAMW_CC_FFI_OPERANDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/adamw.h"
#include "core/leaf.h"
#include "core/options.h"
#include "core/scalars.h"
#include "core/stats_operands.h"
#include "xla/ffi/api/ffi.h"

namespace jfa {

// The name under which every platform registers its handler; a version, because jax.export keeps
// it: a new one for other arguments, results or attributes.
inline constexpr char kUpdateTarget[] = "jax_fused_adamw_update_v2";

struct UpdateOperands {
  UpdateOptions options;
  StepOperands step;
  std::vector<LeafOperands> leaves;
  bool analyzes;
  StepAnalysis analysis;  // if it does
};

// Buffers and attributes of a call, or what is wrong with them.
xla::ffi::ErrorOr<UpdateOperands> DecodeUpdate(xla::ffi::RemainingArgs args,
                                               xla::ffi::RemainingRets rets,
                                               xla::ffi::Dictionary attributes);

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_FFI_OPERANDS_H_
