// Stochastic rounding of tiles, for the CPU kernel of the update.
#include "cpu/tiles.inl"

namespace jfa::cpu::JFA_ISA {
namespace {

// The words of whole quads, from the first one on.
void FillQuads(const Noise& noise, Word64 first_quad, std::int64_t num_quads, Word32* words) {
  const Noise source = noise;  // a local copy: the stores cannot change it
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < num_quads; ++i) {
    const PhiloxWords quad = source.Quad(first_quad + static_cast<Word64>(i));
    words[kQuad * i] = quad.word[0];
    words[kQuad * i + 1] = quad.word[1];
    words[kQuad * i + 2] = quad.word[2];
    words[kQuad * i + 3] = quad.word[3];
  }
}

// The words of a block's n elements from `begin` on.
template <std::int64_t kMost>
void FillNoise(const Noise& noise, const UpdateBlock& block, std::int64_t begin, std::int64_t n,
               Word32* words) {
  alignas(64) Word32 quads[kMost + 2 * kQuad];
  for (std::int64_t i = 0; i < n;) {
    const GlobalRun run =
        FindRun(block.first_index, block.strides, static_cast<Word64>(block.offset + begin + i));
    const std::int64_t left = n - i;
    const bool ends_here = run.length < static_cast<Word64>(left);
    const std::int64_t length = ends_here ? static_cast<std::int64_t>(run.length) : left;
    const std::int64_t skipped = static_cast<std::int64_t>(run.first % kQuad);
    FillQuads(noise, run.first / kQuad, (skipped + length + kQuad - 1) / kQuad, quads);
    __builtin_memcpy(words + i, quads + skipped,
                     sizeof(Word32) * static_cast<unsigned long>(length));
    i += length;
  }
}

template <typename T>
void StoreTileStochastic(const float* tile, const Word32* words, int shift, void* target,
                         std::int64_t begin, std::int64_t n) {
  T* values = static_cast<T*>(target) + begin;
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] = StoreStochastic<T>(tile[i], NoiseBits(words[i], shift));
  }
}

// Of a 16-bit dtype.
void StoreTileStochasticAs(DType dtype, const float* tile, const Word32* words, int shift,
                           void* target, std::int64_t begin, std::int64_t n) {
  if (dtype == DType::kBfloat16) {
    StoreTileStochastic<Bfloat16>(tile, words, shift, target, begin, n);
  } else {
    StoreTileStochastic<Float16>(tile, words, shift, target, begin, n);
  }
}

}  // namespace
}  // namespace jfa::cpu::JFA_ISA
