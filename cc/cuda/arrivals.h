// Arrival counters: how the last block of a launch knows that it is the last.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_ARRIVALS_H_
#define JAX_FUSED_ADAMW_CC_CUDA_ARRIVALS_H_

namespace jfa::cuda {

// The index of the counter of launches that write a result there, or -1 when all are taken. Two
// such launches cannot run at the same time, since they write the same memory; any two others have
// different counters.
int ArrivalCounterOf(const void* result);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_ARRIVALS_H_
