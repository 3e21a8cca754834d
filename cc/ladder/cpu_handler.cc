#include "cpu/update.h"
#include "ffi/decoder.h"
#include "ladder/checks.h"
#include "ladder/cpu_loop.h"
#include "ladder/handlers.h"

namespace jfa::cpu {
namespace {

ffi::Error LadderImpl(ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  const ffi::ErrorOr<UpdateOperands> operands = DecodeLadder(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  const ScopedDefaultFloatEnv float_env;
  UpdateInALoop(MakeSteps(operands->step, operands->options)[0], operands->leaves);
  operands->step.WriteCounts(0, operands->step.ReadCounts(0), operands->step.Skips(0));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kLadder, LadderImpl, BindAll(ffi::Ffi::Bind()));

XLA_FFI_Handler* LadderHandler() { return kLadder; }

}  // namespace jfa::cpu
