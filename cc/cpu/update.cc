#include "cpu/update.h"

namespace jfa::cpu {
namespace {

const void* Advance(const void* pointer, DType dtype, std::int64_t elements) {
  return static_cast<const char*>(pointer) + elements * SizeOf(dtype);
}

const float* Advance(const float* pointer, std::int64_t elements) {
  return pointer == nullptr ? nullptr : pointer + elements;
}

void* Advance(void* pointer, DType dtype, std::int64_t elements) {
  return static_cast<char*>(pointer) + elements * SizeOf(dtype);
}

template <bool kNesterov>
void SetNumbers(const StepOperands& operands, std::int64_t member, const UpdateOptions& options,
                UpdateStep* step) {
  HyperTerms terms;
  const int count = operands.count.Read(member);
  for (int i = 0; i < kNumHyper; ++i) {
    operands.SetTerms<kNesterov>(i, operands.ReadRaw(i, member), count, options.maximize, &terms);
  }
  step->scalars = MakeScalars<kNesterov>(terms);
  step->unscale = MakeUnscale(terms);
  if (options.clip != Clip::kOff) step->clip = operands.ReadClip(options.clip, member);
}

}  // namespace

std::vector<UpdateStep> MakeSteps(const StepOperands& operands, const UpdateOptions& options) {
  std::vector<UpdateStep> steps(static_cast<std::size_t>(options.members));
  for (std::int64_t member = 0; member < options.members; ++member) {
    UpdateStep& step = steps[static_cast<std::size_t>(member)];
    if (options.nesterov) {
      SetNumbers<true>(operands, member, options, &step);
    } else {
      SetNumbers<false>(operands, member, options, &step);
    }
    step.amsgrad = options.amsgrad;
    step.nesterov = options.nesterov;
    step.write_params = options.write_params;
    step.skip = operands.Skips(member);
  }
  return steps;
}

UpdateBlock MakeBlock(const LeafOperands& leaf, const Block& where, const UpdateStep& step) {
  UpdateBlock block;
  block.param = Advance(leaf.param, leaf.param_dtype, where.begin);
  block.grad = Advance(leaf.grad, leaf.grad_dtype, where.begin);
  block.mu = Advance(leaf.mu, where.begin);
  block.nu = Advance(leaf.nu, where.begin);
  block.nu_max = Advance(leaf.nu_max, where.begin);
  block.out = Advance(leaf.out, leaf.param_dtype, where.begin);
  block.mu_out = leaf.mu_out + where.begin;
  block.nu_out = leaf.nu_out + where.begin;
  block.nu_max_out = leaf.nu_max_out == nullptr ? nullptr : leaf.nu_max_out + where.begin;
  block.num_elements = where.elements;
  block.param_dtype = leaf.param_dtype;
  block.grad_dtype = leaf.grad_dtype;
  block.weight_decay = leaf.decays ? step.scalars.weight_decay : 0.0f;
  return block;
}

}  // namespace jfa::cpu
