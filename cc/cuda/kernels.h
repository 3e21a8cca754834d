// Kernels as the driver knows them: loaded once for each context, from the fatbin that nvcc made
// or from what NVRTC makes here; and their launch.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_KERNELS_H_
#define JAX_FUSED_ADAMW_CC_CUDA_KERNELS_H_

#include <string>
#include <vector>

#include "core/adamw.h"
#include "cuda/driver.h"
#include "cuda/embedded.h"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {

enum class Compiler { kNone, kNvcc, kNvrtc };

// nvcc's where the build had one, else NVRTC; JAX_FUSED_ADAMW_CUDA_COMPILER=nvcc|nvrtc chooses.
// With kNone, `error` says why.
Compiler ChooseCompiler(std::string* error);

// An entry point of any source.
struct EntryPoint {
  const EmbeddedKernels* kernels;
  std::string group;                // what is compiled together at run time
  std::vector<std::string> macros;  // and selects it: NAME=VALUE
  std::string name;
};

// One entry point of update_kernel.cu.
struct KernelName {
  Grid grid;
  LeafClass leaf_class;
  Amsgrad amsgrad;
  bool nesterov;

  int Rule() const { return 2 * static_cast<int>(amsgrad) + (nesterov ? 1 : 0); }
  std::string ClassAndRule() const;
  std::string Group() const;  // those, and whether it analyses
  std::string String() const;
  EntryPoint InGroup(const std::string& name) const;  // an entry point compiled with this one
};

struct Kernel {
  CuFunction function = nullptr;
  std::string error;  // empty on success

  bool ok() const { return error.empty(); }
};

// For the calling thread's current context. The first call may compile and load: not while a
// stream is being captured. Later ones only look up.
Kernel GetKernel(const EntryPoint& entry_point);
Kernel GetKernel(const KernelName& name);

// The kernel that only counts the step, from the module of another one.
Kernel GetCountStepKernel(const KernelName& same_module);

// Submits `blocks` blocks to the stream. Returns an error text, empty on success.
std::string Launch(CuStream stream, const Kernel& kernel, long long blocks, void** parameters,
                   unsigned threads = kThreads);

// The same of blocks that wait for each other: all run at the same time, or none. Sets `refused`
// where the driver says that they cannot, and ResidentBlocks to 0.
std::string LaunchTogether(CuStream stream, const Kernel& kernel, long long blocks,
                           void** parameters, unsigned threads, bool* refused);

// How many blocks of a launch can run at the same time; 0 where the device cannot tell them to. The
// first call asks the driver: not while a stream is being captured.
long long ResidentBlocks(const Kernel& kernel, unsigned threads);

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_KERNELS_H_
