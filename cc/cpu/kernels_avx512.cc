// The CPU kernels for AVX-512 F, BW, DQ and VL (flags in CMakeLists.txt).
#include <cstdint>

#include "cpu/kernels.h"

#define JFA_ISA avx512
#include "cpu/analyze_chunk.inl"
#include "cpu/update_block.inl"
