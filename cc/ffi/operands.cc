#include "ffi/operands.h"

#include <cstddef>

#include "ffi/attributes.h"
#include "ffi/decoder.h"

namespace jfa {
namespace {

// norm, scaled_norm, max_abs, nonfinite, merged, rows.
constexpr std::size_t kNumReportResults = 6;

// Where scalars and leaves lie among arguments and results.
struct Frame {
  std::size_t num_leaves;
  std::size_t num_norms;       // norm, scaled_norm: 2 or 0
  std::size_t num_nonfinite;   // 1 or 0
  std::size_t num_scales;      // gradient_scale: 1 or 0
  std::size_t num_noise;       // 1 or 0
  std::size_t num_counts;      // skipped, consecutive: 2 or 0
  std::size_t first_leaf;      // index of the first parameter
  std::size_t argument_kinds;  // params, grads [, mu, nu [, nu_max]] [, copies] [, ema]
  std::size_t result_kinds;    // out, mu, nu [, nu_max] [, copies] [, ema]

  explicit Frame(const Attributes& attributes)
      : num_leaves(attributes.decays.size()),
        num_norms(attributes.options.clip == Clip::kNorm && !attributes.analyze ? 2 : 0),
        num_nonfinite(attributes.skip_nonfinite && !attributes.analyze ? 1 : 0),
        num_scales(attributes.analyze ? 1 : 0),
        num_noise(attributes.has_noise() ? 1 : 0),
        num_counts(attributes.count_step ? 2 : 0),
        first_leaf(3 + num_norms + num_nonfinite + num_scales + num_noise + num_counts +
                   static_cast<std::size_t>(attributes.num_after)) {
    const UpdateOptions& options = attributes.options;
    for (const std::uint8_t is_traced : attributes.traced) first_leaf += is_traced != 0;
    const std::size_t moments = options.amsgrad != Amsgrad::kOff ? 3 : 2;
    const std::size_t others = (options.has_copies ? 1 : 0) + (options.has_ema ? 1 : 0);
    argument_kinds = 2 + (options.zero_moments ? 0 : moments) + others;
    result_kinds = 1 + moments + others;
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
  if (frame.num_noise > 0) {
    const std::int64_t rows = 1 + static_cast<std::int64_t>(frame.num_leaves);
    const ScalarOperand<Word32> noise =
        decoder.Scalar<Word32>(next++, ffi::U32, "noise", 2, 2 * rows);
    step.noise = noise.data;
    step.noise_rows = static_cast<int>(rows);
    step.noise_per_member = noise.per_member;
  }
  if (frame.num_counts > 0) DecodeCounts(decoder, frame, next, &step);
  return step;
}

// The dtypes of the moments, as the first leaf has them: all others must agree.
void DecodeMomentDTypes(Decoder& decoder, const Frame& frame, UpdateOptions* options) {
  if (frame.num_leaves == 0) return;
  options->mu_dtype = decoder.LeafDType(decoder.Result(frame.num_leaves), "new mu", 0);
  options->nu_dtype = decoder.LeafDType(decoder.Result(2 * frame.num_leaves), "new nu", 0);
  if (options->nu_dtype == DType::kFloat16) decoder.Fail("nu: expected float32 or bfloat16");
  const bool stochastic = options->stochastic_moments || options->stochastic_params;
  if (options->is_float64() && stochastic) {
    decoder.Fail("float64: nothing of it is rounded stochastically");
  }
}

// The operands and results of one leaf, a kind after the other.
class LeafDecoder {
 public:
  LeafDecoder(Decoder& decoder, const Frame& frame, std::size_t leaf)
      : decoder_(decoder),
        num_leaves_(frame.num_leaves),
        leaf_(leaf),
        argument_(frame.first_leaf + leaf),
        result_(leaf),
        param_(decoder.Argument(argument_)) {}

  LeafOperands Decode(const UpdateOptions& options) {
    LeafOperands leaf{};
    DecodeParam(options, &leaf);
    const DType mu = options.mu_dtype;
    const DType nu = options.nu_dtype;
    const bool has_nu_max = options.amsgrad != Amsgrad::kOff;
    if (!options.zero_moments) {
      leaf.mu = Next(mu, "mu");
      leaf.nu = Next(nu, "nu");
      if (has_nu_max) leaf.nu_max = Next(nu, "nu_max");
    }
    leaf.mu_out = NextResult(mu, "new mu");
    leaf.nu_out = NextResult(nu, "new nu");
    if (has_nu_max) leaf.nu_max_out = NextResult(nu, "new nu_max");
    if (options.has_copies) DecodeCopy(&leaf);
    if (options.has_ema) {
      leaf.ema = Next(ArithmeticOf(leaf.param_dtype), "ema");
      leaf.ema_out = NextResult(ArithmeticOf(leaf.param_dtype), "new ema");
    }
    return leaf;
  }

