// The XLA FFI handlers: decode, check, launch. They read shapes, dtypes and addresses, never the
// contents of a buffer, and launch the same work every time, so XLA may capture and replay them.
#include "cuda/handlers.h"

#include <string>

#include "cuda/stats.h"
#include "cuda/update.h"
#include "ffi/decoder.h"
#include "ffi/operands.h"
#include "ffi/stats.h"

namespace jfa::cuda {
namespace {

ffi::Error UpdateInitializeImpl(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                ffi::Dictionary attributes) {
  const ffi::ErrorOr<UpdateOperands> operands = DecodeUpdate(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  const auto prepare = operands->analyzes ? PrepareAnalyzeAndUpdate : PrepareUpdate;
  return InternalError(prepare(operands->leaves, operands->options));
}

ffi::Error UpdateExecuteImpl(CuStream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attributes) {
  const ffi::ErrorOr<UpdateOperands> operands = DecodeUpdate(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  if (operands->analyzes) {
    return InternalError(AnalyzeAndUpdate(stream, operands->step, operands->analysis,
                                          operands->leaves, operands->options));
  }
  return InternalError(Update(stream, operands->step, operands->leaves, operands->options));
}

ffi::Error StatsInitializeImpl(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return InternalError(PrepareStats());
}

ffi::Error AnalyzeExecuteImpl(CuStream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                              ffi::Dictionary attributes) {
  const ffi::ErrorOr<StatsOperands> operands = DecodeAnalyze(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  return InternalError(AnalyzeAndMerge(stream, operands->analyze, operands->merge));
}

ffi::Error MergeExecuteImpl(CuStream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            ffi::Dictionary attributes) {
  const ffi::ErrorOr<MergeOperands> operands = DecodeMerge(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  return InternalError(MergeGradientStats(stream, *operands));
}

auto BindInitialize() { return BindAll(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()); }
auto BindExecute() { return BindAll(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CuStream>>()); }

}  // namespace

XLA_FFI_DEFINE_HANDLER(kUpdateInitialize, UpdateInitializeImpl, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kUpdateExecute, UpdateExecuteImpl, BindExecute(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kStatsInitialize, StatsInitializeImpl, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kAnalyzeExecute, AnalyzeExecuteImpl, BindExecute(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMergeExecute, MergeExecuteImpl, BindExecute(),
                       {ffi::Traits::kCmdBufferCompatible});

Handlers UpdateHandlers() { return {kUpdateInitialize, kUpdateExecute}; }
Handlers AnalyzeHandlers() { return {kStatsInitialize, kAnalyzeExecute}; }
Handlers MergeHandlers() { return {kStatsInitialize, kMergeExecute}; }

}  // namespace jfa::cuda
