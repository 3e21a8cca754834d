#ifndef JAX_FUSED_ADAMW_CC_CUDA_HANDLERS_H_
#define JAX_FUSED_ADAMW_CC_CUDA_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jfa::cuda {

// The stages of a call. `initialize` loads the kernels, since that is not allowed while XLA
// captures a graph; `execute` only launches.
struct Handlers {
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

// Operands and results as ffi/operands.h and ffi/stats.h list them.
Handlers UpdateHandlers();
Handlers AnalyzeHandlers();
Handlers MergeHandlers();

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_HANDLERS_H_
