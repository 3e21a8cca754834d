// One call of the CUDA update without JAX, and the CPU's, whose bits it must have.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_CUDA_UPDATE_H_
#define JAX_FUSED_ADAMW_CC_TESTS_CUDA_UPDATE_H_

#include <string>
#include <vector>

#include "cpu/update.h"
#include "cuda/update.h"
#include "tests/cases.h"
#include "tests/device.h"
#include "tests/pools.h"
#include "tests/step_scalars.h"

namespace jfa::cuda {

using namespace jfa::tests;  // NOLINT: the harness's own vocabulary

// `steps` calls, more than one only in place.
inline void UpdateOnCpu(const std::vector<LeafOperands>& leaves, const Case& c, int steps = 1) {
  const StepScalars<GuardedBuffer> scalars(c, leaves.size());
  InlinePool pool;
  for (int i = 0; i < steps; ++i) {
    cpu::Update(pool, 1, *cpu::SelectInstructionSet(), scalars.Operands(), leaves, c.Options());
  }
  scalars.CheckCounters("cpu", steps);
}

inline void Prepare(const std::vector<LeafOperands>& leaves, const Case& c) {
  const std::string error = PrepareUpdate(leaves, c.Options());
  Check(error.empty(), error);
}

inline void Submit(CuStream stream, const StepScalars<DeviceBuffer>& scalars,
                   const std::vector<LeafOperands>& leaves, const Case& c) {
  const std::string error = Update(stream, scalars.Operands(), leaves, c.Options(), c.vectors);
  Check(error.empty(), error);
}

inline void UpdateOnGpu(const std::vector<LeafOperands>& leaves, const Case& c) {
  const StepScalars<DeviceBuffer> scalars(c, leaves.size());
  Prepare(leaves, c);
  Submit(nullptr, scalars, leaves, c);
  Require(Device().CtxSynchronize(), "cuCtxSynchronize");
  scalars.CheckCounters("cuda");
}

// Of one leaf.
inline void CheckCase(const Case& c) {
  const LeafArrays<GuardedBuffer> host(c.Plain());
  UpdateOnCpu({host.Operands()}, c.Plain());
  const LeafArrays<DeviceBuffer> device(c);
  UpdateOnGpu({device.Operands()}, c);
  Check(device.ReadOutputs("cuda") == host.ReadOutputs("cpu"), "bits, " + c.Name("cuda"));
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CUDA_UPDATE_H_
