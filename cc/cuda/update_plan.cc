#include "cuda/update_plan.h"

#include <algorithm>
#include <initializer_list>

#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

using Leaves = std::vector<LeafOperands>;

// The class of a call's leaves: the widest that one of them needs.
LeafClass ClassOf(const Leaves& leaves, const UpdateOptions& options) {
  if (options.is_float64()) return LeafClass::kFloat64;
  if (options.zero_moments) return LeafClass::kFirstStep;
  const auto any_leaf = [&](const auto& property) {
    return std::any_of(leaves.begin(), leaves.end(), property);
  };
  const bool is_common = !any_leaf([](const LeafOperands& leaf) {
    return leaf.param_dtype != DType::kFloat32 || leaf.grad_dtype == DType::kFloat16;
  });
  const bool copies_are_common = !any_leaf([&](const LeafOperands& leaf) {
    return options.has_copies && leaf.copy_dtype != DType::kBfloat16;
  });
  const bool has_extras = options.has_copies || options.has_ema;
  const auto moments_are = [&](DType dtype) {
    return options.mu_dtype == dtype && options.nu_dtype == dtype;
  };
  const bool stochastic_params = options.stochastic_params && options.write_params;
  if (moments_are(DType::kFloat32)) {
    if (is_common && copies_are_common) {
      return has_extras ? LeafClass::kFloat32Extras : LeafClass::kFloat32;
    }
    if (!has_extras && !stochastic_params) return LeafClass::kAnyDType;
  }
  const bool is_bf16 = moments_are(DType::kBfloat16) && is_common && !has_extras;
  return is_bf16 ? LeafClass::kBf16Moments : LeafClass::kGeneral;
}

// The row of the call's leaf `index`, in the order of cuda/table.h.
std::vector<Word64> RowOf(const LeafOperands& leaf, std::size_t index, const Plan& plan) {
  std::vector<Word64> row;
  const auto add = [&](bool is_there, const void* buffer) {
    if (is_there) row.push_back(PointerWord(buffer));
  };
  const bool reads_moments = !plan.options.zero_moments;
  add(true, leaf.param);
  add(true, leaf.grad);
  add(reads_moments, leaf.mu);
  add(reads_moments, leaf.nu);
  add(reads_moments && plan.has_nu_max(), leaf.nu_max);
  add(plan.options.has_copies, leaf.copy);
  add(plan.options.has_ema, leaf.ema);
  add(plan.out_apart, leaf.out);
  add(plan.moments_apart, leaf.mu_out);
  add(plan.moments_apart, leaf.nu_out);
  add(plan.moments_apart && plan.has_nu_max(), leaf.nu_max_out);
  add(plan.extras_apart && plan.options.has_copies, leaf.copy_out);
  add(plan.extras_apart && plan.options.has_ema, leaf.ema_out);
  if (plan.has_lr_scales) row.push_back(DoubleToBits(leaf.lr_scale));
  if (!plan.has_noise()) return row;
  row.push_back(leaf.leaf_id | static_cast<Word64>(index) << 32);
  if (!plan.has_strides) return row;
  for (const IndexStride& stride : leaf.strides) {
    row.insert(row.end(), {stride.divisor, stride.extra, stride.reciprocal});
  }
  return row;
}

bool LeafIsAligned(const LeafOperands& leaf, const Plan& plan) {
  const UpdateOptions& options = plan.options;
  const struct {
    DType dtype;
    std::initializer_list<const void*> pointers;
  } arrays[] = {{leaf.param_dtype, {leaf.param, leaf.out}},
                {leaf.grad_dtype, {leaf.grad}},
                {options.mu_dtype, {leaf.mu, leaf.mu_out}},
                {options.nu_dtype, {leaf.nu, leaf.nu_max, leaf.nu_out, leaf.nu_max_out}},
                {leaf.copy_dtype, {leaf.copy, leaf.copy_out}},
                {ArithmeticOf(leaf.param_dtype), {leaf.ema, leaf.ema_out}}};
  bool aligned = MembersAreAligned(leaf.num_elements, options.members);
  for (const auto& array : arrays) {
    for (const void* pointer : array.pointers) aligned &= IsAligned(pointer, array.dtype);
  }
  return aligned;
}

// Vectors of a thread where it has several (cuda/tuning.h).
int VectorsOf(const Leaves& leaves) {
  long long elements = 0;
  for (const LeafOperands& leaf : leaves) elements += leaf.num_elements;
  int vectors = kVectorsAtOnce;
  for (const long long limit : kElementsForTwiceTheVectors) vectors *= elements < limit ? 1 : 2;
  return vectors;
}

}  // namespace

Plan MakePlan(const Leaves& leaves, const UpdateOptions& options, int vectors) {
  Plan plan{options};
  plan.leaf_class = ClassOf(leaves, options);
  plan.moments_apart = options.zero_moments;
  bool has_bf16_params = false;
  for (const LeafOperands& leaf : leaves) {
    plan.out_apart |= leaf.out != leaf.param;
    plan.moments_apart |=
        leaf.mu_out != leaf.mu || leaf.nu_out != leaf.nu || leaf.nu_max_out != leaf.nu_max;
    plan.extras_apart |= leaf.copy_out != leaf.copy || leaf.ema_out != leaf.ema;
    plan.has_lr_scales |= leaf.lr_scale != 1.0;
    plan.has_strides |= leaf.has_strides();
    has_bf16_params |= leaf.param_dtype == DType::kBfloat16;
  }
  plan.stochastic_moments = options.stochastic_moments && (options.mu_dtype != DType::kFloat32 ||
                                                           options.nu_dtype != DType::kFloat32);
  plan.stochastic_params = options.stochastic_params && options.write_params && has_bf16_params;
  if (HasVectors(Grid::kLarge, plan.leaf_class)) {
    plan.vectors = vectors > 0 ? vectors : VectorsOf(leaves);
  }
  return plan;
}

TableLeaf DescribeLeaf(const LeafOperands& leaf, std::size_t index, const Plan& plan) {
  const LeafFlags flags{leaf.param_dtype, leaf.grad_dtype, leaf.decays, LeafIsAligned(leaf, plan),
                        leaf.copy_dtype};
  return {RowOf(leaf, index, plan), leaf.num_elements, flags};
}

LaunchOptions LaunchOptionsOf(const Plan& plan, int arrival_counter) {
  LaunchOptions launch;
  launch.arrival_counter = arrival_counter;
  launch.clip = plan.options.clip;
  launch.maximize = plan.options.maximize;
  launch.write_params = plan.options.write_params;
  launch.out_apart = plan.out_apart;
  launch.moments_apart = plan.moments_apart;
  launch.extras_apart = plan.extras_apart;
  launch.has_copies = plan.options.has_copies;
  launch.has_ema = plan.options.has_ema;
  launch.stochastic_moments = plan.stochastic_moments;
  launch.stochastic_params = plan.stochastic_params;
  launch.zero_moments = plan.options.zero_moments;
  launch.vectors = plan.vectors;
  launch.mu_dtype = plan.options.mu_dtype;
  launch.nu_dtype = plan.options.nu_dtype;
  launch.lr_scale_slot = plan.has_lr_scales ? plan.num_buffers() : -1;
  launch.noise_slot = plan.noise_slot();
  launch.strides_slot = plan.has_strides ? plan.noise_slot() + 1 : -1;
  return launch;
}

}  // namespace jfa::cuda
