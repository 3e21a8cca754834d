// Drives the CPU update without JAX: any alignment, exact allocations, every instruction set.
//
// Each buffer is one exact heap allocation with canaries on both sides, so that an access out of
// bounds is found here by the canary and in a sanitizer build by the allocator. Exits with 1
// on a failure.
#include "cpu/update.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/cases.h"
#include "tests/pools.h"
#include "tests/step_scalars.h"
#include "tests/update_cases.h"

namespace jfa::cpu {
namespace {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

std::vector<unsigned char> Run(const InstructionSet& isa, const Case& c, std::int64_t num_threads) {
  const LeafArrays<GuardedBuffer> arrays(c);
  const StepScalars<GuardedBuffer> scalars(c);
  if (num_threads == 0) {
    BusyPool pool;
    Update(pool, 4, isa, scalars.Operands(), {arrays.Operands()}, c.Options());
  } else {
    ThreadPool pool;
    Update(pool, num_threads, isa, scalars.Operands(), {arrays.Operands()}, c.Options());
  }
  scalars.CheckCounters(isa.name);
  return arrays.ReadOutputs(isa.name);
}

// Reference of each case: the plain one, of the portable kernel on one thread.
void CheckCase(const InstructionSet* sets, int num_sets, const Case& c) {
  const auto expected = Run(sets[num_sets - 1], c.Plain(), 1);
  for (int i = 0; i < num_sets; ++i) {
    Check(Run(sets[i], c, 1) == expected, "bits, " + c.Name(sets[i].name));
  }
}

void TestAlignments(const InstructionSet* sets, int num_sets) {
  for (const std::size_t n : {1, 3, 15, 16, 17, 33, 1023, 1024, 1025, 4099}) {
    for (std::size_t offset = 0; offset < 16; ++offset) {
      for (const DType param : kDTypes) {
        for (const DType grad : kDTypes) {
          for (const ZeroMoments zero : {ZeroMoments::kNo, ZeroMoments::kNull}) {
            CheckCase(
                sets, num_sets,
                {n, offset, param, grad, Amsgrad::kUncorrected, true, true, false, true, 1, zero});
          }
        }
      }
    }
  }
}

void TestOptions(const InstructionSet* sets, int num_sets) {
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType dtype : kDTypes) {
      for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
        for (const std::int64_t members : {1, 3}) {
          for (const ZeroMoments zero : {ZeroMoments::kNo, ZeroMoments::kNull}) {
            CheckCase(sets, num_sets,
                      {1000, 1, dtype, dtype, amsgrad, members == 1, (flags & 1) != 0,
                       (flags & 2) != 0, (flags & 4) != 0, members, zero});
          }
        }
      }
    }
  }
}

void TestCounters(const InstructionSet* sets, int num_sets) {
  for (const Case& c : CounterCases()) CheckCase(sets, num_sets, c);
}

void TestClip(const InstructionSet* sets, int num_sets) {
  for (const Case& c : ClipCases()) CheckCase(sets, num_sets, c);
}

void TestLrScales(const InstructionSet* sets, int num_sets) {
  for (const Case& c : LrScaleCases()) CheckCase(sets, num_sets, c);
}

// Each leaf of a call has a learning rate of its own.
void TestLrScalesOfLeaves(const InstructionSet& isa) {
  std::vector<Case> cases(5, CommonCase(300));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    cases[i].lr_scale = static_cast<double>(i) / 3.0;
  }
  std::vector<LeafArrays<GuardedBuffer>> arrays;
  std::vector<LeafOperands> leaves;
  for (const Case& c : cases) leaves.push_back(arrays.emplace_back(c).Operands());
  InlinePool pool;
  const StepScalars<GuardedBuffer> scalars(cases[0], leaves.size());
  Update(pool, 1, isa, scalars.Operands(), leaves, cases[0].Options());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Check(arrays[i].ReadOutputs(isa.name) == Run(isa, cases[i].Plain(), 1),
          "leaf among others, " + cases[i].Name(isa.name));
  }
}

void TestLowPrecision(const InstructionSet* sets, int num_sets) {
  for (const std::size_t n : {5, 258, 1001, 4099}) {
    for (const Case& c : LowPrecisionCases(n)) CheckCase(sets, num_sets, c);
  }
}

void TestFloat64(const InstructionSet* sets, int num_sets) {
  for (const std::size_t n : {2, 5, 17, 258, 1001}) {
    for (const Case& c : Float64Cases(n)) CheckCase(sets, num_sets, c);
  }
}

// Every element offset, the places taking turns.
void TestLowPrecisionAlignments(const InstructionSet* sets, int num_sets) {
  const std::vector<Place> places = Places();
  for (const std::size_t n : {1, 3, 17, 255, 257, 1025}) {
    for (std::size_t offset = 0; offset < 16; ++offset) {
      Case c = CommonCase(n);
      c.offset = offset;
      c.mu_dtype = c.nu_dtype = DType::kBfloat16;
      c.stochastic_moments = c.stochastic_params = true;
      c.has_ema = true;
      c.place = places[(n + offset) % places.size()];
      c.copies = offset % 2 == 0 ? DType::kBfloat16 : DType::kFloat16;
      CheckCase(sets, num_sets, c);
      c.copies = {};
      c.param_dtype = DType::kBfloat16;
      c.mu_dtype = DType::kFloat16;
      CheckCase(sets, num_sets, c);
    }
  }
}

