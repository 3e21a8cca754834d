#include "cpu/update.h"

namespace jfa::cpu {
namespace {

const void* Advance(const void* pointer, DType dtype, std::int64_t elements) {
  if (pointer == nullptr) return nullptr;
  return static_cast<const char*>(pointer) + elements * SizeOf(dtype);
}

void* Advance(void* pointer, DType dtype, std::int64_t elements) {
  return const_cast<void*>(Advance(static_cast<const void*>(pointer), dtype, elements));
}

template <bool kNesterov, typename Real>
void SetNumbers(const StepOperands& operands, std::int64_t member, const UpdateOptions& options,
                StepNumbers<Real>* numbers) {
  HyperTerms<Real> terms;
  const int count = operands.count.Read(member);
  constexpr double kLrScale = 1.0;  // MakeBlock knows the leaf's
  for (int i = 0; i < kNumHyper; ++i) {
    operands.SetTerms<kNesterov>(i, operands.ReadRaw(i, member), count, options.maximize, kLrScale,
                                 &terms);
  }
  numbers->scalars = MakeScalars<kNesterov>(terms);
  numbers->unscale = MakeUnscale(terms);
  numbers->ema = MakeEma(terms);
  if (options.clip != Clip::kOff) {
    numbers->clip = operands.ReadClip<Real>(options.clip, member);
  }
}

template <typename Real>
void SetNumbers(const StepOperands& operands, std::int64_t member, const UpdateOptions& options,
                StepNumbers<Real>* numbers) {
  if (options.nesterov) {
    SetNumbers<true>(operands, member, options, numbers);
  } else {
    SetNumbers<false>(operands, member, options, numbers);
  }
}

}  // namespace

std::vector<UpdateStep> MakeSteps(const StepOperands& operands, const UpdateOptions& options) {
  std::vector<UpdateStep> steps(static_cast<std::size_t>(options.members));
  for (std::int64_t member = 0; member < options.members; ++member) {
    UpdateStep& step = steps[static_cast<std::size_t>(member)];
    step.is_float64 = options.is_float64();
    if (step.is_float64) {
      SetNumbers(operands, member, options, &step.float64);
    } else {
      SetNumbers(operands, member, options, &step.float32);
    }
    constexpr int kRate = static_cast<int>(Hyper::kLearningRate);
    step.learning_rate = operands.Decode(kRate, operands.ReadRaw(kRate, member));
    step.amsgrad = options.amsgrad;
    step.nesterov = options.nesterov;
    step.write_params = options.write_params;
    step.skip = operands.Skips(member);
    step.mu_dtype = options.mu_dtype;
    step.nu_dtype = options.nu_dtype;
    step.has_ema = options.has_ema;
    step.stochastic_moments = options.stochastic_moments;
    step.stochastic_params = options.stochastic_params;
    if (operands.noise != nullptr) step.seed = operands.ReadSeed(member);
    step.number = static_cast<Word32>(NextCount(operands.count.Read(member)));
  }
  return steps;
}

UpdateBlock MakeBlock(const LeafOperands& leaf, const Block& where, const UpdateStep& step,
                      Word64 first_index) {
  const DType ema_dtype = ArithmeticOf(leaf.param_dtype);
  UpdateBlock block;
  block.param = Advance(leaf.param, leaf.param_dtype, where.begin);
  block.grad = Advance(leaf.grad, leaf.grad_dtype, where.begin);
  block.mu = Advance(leaf.mu, step.mu_dtype, where.begin);
  block.nu = Advance(leaf.nu, step.nu_dtype, where.begin);
  block.nu_max = Advance(leaf.nu_max, step.nu_dtype, where.begin);
  block.copy = Advance(leaf.copy, leaf.copy_dtype, where.begin);
  block.ema = Advance(leaf.ema, ema_dtype, where.begin);
  block.out = Advance(leaf.out, leaf.param_dtype, where.begin);
  block.mu_out = Advance(leaf.mu_out, step.mu_dtype, where.begin);
  block.nu_out = Advance(leaf.nu_out, step.nu_dtype, where.begin);
  block.nu_max_out = Advance(leaf.nu_max_out, step.nu_dtype, where.begin);
  block.copy_out = Advance(leaf.copy_out, leaf.copy_dtype, where.begin);
  block.ema_out = Advance(leaf.ema_out, ema_dtype, where.begin);
  block.num_elements = where.elements;
  block.param_dtype = leaf.param_dtype;
  block.grad_dtype = leaf.grad_dtype;
  block.copy_dtype = leaf.copy_dtype;
  block.decays = leaf.decays;
  block.learning_rate = step.learning_rate * leaf.lr_scale;
  block.noise = {step.seed, leaf.leaf_id, step.number};
  block.offset = where.offset;
  block.first_index = first_index;
  block.strides = leaf.strides;
  return block;
}

}  // namespace jfa::cpu
