// Compiled kernels on disk, so that NVRTC runs once for each source, compiler and architecture.
// Nothing here can fail a step: what cannot be read is compiled again, what cannot be written is
// not kept.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_KERNEL_CACHE_H_
#define JAX_FUSED_ADAMW_CC_CUDA_KERNEL_CACHE_H_

#include <string>
#include <vector>

namespace jfa::cuda {

// $JAX_FUSED_ADAMW_CACHE_DIR, or jax_fused_adamw in $XDG_CACHE_HOME or ~/.cache; empty for none.
std::string KernelCacheDirectory();

// The bytes stored under `key`, or nothing if there are none or their checksum is wrong.
std::vector<char> ReadCachedKernel(const std::string& key);

void WriteCachedKernel(const std::string& key, const std::vector<char>& cubin);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_KERNEL_CACHE_H_
