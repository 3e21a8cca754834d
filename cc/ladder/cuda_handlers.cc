#include <cstdint>
#include <string>

#include "ladder/checks.h"
#include "ladder/cuda_launch.h"
#include "ladder/handlers.h"

namespace jfa::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error ToError(const std::string& text) {
  if (text.empty()) return ffi::Error::Success();
  return ffi::Error::Internal("jax_fused_adamw: " + text);
}

ffi::ErrorOr<Rung> RungOf(const ffi::Dictionary& attributes) {
  const ffi::ErrorOr<std::int64_t> rung = attributes.get<std::int64_t>("rung");
  if (rung.has_value() && (*rung == 0 || *rung == 1)) return static_cast<Rung>(*rung);
  return ffi::Unexpected(ffi::Error::InvalidArgument("jax_fused_adamw: rung must be 0 or 1"));
}

ffi::Error InitializeImpl(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  const ffi::ErrorOr<Rung> rung = RungOf(attributes);
  return rung.has_value() ? ToError(PrepareLadder(*rung)) : rung.error();
}

ffi::Error ExecuteImpl(CuStream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  const ffi::ErrorOr<Rung> rung = RungOf(attributes);
  if (!rung.has_value()) return rung.error();
  const ffi::ErrorOr<UpdateOperands> operands = DecodeLadder(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  return ToError(LaunchLadder(stream, *rung, operands->step, operands->leaves));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kLadderInitialize, InitializeImpl,
                       BindUpdate(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()));
XLA_FFI_DEFINE_HANDLER(kLadderExecute, ExecuteImpl,
                       BindUpdate(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CuStream>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Handler* LadderInitializeHandler() { return kLadderInitialize; }
XLA_FFI_Handler* LadderExecuteHandler() { return kLadderExecute; }

}  // namespace jfa::cuda
