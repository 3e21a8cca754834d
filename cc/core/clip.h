// Clipping of unscaled gradients, by their global norm or element by element.
//
//   by norm    g if norm <= max_norm, else (g / norm) * max_norm: two roundings, in this order
//   by value   g limited to +- max_value; a NaN stays one
#ifndef JAX_FUSED_ADAMW_CC_CORE_CLIP_H_
#define JAX_FUSED_ADAMW_CC_CORE_CLIP_H_

#include "core/dtype.h"
#include "core/macros.h"

namespace jfa {

enum class Clip {
  kOff = 0,
  kNorm = 1,
  kValue = 2,
};

template <typename Real>
struct GradientClip {
  Real limit;     // max_norm or max_value
  Real norm;      // times prescale
  Real prescale;  // 1, or the power of two by which a norm beyond float32 is scaled
  bool by_norm;   // whether the norm exceeds the limit
  bool by_value;

  JFA_HOST_DEVICE Real ByNorm(Real gradient) const { return gradient * prescale / norm * limit; }
  JFA_HOST_DEVICE Real ByValue(Real gradient) const {
    return gradient > limit ? limit : gradient < -limit ? -limit : gradient;
  }
};

// Of a StatsReport's norms, which are float32 always. A norm that is not finite makes every
// gradient NaN.
template <typename Real>
JFA_HOST_DEVICE GradientClip<Real> ClipByNorm(float norm, float scaled_norm, Real max_norm) {
  GradientClip<Real> clip{max_norm, norm, 1.0f, !(norm <= max_norm), false};
  if (!(norm <= kMaxFloat)) {
    clip.norm = BitsToFloat(kNanBits);
    clip.by_norm = true;
  } else if (norm == kMaxFloat) {
    clip.norm = scaled_norm;
    clip.prescale = 0x1p-64f;
  }
  return clip;
}

template <typename Real>
JFA_HOST_DEVICE GradientClip<Real> ClipByValue(Real max_value) {
  return {max_value, 1.0f, 1.0f, false, true};
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_CLIP_H_
