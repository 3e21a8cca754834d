// The CPU kernels for AVX2 (flags in CMakeLists.txt).
#include <cstdint>

#include "cpu/kernels.h"

#define JFA_ISA avx2
#include "cpu/analyze_chunk.inl"
#include "cpu/update_block.inl"
