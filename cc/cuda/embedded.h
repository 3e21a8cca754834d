// Files that the build puts into the module (cmake/embed.cmake writes the definitions).
#ifndef JAX_FUSED_ADAMW_CC_CUDA_EMBEDDED_H_
#define JAX_FUSED_ADAMW_CC_CUDA_EMBEDDED_H_

#include <cstddef>

namespace jfa::cuda {

struct EmbeddedFile {
  const char* name;  // as the source includes it; null ends the list
  const char* text;
};

const EmbeddedFile* EmbeddedHeaders();
const char* EmbeddedKernelSource();
const char* EmbeddedSourceHash();  // of all of them

// What nvcc compiled at build time: a fatbin, or null where there was no nvcc.
const unsigned char* EmbeddedFatbin();
const char* EmbeddedFatbinArchitectures();  // "75 80 90 120-ptx", for people

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_EMBEDDED_H_
