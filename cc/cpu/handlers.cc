// The XLA FFI handlers: decode, check, run. Stateless: XLA:CPU replays queued targets before queued
// types, so a stateful handler registered at import would break the backend.
#include "cpu/handlers.h"

#include "cpu/stats.h"
#include "cpu/update.h"
#include "ffi/decoder.h"
#include "ffi/operands.h"
#include "ffi/stats.h"

namespace jfa::cpu {
namespace {

ffi::Error UpdateImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  const ffi::ErrorOr<UpdateOperands> operands = DecodeUpdate(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  StepOperands step = operands->step;
  if (operands->analyzes) {
    const StepAnalysis& analysis = operands->analysis;
    AnalyzeGradient(pool, pool.num_threads(), *SelectInstructionSet(), analysis.gradients);
    MergeGradientStats(analysis.report);
    step = analysis.Inform(step, operands->options.clip);
  }
  Update(pool, pool.num_threads(), *SelectInstructionSet(), step, operands->leaves,
         operands->options);
  return ffi::Error::Success();
}

ffi::Error AnalyzeImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  const ffi::ErrorOr<StatsOperands> operands = DecodeAnalyze(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  AnalyzeGradient(pool, pool.num_threads(), *SelectInstructionSet(), operands->analyze);
  MergeGradientStats(operands->merge);
  return ffi::Error::Success();
}

ffi::Error MergeImpl(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const ffi::ErrorOr<MergeOperands> operands = DecodeMerge(args, rets, attributes);
  if (!operands.has_value()) return operands.error();
  MergeGradientStats(*operands);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kUpdate, UpdateImpl, BindAll(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(kAnalyze, AnalyzeImpl, BindAll(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(kMerge, MergeImpl, BindAll(ffi::Ffi::Bind()));

XLA_FFI_Handler* UpdateHandler() { return kUpdate; }
XLA_FFI_Handler* AnalyzeHandler() { return kAnalyze; }
XLA_FFI_Handler* MergeHandler() { return kMerge; }

}  // namespace jfa::cpu
