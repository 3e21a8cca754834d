// Decodes and checks the buffers of one update call, alike for every platform. Reads shapes and
// dtypes only, never contents: on a GPU the pointers are device memory.
//
//   arguments  step, skip_update, hyper_bits, traced... (core/scalars.h), then
//              params..., grads..., mu..., nu... [, nu_max...]
//   results    params... (write_params) or updates..., mu..., nu... [, nu_max...]
//
// Python has checked all of this with the leaves' names; these checks guard the memory.
#ifndef JAX_FUSED_ADAMW_CC_FFI_OPERANDS_H_
#define JAX_FUSED_ADAMW_CC_FFI_OPERANDS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/adamw.h"
#include "core/leaf.h"
#include "core/scalars.h"
#include "xla/ffi/api/ffi.h"

namespace jfa {

struct UpdateOperands {
  StepOperands step;
  std::vector<LeafOperands> leaves;
};

// What the attributes of the call say about its operands.
struct CallShape {
  Amsgrad amsgrad;
  std::int64_t members;
  xla::ffi::Span<const std::uint8_t> decays;  // one a leaf: does weight decay apply
  xla::ffi::Span<const std::uint8_t> traced;  // one a hyperparameter: is it an operand of its own
};

xla::ffi::ErrorOr<UpdateOperands> DecodeUpdateOperands(xla::ffi::RemainingArgs args,
                                                       xla::ffi::RemainingRets rets,
                                                       const CallShape& shape);

xla::ffi::ErrorOr<Amsgrad> DecodeAmsgrad(std::int64_t value);

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_FFI_OPERANDS_H_
