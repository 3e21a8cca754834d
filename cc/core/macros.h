// Qualifiers that let one source serve g++/clang and nvcc/NVRTC.
#ifndef JAX_FUSED_ADAMW_CC_CORE_MACROS_H_
#define JAX_FUSED_ADAMW_CC_CORE_MACROS_H_

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define JFA_HOST_DEVICE __host__ __device__ __forceinline__
#else
// always_inline is a correctness constraint on the CPU: the same header is compiled for several
// instruction sets, and an out-of-line copy built for AVX-512 must never be linked into the
// portable path.
#define JFA_HOST_DEVICE inline __attribute__((always_inline))
#endif

#endif  // JAX_FUSED_ADAMW_CC_CORE_MACROS_H_
