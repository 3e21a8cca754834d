// What both harnesses test: cases, their arrays, the step's operands.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
#define JAX_FUSED_ADAMW_CC_TESTS_CASES_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "core/adamw.h"
#include "core/dtype.h"
#include "core/leaf.h"
#include "core/options.h"
#include "core/scalars.h"

namespace jfa::tests {

inline int failures = 0;

inline void Check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16};

// Pseudo-random values in [-1, 1), or their magnitudes.
inline void Fill(void* array, DType dtype, std::size_t n, unsigned seed, bool positive) {
  for (std::size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    float value = static_cast<float>(static_cast<int>(seed >> 8) - (1 << 23)) / (1 << 23);
    if (positive && value < 0) value = -value;
    if (dtype == DType::kFloat32) static_cast<float*>(array)[i] = value;
    if (dtype == DType::kBfloat16) static_cast<Bfloat16*>(array)[i] = Store<Bfloat16>(value);
    if (dtype == DType::kFloat16) static_cast<Float16*>(array)[i] = Store<Float16>(value);
  }
}

// Whether the old moments are zero. kNull has no buffers for them, as UpdateOptions says, and must
// give the bits of kFilled.
enum class ZeroMoments { kNo, kFilled, kNull };

// Whether a call counts the step, and whether each member has counters and a skip of its own.
enum class Counting { kNone, kShared, kPerMember };

struct Case {
  std::size_t n;
  std::size_t offset;  // elements
  DType param_dtype;
  DType grad_dtype;
  Amsgrad amsgrad;
  bool nesterov;
  bool write_params;
  bool skip;
  bool in_place;  // an output takes the buffer of its input, if there is one
  std::int64_t members;
  ZeroMoments zero_moments;
  Counting counting = Counting::kShared;
  StepCounts counts = {2, 7, 4};  // before the call, of the first member

  std::string Name(const char* kernel) const {
    return std::string(kernel) + " n=" + std::to_string(n) + " offset=" + std::to_string(offset) +
           " param=" + std::to_string(static_cast<int>(param_dtype)) +
           " grad=" + std::to_string(static_cast<int>(grad_dtype)) +
           " amsgrad=" + std::to_string(static_cast<int>(amsgrad)) +
           " nesterov=" + std::to_string(nesterov) +
           " write_params=" + std::to_string(write_params) + " skip=" + std::to_string(skip) +
           " in_place=" + std::to_string(in_place) + " members=" + std::to_string(members) +
           " zero_moments=" + std::to_string(static_cast<int>(zero_moments)) +
           " counting=" + std::to_string(static_cast<int>(counting)) +
           " count=" + std::to_string(counts.count);
  }

  bool has_nu_max() const { return amsgrad != Amsgrad::kOff; }
  bool null_moments() const { return zero_moments == ZeroMoments::kNull; }
  std::int64_t num_counts() const { return counting == Counting::kPerMember ? members : 1; }
  std::size_t total() const { return n * static_cast<std::size_t>(members); }

  UpdateOptions Options() const {
    return {amsgrad, clip, nesterov, true, write_params, null_moments(), members};
  }

  // The case that must have the same result: aligned, out of place, every input in a buffer.
  Case Plain() const {
    Case plain = *this;
    plain.offset = 0;
    plain.in_place = false;
    if (null_moments()) plain.zero_moments = ZeroMoments::kFilled;
    return plain;
  }
};

// Aligned, float32, parameters written in place.
inline Case CommonCase(std::size_t n) {
  return {n,    0, DType::kFloat32, DType::kFloat32, Amsgrad::kOff, false, true, false,
          true, 1, ZeroMoments::kNo};
}

// The arrays that a leaf may have, inputs first.
enum Array { kParam, kGrad, kMu, kNu, kNuMax, kOut, kMuOut, kNuOut, kNuMaxOut, kNumArrays };

inline bool IsInput(int array) { return array < kOut; }

inline DType ArrayDType(const Case& c, int array) {
  if (array == kGrad) return c.grad_dtype;
  return array == kParam || array == kOut ? c.param_dtype : DType::kFloat32;
}

inline std::size_t ElementBytes(const Case& c, int array) {
  return static_cast<std::size_t>(SizeOf(ArrayDType(c, array)));
}

inline std::size_t ArrayBytes(const Case& c, int array) {
  return c.total() * ElementBytes(c, array);
}

// The array that takes an output: its own or its input's.
inline int ArrayOfOutput(const Case& c, int output) {
  const bool has_input = output == kOut ? c.write_params : !c.null_moments();
  if (!c.in_place || !has_input) return output;
  return output == kOut ? kParam : kMu + (output - kMuOut);
}

inline bool HasArray(const Case& c, int array) {
  if ((array == kNuMax || array == kNuMaxOut) && !c.has_nu_max()) return false;
  if (!IsInput(array)) return ArrayOfOutput(c, array) == array;
  return array == kParam || array == kGrad || !c.null_moments();
}

// The seed tells leaves apart.
inline void FillInput(void* array, const Case& c, int input, unsigned seed) {
  if (input >= kMu && c.zero_moments != ZeroMoments::kNo) {
    std::fill_n(static_cast<unsigned char*>(array), ArrayBytes(c, input), 0);
  } else {
    const unsigned array_seed = kOut * seed + static_cast<unsigned>(input) + 1;
    Fill(array, ArrayDType(c, input), c.total(), array_seed, input >= kNu);
  }
}

