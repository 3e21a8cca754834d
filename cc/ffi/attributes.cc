#include "ffi/attributes.h"

#include <cstddef>
#include <string>

#include "ffi/decoder.h"

namespace jfa {
namespace {

// The one attribute that a call may leave out.
bool GetLrScales(const ffi::Dictionary& dictionary, Attributes* attributes) {
  constexpr char kName[] = "lr_scales";
  return !dictionary.contains(kName) ||
         Get<ffi::Span<const double>>(dictionary, kName, &attributes->lr_scales);
}

// Whether all attributes are there, with their types.
bool GetAttributes(const ffi::Dictionary& dictionary, std::int64_t* amsgrad, std::int64_t* clip,
                   Attributes* attributes) {
  UpdateOptions& options = attributes->options;
  using Flags = ffi::Span<const std::uint8_t>;
  using Numbers = ffi::Span<const std::int64_t>;
  return Get<std::int64_t>(dictionary, "amsgrad", amsgrad) &&
         Get<std::int64_t>(dictionary, "clip", clip) &&
         Get<bool>(dictionary, "skip_nonfinite", &attributes->skip_nonfinite) &&
         Get<bool>(dictionary, "analyze", &attributes->analyze) &&
         Get<bool>(dictionary, "nesterov", &options.nesterov) &&
         Get<bool>(dictionary, "maximize", &options.maximize) &&
         Get<bool>(dictionary, "write_params", &options.write_params) &&
         Get<std::int64_t>(dictionary, "members", &options.members) &&
         Get<std::int64_t>(dictionary, "num_after", &attributes->num_after) &&
         Get<bool>(dictionary, "count_step", &attributes->count_step) &&
         Get<bool>(dictionary, "zero_moments", &options.zero_moments) &&
         Get<bool>(dictionary, "has_copies", &options.has_copies) &&
         Get<bool>(dictionary, "has_ema", &options.has_ema) &&
         Get<bool>(dictionary, "stochastic_moments", &options.stochastic_moments) &&
         Get<bool>(dictionary, "stochastic_params", &options.stochastic_params) &&
         Get<Flags>(dictionary, "decays", &attributes->decays) &&
         GetLrScales(dictionary, attributes) &&
         Get<Flags>(dictionary, "traced", &attributes->traced) &&
         Get<Numbers>(dictionary, "leaf_ids", &attributes->leaf_ids) &&
         Get<Numbers>(dictionary, "shard_strides", &attributes->shard_strides);
}

// What is wrong with the factors of the learning rate; empty if nothing is.
std::string LrScalesError(const Attributes& attributes) {
  const auto& scales = attributes.lr_scales;
  if (scales.size() != 0 && scales.size() != attributes.decays.size()) {
    return "lr_scales must have one entry for each leaf";
  }
  for (const double scale : scales) {
    if (!(scale >= 0.0 && scale <= kMaxFloat)) {
      return "lr_scales must be finite in float32 and not negative";
    }
  }
  return "";
}

// What is wrong with where the leaves lie in the whole tree; empty if nothing is.
std::string PlacesError(const Attributes& attributes) {
  const std::size_t num_leaves = attributes.decays.size();
  if (attributes.leaf_ids.size() != num_leaves ||
      attributes.shard_strides.size() != num_leaves * 2 * kIndexStrides) {
    return "leaf_ids must have one entry for each leaf, shard_strides three pairs";
  }
  for (const std::int64_t id : attributes.leaf_ids) {
    if (id < 0 || id > 0x7fffffff) return "leaf_ids must be int32 and not negative";
  }
  for (const std::int64_t number : attributes.shard_strides) {
    if (number < 0) return "shard_strides must not be negative";
  }
  return "";
}

}  // namespace

ffi::ErrorOr<Attributes> DecodeAttributes(const ffi::Dictionary& dictionary) {
  Attributes attributes{};
  UpdateOptions& options = attributes.options;
  std::int64_t amsgrad = 0;
  std::int64_t clip = 0;
  if (!GetAttributes(dictionary, &amsgrad, &clip, &attributes)) {
    return ffi::Unexpected(Invalid("an attribute is missing or of another type"));
  }
  if (amsgrad < 0 || amsgrad > 2) {
    return ffi::Unexpected(Invalid("unknown amsgrad attribute " + std::to_string(amsgrad)));
  }
  options.amsgrad = static_cast<Amsgrad>(amsgrad);
  if (clip < 0 || clip > 2) {
    return ffi::Unexpected(Invalid("unknown clip attribute " + std::to_string(clip)));
  }
  options.clip = static_cast<Clip>(clip);
  if (options.members < 1 || options.members > kMaxMembers)
    return ffi::Unexpected(Invalid("members must be 1 or more"));
  if (attributes.num_after < 0) return ffi::Unexpected(Invalid("num_after must not be negative"));
  if (attributes.traced.size() != kNumHyper) {
    return ffi::Unexpected(Invalid("traced must have one entry for each hyperparameter"));
  }
  if (options.has_copies && !options.write_params) {
    return ffi::Unexpected(Invalid("has_copies needs write_params"));
  }
  for (const std::string& error : {LrScalesError(attributes), PlacesError(attributes)}) {
    if (!error.empty()) return ffi::Unexpected(Invalid(error));
  }
  return attributes;
}

}  // namespace jfa
