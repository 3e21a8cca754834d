// The scalars of a step, as a case of the update has them.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_STEP_SCALARS_H_
#define JAX_FUSED_ADAMW_CC_TESTS_STEP_SCALARS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/scalars.h"
#include "tests/buffers.h"
#include "tests/cases.h"
#include "tests/check.h"

namespace jfa::tests {

inline int SaturatingSum(int a, std::int64_t b) {
  return static_cast<int>(std::min<std::int64_t>(a + b, 0x7fffffff));
}

inline constexpr Word64 kSeed = 0x9abcdef012345678ull;

// The step's scalars, in Buffers of the host or a device. The counters share one: the old ones,
// then the new ones unless they take the place of the old, a canary on each side of each array.
template <typename Buffer>
class StepScalars {
 public:
  explicit StepScalars(const Case& c, std::size_t num_leaves = 1)
      : case_(c),
        image_(static_cast<std::size_t>(Place(2 * kNumCounters, 0)), kCanaryInt),
        counters_(image_.size() * sizeof(int), 0),
        skip_(static_cast<std::size_t>(c.num_counts()), 0),
        hyper_bits_(kNumHyper * sizeof(double), 0),
        norms_(2 * static_cast<std::size_t>(c.members) * sizeof(float), 0),
        nonfinite_(static_cast<std::size_t>(c.num_counts()) * sizeof(int), 0),
        noise_rows_(1 + num_leaves),
        noise_(static_cast<std::size_t>(c.num_counts()) * noise_rows_ * sizeof(Word64), 0) {
    std::vector<unsigned char> skip;
    for (std::int64_t i = 0; i < c.num_counts(); ++i) {
      SetCounters(&image_, 0, i, OldCounts(i));
      skip.push_back(SkipsUpdate(i));
    }
    counters_.Write(BytesOf(image_.data(), image_.size()));
    skip_.Write(skip);
    const double hyper[kNumHyper] = {c.learning_rate, 0.9, 0.99, 1e-6, 1e-9, 0.1, 3.0,
                                     c.max_grad,      0.97};
    hyper_bits_.Write(BytesOf(hyper, kNumHyper));
    std::vector<float> norms;
    for (std::int64_t i = 0; i < c.members; ++i) norms.push_back(Norm(i));
    for (std::int64_t i = 0; i < c.members; ++i) norms.push_back(ScaledNorm(i));
    norms_.Write(BytesOf(norms.data(), norms.size()));
    std::vector<int> nonfinite;
    for (std::int64_t i = 0; i < c.num_counts(); ++i) nonfinite.push_back(Nonfinite(i));
    nonfinite_.Write(BytesOf(nonfinite.data(), nonfinite.size()));
    WriteNoise();
  }

  StepOperands Operands() const {
    const bool per_member = case_.counting == Counting::kPerMember;
    int* const counters = counters_.template As<int>();
    StepOperands operands;
    operands.count = {counters + Place(0, 0), per_member};
    operands.skip_update = {skip_.template As<unsigned char>(), per_member};
    operands.hyper_bits = hyper_bits_.template As<Word32>();
    if (case_.clip == Clip::kNorm) {
      float* const norms = norms_.template As<float>();
      operands.norm = {norms, case_.members > 1};
      operands.scaled_norm = {norms + case_.members, case_.members > 1};
    }
    if (case_.nonfinite) operands.nonfinite = {nonfinite_.template As<int>(), per_member};
    if (case_.has_noise()) {
      operands.noise = noise_.template As<Word32>();
      operands.noise_rows = static_cast<int>(noise_rows_);
      operands.noise_per_member = per_member;
    }
    if (case_.counting == Counting::kNone) return operands;
    operands.skipped = {counters + Place(1, 0), per_member};
    operands.consecutive = {counters + Place(2, 0), per_member};
    operands.new_counts = {counters + Place(FirstNew(), 0), counters + Place(FirstNew() + 1, 0),
                           counters + Place(FirstNew() + 2, 0)};
    return operands;
  }

  // After `steps` calls; more than one only in place.
  void CheckCounters(const char* kernel, int steps = 1) const {
    std::vector<int> expected = image_;
    if (case_.counting != Counting::kNone) {
      for (std::int64_t i = 0; i < case_.num_counts(); ++i) {
        SetCounters(&expected, FirstNew(), i, ExpectedCounts(i, steps));
      }
    }
    Check(counters_.Read() == BytesOf(expected.data(), expected.size()),
          "counters, " + case_.Name(kernel));
    Check(counters_.Intact(), "canary of the counters, " + case_.Name(kernel));
  }

 private:
  // A seed for each member; leaves far from each other in the whole tree.
  void WriteNoise() {
    std::vector<Word64> noise;
    for (std::int64_t member = 0; member < case_.num_counts(); ++member) {
      noise.push_back(kSeed + static_cast<Word64>(member));
      for (std::size_t leaf = 1; leaf < noise_rows_; ++leaf) {
        noise.push_back(case_.place.first_index + (leaf - 1) * 1000003);
      }
    }
    noise_.Write(BytesOf(noise.data(), noise.size()));
  }

  static constexpr int kNumCounters = 3;
  static constexpr int kCanaryInt = static_cast<int>(kCanary * 0x01010101u);

  // Where a member's value of a counter lies.
  std::int64_t Place(int counter, std::int64_t member) const {
    return 1 + counter * (case_.num_counts() + 1) + member;
  }
  int FirstNew() const { return case_.in_place ? 0 : kNumCounters; }

  void SetCounters(std::vector<int>* image, int first, std::int64_t member,
                   StepCounts counts) const {
    int* const place = image->data() + Place(first, member);
    const std::int64_t stride = case_.num_counts() + 1;
    place[0] = counts.count;
    place[stride] = counts.skipped;
    place[2 * stride] = counts.consecutive;
  }

  // Members differ: in their counts, and each skips if its neighbours do not.
  StepCounts OldCounts(std::int64_t member) const {
    return {SaturatingSum(case_.counts.count, member), SaturatingSum(case_.counts.skipped, member),
            SaturatingSum(case_.counts.consecutive, member)};
  }
  bool SkipsUpdate(std::int64_t member) const { return case_.skip != (member % 2 == 1); }
  int Nonfinite(std::int64_t member) const {
    return member % 3 == 0 ? case_.nonfinite.value_or(0) : 0;
  }
  bool Skips(std::int64_t member) const { return SkipsUpdate(member) || Nonfinite(member) != 0; }

  // The largest float32 stands for a norm that only its scaled one tells, here 2^129.
  float Norm(std::int64_t member) const {
    return member % 3 == 1 ? case_.norm / 16 : member % 3 == 2 ? case_.norm * 16 : case_.norm;
  }
  float ScaledNorm(std::int64_t member) const {
    return Norm(member) == kMaxFloat ? 0x1p65f : Norm(member) * 0x1p-64f;
  }

  // Not by CountStep, which is what is tested.
  StepCounts ExpectedCounts(std::int64_t member, int steps) const {
    const StepCounts old = OldCounts(member);
    if (!Skips(member)) return {SaturatingSum(old.count, steps), old.skipped, 0};
    return {old.count, SaturatingSum(old.skipped, steps), SaturatingSum(old.consecutive, steps)};
  }

  Case case_;
  std::vector<int> image_;  // the counters before the call
  Buffer counters_;
  Buffer skip_;
  Buffer hyper_bits_;
  Buffer norms_;  // then the scaled ones
  Buffer nonfinite_;
  std::size_t noise_rows_;
  Buffer noise_;
};

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_STEP_SCALARS_H_
