#ifndef JAX_FUSED_ADAMW_CC_CUDA_HANDLERS_H_
#define JAX_FUSED_ADAMW_CC_CUDA_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jfa::cuda {

// Operands and results as ffi/operands.h lists them. Initialize loads the kernels, since that is
// not allowed while XLA captures a graph; Execute only launches.
XLA_FFI_Handler* UpdateInitializeHandler();
XLA_FFI_Handler* UpdateExecuteHandler();

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_HANDLERS_H_
