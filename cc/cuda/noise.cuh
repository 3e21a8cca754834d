// The noise of a thread's elements (core/noise.h).
#ifndef JAX_FUSED_ADAMW_CC_CUDA_NOISE_CUH_
#define JAX_FUSED_ADAMW_CC_CUDA_NOISE_CUH_

#include "core/noise.h"
#include "cuda/io.cuh"
#include "cuda/table.h"

namespace jfa::cuda {

static_assert(kVector == kQuad, "a vector whose indices begin with a quad is one");

// Where the noise of a block's elements comes from: in shared memory, for all its threads.
struct BlockNoise {
  Noise noise;
  Word64 first_index;
  const IndexStride* strides;
};

// Words of the elements from local index `local` on: by one call of Philox where they are a quad.
__device__ __forceinline__ PhiloxWords NoiseOfVector(const BlockNoise& block, Word64 local) {
  PhiloxWords words{};
#pragma unroll 1
  for (int i = 0; i < kVector;) {
    const GlobalRun run = FindRun(block.first_index, block.strides, local + i);
    const PhiloxWords quad = block.noise.Quad(run.first / kQuad);
    const int place = static_cast<int>(run.first % kQuad);
    if (place == 0 && run.length >= kVector && i == 0) return quad;
    const int left = kQuad - place;
    const int taken = run.length < static_cast<Word64>(left) ? static_cast<int>(run.length) : left;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (i <= j && j < i + taken) words.word[j] = quad.Select(static_cast<Word32>(place + j - i));
    }
    i += taken;
  }
  return words;
}

// What is not rounded stochastically has no words.
struct VectorNoise {
  PhiloxWords moments;
  PhiloxWords param;
};

__device__ __forceinline__ RawVector<float> FromFloatStochastic(DType dtype, const Vector<float>& v,
                                                                const PhiloxWords& words,
                                                                int shift) {
  RawVector<float> raw{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const Word32 random = NoiseBits(words.word[i], shift);
    const Word32 half = dtype == DType::kBfloat16
                            ? StoreStochastic<Bfloat16>(v.value[i], random).bits
                            : StoreStochastic<Float16>(v.value[i], random).bits;
    raw.word[i / 2] |= half << (16 * (i % 2));
  }
  return raw;
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_NOISE_CUH_
