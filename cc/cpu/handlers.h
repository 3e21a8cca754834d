#ifndef JAX_FUSED_ADAMW_CC_CPU_HANDLERS_H_
#define JAX_FUSED_ADAMW_CC_CPU_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jfa::cpu {

// Operands and results as ffi/operands.h and ffi/stats.h list them.
XLA_FFI_Handler* UpdateHandler();
XLA_FFI_Handler* AnalyzeHandler();
XLA_FFI_Handler* MergeHandler();

}  // namespace jfa::cpu

#endif  // JAX_FUSED_ADAMW_CC_CPU_HANDLERS_H_
