// What the CPU kernel makes of float64 parameters, against the formula in long double, written
// from the comment of core/adamw.h, and of the statistics of float64 gradients. Exits with 1 on a
// failure.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/stats.h"
#include "cpu/update.h"
#include "tests/buffers.h"
#include "tests/cases.h"
#include "tests/check.h"
#include "tests/pools.h"
#include "tests/stats_cases.h"
#include "tests/step_scalars.h"
#include "tests/update_cases.h"

namespace jfa::cpu {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

using Long = long double;

// The hyperparameters of tests/step_scalars.h.
constexpr Long kLearningRate = 1e-2;
constexpr Long kB1 = 0.9;
constexpr Long kB2 = 0.99;
constexpr Long kEps = 1e-6;
constexpr Long kEpsRoot = 1e-9;
constexpr Long kWeightDecay = 0.1;
constexpr Long kGradientScale = 3.0;
constexpr Long kEmaDecay = 0.97;

// An expected value, and the largest of the terms that were added up to it.
struct Expected {
  Long value;
  Long magnitude;
};

struct Element {
  Long param, grad, mu, nu, nu_max, ema;
};

struct NextElement {
  Expected update, mu, nu, nu_max, ema;
};

Long Clipped(const Case& c, Long norm, Long g) {
  const Long limit = c.max_grad;
  if (c.clip == Clip::kValue) return std::clamp(g, -limit, limit);
  return c.clip == Clip::kNorm && norm > limit ? g / norm * limit : g;
}

// 1 - base^step as the kernel divides by it, and how much larger than its own rounding errors those
// of base^step make its relative error.
struct Bias {
  Long value;
  Long spread;
};

Bias BiasOf(Long base, int step) {
  const Long power = std::pow(base, step);
  return {1 - power, 1 + power / (1 - power)};
}

// Of an applied step, the `step`th.
NextElement Expect(const Case& c, const Element& old, Long norm, int step) {
  const Long g = Clipped(c, norm, -old.grad / kGradientScale);  // maximize
  NextElement next;
  next.mu = {kB1 * old.mu + (1 - kB1) * g, std::fabs(kB1 * old.mu) + std::fabs((1 - kB1) * g)};
  next.nu.value = next.nu.magnitude = kB2 * old.nu + (1 - kB2) * g * g;
  const Bias mu_bias = BiasOf(kB1, step);
  const Bias nu_bias = BiasOf(kB2, step);
  Expected mu_hat{next.mu.value / mu_bias.value, next.mu.magnitude / mu_bias.value};
  if (c.nesterov) {
    const Long factor = kB1 / BiasOf(kB1, step + 1).value;
    const Long grad_term = (1 - kB1) * g / mu_bias.value;
    mu_hat = {next.mu.value * factor + grad_term,
              next.mu.magnitude * factor + std::fabs(grad_term)};
  }
  mu_hat.magnitude *= mu_bias.spread + nu_bias.spread;
  Long nu_hat = next.nu.value / nu_bias.value;
  if (c.amsgrad == Amsgrad::kUncorrected) {
    next.nu_max.value = std::max(old.nu_max, next.nu.value);
    nu_hat = next.nu_max.value / nu_bias.value;
  } else if (c.amsgrad == Amsgrad::kCorrected) {
    nu_hat = next.nu_max.value = std::max(old.nu_max, nu_hat);
  }
  next.nu_max.magnitude = next.nu_max.value * nu_bias.spread;
  const Long denominator = std::sqrt(nu_hat + kEpsRoot) + kEps;
  const Long decay = kWeightDecay * old.param;
  const Long rate = kLearningRate * c.lr_scale;
  next.update = {-rate * (mu_hat.value / denominator + decay),
                 rate * (mu_hat.magnitude / denominator + std::fabs(decay))};
  const Long param = old.param + next.update.value;
  next.ema.value = kEmaDecay * old.ema + (1 - kEmaDecay) * param;
  next.ema.magnitude =
      std::fabs(kEmaDecay * old.ema) + std::fabs((1 - kEmaDecay) * param) + next.update.magnitude;
  return next;
}

// The buffers of a case before and after its step.
class Step {
 public:
  Step(const InstructionSet& isa, const Case& c) : case_(c), isa_(isa.name), arrays_(c) {
    const LeafOperands leaf = arrays_.Operands();
    for (std::size_t i = 0; i < c.total(); ++i) old_.push_back(Read(leaf, i));
    const StepScalars<GuardedBuffer> scalars(c);
    InlinePool pool;
    Update(pool, 1, isa, scalars.Operands(), {leaf}, c.Options());
    scalars.CheckCounters(isa.name);
  }

