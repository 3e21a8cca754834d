// The whole step on the CPU: all leaves of a call, split over a thread pool. Knows neither XLA nor
// Python, so that the C++ harness drives it directly.
#ifndef JAX_FUSED_ADAMW_CC_CPU_UPDATE_H_
#define JAX_FUSED_ADAMW_CC_CPU_UPDATE_H_

#include <cstdint>
#include <vector>

#include "core/chunks.h"
#include "core/leaf.h"
#include "core/options.h"
#include "core/scalars.h"
#include "cpu/float_env.h"
#include "cpu/kernels.h"
#include "cpu/parallel_for.h"

namespace jfa::cpu {

// 64 Ki elements are 1.8 MB of traffic: near 40 us at 45 GB/s, far above the cost of drawing an
// index, and small enough to balance two threads over one leaf.
inline constexpr std::int64_t kBlockElements = 64 * 1024;

// Below this many elements waking a second thread costs more than it saves.
inline constexpr std::int64_t kParallelElements = 32 * 1024;

std::vector<UpdateStep> MakeSteps(const StepOperands& operands, const UpdateOptions& options);

// `first_index` is where the noise of the member's leaf begins.
UpdateBlock MakeBlock(const LeafOperands& leaf, const Block& where, const UpdateStep& step,
                      Word64 first_index);

template <typename Pool>
void Update(Pool& pool, std::int64_t num_threads, const InstructionSet& isa,
            const StepOperands& operands, const std::vector<LeafOperands>& leaves,
            const UpdateOptions& options) {
  const int num_leaves = static_cast<int>(leaves.size());
  std::vector<std::int64_t> first_block(leaves.size() + 1, 0);
  std::int64_t num_elements = 0;
  for (int i = 0; i < num_leaves; ++i) {
    const std::int64_t n = leaves[i].num_elements;
    num_elements += n;
    first_block[i + 1] =
        first_block[i] + BlocksInLeaf(options.members, n / options.members, kBlockElements);
  }
  const std::int64_t num_blocks = first_block[num_leaves];
  std::vector<UpdateStep> steps;
  {
    const ScopedDefaultFloatEnv float_env;
    steps = MakeSteps(operands, options);
  }
  const auto update_block = [&](std::int64_t index) {
    const int i = FindLeaf(first_block.data(), num_leaves, index);
    const LeafOperands& leaf = leaves[i];
    const std::int64_t block_in_leaf = index - first_block[i];
    const Block where = LocateBlock(block_in_leaf, leaf.num_elements / options.members,
                                    options.members, kBlockElements);
    const UpdateStep& step = steps[where.member];
    const Word64 first_index =
        operands.noise == nullptr ? 0 : operands.ReadFirstIndex(i, where.member);
    isa.update_block(step, MakeBlock(leaf, where, step, first_index));
  };
  std::int64_t num_helpers = num_elements < kParallelElements ? 0 : num_threads - 1;
  if (num_helpers > num_blocks - 1) num_helpers = num_blocks - 1;
  ParallelFor<ScopedDefaultFloatEnv>(pool, num_helpers, num_blocks, update_block);
  if (!operands.counts_step()) return;
  for (std::int64_t i = 0; i < operands.num_counts(options.members); ++i) {
    operands.WriteCounts(i, operands.ReadCounts(i), operands.Skips(i));
  }
}

}  // namespace jfa::cpu

#endif  // JAX_FUSED_ADAMW_CC_CPU_UPDATE_H_
