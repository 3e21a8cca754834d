#include "ffi/operands.h"

#include <cstddef>

#include "ffi/decoder.h"

namespace jfa {
namespace {

struct Attributes {
  UpdateOptions options;
  std::int64_t num_after;
  bool count_step;
  bool skip_nonfinite;
  bool analyze;
  ffi::Span<const std::uint8_t> decays;
  ffi::Span<const std::uint8_t> traced;
};

// norm, scaled_norm, max_abs, nonfinite, merged, rows.
constexpr std::size_t kNumReportResults = 6;

// Where scalars and leaves lie among arguments and results.
struct Frame {
  std::size_t num_leaves;
  std::size_t num_norms;       // norm, scaled_norm: 2 or 0
  std::size_t num_nonfinite;   // 1 or 0
  std::size_t num_scales;      // gradient_scale: 1 or 0
  std::size_t num_counts;      // skipped, consecutive: 2 or 0
  std::size_t first_leaf;      // index of the first parameter
  std::size_t argument_kinds;  // params, grads [, mu, nu [, nu_max]]
  std::size_t result_kinds;    // out, mu, nu [, nu_max]

  explicit Frame(const Attributes& attributes)
      : num_leaves(attributes.decays.size()),
        num_norms(attributes.options.clip == Clip::kNorm && !attributes.analyze ? 2 : 0),
        num_nonfinite(attributes.skip_nonfinite && !attributes.analyze ? 1 : 0),
        num_scales(attributes.analyze ? 1 : 0),
        num_counts(attributes.count_step ? 2 : 0),
        first_leaf(3 + num_norms + num_nonfinite + num_scales + num_counts +
                   static_cast<std::size_t>(attributes.num_after)) {
    const bool has_nu_max = attributes.options.amsgrad != Amsgrad::kOff;
    for (const std::uint8_t is_traced : attributes.traced) first_leaf += is_traced != 0;
    argument_kinds = attributes.options.zero_moments ? 2 : has_nu_max ? 5 : 4;
    result_kinds = has_nu_max ? 4 : 3;
  }
  std::size_t num_arguments() const { return first_leaf + num_leaves * argument_kinds; }
  std::size_t first_count_result() const { return num_leaves * result_kinds; }
  std::size_t first_report_result() const {
    return first_count_result() + (num_counts > 0 ? 3 : 0);
  }
  std::size_t num_results() const {
    return first_report_result() + (num_scales > 0 ? kNumReportResults : 0);
  }
};

void DecodeCounts(Decoder& decoder, const Frame& frame, std::size_t next, StepOperands* step) {
  step->skipped = decoder.Scalar<int>(next++, ffi::S32, "skipped");
  step->consecutive = decoder.Scalar<int>(next++, ffi::S32, "consecutive");
  const bool per_member = step->count.per_member;
  if (step->skipped.per_member != per_member || step->consecutive.per_member != per_member ||
      ((step->skip_update.per_member || step->nonfinite.per_member) && !per_member)) {
    decoder.Fail("counters: expected one for each member, as of skip_update, or one of each");
  }
  int** const results[] = {&step->new_counts.count, &step->new_counts.skipped,
                           &step->new_counts.consecutive};
  for (std::size_t i = 0; i < 3; ++i) {
    *results[i] = decoder.Values<int>(frame.first_count_result() + i, ffi::S32,
                                      per_member ? decoder.members() : 1, "new counters");
  }
}

StepOperands DecodeStep(Decoder& decoder, const Frame& frame, const Attributes& attributes,
                        ScalarOperand<float>* gradient_scale) {
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
  if (frame.num_norms > 0) {
    step.norm = decoder.Scalar<float>(next++, ffi::F32, "norm");
    step.scaled_norm = decoder.Scalar<float>(next++, ffi::F32, "scaled_norm");
  }
  if (frame.num_nonfinite > 0) {
    step.nonfinite = decoder.Scalar<int>(next++, ffi::S32, "nonfinite");
  }
  if (frame.num_scales > 0) {
    *gradient_scale = decoder.Scalar<float>(next++, ffi::F32, "gradient_scale");
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

// Of the gradients of the leaves, which are decoded already.
StepAnalysis DecodeAnalysis(Decoder& decoder, const Frame& frame, bool skip_nonfinite,
                            const std::vector<LeafOperands>& leaves,
                            ScalarOperand<float> gradient_scale) {
  StepAnalysis analysis{};
  analysis.skip_nonfinite = skip_nonfinite;
  AnalyzeOperands& gradients = analysis.gradients;
  gradients.gradient_scale = gradient_scale;
  gradients.members = 1;
  gradients.chunk_elements = kStatsTileElements;
  for (const LeafOperands& leaf : leaves) {
    gradients.leaves.push_back({leaf.grad, leaf.num_elements, leaf.grad_dtype});
  }
  const long long num_rows = gradients.RowsPerMember();
  if (decoder.members() != 1 || num_rows > kMergeFanIn) {
    decoder.Fail("analyze: expected one member, and no more rows than one merge takes");
  }
  std::size_t next = frame.first_report_result();
  MergeOperands& report = analysis.report;
  report.members = 1;
  report.rows_per_member = num_rows;
  report.segments = {{0, num_rows}};
  report.norm = decoder.Values<float>(next++, ffi::F32, 1, "norm");
  report.scaled_norm = decoder.Values<float>(next++, ffi::F32, 1, "scaled_norm");
  report.max_abs = decoder.Values<float>(next++, ffi::F32, 1, "max_abs");
  report.nonfinite = decoder.Values<int>(next++, ffi::S32, 1, "nonfinite");
  report.merged = decoder.Rows(next++, 1, "merged");
  gradients.rows = decoder.Rows(next++, num_rows, "rows");
  report.rows = gradients.rows;
  return analysis;
}

ffi::ErrorOr<Attributes> DecodeAttributes(const ffi::Dictionary& dictionary) {
  Attributes attributes{};
  UpdateOptions& options = attributes.options;
  std::int64_t amsgrad = 0;
  std::int64_t clip = 0;
  using Flags = ffi::Span<const std::uint8_t>;
  const bool complete = Get<std::int64_t>(dictionary, "amsgrad", &amsgrad) &&
                        Get<std::int64_t>(dictionary, "clip", &clip) &&
                        Get<bool>(dictionary, "skip_nonfinite", &attributes.skip_nonfinite) &&
                        Get<bool>(dictionary, "analyze", &attributes.analyze) &&
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
  UpdateOperands operands{};
  ScalarOperand<float> gradient_scale;
  operands.options = attributes.options;
  operands.step = DecodeStep(decoder, frame, attributes, &gradient_scale);
  operands.leaves.reserve(frame.num_leaves);
  for (std::size_t leaf = 0; leaf < frame.num_leaves && decoder.ok(); ++leaf) {
    operands.leaves.push_back(DecodeLeaf(decoder, frame, leaf));
    operands.leaves.back().decays = attributes.decays[leaf] != 0;
    if (operands.leaves.back().num_elements % members != 0) {
      decoder.Fail(LeafName("parameter", leaf) + ": not divisible into " + std::to_string(members) +
                   " members");
    }
  }
  operands.analyzes = attributes.analyze;
  if (operands.analyzes && decoder.ok()) {
    operands.analysis =
        DecodeAnalysis(decoder, frame, attributes.skip_nonfinite, operands.leaves, gradient_scale);
  }
  if (!decoder.ok()) return ffi::Unexpected(decoder.error());
  return operands;
}

}  // namespace jfa
