// The CPU kernels' interface: one block of one leaf. Compiled once for each instruction set from
// the cpu/*.inl; SelectInstructionSet picks the widest that the processor has.
#ifndef JAX_FUSED_ADAMW_CC_CPU_KERNELS_H_
#define JAX_FUSED_ADAMW_CC_CPU_KERNELS_H_

#include <cstdint>

#include "core/adamw.h"
#include "core/clip.h"
#include "core/dtype.h"
#include "core/noise.h"
#include "core/stats.h"

namespace jfa::cpu {

// A member's numbers, as the arithmetic has them.
template <typename Real>
struct StepNumbers {
  AdamWScalars<Real> scalars;
  GradientUnscale<Real> unscale;
  GradientClip<Real> clip;
  Ema<Real> ema;
};

// What is the same for every block of a member.
struct UpdateStep {
  bool is_float64;              // as UpdateOptions says
  StepNumbers<float> float32;   // unless it is
  StepNumbers<double> float64;  // if it is
  double learning_rate;         // before its rounding to them, for a leaf that scales it
  Amsgrad amsgrad;
  bool nesterov;
  bool write_params;  // out is the new parameter, else the update
  bool skip;
  DType mu_dtype;
  DType nu_dtype;  // of nu_max too
  bool has_ema;
  bool stochastic_moments;
  bool stochastic_params;
  PhiloxKey seed;  // if either
  Word32 number;   // 1-based, of the applied steps

  template <typename Real>
  JFA_HOST_DEVICE const StepNumbers<Real>& Numbers() const {
    if constexpr (RealTraits<Real>::kDType == DType::kFloat64) {
      return float64;
    } else {
      return float32;
    }
  }
};

// Pointers already stand at the block's first element. An output is its input's buffer or does
// not overlap any input.
struct UpdateBlock {
  const void* param;
  const void* grad;
  const void* mu;  // null for zeros, as nu and nu_max
  const void* nu;
  const void* nu_max;
  const void* copy;  // null without copies
  const void* ema;   // null without averages
  void* out;
  void* mu_out;
  void* nu_out;
  void* nu_max_out;
  void* copy_out;
  void* ema_out;
  std::int64_t num_elements;
  DType param_dtype;
  DType grad_dtype;
  DType copy_dtype;
  bool decays;
  double learning_rate;  // the leaf's
  // For noise: what it is of, and where the block lies in the member and in the whole leaf.
  Noise noise;
  std::int64_t offset;
  Word64 first_index;
  const IndexStride* strides;
};

// A chunk of a gradient, for statistics.
struct AnalyzeBlock {
  const void* grad;
  std::int64_t num_elements;
  DType grad_dtype;
  GradientUnscale<float> unscale;
};

using UpdateBlockFn = void (*)(const UpdateStep&, const UpdateBlock&);
using AnalyzeChunkFn = StatsRow (*)(const AnalyzeBlock&);

struct InstructionSet {
  const char* name;
  UpdateBlockFn update_block;
  AnalyzeChunkFn analyze_chunk;
};

// All sets this processor can run, widest first; the last is always "portable".
const InstructionSet* SupportedInstructionSets(int* count);

// The widest one, or the one that JAX_FUSED_ADAMW_CPU_ISA names; null where this processor does not
// have that.
const InstructionSet* SelectInstructionSet();

namespace portable {
void UpdateOneBlock(const UpdateStep& step, const UpdateBlock& block);
StatsRow AnalyzeChunk(const AnalyzeBlock& block);
}  // namespace portable
namespace avx2 {
void UpdateOneBlock(const UpdateStep& step, const UpdateBlock& block);
StatsRow AnalyzeChunk(const AnalyzeBlock& block);
}  // namespace avx2
namespace avx512 {
void UpdateOneBlock(const UpdateStep& step, const UpdateBlock& block);
StatsRow AnalyzeChunk(const AnalyzeBlock& block);
}  // namespace avx512

}  // namespace jfa::cpu

#endif  // JAX_FUSED_ADAMW_CC_CPU_KERNELS_H_
