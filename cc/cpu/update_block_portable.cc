// The update kernel for the compiler's baseline.
#include <cstdint>

#include "cpu/kernels.h"

#define JFA_ISA portable
#include "cpu/update_block.inl"