// `address(i)` is where array i lies.
template <typename Address>
LeafOperands MakeLeaf(const Case& c, const Address& address) {
  const auto array = [&](int i) -> void* { return HasArray(c, i) ? address(i) : nullptr; };
  const auto output = [&](int i) { return array(ArrayOfOutput(c, i)); };
  LeafOperands leaf;
  leaf.param = array(kParam);
  leaf.grad = array(kGrad);
  leaf.mu = static_cast<float*>(array(kMu));
  leaf.nu = static_cast<float*>(array(kNu));
  leaf.nu_max = static_cast<float*>(array(kNuMax));
  leaf.out = output(kOut);
  leaf.mu_out = static_cast<float*>(output(kMuOut));
  leaf.nu_out = static_cast<float*>(output(kNuOut));
  leaf.nu_max_out = static_cast<float*>(output(kNuMaxOut));
  leaf.num_elements = static_cast<long long>(c.total());
  leaf.param_dtype = c.param_dtype;
  leaf.grad_dtype = c.grad_dtype;
  leaf.decays = true;
  return leaf;
}

inline constexpr unsigned char kCanary = 0xa5;

// `bytes` of host memory at an address that is `offset` bytes behind a 64-byte boundary.
class GuardedBuffer {
 public:
  GuardedBuffer(std::size_t bytes, std::size_t offset)
      : bytes_(bytes), storage_(64 + offset + 2 * kCanaryBytes + bytes, kCanary) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data() + kCanaryBytes);
    data_ = reinterpret_cast<unsigned char*>((address + 63) / 64 * 64 + offset);
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }
  void Write(const std::vector<unsigned char>& host) { std::copy(host.begin(), host.end(), data_); }
  std::vector<unsigned char> Read() const { return {data_, data_ + bytes_}; }

  bool Intact() const {
    for (const unsigned char* p = storage_.data(); p < data_; ++p) {
      if (*p != kCanary) return false;
    }
    for (const unsigned char* p = data_ + bytes_; p < storage_.data() + storage_.size(); ++p) {
      if (*p != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kCanaryBytes = 64;
  std::size_t bytes_;
  std::vector<unsigned char> storage_;
  unsigned char* data_;
};

// The arrays that a case has, each in a Buffer, of the host or a device. Outputs begin as canaries:
// one that is not written differs from the expected bits.
template <typename Buffer>
class LeafArrays {
 public:
  explicit LeafArrays(const Case& c) : case_(c) {
    for (int i = 0; i < kNumArrays; ++i) {
      if (!HasArray(c, i)) continue;
      const std::size_t bytes = ArrayBytes(c, i);
      Buffer& buffer = buffers_.try_emplace(i, bytes, c.offset * ElementBytes(c, i)).first->second;
      if (!IsInput(i)) continue;
      std::vector<unsigned char> host(bytes);
      FillInput(host.data(), c, i, 0);
      buffer.Write(host);
    }
  }

  LeafOperands Operands() const {
    return MakeLeaf(case_, [&](int i) { return buffers_.at(i).template As<void>(); });
  }

  // Checks the canaries too.
  std::vector<unsigned char> ReadOutputs(const char* kernel) const {
    std::vector<unsigned char> bytes;
    for (int output = kOut; output <= (case_.has_nu_max() ? kNuMaxOut : kNuOut); ++output) {
      const std::vector<unsigned char> part = buffers_.at(ArrayOfOutput(case_, output)).Read();
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    for (const auto& [array, buffer] : buffers_) {
      Check(buffer.Intact(), "canary, array " + std::to_string(array) + ", " + case_.Name(kernel));
    }
    return bytes;
  }

 private:
  Case case_;
  std::map<int, Buffer> buffers_;
};

inline int SaturatingSum(int a, std::int64_t b) {
  return static_cast<int>(std::min<std::int64_t>(a + b, 0x7fffffff));
}

// The step's scalars, in Buffers of the host or a device. The counters share one: the old ones,
// then the new ones unless they take the place of the old, a canary on each side of each array.
template <typename Buffer>
class StepScalars {
 public:
  explicit StepScalars(const Case& c)
      : case_(c),
        image_(static_cast<std::size_t>(Place(2 * kNumCounters, 0)), kCanaryInt),
        counters_(image_.size() * sizeof(int), 0),
        skip_(static_cast<std::size_t>(c.num_counts()), 0),
        hyper_bits_(kNumHyper * sizeof(double), 0) {
    std::vector<unsigned char> skip;
    for (std::int64_t i = 0; i < c.num_counts(); ++i) {
      SetCounters(&image_, 0, i, OldCounts(i));
      skip.push_back(Skips(i));
    }
    counters_.Write(BytesOf(image_.data(), image_.size()));
    skip_.Write(skip);
    const double hyper[kNumHyper] = {1e-2, 0.9, 0.99, 1e-6, 1e-9, 0.1, 3.0};
    hyper_bits_.Write(BytesOf(hyper, kNumHyper));
  }

  StepOperands Operands() const {
    const bool per_member = case_.counting == Counting::kPerMember;
    int* const counters = counters_.template As<int>();
    StepOperands operands;
    operands.count = {counters + Place(0, 0), per_member};
    operands.skip_update = {skip_.template As<unsigned char>(), per_member};
    operands.hyper_bits = hyper_bits_.template As<Word32>();
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
  static constexpr int kNumCounters = 3;
  static constexpr int kCanaryInt = static_cast<int>(kCanary * 0x01010101u);

  template <typename T>
  static std::vector<unsigned char> BytesOf(const T* values, std::size_t n) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values);
    return {bytes, bytes + n * sizeof(T)};
  }

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
  bool Skips(std::int64_t member) const { return case_.skip != (member % 2 == 1); }

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
};

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

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
