// The attributes of an update call (ffi/operands.h lists them).
#ifndef JAX_FUSED_ADAMW_CC_FFI_ATTRIBUTES_H_
#define JAX_FUSED_ADAMW_CC_FFI_ATTRIBUTES_H_

#include <cstdint>

#include "core/options.h"
#include "xla/ffi/api/ffi.h"

namespace jfa {

struct Attributes {
  UpdateOptions options;  // without the dtypes, which buffers have
  std::int64_t num_after;
  bool count_step;
  bool skip_nonfinite;
  bool analyze;
  xla::ffi::Span<const std::uint8_t> decays;
  xla::ffi::Span<const std::uint8_t> traced;
  xla::ffi::Span<const double> lr_scales;  // empty where all are 1
  xla::ffi::Span<const std::int64_t> leaf_ids;
  xla::ffi::Span<const std::int64_t> shard_strides;

  bool has_noise() const { return options.stochastic_moments || options.stochastic_params; }
};

// Those of a call, checked against each other, or what is wrong with them.
xla::ffi::ErrorOr<Attributes> DecodeAttributes(const xla::ffi::Dictionary& dictionary);

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_FFI_ATTRIBUTES_H_
