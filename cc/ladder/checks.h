// What the ladder's rungs take: less than the optimizer, so that their code stays short.
#ifndef JAX_FUSED_ADAMW_CC_LADDER_CHECKS_H_
#define JAX_FUSED_ADAMW_CC_LADDER_CHECKS_H_

#include "ffi/operands.h"

namespace jfa {

// The rungs are no part of the interface: the name has no version.
inline constexpr char kLadderTarget[] = "jax_fused_adamw_ladder";

inline bool LadderTakes(const LeafOperands& leaf) {
  return leaf.param_dtype == DType::kFloat32 && leaf.grad_dtype == DType::kFloat32 && leaf.decays &&
         leaf.out == leaf.param && leaf.mu_out == leaf.mu && leaf.nu_out == leaf.nu;
}

// DecodeUpdate, and an error for what the rungs have no code for. They do not read skip_update.
inline xla::ffi::ErrorOr<UpdateOperands> DecodeLadder(xla::ffi::RemainingArgs args,
                                                      xla::ffi::RemainingRets rets,
                                                      xla::ffi::Dictionary attributes) {
  xla::ffi::ErrorOr<UpdateOperands> operands = DecodeUpdate(args, rets, attributes);
  if (!operands.has_value()) return operands;
  const UpdateOptions& options = operands->options;
  bool plain = options.amsgrad == Amsgrad::kOff && !options.nesterov && !options.maximize &&
               options.clip == Clip::kOff && options.write_params && options.members == 1 &&
               options.mu_dtype == DType::kFloat32 && options.nu_dtype == DType::kFloat32 &&
               !options.has_copies && !options.has_ema && operands->step.counts_step() &&
               operands->step.nonfinite.data == nullptr;
  for (const LeafOperands& leaf : operands->leaves) plain = plain && LadderTakes(leaf);
  if (plain) return operands;
  return xla::ffi::Unexpected(xla::ffi::Error::InvalidArgument(
      "jax_fused_adamw: the ladder takes a counted step of AdamW without options, on float32 "
      "leaves in place; use fused_adamw for anything else"));
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_LADDER_CHECKS_H_
