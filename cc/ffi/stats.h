// Decodes and checks the buffers of the two calls of gradient statistics (core/stats.h), alike for
// every platform; reads no contents.
//
// analyze_gradient
//   arguments  gradient_scale f32[], grads...
//   results    those of merge_gradient_stats, then rows u32[rows, 3]
//   attributes those of merge_gradient_stats, chunk_elements i64
//
// merge_gradient_stats
//   arguments  rows u32[rows, 3]
//   results    for each segment norm f32, scaled_norm f32, max_abs f32, nonfinite s32,
//              merged u32[3]; then scratch u32[rows, 3]
//   attributes members i64, first_rows i64[segments], num_rows i64[segments]
//
// Under vmap gradients, rows and results have a leading dimension [members], gradient_scale may.
#ifndef JAX_FUSED_ADAMW_CC_FFI_STATS_H_
#define JAX_FUSED_ADAMW_CC_FFI_STATS_H_

#include "core/stats_operands.h"
#include "xla/ffi/api/ffi.h"

namespace jfa {

inline constexpr char kAnalyzeTarget[] = "jax_fused_adamw_analyze_gradient_v1";
inline constexpr char kMergeTarget[] = "jax_fused_adamw_merge_gradient_stats_v1";

struct StatsOperands {
  AnalyzeOperands analyze;
  MergeOperands merge;  // reads the rows of `analyze`
};

xla::ffi::ErrorOr<StatsOperands> DecodeAnalyze(xla::ffi::RemainingArgs args,
                                               xla::ffi::RemainingRets rets,
                                               xla::ffi::Dictionary attributes);

xla::ffi::ErrorOr<MergeOperands> DecodeMerge(xla::ffi::RemainingArgs args,
                                             xla::ffi::RemainingRets rets,
                                             xla::ffi::Dictionary attributes);

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_FFI_STATS_H_
