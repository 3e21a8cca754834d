// Files that the build puts into the module (cmake/embed.cmake writes the definitions).
#ifndef JAX_FUSED_ADAMW_CC_CUDA_EMBEDDED_H_
#define JAX_FUSED_ADAMW_CC_CUDA_EMBEDDED_H_

#include <cstddef>

namespace jfa::cuda {

struct EmbeddedFile {
  const char* name;  // as the source includes it; null ends the list
  const char* text;
};

// A source with kernels in it: as text for NVRTC, and as nvcc compiled it at build time.
struct EmbeddedKernels {
  const char* name;  // "update_kernel.cu"
  const char* source;
  const char* hash;             // of the source, the headers and the options of compiling
  const unsigned char* fatbin;  // null where there was no nvcc
};

namespace embedded {
extern const EmbeddedKernels update_kernel;
extern const EmbeddedKernels ladder_kernel;
}  // namespace embedded

const EmbeddedFile* EmbeddedHeaders();      // of both
const char* EmbeddedFatbinArchitectures();  // "75 80 90 120-ptx", for people

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_EMBEDDED_H_
