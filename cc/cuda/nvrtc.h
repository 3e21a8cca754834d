// Compiles kernels at run time with the NVRTC library that jax[cuda12] and
// jax[cuda13] install.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_NVRTC_H_
#define JAX_FUSED_ADAMW_CC_CUDA_NVRTC_H_

#include <string>
#include <vector>

#include "cuda/embedded.h"

namespace jfa::cuda {

// Where to look, in order: full paths of libnvrtc-builtins and libnvrtc. NVRTC opens its builtins
// by name, so they are loaded first. To be called before the first use.
void SetNvrtcLibraries(std::vector<std::string> paths);

struct Compilation {
  std::vector<char> cubin;
  std::string error;  // empty on success

  bool ok() const { return error.empty(); }
};

// "13.0", or empty where no NVRTC can be loaded (then NvrtcError says why).
std::string NvrtcVersion();
std::string NvrtcError();

// `kernels` for compute capability `architecture`, for example 90; `macros` (NAME=VALUE) say which
// of them.
Compilation CompileWithNvrtc(const EmbeddedKernels& kernels, const std::vector<std::string>& macros,
                             int architecture);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_NVRTC_H_
