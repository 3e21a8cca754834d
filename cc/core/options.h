// What a call's attributes say about the update, alike for every leaf and platform.
#ifndef JAX_FUSED_ADAMW_CC_CORE_OPTIONS_H_
#define JAX_FUSED_ADAMW_CC_CORE_OPTIONS_H_

#include "core/adamw.h"
#include "core/clip.h"
#include "core/dtype.h"

namespace jfa {

struct UpdateOptions {
  Amsgrad amsgrad;
  Clip clip;
  bool nesterov;
  bool maximize;
  bool write_params;  // the output is the new parameter, else the update
  bool zero_moments;  // a first step: mu, nu and nu_max are zero, and their pointers null
  long long members;  // slices of each leaf with scalars of their own; 1 unless vmap made more
  DType mu_dtype = DType::kFloat32;
  DType nu_dtype = DType::kFloat32;  // of nu_max too; not float16, which has no room for squares
  bool has_copies = false;           // of float32 parameters, in 16 bits, rounded to nearest
  bool has_ema = false;              // of the new parameters as stored
  bool stochastic_moments = false;   // mu and nu below float32; nu_max is rounded to nearest
  bool stochastic_params = false;    // new parameters in bfloat16

  // Whether the parameters are float64, all of a call or none: their moments are then too, there
  // are no copies, and nothing is rounded stochastically.
  bool is_float64() const { return mu_dtype == DType::kFloat64; }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_OPTIONS_H_
