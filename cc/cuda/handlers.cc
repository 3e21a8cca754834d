// The XLA FFI handlers: decode, check, launch. They read shapes, dtypes and addresses, never the
// contents of a buffer, and launch the same work every time, so XLA may capture and replay them.
#include "cuda/handlers.h"

#include <string>

#include "cuda/update.h"
#include "ffi/decoder.h"
#include "ffi/operands.h"

namespace jfa::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error ToError(const std::string& text) {
  if (text.empty()) return ffi::Error::Success();
  return ffi::Error::Internal("jax_fused_adamw: " + text);
}

ffi::Error InitializeImpl(ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  const ffi::ErrorOr<UpdateOperands> operands = DecodeUpdate(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  return ToError(PrepareUpdate(operands->leaves, operands->options));
}

ffi::Error ExecuteImpl(CuStream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  const ffi::ErrorOr<UpdateOperands> operands = DecodeUpdate(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  return ToError(Update(stream, operands->step, operands->leaves, operands->options));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kUpdateInitialize, InitializeImpl,
                       BindAll(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()));
XLA_FFI_DEFINE_HANDLER(kUpdateExecute, ExecuteImpl,
                       BindAll(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CuStream>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Handler* UpdateInitializeHandler() { return kUpdateInitialize; }
XLA_FFI_Handler* UpdateExecuteHandler() { return kUpdateExecute; }

}  // namespace jfa::cuda
