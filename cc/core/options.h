// What a call's attributes say about the update, alike for every leaf and platform.
#ifndef JAX_FUSED_ADAMW_CC_CORE_OPTIONS_H_
#define JAX_FUSED_ADAMW_CC_CORE_OPTIONS_H_

#include "core/adamw.h"
#include "core/clip.h"

namespace jfa {

struct UpdateOptions {
  Amsgrad amsgrad;
  Clip clip;
  bool nesterov;
  bool maximize;
  bool write_params;  // the output is the new parameter, else the update
  bool zero_moments;  // a first step: mu, nu and nu_max are zero, and their pointers null
  long long members;  // slices of each leaf with scalars of their own; 1 unless vmap made more
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_OPTIONS_H_