  // The rounding errors that one value passes through, in units of its terms' last places.
  void CheckApplied(std::size_t i) const {
    const auto member = static_cast<std::int64_t>(i / case_.n);
    const NextElement next = Expect(case_, old_[i], Norm(member), NumberOfStep(member));
    const LeafOperands leaf = arrays_.Operands();
    const Long param = case_.write_params ? old_[i].param : 0.0L;
    const Expected out{param + next.update.value, std::fabs(param) + 16 * next.update.magnitude};
    CheckNear(leaf.out, i, out, "out");
    CheckNear(leaf.mu_out, i, next.mu, "mu");
    CheckNear(leaf.nu_out, i, next.nu, "nu");
    if (case_.has_nu_max()) CheckNear(leaf.nu_max_out, i, next.nu_max, "nu_max");
    if (case_.has_ema) CheckNear(leaf.ema_out, i, next.ema, "ema");
  }

  void CheckSkipped(std::size_t i) const {
    const LeafOperands leaf = arrays_.Operands();
    const double out = LoadAs(DType::kFloat64, leaf.out, i);
    const Long expected = case_.write_params ? old_[i].param : -0.0L;
    CheckThat(DoubleToBits(out) == DoubleToBits(static_cast<double>(expected)), i, "kept out");
    CheckThat(ValueOf(leaf.mu_out, i) == old_[i].mu, i, "kept mu");
    CheckThat(ValueOf(leaf.nu_out, i) == old_[i].nu, i, "kept nu");
    if (case_.has_nu_max()) CheckThat(ValueOf(leaf.nu_max_out, i) == old_[i].nu_max, i, "kept max");
    if (case_.has_ema) CheckThat(ValueOf(leaf.ema_out, i) == old_[i].ema, i, "kept ema");
  }

 private:
  static constexpr Long kMostUlp = 6;

  static Long ValueOf(const void* array, std::size_t i) {
    return array == nullptr ? 0.0L : static_cast<Long>(LoadAs(DType::kFloat64, array, i));
  }
  Element Read(const LeafOperands& leaf, std::size_t i) const {
    return {ValueOf(leaf.param, i),  static_cast<Long>(LoadAs(case_.grad_dtype, leaf.grad, i)),
            ValueOf(leaf.mu, i),     ValueOf(leaf.nu, i),
            ValueOf(leaf.nu_max, i), ValueOf(leaf.ema, i)};
  }

  // As tests/step_scalars.h has them.
  Long Norm(std::int64_t member) const {
    const float norm = member % 3 == 1   ? case_.norm / 16
                       : member % 3 == 2 ? case_.norm * 16
                                         : case_.norm;
    return norm == kMaxFloat ? 0x1p129L : static_cast<Long>(norm);
  }
  int NumberOfStep(std::int64_t member) const {
    const bool per_member = case_.counting == Counting::kPerMember;
    return case_.counts.count + static_cast<int>(per_member ? member : 0) + 1;
  }

  void CheckNear(const void* array, std::size_t i, const Expected& expected,
                 const char* what) const {
    const Long apart = std::fabs(ValueOf(array, i) - expected.value);
    CheckThat(apart <= kMostUlp * 0x1p-53L * expected.magnitude, i, what);
  }
  void CheckThat(bool ok, std::size_t i, const char* what) const {
    if (ok) return;
    Check(false, std::string(what) + " of element " + std::to_string(i) + ", " + case_.Name(isa_));
  }

