#include "ffi/operands.h"

#include <cstddef>

namespace jfa {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_fused_adamw: " + message);
}

std::string LeafName(const char* kind, std::size_t leaf) {
  return std::string(kind) + " of leaf " + std::to_string(leaf);
}

// Pulls typed views out of the two variadic frames and remembers the first failure.
class Decoder {
 public:
  Decoder(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int64_t members)
      : args_(args), rets_(rets), members_(members) {}

  const ffi::Error& error() const { return error_; }
  bool ok() const { return error_.success(); }

  ffi::AnyBuffer Argument(std::size_t index) {
    auto buffer = args_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) Fail(buffer.error().message());
    return buffer.has_value() ? *buffer : *args_.get<ffi::AnyBuffer>(0);
  }

  ffi::AnyBuffer Result(std::size_t index) {
    auto buffer = rets_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) Fail(buffer.error().message());
    return buffer.has_value() ? **buffer : *args_.get<ffi::AnyBuffer>(0);
  }

  // An operand of `value_elements` elements, or of that many for each member.
  template <typename T>
  ScalarOperand<T> Scalar(std::size_t index, ffi::DataType dtype, const char* name,
                          std::size_t value_rank = 0, std::int64_t value_elements = 1) {
    const ffi::AnyBuffer buffer = Argument(index);
    const bool per_member = buffer.dimensions().size() == value_rank + 1;
    const std::int64_t expected = per_member ? members_ * value_elements : value_elements;
    if (buffer.element_type() != dtype ||
        (buffer.dimensions().size() != value_rank && !per_member) ||
        static_cast<std::int64_t>(buffer.element_count()) != expected) {
      Fail(std::string(name) + ": expected one value, or one for each member");
    }
    return {static_cast<const T*>(buffer.untyped_data()), per_member};
  }

  int* CountResult(std::size_t index, bool per_member) {
    const ffi::AnyBuffer buffer = Result(index);
    if (buffer.element_type() != ffi::S32 ||
        static_cast<std::int64_t>(buffer.element_count()) != (per_member ? members_ : 1)) {
      Fail("new counters: expected as many as there are");
    }
    return static_cast<int*>(buffer.untyped_data());
  }

  DType LeafDType(const ffi::AnyBuffer& buffer, const char* kind, std::size_t leaf) {
    switch (buffer.element_type()) {
      case ffi::F32:
        return DType::kFloat32;
      case ffi::BF16:
        return DType::kBfloat16;
      case ffi::F16:
        return DType::kFloat16;
      default:
        Fail(LeafName(kind, leaf) + ": expected float32, bfloat16 or float16");
        return DType::kFloat32;
    }
  }

  void CheckLike(const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& param, ffi::DataType dtype,
                 const char* kind, std::size_t leaf) {
    if (buffer.element_count() != param.element_count()) {
      Fail(LeafName(kind, leaf) + ": expected " + std::to_string(param.element_count()) +
           " elements, got " + std::to_string(buffer.element_count()));
    }
    if (buffer.element_type() != dtype) Fail(LeafName(kind, leaf) + ": unexpected dtype");
  }

  const float* Moment(std::size_t index, const ffi::AnyBuffer& param, const char* kind,
                      std::size_t leaf) {
    const ffi::AnyBuffer buffer = Argument(index);
    CheckLike(buffer, param, ffi::F32, kind, leaf);
    return static_cast<const float*>(buffer.untyped_data());
  }

  float* MomentResult(std::size_t index, const ffi::AnyBuffer& param, const char* kind,
                      std::size_t leaf) {
    const ffi::AnyBuffer buffer = Result(index);
    CheckLike(buffer, param, ffi::F32, kind, leaf);
    return static_cast<float*>(buffer.untyped_data());
  }

  void Fail(const std::string& message) {
    if (ok()) error_ = Invalid(message);
  }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::int64_t members_;
  ffi::Error error_ = ffi::Error::Success();
};

struct Attributes {
  UpdateOptions options;
  std::int64_t num_after;
  bool count_step;
  ffi::Span<const std::uint8_t> decays;
  ffi::Span<const std::uint8_t> traced;
};