// The update of one gradient from zero moments, as its first moment shows it. It is divided by -3.
void CheckClipped(const InstructionSet& isa, Case c, float expected) {
  c.zero_moments = ZeroMoments::kNull;
  const LeafArrays<GuardedBuffer> arrays(c);
  const StepScalars<GuardedBuffer> scalars(c);
  InlinePool pool;
  const LeafOperands leaf = arrays.Operands();
  Update(pool, 1, isa, scalars.Operands(), {leaf}, c.Options());
  const float mu = *static_cast<const float*>(leaf.mu_out);
  const float expected_mu = static_cast<float>(1.0 - 0.9) * expected;
  Check(mu == expected_mu || (mu != mu && expected != expected), "clipped, " + c.Name(isa.name));
}

void TestClippedValues(const InstructionSet& isa) {
  const float inf = BitsToFloat(kInfinityBits);
  const float nan = BitsToFloat(kNanBits);
  struct ByNorm {
    float gradient, norm, limit, expected;
  };
  const ByNorm by_norm[] = {
      {-3.0f, 4.0f, 2.0f, 0.5f},
      {-3.0f, 2.0f, 2.0f, 1.0f},
      {-3.0f, 1.0f, 2.0f, 1.0f},
      {3.0f, 4.0f, 2.0f, -0.5f},
      {-3.0f, inf, 2.0f, nan},
      {0.0f, nan, 2.0f, nan},
      {-3.0f, kMaxFloat, 0x1p126f, 0x1p-3f},  // the norm is 2^129
      {-3.0f, 3.0f, 1.0f, 1.0f / 3.0f},
      {-3.0f, 4.0f, 0.0f, 0.0f},
      {nan, 1.0f, 2.0f, nan},
      {-3.0f, 41.0f, 41.0f, 1.0f},       // 1 / 41 * 41 would be less
      {-3.0f, 7.0f, 3.0f, 0.42857146f},  // 3 / 7 would be 0.42857143

  };
  Case c = CommonCase(1);
  c.clip = Clip::kNorm;
  for (const ByNorm& example : by_norm) {
    c.gradients = {example.gradient};
    c.norm = example.norm;
    c.max_grad = example.limit;
    CheckClipped(isa, c, example.expected);
  }
  const std::pair<float, float> by_value[] = {{-3.0f, 0.5f}, {3.0f, -0.5f}, {-0.75f, 0.25f},
                                              {-inf, 0.5f},  {inf, -0.5f},  {nan, nan},
                                              {-1.5f, 0.5f}, {0.0f, 0.0f}};
  c.clip = Clip::kValue;
  c.max_grad = 0.5f;
  for (const auto& [gradient, expected] : by_value) {
    c.gradients = {gradient};
    CheckClipped(isa, c, expected);
  }
}

void TestThreads(const InstructionSet& isa) {
  const std::size_t many = 5 * kBlockElements + 17;
  Case c{many, 0, DType::kFloat32, DType::kBfloat16, Amsgrad::kOff, false, true, false,
         true, 1, ZeroMoments::kNo};
  for (const int kind : {0, 1, 2, 3, 4}) {
    if (kind == 4) c = Float64Case(many);
    c.zero_moments = (kind & 1) != 0 ? ZeroMoments::kNull : ZeroMoments::kNo;
    if ((kind & 2) != 0) {
      c.mu_dtype = c.nu_dtype = DType::kBfloat16;
      c.stochastic_moments = true;
      c.place = Places()[6];
    }
    const auto expected = Run(isa, c.Plain(), 1);
    for (const std::int64_t num_threads : {1, 2, 4, 16}) {
      Check(Run(isa, c, num_threads) == expected, "threads " + std::to_string(num_threads));
    }
    Check(Run(isa, c, 0) == expected, "a pool that is busy until the loop has returned");
  }
}

// Every float32 whose 13 low bits vary the rounding, and every 16-bit pattern both ways.
void TestConversions() {
  for (Word32 bits = 0; bits <= 0xffff; ++bits) {
    const Float16 half{static_cast<Word16>(bits)};
    const Bfloat16 brain{static_cast<Word16>(bits)};
    const bool half_nan = (bits & 0x7fffu) > 0x7c00u;
    const bool brain_nan = (bits & 0x7fffu) > 0x7f80u;
    Check(half_nan ? Load(half) != Load(half) : Store<Float16>(Load(half)).bits == bits, "float16");
    Check(brain_nan ? Load(brain) != Load(brain) : Store<Bfloat16>(Load(brain)).bits == bits,
          "bfloat16");
  }
#if defined(__FLT16_MAX__)
  for (std::uint64_t word = 0; word <= 0xffffffffu; word += 997) {
    const float value = BitsToFloat(static_cast<Word32>(word));
    if (value != value) continue;
    const _Float16 expected = static_cast<_Float16>(value);
    Word16 expected_bits;
    std::memcpy(&expected_bits, &expected, sizeof(expected_bits));
    Check(Store<Float16>(value).bits == expected_bits, "rounding to float16");
  }
#endif
}

int Main() {
  int num_sets = 0;
  const InstructionSet* sets = SupportedInstructionSets(&num_sets);
  for (int i = 0; i < num_sets; ++i) std::printf("instruction set: %s\n", sets[i].name);
  TestConversions();
  TestAlignments(sets, num_sets);
  TestOptions(sets, num_sets);
  TestCounters(sets, num_sets);
  TestClip(sets, num_sets);
  TestLrScales(sets, num_sets);
  for (int i = 0; i < num_sets; ++i) TestLrScalesOfLeaves(sets[i]);
  TestLowPrecision(sets, num_sets);
  TestLowPrecisionAlignments(sets, num_sets);
  TestFloat64(sets, num_sets);
  for (int i = 0; i < num_sets; ++i) TestClippedValues(sets[i]);
  TestThreads(sets[0]);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jfa::cpu

int main() { return jfa::cpu::Main(); }
