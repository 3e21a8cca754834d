// The XLA FFI handlers: decode, check, launch. They read shapes, dtypes and addresses, never the
// contents of a buffer, and launch the same work every time, so XLA may capture and replay them.
#include "cuda/handlers.h"

#include <cstdint>
#include <string>
#include <utility>

#include "cuda/update.h"
#include "ffi/operands.h"

namespace jfa::cuda {
namespace {

namespace ffi = xla::ffi;

using Flags = ffi::Span<const std::uint8_t>;

ffi::Error ToError(const std::string& text) {
  if (text.empty()) return ffi::Error::Success();
  return ffi::Error::Internal("jax_fused_adamw: " + text);
}

// Decodes a call and hands it to `run(operands, options)`, which returns an error text.
template <typename Run>
ffi::Error WithOperands(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int64_t amsgrad,
                        Flags decays, bool maximize, std::int64_t members, bool nesterov,
                        Flags traced, bool write_params, const Run& run) {
  const ffi::ErrorOr<Amsgrad> kind = DecodeAmsgrad(amsgrad);
  if (!kind.has_value()) return kind.error();
  const ffi::ErrorOr<UpdateOperands> operands =
      DecodeUpdateOperands(args, rets, {*kind, members, decays, traced});
  if (!operands.has_value()) return operands.error();
  return ToError(run(*operands, UpdateOptions{*kind, nesterov, maximize, write_params, members}));
}

ffi::Error InitializeImpl(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int64_t amsgrad,
                          Flags decays, bool maximize, std::int64_t members, bool nesterov,
                          Flags traced, bool write_params) {
  return WithOperands(args, rets, amsgrad, decays, maximize, members, nesterov, traced,
                      write_params,
                      [](const UpdateOperands& operands, const UpdateOptions& options) {
                        return PrepareUpdate(operands.leaves, options);
                      });
}

ffi::Error ExecuteImpl(CuStream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       std::int64_t amsgrad, Flags decays, bool maximize, std::int64_t members,
                       bool nesterov, Flags traced, bool write_params) {
  return WithOperands(args, rets, amsgrad, decays, maximize, members, nesterov, traced,
                      write_params,
                      [stream](const UpdateOperands& operands, const UpdateOptions& options) {
                        return Update(stream, operands.step, operands.leaves, options);
                      });
}

template <typename Binding>
auto BindCall(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::int64_t>("amsgrad")
      .template Attr<Flags>("decays")
      .template Attr<bool>("maximize")
      .template Attr<std::int64_t>("members")
      .template Attr<bool>("nesterov")
      .template Attr<Flags>("traced")
      .template Attr<bool>("write_params");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kUpdateInitialize, InitializeImpl,
                       BindCall(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()));
XLA_FFI_DEFINE_HANDLER(kUpdateExecute, ExecuteImpl,
                       BindCall(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CuStream>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Handler* UpdateInitializeHandler() { return kUpdateInitialize; }
XLA_FFI_Handler* UpdateExecuteHandler() { return kUpdateExecute; }

}  // namespace jfa::cuda
