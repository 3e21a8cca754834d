// Kernels as the driver knows them: loaded once for each context, from the fatbin that nvcc made
// or from what NVRTC makes here.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_KERNELS_H_
#define JAX_FUSED_ADAMW_CC_CUDA_KERNELS_H_

#include <string>

#include "core/adamw.h"
#include "cuda/driver.h"
#include "cuda/table.h"

namespace jfa::cuda {

enum class Compiler { kNone, kNvcc, kNvrtc };

// nvcc's where the build had one, else NVRTC; JAX_FUSED_ADAMW_CUDA_COMPILER=nvcc|nvrtc chooses.
// With kNone, `error` says why.
Compiler ChooseCompiler(std::string* error);

// One entry point of update_kernel.cu.
struct KernelName {
  bool small_grid;
  LeafClass leaf_class;
  Amsgrad amsgrad;
  bool nesterov;

  int Rule() const { return 2 * static_cast<int>(amsgrad) + (nesterov ? 1 : 0); }
  std::string Group() const;  // what is compiled together at run time: rule and leaf class
  std::string String() const;
};

struct Kernel {
  CuFunction function = nullptr;
  std::string error;  // empty on success

  bool ok() const { return error.empty(); }
};

// For the calling thread's current context. The first call may compile and load: not while a
// stream is being captured. Later ones only look up.
Kernel GetKernel(const KernelName& name);

// The kernel that only counts the step, from the module of another one.
Kernel GetCountStepKernel(const KernelName& same_module);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_KERNELS_H_
