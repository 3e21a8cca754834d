#include "ladder/cuda_launch.h"

#include "core/chunks.h"
#include "cuda/embedded.h"
#include "cuda/kernels.h"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

Kernel GetRung(Rung rung) {
  const char* name = rung == Rung::kNaive ? "LadderNaive" : "LadderVectors";
  return GetKernel(EntryPoint{&embedded::ladder_kernel, "Ladder", {}, name});
}

// The optimizer's own: counting is no part of what the rungs show.
Kernel GetCounter() {
  return GetCountStepKernel({Grid::kLarge, LeafClass::kFloat32, Amsgrad::kOff, false});
}

std::string LaunchLeaf(CuStream stream, const Kernel& kernel, int elements_per_block,
                       StepOperands step, LeafOperands leaf) {
  if (leaf.num_elements == 0) return "";
  void* parameters[] = {&step,        &leaf.out,    &leaf.grad,
                        &leaf.mu_out, &leaf.nu_out, &leaf.num_elements};
  return Launch(stream, kernel, CeilDivide(leaf.num_elements, elements_per_block), parameters);
}

}  // namespace

std::string PrepareLadder(Rung rung) {
  const Kernel kernel = GetRung(rung);
  return kernel.ok() ? GetCounter().error : kernel.error;
}

std::string LaunchLadder(CuStream stream, Rung rung, const StepOperands& operands,
                         const std::vector<LeafOperands>& leaves) {
  const Kernel kernel = GetRung(rung);
  const Kernel counter = GetCounter();
  if (!kernel.ok()) return kernel.error;
  if (!counter.ok()) return counter.error;
  const int elements_per_block = rung == Rung::kNaive ? kThreads : kChunk;
  for (const LeafOperands& leaf : leaves) {
    const std::string error = LaunchLeaf(stream, kernel, elements_per_block, operands, leaf);
    if (!error.empty()) return error;
  }
  StepOperands step = operands;
  long long num_counts = 1;
  void* parameters[] = {&step, &num_counts};
  return Launch(stream, counter, 1, parameters);
}

}  // namespace jfa::cuda
