// The CPU kernels for the compiler's baseline.
#include <cstdint>

#include "cpu/kernels.h"

#define JFA_ISA portable
#include "cpu/analyze_chunk.inl"
#include "cpu/update_block.inl"
