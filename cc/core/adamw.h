// THE AdamW / AMSGrad update. Every kernel, on every platform, calls these functions; nothing else
// in the project states the formula except its plain-JAX twin, jax_fused_adamw/_reference.py.
//
//   g     = gradient / gradient_scale                 (negated if maximize)
//   mu    = b1 * mu + (1 - b1) * g
//   nu    = b2 * nu + (1 - b2) * g * g
//   v_hat = correction of nu, or of its running maximum (AMSGrad)
//   u     = -learning_rate * (mu_hat / (sqrt(v_hat + eps_root) + eps) + weight_decay * param)
//
// Arithmetic is float32 without fused multiply-adds: build with -ffp-contract=off and
// --fmad=false, so that every platform rounds each operation the same way.
#ifndef JAX_FUSED_ADAMW_CC_CORE_ADAMW_H_
#define JAX_FUSED_ADAMW_CC_CORE_ADAMW_H_

#include "core/dtype.h"
#include "core/macros.h"

namespace jfa {

// Which second moment divides the step.
enum class Amsgrad {
  kOff = 0,
  kUncorrected = 1,  // maximum of nu, bias-corrected afterwards (PyTorch, amsgrad=True)
  kCorrected = 2,    // maximum of the bias-corrected nu (optax, amsgrad="optax")
};

// Hyperparameters of one step at the precision in which they arrive.
struct AdamWHyper {
  double learning_rate;
  double b1;
  double b2;
  double eps;
  double eps_root;
  double weight_decay;
  double gradient_scale;
};

// What one element needs, each value rounded to float32 exactly once.
struct AdamWScalars {
  float b1;
  float one_minus_b1;
  float b2;
  float one_minus_b2;
  float mu_correction;    // 1 / (1 - b1^t); with nesterov b1 / (1 - b1^(t+1))
  float grad_correction;  // nesterov only: (1 - b1) / (1 - b1^t)
  float nu_correction;    // 1 / (1 - b2^t)
  float eps;
  float eps_root;
  float weight_decay;
  float neg_learning_rate;
};

struct Moments {
  float mu;
  float nu;
  float nu_max;  // used with AMSGrad only
};

struct ElementUpdate {
  float update;
  Moments moments;
};

// base^exponent by repeated squaring in double: multiplications only, so every platform returns
// the same bits.
JFA_HOST_DEVICE double IntegerPower(double base, long long exponent) {
  double power = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) power *= base;
    base *= base;
  }
  return power;
}

// `step` is 1-based: the number of applied steps up to and including this one.
JFA_HOST_DEVICE AdamWScalars MakeScalars(const AdamWHyper& hyper, long long step, bool nesterov) {
  const double b1_power = IntegerPower(hyper.b1, step);
  const double b2_power = IntegerPower(hyper.b2, step);
  AdamWScalars s;
  s.b1 = static_cast<float>(hyper.b1);
  s.one_minus_b1 = static_cast<float>(1.0 - hyper.b1);
  s.b2 = static_cast<float>(hyper.b2);
  s.one_minus_b2 = static_cast<float>(1.0 - hyper.b2);
  s.mu_correction = static_cast<float>(nesterov ? hyper.b1 / (1.0 - b1_power * hyper.b1)
                                                : 1.0 / (1.0 - b1_power));
  s.grad_correction = static_cast<float>((1.0 - hyper.b1) / (1.0 - b1_power));
  s.nu_correction = static_cast<float>(1.0 / (1.0 - b2_power));
  s.eps = static_cast<float>(hyper.eps);
  s.eps_root = static_cast<float>(hyper.eps_root);
  s.weight_decay = static_cast<float>(hyper.weight_decay);
  s.neg_learning_rate = static_cast<float>(-hyper.learning_rate);
  return s;
}

// Division by gradient_scale. A power of two, which loss scales are, has an exact reciprocal, and
// the product is then the correctly rounded quotient: same bits, no division.
struct GradientUnscale {
  float divisor;
  float reciprocal;
  bool exact_reciprocal;

  JFA_HOST_DEVICE float Multiply(float gradient) const { return gradient * reciprocal; }
  JFA_HOST_DEVICE float Divide(float gradient) const { return gradient / divisor; }
};

// A scale that is not a positive finite number makes every gradient NaN: it is data, never an
// error. Dividing by the negated scale is maximize.
JFA_HOST_DEVICE GradientUnscale MakeUnscale(double gradient_scale, bool maximize) {
  float scale = static_cast<float>(gradient_scale);
  const float kMaxFloat = 3.402823466e+38f;
  if (!(scale > 0.0f && scale <= kMaxFloat)) scale = BitsToFloat(0x7fc00000u);
  const unsigned exponent = FloatToBits(scale) >> 23;
  const bool mantissa_is_zero = (FloatToBits(scale) & 0x7fffffu) == 0;
  GradientUnscale unscale;
  unscale.divisor = maximize ? -scale : scale;
  unscale.reciprocal = 1.0f / unscale.divisor;
  // 2^-126 .. 2^126: the reciprocal is normal too.
  unscale.exact_reciprocal = mantissa_is_zero && exponent >= 1 && exponent <= 253;
  return unscale;
}

// Unlike fmaxf and std::max, keeps a NaN on either side.
JFA_HOST_DEVICE float MaxKeepingNan(float a, float b) { return (a > b || a != a) ? a : b; }

template <Amsgrad kAmsgrad, bool kNesterov>
struct AdamW {
  AdamWScalars s;

  // `gradient` is already unscaled. `weight_decay` is the leaf's: zero where the mask is False,
  // and then an infinite parameter must not turn into NaN, hence the selection.
  JFA_HOST_DEVICE ElementUpdate operator()(float param, float gradient, Moments old,
                                           float weight_decay) const {
    Moments next;
    next.mu = s.b1 * old.mu + s.one_minus_b1 * gradient;
    next.nu = s.b2 * old.nu + s.one_minus_b2 * gradient * gradient;
    next.nu_max = 0.0f;
    float mu_hat = next.mu * s.mu_correction;
    if (kNesterov) mu_hat = mu_hat + gradient * s.grad_correction;
    float nu_hat;
    if (kAmsgrad == Amsgrad::kUncorrected) {
      next.nu_max = MaxKeepingNan(old.nu_max, next.nu);
      nu_hat = next.nu_max * s.nu_correction;
    } else if (kAmsgrad == Amsgrad::kCorrected) {
      next.nu_max = MaxKeepingNan(old.nu_max, next.nu * s.nu_correction);
      nu_hat = next.nu_max;
    } else {
      nu_hat = next.nu * s.nu_correction;
    }
    const float direction = mu_hat / (SquareRoot(nu_hat + s.eps_root) + s.eps);
    const float decay = weight_decay == 0.0f ? 0.0f : weight_decay * param;
    return {s.neg_learning_rate * (direction + decay), next};
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_ADAMW_H_
