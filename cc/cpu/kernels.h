// The CPU kernels' interface: one block of one leaf. Compiled once for each instruction set from
// the cpu/*.inl; SelectInstructionSet picks the widest that the processor has.
#ifndef JAX_FUSED_ADAMW_CC_CPU_KERNELS_H_
#define JAX_FUSED_ADAMW_CC_CPU_KERNELS_H_

#include <cstdint>

#include "core/adamw.h"
#include "core/clip.h"
#include "core/dtype.h"
#include "core/stats.h"

namespace jfa::cpu {

// What is the same for every block of a member.
struct UpdateStep {
  AdamWScalars scalars;
  GradientUnscale unscale;
  GradientClip clip;
  Amsgrad amsgrad;
  bool nesterov;
  bool write_params;  // out is the new parameter, else the update
  bool skip;
};

// Pointers already stand at the block's first element. An output is its input's buffer or does
// not overlap any input.
struct UpdateBlock {
  const void* param;
  const void* grad;
  const float* mu;  // null for zeros, as nu and nu_max
  const float* nu;
  const float* nu_max;
  void* out;
  float* mu_out;
  float* nu_out;
  float* nu_max_out;
  std::int64_t num_elements;
  DType param_dtype;
  DType grad_dtype;
  float weight_decay;
};

// A chunk of a gradient, for statistics.
struct AnalyzeBlock {
  const void* grad;
  std::int64_t num_elements;
  DType grad_dtype;
  GradientUnscale unscale;
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
