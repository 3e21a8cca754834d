// What both harnesses test: cases, their inputs, the step's operands.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
#define JAX_FUSED_ADAMW_CC_TESTS_CASES_H_

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/adamw.h"
#include "core/dtype.h"
#include "core/leaf.h"
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

struct Case {
  std::size_t n;
  std::size_t offset;  // elements
  DType param_dtype;
  DType grad_dtype;
  Amsgrad amsgrad;
  bool nesterov;
  bool write_params;
  bool skip;
  bool in_place;
  std::int64_t members;

  std::string Name(const char* kernel) const {
    return std::string(kernel) + " n=" + std::to_string(n) + " offset=" + std::to_string(offset) +
           " param=" + std::to_string(static_cast<int>(param_dtype)) +
           " grad=" + std::to_string(static_cast<int>(grad_dtype)) +
           " amsgrad=" + std::to_string(static_cast<int>(amsgrad)) +
           " nesterov=" + std::to_string(nesterov) +
           " write_params=" + std::to_string(write_params) + " skip=" + std::to_string(skip) +
           " in_place=" + std::to_string(in_place) + " members=" + std::to_string(members);
  }
};

// A leaf's five inputs, in the order param, grad, mu, nu, nu_max.
inline DType InputDType(const Case& c, int input) {
  return input == 0 ? c.param_dtype : input == 1 ? c.grad_dtype : DType::kFloat32;
}

inline void FillInput(void* array, const Case& c, int input) {
  const std::size_t total = c.n * static_cast<std::size_t>(c.members);
  Fill(array, InputDType(c, input), total, static_cast<unsigned>(input) + 1, input > 2);
}

// The step's scalars in host memory: nesterov's and maximize's settings are the caller's.
struct HostScalars {
  explicit HostScalars(bool skipped) : skip(skipped) {
    const double hyper[kNumHyper] = {1e-2, 0.9, 0.99, 1e-6, 1e-9, 0.1, 3.0};
    std::memcpy(hyper_bits, hyper, sizeof(hyper_bits));
  }

  int step = 3;
  unsigned char skip;
  Word32 hyper_bits[2 * kNumHyper];
};

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CASES_H_
