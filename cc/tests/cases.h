// What both harnesses of the update test: cases and their arrays.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
#define JAX_FUSED_ADAMW_CC_TESTS_CASES_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/adamw.h"
#include "core/dtype.h"
#include "core/leaf.h"
#include "core/options.h"
#include "core/scalars.h"
#include "tests/buffers.h"
#include "tests/check.h"

namespace jfa::tests {

// Pseudo-random values in [-1, 1), or their magnitudes; of float64 with all its bits.
inline void Fill(void* array, DType dtype, std::size_t n, unsigned seed, bool positive) {
  for (std::size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    double value = static_cast<double>(static_cast<int>(seed >> 8) - (1 << 23)) / (1 << 23);
    if (dtype == DType::kFloat64) value += (seed * 2654435761u) * 0x1p-56;
    if (positive && value < 0) value = -value;
    StoreAs(dtype, array, i, value);
  }
}

// Whether the old moments are zero. kNull has no buffers for them, as UpdateOptions says, and must
// give the bits of kFilled.
enum class ZeroMoments { kNo, kFilled, kNull };

// Whether a call counts the step, and whether each member has counters and a skip of its own.
enum class Counting { kNone, kShared, kPerMember };

// Where a leaf lies in the whole tree, for the noise.
struct Place {
  Word32 leaf_id = 0;
  Word64 first_index = 0;
  std::vector<IndexStride> strides = {};
};

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
  Clip clip = Clip::kOff;
  float max_grad = 0.125f;
  float norm = 1.0f;                   // of the first member
  std::optional<int> nonfinite = {};   // of the first member; without one none skips the step
  std::vector<double> gradients = {};  // repeated, in place of random ones
  DType mu_dtype = DType::kFloat32;
  DType nu_dtype = DType::kFloat32;
  std::optional<DType> copies = {};
  bool has_ema = false;
  bool stochastic_moments = false;
  bool stochastic_params = false;
  Place place = {};
  double learning_rate = 1e-2;
  double lr_scale = 1.0;  // of the first leaf
  int vectors = 0;        // as for cuda::Update

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
           " count=" + std::to_string(counts.count) +
           " clip=" + std::to_string(static_cast<int>(clip)) + " norm=" + std::to_string(norm) +
           " nonfinite=" + (nonfinite ? std::to_string(*nonfinite) : "none") +
           " gradients=" + std::to_string(gradients.size()) + LowPrecisionName();
  }

  std::string LowPrecisionName() const {
    return " mu=" + std::to_string(static_cast<int>(mu_dtype)) +
           " nu=" + std::to_string(static_cast<int>(nu_dtype)) +
           " copies=" + (copies ? std::to_string(static_cast<int>(*copies)) : "none") +
           " ema=" + std::to_string(has_ema) + " stochastic=" + std::to_string(stochastic_moments) +
           std::to_string(stochastic_params) + " leaf_id=" + std::to_string(place.leaf_id) +
           " first_index=" + std::to_string(place.first_index) +
           " strides=" + std::to_string(place.strides.size()) +
           " lr_scale=" + std::to_string(lr_scale) + " vectors=" + std::to_string(vectors);
  }

  bool has_noise() const { return stochastic_moments || stochastic_params; }
  bool has_nu_max() const { return amsgrad != Amsgrad::kOff; }
  bool null_moments() const { return zero_moments == ZeroMoments::kNull; }
  std::int64_t num_counts() const { return counting == Counting::kPerMember ? members : 1; }
  std::size_t total() const { return n * static_cast<std::size_t>(members); }

  UpdateOptions Options() const {
    return {amsgrad,          clip,
            nesterov,         true,
            write_params,     null_moments(),
            members,          mu_dtype,
            nu_dtype,         copies.has_value(),
            has_ema,          stochastic_moments,
            stochastic_params};
  }

  // The case that must have the same result: aligned, out of place, every input in a buffer, the
  // learning rate scaled beforehand.
  Case Plain() const {
    Case plain = *this;
    plain.offset = 0;
    plain.in_place = false;
    if (null_moments()) plain.zero_moments = ZeroMoments::kFilled;
    plain.learning_rate = learning_rate * lr_scale;
    plain.lr_scale = 1.0;
    return plain;
  }
};

// Aligned, float32, parameters written in place.
inline Case CommonCase(std::size_t n) {
  return {n,    0, DType::kFloat32, DType::kFloat32, Amsgrad::kOff, false, true, false,
          true, 1, ZeroMoments::kNo};
}

inline Case Float64Case(std::size_t n) {
  Case c = CommonCase(n);
  c.param_dtype = c.grad_dtype = c.mu_dtype = c.nu_dtype = DType::kFloat64;
  return c;
}

// The arrays that a leaf may have, inputs first.
enum Array {
  kParam,
  kGrad,
  kMu,
  kNu,
  kNuMax,
  kCopy,
  kEma,
  kOut,
  kMuOut,
  kNuOut,
  kNuMaxOut,
  kCopyOut,
  kEmaOut,
  kNumArrays
};

