// How the leaves of a call become the tables and options of its launches.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_UPDATE_PLAN_H_
#define JAX_FUSED_ADAMW_CC_CUDA_UPDATE_PLAN_H_

#include <cstddef>
#include <vector>

#include "core/leaf.h"
#include "core/options.h"
#include "cuda/fill_table.h"
#include "cuda/kernels.h"
#include "cuda/table.h"

namespace jfa::cuda {

// What all launches of a call share.
struct Plan {
  UpdateOptions options;
  bool out_apart = false;
  bool moments_apart = false;
  bool extras_apart = false;
  bool stochastic_moments = false;  // with low-precision ones, as stochastic_params
  bool stochastic_params = false;
  bool has_lr_scales = false;
  bool has_strides = false;
  int vectors = 1;  // of a thread in a large grid
  LeafClass leaf_class = LeafClass::kFloat32;

  bool has_nu_max() const { return options.amsgrad != Amsgrad::kOff; }
  bool has_noise() const { return stochastic_moments || stochastic_params; }
  int num_extras() const { return (options.has_copies ? 1 : 0) + (options.has_ema ? 1 : 0); }
  int num_buffers() const {
    const int moments = has_nu_max() ? 3 : 2;
    return 2 + (options.zero_moments ? 0 : moments) + num_extras() + (out_apart ? 1 : 0) +
           (moments_apart ? moments : 0) + (extras_apart ? num_extras() : 0);
  }
  int noise_slot() const { return num_buffers() + (has_lr_scales ? 1 : 0); }
  int row_words() const {
    const int strides = has_strides ? kIndexStrides * kStrideWords : 0;
    return noise_slot() + (has_noise() ? 1 + strides : 0);
  }
  KernelName Kernel(Grid grid) const {
    return {grid, leaf_class, options.amsgrad, options.nesterov};
  }
};

// `vectors` as for Update (cuda/update.h).
Plan MakePlan(const std::vector<LeafOperands>& leaves, const UpdateOptions& options,
              int vectors = 0);

// The call's leaf `index`.
TableLeaf DescribeLeaf(const LeafOperands& leaf, std::size_t index, const Plan& plan);

// What is the same for every leaf.
LaunchOptions LaunchOptionsOf(const Plan& plan, int arrival_counter);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_UPDATE_PLAN_H_
