// The XLA FFI handler: decode, check, run. Stateless: XLA:CPU replays queued targets before queued
// types, so a stateful handler registered at import would break the backend.
#include "cpu/handlers.h"

#include "cpu/update.h"
#include "ffi/operands.h"

namespace jfa::cpu {
namespace {

namespace ffi = xla::ffi;

ffi::Error UpdateImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  const ffi::ErrorOr<UpdateOperands> operands = DecodeUpdate(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  Update(pool, pool.num_threads(), *SelectInstructionSet(), operands->step, operands->leaves,
         operands->options);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kUpdate, UpdateImpl, BindUpdate(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_Handler* UpdateHandler() { return kUpdate; }

}  // namespace jfa::cpu
