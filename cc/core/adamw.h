// THE AdamW / AMSGrad update. Every kernel, on every platform, calls these functions; nothing else
// in the project states the formula except its plain-JAX twin, jax_fused_adamw/_reference.py.
//
//   g     = gradient / gradient_scale                 (negated if maximize)
//   mu    = b1 * mu + (1 - b1) * g
//   nu    = b2 * nu + (1 - b2) * g * g
//   v_hat = correction of nu, or of its running maximum (AMSGrad)
//   u     = -learning_rate * (mu_hat / (sqrt(v_hat + eps_root) + eps) + weight_decay * param)
//   ema   = ema_decay * ema + (1 - ema_decay) * param, of the new parameter
//
// Arithmetic is float32, of float64 parameters float64: Real below. It is without fused
// multiply-adds: build with -ffp-contract=off and --fmad=false, so that every platform rounds each
// operation the same way.
#ifndef JAX_FUSED_ADAMW_CC_CORE_ADAMW_H_
#define JAX_FUSED_ADAMW_CC_CORE_ADAMW_H_

#include "core/dtype.h"
#include "core/macros.h"

#ifdef __FAST_MATH__
#error "jax_fused_adamw needs IEEE arithmetic: NaN and infinity decide. Build without -ffast-math."
#endif

namespace jfa {

// Which second moment divides the step.
enum class Amsgrad {
  kOff = 0,
  kUncorrected = 1,  // maximum of nu, bias-corrected afterwards (PyTorch, amsgrad=True)
  kCorrected = 2,    // maximum of the bias-corrected nu (optax, amsgrad="optax")
};

// The hyperparameters of a step, in the order of jax_fused_adamw/_operands.py: HYPERPARAMETERS.
enum class Hyper {
  kLearningRate,
  kB1,
  kB2,
  kEps,
  kEpsRoot,
  kWeightDecay,
  kGradientScale,
  kMaxGrad,  // what gradients are clipped at (core/clip.h)
  kEmaDecay,
};
constexpr int kNumHyper = 9;

// Of an array of terms: whole vectors of four, so that a GPU loads neighbours at once.
constexpr int kHyperRow = 12;

// What the update may need of each hyperparameter x at step t: the same for all of them, used or
// not, so that lanes of a GPU work them out side by side. Arrays by Hyper.
template <typename Real>
struct HyperTerms {
  Real value[kHyperRow];            // x
  Real inverse[kHyperRow];          // 1 / x
  Real complement[kHyperRow];       // 1 - x
  Real correction[kHyperRow];       // 1 / (1 - x^t)
  Real next_correction[kHyperRow];  // 1 / (1 - x^(t+1)), for nesterov
};

// What one element needs.
template <typename Real>
struct AdamWScalars {
  Real b1;
  Real one_minus_b1;
  Real b2;
  Real one_minus_b2;
  Real mu_correction;    // 1 / (1 - b1^t); with nesterov b1 / (1 - b1^(t+1))
  Real grad_correction;  // nesterov only: (1 - b1) / (1 - b1^t)
  Real nu_correction;    // 1 / (1 - b2^t)
  Real eps;
  Real eps_root;
  Real weight_decay;
  Real neg_learning_rate;
};

template <typename Real>
struct Moments {
  Real mu;
  Real nu;
  Real nu_max;  // used with AMSGrad only
};

template <typename Real>
struct ElementUpdate {
  Real update;
  Moments<Real> moments;
};

// base^exponent by repeated squaring in double: multiplications only, so every platform returns
// the same bits.
JFA_HOST_DEVICE double IntegerPower(double base, int exponent) {
  double power = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) power *= base;
    base *= base;
  }
  return power;
}

// Fills in the terms of one hyperparameter. `step` is 1-based: the number of applied steps up to
// and including this one. 1 - x^t is taken in double, where it cancels, and rounded once; the
// divisions are Real's, since double ones cost a GPU bandwidth (H200, 2026-11-29).
template <bool kNesterov, typename Real>
JFA_HOST_DEVICE void SetTerms(int hyper, double x, int step, HyperTerms<Real>* terms) {
  const Real one = 1;
  const double power = IntegerPower(x, step);
  terms->value[hyper] = static_cast<Real>(x);
  terms->inverse[hyper] = one / static_cast<Real>(x);
  terms->complement[hyper] = static_cast<Real>(1.0 - x);
  terms->correction[hyper] = one / static_cast<Real>(1.0 - power);
  if (kNesterov) terms->next_correction[hyper] = one / static_cast<Real>(1.0 - power * x);
}

template <bool kNesterov, typename Real>
JFA_HOST_DEVICE AdamWScalars<Real> MakeScalars(const HyperTerms<Real>& terms) {
  const int b1 = static_cast<int>(Hyper::kB1);
  const int b2 = static_cast<int>(Hyper::kB2);
  AdamWScalars<Real> s;
  s.b1 = terms.value[b1];
  s.one_minus_b1 = terms.complement[b1];
  s.b2 = terms.value[b2];
  s.one_minus_b2 = terms.complement[b2];
  s.mu_correction = kNesterov ? s.b1 * terms.next_correction[b1] : terms.correction[b1];
  s.grad_correction = s.one_minus_b1 * terms.correction[b1];
  s.nu_correction = terms.correction[b2];
  s.eps = terms.value[static_cast<int>(Hyper::kEps)];
  s.eps_root = terms.value[static_cast<int>(Hyper::kEpsRoot)];
  s.weight_decay = terms.value[static_cast<int>(Hyper::kWeightDecay)];
  s.neg_learning_rate = -terms.value[static_cast<int>(Hyper::kLearningRate)];
  return s;
}

