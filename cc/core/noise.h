// The noise of stochastic rounding: where an element's random bits come from. Its plain-JAX twin is
// jax_fused_adamw/_noise.py.
//
//   words     Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
//             3", SC 2011), four a call
//   key       the seed: low word, high word
//   counter   quad low, quad high, stream, step; quad = global index / 4
//   element   has the word global index % 4: the moments its halves, a parameter the low half of
//             its word in the parameters' stream
//
// The global index is the element's in the whole leaf, and the stream is the leaf's in the whole
// tree: the bits do not depend on how a step is cut into calls, blocks or shards.
#ifndef JAX_FUSED_ADAMW_CC_CORE_NOISE_H_
#define JAX_FUSED_ADAMW_CC_CORE_NOISE_H_

#include "core/dtype.h"
#include "core/macros.h"

namespace jfa {

constexpr int kQuad = 4;  // elements that share a call

struct PhiloxKey {
  Word32 low;
  Word32 high;
};

struct PhiloxWords {
  Word32 word[kQuad];

  // Not an index: on a GPU that would put the words into memory.
  JFA_HOST_DEVICE Word32 Select(Word32 i) const {
    const Word32 even = i < 2 ? word[0] : word[2];
    const Word32 odd = i < 2 ? word[1] : word[3];
    return (i & 1u) == 0 ? even : odd;
  }
};

JFA_HOST_DEVICE PhiloxWords Philox(PhiloxKey key, PhiloxWords counter) {
  constexpr int kRounds = 7;
  for (int round = 0; round < kRounds; ++round) {
    const Word64 first = 0xd2511f53ull * counter.word[0];
    const Word64 second = 0xcd9e8d57ull * counter.word[2];
    counter = {{static_cast<Word32>(second >> 32) ^ counter.word[1] ^ key.low,
                static_cast<Word32>(second),
                static_cast<Word32>(first >> 32) ^ counter.word[3] ^ key.high,
                static_cast<Word32>(first)}};
    key.low += 0x9e3779b9u;
    key.high += 0xbb67ae85u;
  }
  return counter;
}

// The noise of one leaf in one step.
struct Noise {
  PhiloxKey key;
  Word32 stream;
  Word32 step;  // 1-based: the number of applied steps up to and including this one

  // Of the four elements from global index 4 * quad on.
  JFA_HOST_DEVICE PhiloxWords Quad(Word64 quad) const {
    const Word32 low = static_cast<Word32>(quad);
    const Word32 high = static_cast<Word32>(quad >> 32);
    return Philox(key, {{low, high, stream, step}});
  }

  JFA_HOST_DEVICE Noise OfParams() const { return {key, stream | 0x80000000u, step}; }
};

// Which half of a word an array takes.
constexpr int kMuNoiseShift = 0;
constexpr int kNuNoiseShift = 16;
constexpr int kParamNoiseShift = 0;

JFA_HOST_DEVICE Word32 NoiseBits(Word32 word, int shift) { return word >> shift & 0xffffu; }

// How the part of a leaf that this process has lies in the whole: behind each `divisor` elements
// the index jumps by `extra`.
struct IndexStride {
  Word64 divisor;  // 0: there is none
  Word64 extra;
  Word64 reciprocal;  // 2^64 / divisor, rounded down: a GPU has no instruction for division
};
constexpr int kIndexStrides = 3;

inline IndexStride MakeStride(long long divisor, long long extra) {
  if (divisor <= 0) return {0, 0, 0};
  const Word64 words = static_cast<Word64>(divisor);
  return {words, static_cast<Word64>(extra), ~Word64{0} / words};
}

struct GlobalRun {
  Word64 first;   // global index of the element
  Word64 length;  // elements from it on whose global indices follow each other
};

// From the local element on. `strides` are kIndexStrides, each for the indices that the one before
// it leads to, or null for none.
JFA_HOST_DEVICE GlobalRun FindRun(Word64 first_index, const IndexStride* strides, Word64 local) {
  GlobalRun run{0, ~Word64{0}};
  for (int i = 0; strides != nullptr && i < kIndexStrides; ++i) {
    const IndexStride stride = strides[i];
    if (stride.divisor == 0) continue;
    // The product is the quotient or, since the reciprocal was rounded down, one less.
    Word64 jumps = HighProduct(local, stride.reciprocal);
    Word64 rest = local - jumps * stride.divisor;
    if (rest >= stride.divisor) {
      ++jumps;
      rest -= stride.divisor;
    }
    const Word64 left = stride.divisor - rest;
    run.length = left < run.length ? left : run.length;
    local += jumps * stride.extra;
  }
  run.first = first_index + local;
  return run;
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_NOISE_H_