// Where scalars and leaves lie among arguments and results.
struct Frame {
  std::size_t num_leaves;
  std::size_t num_counts;      // skipped, consecutive: 2 or 0
  std::size_t first_leaf;      // index of the first parameter
  std::size_t argument_kinds;  // params, grads [, mu, nu [, nu_max]]
  std::size_t result_kinds;    // out, mu, nu [, nu_max]

  explicit Frame(const Attributes& attributes)
      : num_leaves(attributes.decays.size()),
        num_counts(attributes.count_step ? 2 : 0),
        first_leaf(3 + num_counts + static_cast<std::size_t>(attributes.num_after)) {
    const bool has_nu_max = attributes.options.amsgrad != Amsgrad::kOff;
    for (const std::uint8_t is_traced : attributes.traced) first_leaf += is_traced != 0;
    argument_kinds = attributes.options.zero_moments ? 2 : has_nu_max ? 5 : 4;
    result_kinds = has_nu_max ? 4 : 3;
  }
  std::size_t num_arguments() const { return first_leaf + num_leaves * argument_kinds; }
  std::size_t first_count_result() const { return num_leaves * result_kinds; }
  std::size_t num_results() const { return first_count_result() + (num_counts > 0 ? 3 : 0); }
};

void DecodeCounts(Decoder& decoder, const Frame& frame, std::size_t next, StepOperands* step) {
  step->skipped = decoder.Scalar<int>(next++, ffi::S32, "skipped");
  step->consecutive = decoder.Scalar<int>(next++, ffi::S32, "consecutive");
  const bool per_member = step->count.per_member;
  if (step->skipped.per_member != per_member || step->consecutive.per_member != per_member ||
      (step->skip_update.per_member && !per_member)) {
    decoder.Fail("counters: expected one for each member, as of skip_update, or one of each");
  }
  int** const results[] = {&step->new_counts.count, &step->new_counts.skipped,
                           &step->new_counts.consecutive};
  for (std::size_t i = 0; i < 3; ++i) {
    *results[i] = decoder.CountResult(frame.first_count_result() + i, per_member);
  }
}

StepOperands DecodeStep(Decoder& decoder, const Frame& frame, const Attributes& attributes) {
  StepOperands step;
  std::size_t next = 0;
  step.count = decoder.Scalar<int>(next++, ffi::S32, "count");
  step.skip_update = decoder.Scalar<unsigned char>(next++, ffi::PRED, "skip_update");
  const ScalarOperand<Word32> bits =
      decoder.Scalar<Word32>(next++, ffi::U32, "hyper_bits", 2, 2 * kNumHyper);
  step.hyper_bits = bits.data;
  step.hyper_bits_per_member = bits.per_member;
  for (int i = 0; i < kNumHyper; ++i) {
    if (!attributes.traced[i]) continue;
    step.traced[i] = decoder.Scalar<float>(next++, ffi::F32, "hyperparameter");
  }
  if (frame.num_counts > 0) DecodeCounts(decoder, frame, next, &step);
  return step;
}

LeafOperands DecodeLeaf(Decoder& decoder, const Frame& frame, std::size_t leaf) {
  const std::size_t num_leaves = frame.num_leaves;
  const auto argument = [&](std::size_t group) {
    return frame.first_leaf + group * num_leaves + leaf;
  };
  const auto result = [&](std::size_t group) { return group * num_leaves + leaf; };
  const ffi::AnyBuffer param = decoder.Argument(argument(0));
  const ffi::AnyBuffer grad = decoder.Argument(argument(1));
  const ffi::AnyBuffer out = decoder.Result(result(0));
  decoder.CheckLike(grad, param, grad.element_type(), "gradient", leaf);
  decoder.CheckLike(out, param, param.element_type(), "output", leaf);
  LeafOperands operands{};
  operands.param = param.untyped_data();
  operands.grad = grad.untyped_data();
  operands.out = out.untyped_data();
  if (frame.argument_kinds > 2) {
    operands.mu = decoder.Moment(argument(2), param, "mu", leaf);
    operands.nu = decoder.Moment(argument(3), param, "nu", leaf);
  }
  if (frame.argument_kinds > 4)
    operands.nu_max = decoder.Moment(argument(4), param, "nu_max", leaf);
  operands.mu_out = decoder.MomentResult(result(1), param, "new mu", leaf);
  operands.nu_out = decoder.MomentResult(result(2), param, "new nu", leaf);
  if (frame.result_kinds > 3) {
    operands.nu_max_out = decoder.MomentResult(result(3), param, "new nu_max", leaf);
  }
  operands.num_elements = static_cast<std::int64_t>(param.element_count());
  operands.param_dtype = decoder.LeafDType(param, "parameter", leaf);
  operands.grad_dtype = decoder.LeafDType(grad, "gradient", leaf);
  return operands;
}

