// Compiled without vectorisation (CMakeLists.txt): one element after the other, as it is written.
#include "ladder/cpu_loop.h"

namespace jfa::cpu {

void UpdateInALoop(const UpdateStep& step, const std::vector<LeafOperands>& leaves) {
  const AdamW<float, Amsgrad::kOff, false> adamw{step.float32.scalars};
  const GradientUnscale<float> unscale = step.float32.unscale;
  for (const LeafOperands& leaf : leaves) {
    float* const param = static_cast<float*>(leaf.out);
    float* const mu = static_cast<float*>(leaf.mu_out);
    float* const nu = static_cast<float*>(leaf.nu_out);
    const float* const grad = static_cast<const float*>(leaf.grad);
    for (long long i = 0; i < leaf.num_elements; ++i) {
      const float g =
          unscale.exact_reciprocal ? unscale.Multiply(grad[i]) : unscale.Divide(grad[i]);
      const ElementUpdate<float> next =
          adamw(param[i], g, {mu[i], nu[i], 0.0f}, adamw.s.weight_decay);
      param[i] += next.update;
      mu[i] = next.moments.mu;
      nu[i] = next.moments.nu;
    }
  }
}

}  // namespace jfa::cpu
