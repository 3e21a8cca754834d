#ifndef JAX_FUSED_ADAMW_CC_CPU_FLOAT_ENV_H_
#define JAX_FUSED_ADAMW_CC_CPU_FLOAT_ENV_H_

#include <cfenv>

namespace jfa::cpu {

// XLA's threads flush subnormals to zero; these kernels keep them, and put the caller's mode back.
class ScopedDefaultFloatEnv {
 public:
  ScopedDefaultFloatEnv() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ScopedDefaultFloatEnv() { std::fesetenv(&saved_); }
  ScopedDefaultFloatEnv(const ScopedDefaultFloatEnv&) = delete;
  ScopedDefaultFloatEnv& operator=(const ScopedDefaultFloatEnv&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace jfa::cpu

#endif  // JAX_FUSED_ADAMW_CC_CPU_FLOAT_ENV_H_
