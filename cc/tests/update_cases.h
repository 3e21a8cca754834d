// Cases of the update that both harnesses run.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_UPDATE_CASES_H_
#define JAX_FUSED_ADAMW_CC_TESTS_UPDATE_CASES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "tests/cases.h"

namespace jfa::tests {

// Calls that count and that do not, with elements and without, up to where the counters saturate.
inline std::vector<Case> CounterCases() {
  constexpr int kMost = 0x7fffffff;
  std::vector<Case> cases;
  for (const std::size_t n : {0, 1500}) {
    for (const bool skip : {false, true}) {
      for (const bool in_place : {false, true}) {
        Case c = CommonCase(n);
        c.skip = skip;
        c.in_place = in_place;
        c.members = 3;
        for (const Counting counting : {Counting::kNone, Counting::kShared, Counting::kPerMember}) {
          c.counting = counting;
          cases.push_back(c);
        }
        c.counting = Counting::kPerMember;
        c.counts = {kMost - 1, kMost - 1, kMost - 1};
        cases.push_back(c);
        c.counting = Counting::kShared;
        c.counts = {kMost, kMost, kMost};
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Limits of the norm, norms that are none, limits of values, and steps that `nonfinite` skips.
inline std::vector<Case> ClipCases() {
  const float inf = BitsToFloat(kInfinityBits);
  const float nan = BitsToFloat(kNanBits);
  std::vector<Case> variants;
  Case c = CommonCase(1001);
  c.clip = Clip::kNorm;
  for (const float norm : {0.1f, c.max_grad, 1.0f, 0.0f, 1e-40f, kMaxFloat, inf, nan}) {
    c.norm = norm;
    variants.push_back(c);
  }
  c.clip = Clip::kValue;
  variants.push_back(c);
  c.gradients = {0.5f, nan, -inf, inf, -1e-3f, 1e-40f, kMaxFloat, -0.0f, 0.375f};
  variants.push_back(c);
  c.clip = Clip::kOff;
  variants.push_back(c);

  std::vector<Case> cases;
  for (Case variant : variants) {
    for (const DType dtype : kDTypes) {
      for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
        variant.param_dtype = dtype;
        variant.grad_dtype = kDTypes[(static_cast<int>(dtype) + flags) % 3];
        variant.amsgrad = static_cast<Amsgrad>(cases.size() % 3);
        variant.offset = cases.size() % 2;
        variant.members = (flags & 1) != 0 ? 3 : 1;
        variant.counting = (flags & 1) != 0 ? Counting::kPerMember : Counting::kShared;
        variant.zero_moments = (flags & 2) != 0 ? ZeroMoments::kNull : ZeroMoments::kNo;
        variant.in_place = (flags & 4) == 0;
        for (const std::optional<int> nonfinite : {std::optional<int>(), {0}, {5}}) {
          variant.nonfinite = nonfinite;
          cases.push_back(variant);
        }
      }
    }
  }
  return cases;
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_UPDATE_CASES_H_