 private:
  void DecodeParam(const UpdateOptions& options, LeafOperands* leaf) {
    leaf->num_elements = static_cast<std::int64_t>(param_.element_count());
    leaf->param = param_.untyped_data();
    leaf->param_dtype = decoder_.LeafDType(param_, "parameter", leaf_);
    leaf->grad_dtype = NextDType("gradient");
    leaf->grad = Next(leaf->grad_dtype, "gradient");
    leaf->out = decoder_.ResultLike(result_, param_, param_.element_type(), "output", leaf_);
    CheckFloat64(options, *leaf);
  }

  // A call is float64 or not, but for gradients: those of float64 parameters may be narrower.
  void CheckFloat64(const UpdateOptions& options, const LeafOperands& leaf) {
    const bool is_float64 = leaf.param_dtype == DType::kFloat64;
    if (options.is_float64() != is_float64 || (options.nu_dtype == DType::kFloat64) != is_float64) {
      decoder_.Fail(LeafName("parameter", leaf_) +
                    ": expected float64 parameters and moments in all of a call, or in none");
    }
    if (leaf.grad_dtype == DType::kFloat64 && !is_float64) {
      decoder_.Fail(LeafName("gradient", leaf_) + ": float64, of a parameter that is not");
    }
  }

  void DecodeCopy(LeafOperands* leaf) {
    leaf->copy_dtype = NextDType("copy");
    if (leaf->param_dtype != DType::kFloat32 || SizeOf(leaf->copy_dtype) != 2) {
      decoder_.Fail(LeafName("copy", leaf_) +
                    ": expected bfloat16 or float16, of a float32 parameter");
    }
    leaf->copy = Next(leaf->copy_dtype, "copy");
    leaf->copy_out = NextResult(leaf->copy_dtype, "new copy");
  }

  DType NextDType(const char* kind) {
    return decoder_.LeafDType(decoder_.Argument(argument_ + num_leaves_), kind, leaf_);
  }
  const void* Next(DType dtype, const char* kind) {
    argument_ += num_leaves_;
    return decoder_.Like(argument_, param_, FfiDType(dtype), kind, leaf_);
  }
  void* NextResult(DType dtype, const char* kind) {
    result_ += num_leaves_;
    return decoder_.ResultLike(result_, param_, FfiDType(dtype), kind, leaf_);
  }

  Decoder& decoder_;
  std::size_t num_leaves_;
  std::size_t leaf_;
  std::size_t argument_;  // index of the last one decoded, as result_
  std::size_t result_;
  ffi::AnyBuffer param_;
};

LeafOperands DecodeLeaf(Decoder& decoder, const Frame& frame, const Attributes& attributes,
                        const UpdateOptions& options, std::size_t index) {
  LeafOperands leaf = LeafDecoder(decoder, frame, index).Decode(options);
  leaf.decays = attributes.decays[index] != 0;
  if (attributes.lr_scales.size() != 0) leaf.lr_scale = attributes.lr_scales[index];
  leaf.leaf_id = static_cast<Word32>(attributes.leaf_ids[index]);
  for (std::size_t i = 0; i < kIndexStrides; ++i) {
    const std::int64_t* pair = &attributes.shard_strides[2 * (kIndexStrides * index + i)];
    leaf.strides[i] = MakeStride(pair[0], pair[1]);
  }
  if (leaf.num_elements % options.members != 0) {
    decoder.Fail(LeafName("parameter", index) + ": not divisible into " +
                 std::to_string(options.members) + " members");
  }
  return leaf;
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
  DecodeMomentDTypes(decoder, frame, &operands.options);
  operands.leaves.reserve(frame.num_leaves);
  for (std::size_t leaf = 0; leaf < frame.num_leaves && decoder.ok(); ++leaf) {
    operands.leaves.push_back(DecodeLeaf(decoder, frame, attributes, operands.options, leaf));
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
