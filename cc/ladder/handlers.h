// The ladder's XLA FFI handlers. Operands and results as ffi/operands.h lists them; on CUDA one
// more attribute, rung i64, is a jfa::cuda::Rung.
#ifndef JAX_FUSED_ADAMW_CC_LADDER_HANDLERS_H_
#define JAX_FUSED_ADAMW_CC_LADDER_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jfa::cpu {
XLA_FFI_Handler* LadderHandler();
}

namespace jfa::cuda {
XLA_FFI_Handler* LadderInitializeHandler();
XLA_FFI_Handler* LadderExecuteHandler();
}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_LADDER_HANDLERS_H_