// Those of a leaf with a learning rate of its own, a double that is rounded here.
template <typename Real>
JFA_HOST_DEVICE AdamWScalars<Real> WithLearningRate(AdamWScalars<Real> s, double learning_rate) {
  s.neg_learning_rate = -static_cast<Real>(learning_rate);
  return s;
}

// The exponential moving average of parameters.
template <typename Real>
struct Ema {
  Real decay;
  Real one_minus_decay;

  JFA_HOST_DEVICE Real operator()(Real ema, Real param) const {
    return decay * ema + one_minus_decay * param;
  }
};

template <typename Real>
JFA_HOST_DEVICE Ema<Real> MakeEma(const HyperTerms<Real>& terms) {
  const int decay = static_cast<int>(Hyper::kEmaDecay);
  return {terms.value[decay], terms.complement[decay]};
}

// What gradients are divided by. A scale that is not a positive finite float32 makes every gradient
// NaN: it is data, never an error. Dividing by the negated scale is maximize.
JFA_HOST_DEVICE double GradientDivisor(double gradient_scale, bool maximize) {
  const float scale = static_cast<float>(gradient_scale);
  if (!(scale > 0.0f && scale <= kMaxFloat)) return BitsToFloat(kNanBits);
  return maximize ? -gradient_scale : gradient_scale;
}

// Division by the gradient divisor. A power of two, which loss scales are, has an exact
// reciprocal, and the product is then the correctly rounded quotient: same bits, no division.
template <typename Real>
struct GradientUnscale {
  Real divisor;
  Real reciprocal;
  bool exact_reciprocal;

  JFA_HOST_DEVICE Real Multiply(Real gradient) const { return gradient * reciprocal; }
  JFA_HOST_DEVICE Real Divide(Real gradient) const { return gradient / divisor; }
};

// In magnitude 2^-126 .. 2^126, as float64 2^-1022 .. 2^1022: the reciprocal is normal too.
JFA_HOST_DEVICE bool IsPowerOfTwo(float x) {
  const Word32 exponent = FloatToBits(x) >> 23 & 0xffu;
  return (FloatToBits(x) & 0x7fffffu) == 0 && exponent >= 1 && exponent <= 253;
}
JFA_HOST_DEVICE bool IsPowerOfTwo(double x) {
  const Word64 exponent = DoubleToBits(x) >> 52 & 0x7ffu;
  return (DoubleToBits(x) & 0xfffffffffffffull) == 0 && exponent >= 1 && exponent <= 2045;
}

template <typename Real>
JFA_HOST_DEVICE GradientUnscale<Real> MakeUnscale(Real divisor, Real reciprocal) {
  return {divisor, reciprocal, IsPowerOfTwo(divisor)};
}

// The terms of kGradientScale are those of GradientDivisor.
template <typename Real>
JFA_HOST_DEVICE GradientUnscale<Real> MakeUnscale(const HyperTerms<Real>& terms) {
  const int scale = static_cast<int>(Hyper::kGradientScale);
  return MakeUnscale(terms.value[scale], terms.inverse[scale]);
}

// For statistics, which are float32 and where the sign does not matter.
JFA_HOST_DEVICE GradientUnscale<float> MakeUnscale(float gradient_scale) {
  const float divisor = static_cast<float>(GradientDivisor(gradient_scale, false));
  return MakeUnscale(divisor, 1.0f / divisor);
}

// Unlike fmaxf and std::max, keeps a NaN on either side.
template <typename Real>
JFA_HOST_DEVICE Real MaxKeepingNan(Real a, Real b) {
  return (a > b || a != a) ? a : b;
}

template <typename Real, Amsgrad kAmsgrad, bool kNesterov>
struct AdamW {
  AdamWScalars<Real> s;

  // `gradient` is already unscaled. `weight_decay` is the leaf's: zero where the mask is False,
  // and then an infinite parameter must not turn into NaN, hence the selection.
  JFA_HOST_DEVICE ElementUpdate<Real> operator()(Real param, Real gradient, Moments<Real> old,
                                                 Real weight_decay) const {
    Moments<Real> next;
    next.mu = s.b1 * old.mu + s.one_minus_b1 * gradient;
    next.nu = s.b2 * old.nu + s.one_minus_b2 * gradient * gradient;
    next.nu_max = 0;
    Real mu_hat = next.mu * s.mu_correction;
    if (kNesterov) mu_hat = mu_hat + gradient * s.grad_correction;
    Real nu_hat;
    if (kAmsgrad == Amsgrad::kUncorrected) {
      next.nu_max = MaxKeepingNan(old.nu_max, next.nu);
      nu_hat = next.nu_max * s.nu_correction;
    } else if (kAmsgrad == Amsgrad::kCorrected) {
      next.nu_max = MaxKeepingNan(old.nu_max, next.nu * s.nu_correction);
      nu_hat = next.nu_max;
    } else {
      nu_hat = next.nu * s.nu_correction;
    }
    const Real direction = mu_hat / (SquareRoot(nu_hat + s.eps_root) + s.eps);
    const Real decay = weight_decay == 0 ? 0 : weight_decay * param;
    return {s.neg_learning_rate * (direction + decay), next};
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_ADAMW_H_
