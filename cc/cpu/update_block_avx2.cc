// The update kernel for AVX2 (flags in CMakeLists.txt).
#include <cstdint>

#include "cpu/kernels.h"

#define JFA_ISA avx2
#include "cpu/update_block.inl"
