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

// Pseudo-random values in [-1, 1), or their magnitudes.
inline void Fill(void* array, DType dtype, std::size_t n, unsigned seed, bool positive) {
  for (std::size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    float value = static_cast<float>(static_cast<int>(seed >> 8) - (1 << 23)) / (1 << 23);
    if (positive && value < 0) value = -value;
    StoreAs(dtype, array, i, value);
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
  Clip clip = Clip::kOff;
  float max_grad = 0.125f;
  float norm = 1.0f;                  // of the first member
  std::optional<int> nonfinite = {};  // of the first member; without one none skips the step
  std::vector<float> gradients = {};  // repeated, in place of random ones

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
           " gradients=" + std::to_string(gradients.size());
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
    for (int output = kOut; output <= (case_.has_nu_max() ? kNuMaxOut : kNuOut); ++output) {
      std::vector<unsigned char> part = buffers_.at(ArrayOfOutput(case_, output)).Read();
      UnifyNans(ArrayDType(case_, output), &part);
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

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