// Reads one attribute into `value`; returns whether it was there, with this type.
template <typename T, typename Value>
bool Get(const ffi::Dictionary& attributes, const char* name, Value* value) {
  const ffi::ErrorOr<T> found = attributes.get<T>(name);
  if (found.has_value()) *value = static_cast<Value>(*found);
  return found.has_value();
}

ffi::ErrorOr<Attributes> DecodeAttributes(const ffi::Dictionary& dictionary) {
  Attributes attributes{};
  UpdateOptions& options = attributes.options;
  std::int64_t amsgrad = 0;
  using Flags = ffi::Span<const std::uint8_t>;
  const bool complete = Get<std::int64_t>(dictionary, "amsgrad", &amsgrad) &&
                        Get<bool>(dictionary, "nesterov", &options.nesterov) &&
                        Get<bool>(dictionary, "maximize", &options.maximize) &&
                        Get<bool>(dictionary, "write_params", &options.write_params) &&
                        Get<std::int64_t>(dictionary, "members", &options.members) &&
                        Get<std::int64_t>(dictionary, "num_after", &attributes.num_after) &&
                        Get<bool>(dictionary, "count_step", &attributes.count_step) &&
                        Get<bool>(dictionary, "zero_moments", &options.zero_moments) &&
                        Get<Flags>(dictionary, "decays", &attributes.decays) &&
                        Get<Flags>(dictionary, "traced", &attributes.traced);
  if (!complete) return ffi::Unexpected(Invalid("an attribute is missing or of another type"));
  if (amsgrad < 0 || amsgrad > 2) {
    return ffi::Unexpected(Invalid("unknown amsgrad attribute " + std::to_string(amsgrad)));
  }
  options.amsgrad = static_cast<Amsgrad>(amsgrad);
  constexpr std::int64_t kMaxMembers = std::int64_t{1} << 40;  // products with it fit 64 bits
  if (options.members < 1 || options.members > kMaxMembers)
    return ffi::Unexpected(Invalid("members must be 1 or more"));
  if (attributes.num_after < 0) return ffi::Unexpected(Invalid("num_after must not be negative"));
  if (attributes.traced.size() != kNumHyper) {
    return ffi::Unexpected(Invalid("traced must have one entry for each hyperparameter"));
  }
  return attributes;
}

}  // namespace

ffi::ErrorOr<UpdateOperands> DecodeUpdate(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                          ffi::Dictionary dictionary) {
  const ffi::ErrorOr<Attributes> decoded = DecodeAttributes(dictionary);
  if (!decoded.has_value()) return ffi::Unexpected(decoded.error());
  const Attributes& attributes = *decoded;
  const Frame frame(attributes);
  if (args.size() != frame.num_arguments() || rets.size() != frame.num_results()) {
    return ffi::Unexpected(Invalid(
        "expected " + std::to_string(frame.num_arguments()) + " operands and " +
        std::to_string(frame.num_results()) + " results for " + std::to_string(frame.num_leaves) +
        " leaves, got " + std::to_string(args.size()) + " and " + std::to_string(rets.size())));
  }
  const std::int64_t members = attributes.options.members;
  Decoder decoder(args, rets, members);
  UpdateOperands operands;
  operands.options = attributes.options;
  operands.step = DecodeStep(decoder, frame, attributes);
  operands.leaves.reserve(frame.num_leaves);
  for (std::size_t leaf = 0; leaf < frame.num_leaves && decoder.ok(); ++leaf) {
    operands.leaves.push_back(DecodeLeaf(decoder, frame, leaf));
    operands.leaves.back().decays = attributes.decays[leaf] != 0;
    if (operands.leaves.back().num_elements % members != 0) {
      decoder.Fail(LeafName("parameter", leaf) + ": not divisible into " + std::to_string(members) +
                   " members");
    }
  }
  if (!decoder.ok()) return ffi::Unexpected(decoder.error());
  return operands;
}

}  // namespace jfa
