// Drives the CUDA update without JAX, of one leaf, and compares its bits with the CPU's. Each array
// is one exact device allocation, so that compute-sanitizer finds the first byte beyond it; a
// pooled allocator would hide it. Exits with 1 on a failure.
#include "tests/cuda_update.h"

#include <cstdlib>
#include <iterator>
#include <vector>

#include "cuda/tuning.h"
#include "ladder/cuda_launch.h"
#include "tests/leaf_set.h"
#include "tests/update_cases.h"

namespace jfa::cuda {
namespace {

// Around a thread's 4 elements and a block's 512.
constexpr std::size_t kSizes[] = {0,   1,   2,   3,   4,   5,   7,    8,    31,   127, 128,
                                  129, 509, 511, 512, 513, 516, 1023, 1024, 1027, 2049};

// Some calls of each kernel do not count the step. Those of no element are among them: a launch
// only to count is for TestCounters.
Counting CountingOf(std::size_t n) { return n % 2 == 0 ? Counting::kNone : Counting::kShared; }

// Every rule and pair of dtypes at every element offset.
void TestShapesAndOffsets() {
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const bool nesterov : {false, true}) {
      for (const DType param : kDTypes) {
        for (const DType grad : kDTypes) {
          for (std::size_t offset = 0; offset < 16; ++offset) {
            const std::size_t n = kSizes[next++ % std::size(kSizes)];
            CheckCase({n, offset, param, grad, amsgrad, nesterov, true, false, true, 1,
                       ZeroMoments::kNo, CountingOf(n)});
          }
          for (const std::size_t n : kSizes) {
            CheckCase({n, next++ % 3, param, grad, amsgrad, nesterov, next % 2 == 0, false,
                       next % 3 != 0, 1, ZeroMoments::kNo, CountingOf(n)});
          }
        }
      }
    }
  }
}

// The same for a first step. The other options take turns, with a period that is prime to those of
// offset and n.
void TestZeroMoments() {
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType param : kDTypes) {
      for (const DType grad : kDTypes) {
        for (std::size_t offset = 0; offset < 8; ++offset, ++next) {
          const std::size_t flags = next % 17;
          const std::size_t n = kSizes[next % std::size(kSizes)];
          CheckCase({n, offset, param, grad, amsgrad, (flags & 1) != 0, (flags & 2) != 0,
                     (flags & 4) != 0, (flags & 8) != 0, 1, ZeroMoments::kNull, CountingOf(n)});
        }
      }
    }
  }
}

void TestOptions() {
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType dtype : kDTypes) {
      for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7}) {
        for (const std::int64_t members : {1, 3}) {
          for (const ZeroMoments zero : {ZeroMoments::kNo, ZeroMoments::kNull}) {
            CheckCase({1001, 0, dtype, dtype, amsgrad, false, (flags & 1) != 0, (flags & 2) != 0,
                       (flags & 4) != 0, members, zero});
          }
        }
      }
    }
  }
}

// The last case has more members than the kernel that counts for them has threads in a block.
void TestCounters() {
  std::vector<Case> cases = CounterCases();
  cases.push_back(CommonCase(1));
  cases.back().members = kThreads + 1;
  cases.back().counting = Counting::kPerMember;
  for (const Case& c : cases) CheckCase(c);
}

void TestClip() {
  for (const Case& c : ClipCases()) CheckCase(c);
}

void TestLrScales() {
  for (const Case& c : LrScaleCases()) CheckCase(c);
}

void TestLowPrecision() {
  for (const std::size_t n : {6, 514, 1028}) {
    for (const Case& c : LowPrecisionCases(n)) CheckCase(c);
  }
}

// bfloat16 moments, which have kernels of their own, at every element offset and place.
void TestBf16Moments() {
  const std::vector<Place> places = Places();
  std::size_t next = 0;
  for (const Amsgrad amsgrad : {Amsgrad::kOff, Amsgrad::kUncorrected, Amsgrad::kCorrected}) {
    for (const DType grad : {DType::kFloat32, DType::kBfloat16}) {
      for (const std::size_t n : kSizes) {
        Case c = CommonCase(n);
        c.mu_dtype = c.nu_dtype = DType::kBfloat16;
        c.amsgrad = amsgrad;
        c.grad_dtype = grad;
        c.offset = next % 3 == 0 ? next % 16 : 0;
        c.stochastic_moments = next % 5 != 0;
        c.nesterov = next % 2 == 0;
        c.write_params = next % 7 != 0;
        c.in_place = next % 4 != 0;
        c.place = places[next++ % places.size()];
        CheckCase(c);
      }
    }
  }
}

void TestFloat64() {
  for (const std::size_t n : {2, 4, 6, 129, 512, 514, 1028}) {
    for (const Case& c : Float64Cases(n)) CheckCase(c);
  }
}

// Every element offset of a vector and of a 16-byte access, with every gradient dtype.
void TestFloat64Offsets() {
  std::size_t next = 0;
  for (const DType grad : kAllDTypes) {
    for (std::size_t offset = 0; offset < 8; ++offset) {
      for (const std::size_t n : kSizes) {
        Case c = Float64Case(n);
        c.grad_dtype = grad;
        c.offset = offset;
        c.in_place = next++ % 2 == 0;
        c.has_ema = next % 3 == 0;
        c.counting = CountingOf(n);
        CheckCase(c);
      }
    }
  }
}  // The ladder's kernels give the bits of the CPU too, for what they take.
void TestLadder(Rung rung) {
  for (const std::size_t n : kSizes) {
    const Case c = CommonCase(n);
    UpdateOptions options = c.Options();
    options.maximize = false;
    const LeafSet set({c, CommonCase(100)});
    std::vector<unsigned char> host = set.image();
    DeviceBuffer device(host.size(), 0);
    device.Write(host);
    const auto leaves = [&](unsigned char* base) {
      std::vector<LeafOperands> both = set.Leaves({0, 1}, base);
      for (LeafOperands& leaf : both) leaf.decays = true;
      return both;
    };
    const StepScalars<GuardedBuffer> host_scalars(c);
    InlinePool pool;
    cpu::Update(pool, 1, *cpu::SelectInstructionSet(), host_scalars.Operands(), leaves(host.data()),
                options);
    const StepScalars<DeviceBuffer> scalars(c);
    std::string error = PrepareLadder(rung);
    Check(error.empty(), error);
    error = LaunchLadder(nullptr, rung, scalars.Operands(), leaves(device.As<unsigned char>()));
    Check(error.empty(), error);
    Require(Device().CtxSynchronize(), "cuCtxSynchronize");
    scalars.CheckCounters("ladder");
    Check(device.Read() == host, "bits of the ladder's rung, " + c.Name("cuda"));
  }
}

}  // namespace
}  // namespace jfa::cuda

int main(int argc, char** argv) {
  using namespace jfa::cuda;  // NOLINT: the tests
  return jfa::tests::RunTests(
      {TestShapesAndOffsets, TestZeroMoments, TestOptions, TestCounters, TestClip, TestLrScales,
       TestLowPrecision, TestBf16Moments, TestFloat64, TestFloat64Offsets,
       [] { TestLadder(Rung::kNaive); }, [] { TestLadder(Rung::kVectors); }},
      argc, argv);
}