  Case case_;
  const char* isa_;
  LeafArrays<GuardedBuffer> arrays_;
  std::vector<Element> old_;
};

// Extreme gradients have no precision to compare; the other harness has them.
void TestUpdate(const InstructionSet& isa) {
  for (Case c : Float64Cases(515)) {
    c.gradients = {};
    c.in_place = false;
    const Step step(isa, c);
    for (std::size_t i = 0; i < c.total(); ++i) {
      const bool odd = c.counting == Counting::kPerMember && i / c.n % 2 == 1;
      if (c.skip != odd) {
        step.CheckSkipped(i);
      } else {
        step.CheckApplied(i);
      }
    }
  }
}

// A divisor and a limit that float32 would round.
void TestScalarsAreNotRounded(const InstructionSet& isa) {
  Case c = Float64Case(1);
  c.zero_moments = ZeroMoments::kNull;
  c.gradients = {1.0};
  const LeafArrays<GuardedBuffer> arrays(c);
  const LeafOperands leaf = arrays.Operands();
  const double hyper[kNumHyper] = {0.1, 0.9, 0.99, 1e-8, 0, 0, 0.1, 0.1, 0.5};
  const int count = 0;
  const unsigned char skip = 0;
  StepOperands operands;
  operands.count = {&count};
  operands.skip_update = {&skip};
  operands.hyper_bits = reinterpret_cast<const Word32*>(hyper);
  UpdateOptions options = c.Options();
  options.maximize = false;
  InlinePool pool;
  Update(pool, 1, isa, operands, {leaf}, options);
  const auto mu = [&] { return LoadAs(DType::kFloat64, leaf.mu_out, 0); };
  Check(mu() == (1.0 - 0.9) * (1.0 / 0.1), std::string("divisor, ") + isa.name);
  options.clip = Clip::kValue;
  Update(pool, 1, isa, operands, {leaf}, options);
  Check(mu() == (1.0 - 0.9) * 0.1, std::string("limit, ") + isa.name);
}

struct Totals {
  double norm = 0.0;
  float largest = 0.0f;
  int nonfinite = 0;
};

Totals Analyze(const InstructionSet& isa, const std::vector<double>& gradient) {
  const float scale = 1.0f;
  std::vector<StatsRow> rows(1);
  AnalyzeOperands operands;
  operands.gradient_scale = {&scale};
  operands.leaves = {{gradient.data(), static_cast<long long>(gradient.size()), DType::kFloat64}};
  operands.rows = rows.data();
  operands.members = 1;
  operands.chunk_elements = kStatsTileElements;
  InlinePool pool;
  AnalyzeGradient(pool, 1, isa, operands);
  const StatsReport report = ReportOf(SumsOf(rows[0]));
  return {report.norm, report.max_abs, report.nonfinite};
}

// Finite numbers beyond float32 are not counted, and those below it vanish.
void TestStatistics(const InstructionSet& isa) {
  const double inf = BitsToFloat(kInfinityBits);
  const double nan = BitsToFloat(kNanBits);
  const std::string name = std::string(", ") + isa.name;
  const Totals large = Analyze(isa, {1e300, -1e300, 0x1.fffffffffffffp1023, 1.0});
  Check(large.nonfinite == 0 && large.largest == kMaxFloat && large.norm == kMaxFloat,
        "numbers beyond float32" + name);
  Check(Analyze(isa, {-1e300}).largest == kMaxFloat, "a negative number beyond float32" + name);
  Check(Analyze(isa, {3e38, 0x1.ffffffp127}).largest == kMaxFloat, "rounding to infinity" + name);
  const Totals small = Analyze(isa, {0x1p-1074, -1e-310, 0.0, 3.0, 4.0});
  Check(small.nonfinite == 0 && small.norm == 5.0 && small.largest == 4.0f, "subnormals" + name);
  Check(Analyze(isa, {0x1p-149}).norm == 0x1p-149, "float32's smallest number" + name);
  const Totals mixed = Analyze(isa, {inf, 1e300, -inf, 2.0});
  Check(mixed.nonfinite == 2 && std::isinf(mixed.norm), "infinities" + name);
  const Totals nans = Analyze(isa, {inf, nan, -nan, 1e300, 0.5});
  Check(nans.nonfinite == 3 && std::isnan(nans.norm), "NaNs" + name);
  std::vector<double> ordinary(4000);
  Fill(ordinary.data(), DType::kFloat64, ordinary.size(), 5, false);
  Long sum = 0;
  for (const Long x : ordinary) sum += x * x;
  const Long norm = std::sqrt(sum);
  Check(std::fabs(Analyze(isa, ordinary).norm - norm) <= 0x1p-22L * norm, "norm" + name);
}

int Main() {
  int num_sets = 0;
  const InstructionSet* sets = SupportedInstructionSets(&num_sets);
  for (int i = 0; i < num_sets; ++i) {
    std::printf("instruction set: %s\n", sets[i].name);
    TestUpdate(sets[i]);
    TestScalarsAreNotRounded(sets[i]);
    TestStatistics(sets[i]);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jfa::cpu

int main() { return jfa::cpu::Main(); }
