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

// Learning rates of a leaf's own: of each arithmetic, with every other thing that a row of the CUDA
// table may have. The first scale shows where a product was rounded too early, others are limits.
inline std::vector<Case> LrScaleCases() {
  constexpr double kScales[] = {1.0 / 3.0, 0.0, 2.0, 1e-3, 1e-45, 1e30};
  std::vector<Case> cases;
  for (const double scale : kScales) {
    for (const int kind : {0, 1, 2, 3, 4, 5, 6, 7}) {
      Case c = kind % 4 == 1 ? Float64Case(1003) : CommonCase(1003);
      c.lr_scale = scale;
      c.amsgrad = static_cast<Amsgrad>(cases.size() % 3);
      c.nesterov = cases.size() % 5 == 0;
      c.write_params = cases.size() % 7 != 0;
      c.skip = cases.size() % 11 == 10;
      c.clip = static_cast<Clip>(kind % 3);
      c.members = kind < 4 ? 1 : 3;
      c.counting = kind < 4 ? Counting::kShared : Counting::kPerMember;
      c.zero_moments = kind % 2 == 0 ? ZeroMoments::kNo : ZeroMoments::kNull;
      c.in_place = kind < 4;
      c.has_ema = kind % 4 == 3;
      if (kind % 4 > 1) {
        c.mu_dtype = c.nu_dtype = DType::kBfloat16;
        c.stochastic_moments = true;
        c.param_dtype = c.grad_dtype = kind % 4 == 3 ? DType::kBfloat16 : DType::kFloat32;
        c.place.strides = {MakeStride(5, 2), MakeStride(0, 0), MakeStride(0, 0)};
      }
      cases.push_back(c);
    }
  }
  return cases;
}

// Places in the whole tree: at a quad or not, beyond 32 bits of elements and of quads, and in parts
// of leaves that are cut along one dimension or more.
inline std::vector<Place> Places() {
  const IndexStride none = MakeStride(0, 0);
  return {{7, 0, {}},
          {0, 3, {}},
          {1, 0xfffffffffull, {}},
          {0x7fffffff, 0x3fffffffeull, {}},
          {2, 12, {MakeStride(64, 64), none, none}},
          {3, 1, {MakeStride(5, 2), none, none}},
          {4, 4, {MakeStride(1, 3), MakeStride(20, 7), MakeStride(81, 1ll << 33)}},
          {5, 0, {none, MakeStride(128, 384), MakeStride(2048, 1ll << 40)}}};
}

// float64 parameters by every rule, with gradients of every dtype, clipped both ways and not; the
// other options take turns, with periods that are prime to each other's.
inline std::vector<Case> Float64Cases(std::size_t n) {
  const double inf = BitsToFloat(kInfinityBits);
  const std::vector<double> extremes = {1e300, -0.5, inf, 1e-310, -1e300,   BitsToFloat(kNanBits),
                                        0.25,  -inf, 0.0, 1e-160, kMaxFloat};
  std::vector<Case> cases;
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const bool nesterov : {false, true}) {
      for (const DType grad : kAllDTypes) {
        for (const Clip clip : {Clip::kOff, Clip::kNorm, Clip::kValue}) {
          for (const ZeroMoments zero : {ZeroMoments::kNo, ZeroMoments::kNull}) {
            Case c = Float64Case(n - next % 5 / 3);
            c.amsgrad = amsgrad;
            c.nesterov = nesterov;
            c.grad_dtype = grad;
            c.clip = clip;
            c.zero_moments = zero;
            if (next % 7 == 0) c.gradients = extremes;
            c.write_params = next % 5 != 0;
            c.skip = next % 11 == 0;
            c.in_place = next % 3 != 0;
            c.has_ema = next % 13 % 2 == 0;
            c.offset = next % 17 % 4;
            c.members = next % 19 == 0 ? 3 : 1;
            c.norm = c.members == 1 && next % 25 < 8 ? kMaxFloat : next % 25 < 16 ? 0.1f : 1.3f;
            c.counting = next % 5 < 2 ? Counting::kPerMember : Counting::kShared;
            c.counts.count = next % 23 == 0 ? 999 : 2;
            if (next % 31 < 8) c.lr_scale = 1.0 / 3.0;
            cases.push_back(c);
            ++next;
          }
        }
      }
    }
  }
  return cases;
}

// Every set of dtypes of parameters and moments, rounded both ways, with copies and averages; the
// other options take turns, with periods that are prime to each other's.
inline std::vector<Case> LowPrecisionCases(std::size_t n) {
  const std::vector<Place> places = Places();
  std::vector<Case> cases;
  std::size_t next = 0;
  for (const DType param : kDTypes) {
    for (const DType mu : kDTypes) {
      for (const DType nu : {DType::kFloat32, DType::kBfloat16}) {
        for (const int flags : {0, 1, 2, 3}) {
          for (const int extras : {0, 1, 2, 3}) {
            const bool has_copies = (extras & 1) != 0;
            if (has_copies && param != DType::kFloat32) continue;
            Case c = CommonCase(n - next % 3);
            c.param_dtype = param;
            c.grad_dtype = kDTypes[next % (param == DType::kFloat32 ? 2 : 3)];
            c.mu_dtype = mu;
            c.nu_dtype = nu;
            c.stochastic_moments = (flags & 1) != 0;
            c.stochastic_params = (flags & 2) != 0;
            if (has_copies) c.copies = next % 7 == 0 ? DType::kFloat16 : DType::kBfloat16;
            c.has_ema = (extras & 2) != 0;
            c.amsgrad = static_cast<Amsgrad>(next % 3);
            c.nesterov = next % 4 == 0;
            c.write_params = has_copies || next % 5 != 0;
            c.skip = next % 11 == 0;
            c.in_place = next % 2 == 0;
            c.offset = next % 16 < 8 ? 0 : next % 16;
            c.members = next % 13 == 0 ? 3 : 1;
            c.counting = next % 2 == 0 ? Counting::kPerMember : Counting::kShared;
            c.place = places[next % places.size()];
            cases.push_back(c);
            c.zero_moments = ZeroMoments::kNull;
            cases.push_back(c);
            ++next;
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_UPDATE_CASES_H_