inline bool IsInput(int array) { return array < kOut; }

inline DType ArrayDType(const Case& c, int array) {
  switch (array) {
    case kParam:
    case kOut:
      return c.param_dtype;
    case kGrad:
      return c.grad_dtype;
    case kMu:
    case kMuOut:
      return c.mu_dtype;
    case kCopy:
    case kCopyOut:
      return c.copies.value_or(DType::kFloat32);
    case kEma:
    case kEmaOut:
      return ArithmeticOf(c.param_dtype);
    default:
      return c.nu_dtype;
  }
}

inline bool IsMoment(int array) {
  return (kMu <= array && array <= kNuMax) || (kMuOut <= array && array <= kNuMaxOut);
}

inline std::size_t ElementBytes(const Case& c, int array) {
  return static_cast<std::size_t>(SizeOf(ArrayDType(c, array)));
}

inline std::size_t ArrayBytes(const Case& c, int array) {
  return c.total() * ElementBytes(c, array);
}

// The array that takes an output: its own or its input's.
inline int ArrayOfOutput(const Case& c, int output) {
  const bool has_input = output == kOut ? c.write_params : !(IsMoment(output) && c.null_moments());
  if (!c.in_place || !has_input) return output;
  return output == kOut ? kParam : kMu + (output - kMuOut);
}

inline bool HasArray(const Case& c, int array) {
  if ((array == kNuMax || array == kNuMaxOut) && !c.has_nu_max()) return false;
  if ((array == kCopy || array == kCopyOut) && !c.copies) return false;
  if ((array == kEma || array == kEmaOut) && !c.has_ema) return false;
  if (!IsInput(array)) return ArrayOfOutput(c, array) == array;
  return !IsMoment(array) || !c.null_moments();
}

// The seed tells leaves apart.
inline void FillInput(void* array, const Case& c, int input, unsigned seed) {
  if (IsMoment(input) && c.zero_moments != ZeroMoments::kNo) {
    std::fill_n(static_cast<unsigned char*>(array), ArrayBytes(c, input), 0);
  } else {
    const unsigned array_seed = kOut * seed + static_cast<unsigned>(input) + 1;
    Fill(array, ArrayDType(c, input), c.total(), array_seed, input == kNu || input == kNuMax);
  }
  if (input != kGrad || c.gradients.empty()) return;
  for (std::size_t i = 0; i < c.total(); ++i) {
    StoreAs(c.grad_dtype, array, i, c.gradients[i % c.gradients.size()]);
  }
}

// `address(i)` is where array i lies.
template <typename Address>
LeafOperands MakeLeaf(const Case& c, const Address& address) {
  const auto array = [&](int i) -> void* { return HasArray(c, i) ? address(i) : nullptr; };
  const auto output = [&](int i) { return array(ArrayOfOutput(c, i)); };
  LeafOperands leaf{};
  leaf.param = array(kParam);
  leaf.grad = array(kGrad);
  leaf.mu = array(kMu);
  leaf.nu = array(kNu);
  leaf.nu_max = array(kNuMax);
  leaf.copy = array(kCopy);
  leaf.ema = array(kEma);
  leaf.out = output(kOut);
  leaf.mu_out = output(kMuOut);
  leaf.nu_out = output(kNuOut);
  leaf.nu_max_out = output(kNuMaxOut);
  leaf.copy_out = output(kCopyOut);
  leaf.ema_out = output(kEmaOut);
  leaf.num_elements = static_cast<long long>(c.total());
  leaf.param_dtype = c.param_dtype;
  leaf.grad_dtype = c.grad_dtype;
  leaf.copy_dtype = ArrayDType(c, kCopy);
  leaf.decays = true;
  leaf.lr_scale = c.lr_scale;
  leaf.leaf_id = c.place.leaf_id;
  std::copy(c.place.strides.begin(), c.place.strides.end(), leaf.strides);
  return leaf;
}

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

  // Each NaN as the same one: what it carries is left to the platform. Checks the canaries too.
  std::vector<unsigned char> ReadOutputs(const char* kernel) const {
    std::vector<unsigned char> bytes;
    for (int output = kOut; output < kNumArrays; ++output) {
      const int array = ArrayOfOutput(case_, output);
      if (HasArray(case_, array)) Append(array, &bytes);
    }
    for (const auto& [array, buffer] : buffers_) {
      Check(buffer.Intact(), "canary, array " + std::to_string(array) + ", " + case_.Name(kernel));
    }
    return bytes;
  }

 private:
  void Append(int array, std::vector<unsigned char>* bytes) const {
    std::vector<unsigned char> part = buffers_.at(array).Read();
    UnifyNans(ArrayDType(case_, array), &part);
    bytes->insert(bytes->end(), part.begin(), part.end());
  }

  Case case_;
  std::map<int, Buffer> buffers_;
};

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
