// The XLA FFI handler: decode, check, run. Stateless: XLA:CPU replays queued targets before queued
// types, so a stateful handler registered at import would break the backend.
#include <cstdint>
#include <utility>

#include "cpu/handlers.h"
#include "cpu/update.h"
#include "ffi/operands.h"

namespace jfa::cpu {
namespace {

namespace ffi = xla::ffi;

ffi::Error UpdateImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      std::int64_t amsgrad, ffi::Span<const std::uint8_t> decays, bool maximize,
                      std::int64_t members, bool nesterov, ffi::Span<const std::uint8_t> traced,
                      bool write_params) {
  const ffi::ErrorOr<Amsgrad> kind = DecodeAmsgrad(amsgrad);
  if (!kind.has_value()) return kind.error();
  const ffi::ErrorOr<UpdateOperands> operands =
      DecodeUpdateOperands(args, rets, {*kind, members, decays, traced});
  if (!operands.has_value()) return operands.error();
  const UpdateOptions options{*kind, nesterov, maximize, write_params, members};
  Update(pool, pool.num_threads(), SelectInstructionSet(), operands->step, operands->leaves,
         options);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kUpdate, UpdateImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::int64_t>("amsgrad")
                           .Attr<ffi::Span<const std::uint8_t>>("decays")
                           .Attr<bool>("maximize")
                           .Attr<std::int64_t>("members")
                           .Attr<bool>("nesterov")
                           .Attr<ffi::Span<const std::uint8_t>>("traced")
                           .Attr<bool>("write_params"));

XLA_FFI_Handler* UpdateHandler() { return kUpdate; }

}  // namespace jfa::cpu
