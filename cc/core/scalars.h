// How the step's scalars travel: as operands in the memory of the device that runs the kernel,
// never read by a host that launches for another device.
//
//   count        int32[]       steps applied before this one
//   skip_update  bool[]
//   hyper_bits   uint32[9, 2]  a row for each Hyper: the bit pattern of a float64, low word first,
//                              so that what the host knows loses nothing before the last rounding
//   traced...    float32[]     one for each hyperparameter that only the device knows (a schedule,
//                              an injected value); its row of hyper_bits is not read
//   norm, scaled_norm     float32[]   of a StatsReport (core/stats.h), if it clips by the norm
//   nonfinite             int32[]     of a StatsReport, if non-zero skips the step
//   noise        uint32[1 + leaves, 2]  if anything is rounded stochastically (core/noise.h), low
//                              word first: the seed, then of each leaf the global index of its
//                              first element
//   skipped, consecutive  int32[]     in the call that counts the step: core/counts.h
//
// That call returns the three counters too. A step of several calls is counted by the last, since
// the counters may be updated in place and all calls read count.
//
// Under vmap any of them may have one value for each member: a leading dimension [members].
#ifndef JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_
#define JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_

#include "core/adamw.h"
#include "core/clip.h"
#include "core/counts.h"
#include "core/macros.h"
#include "core/noise.h"

namespace jfa {

template <typename T>
struct ScalarOperand {
  const T* data = nullptr;
  bool per_member = false;

  JFA_HOST_DEVICE T Read(long long member) const { return data[per_member ? member : 0]; }
};

// The words of a float64, or in `low` those of a float32.
struct RawHyper {
  Word32 low;
  Word32 high;
};

// Where the counters go; as many values of each as there are of count.
struct CounterResults {
  int* count = nullptr;  // null in a call that does not count the step
  int* skipped = nullptr;
  int* consecutive = nullptr;
};

struct StepOperands {
  ScalarOperand<int> count;
  ScalarOperand<unsigned char> skip_update;
  const Word32* hyper_bits = nullptr;
  bool hyper_bits_per_member = false;
  ScalarOperand<float> traced[kNumHyper];  // null where hyper_bits holds the value
  ScalarOperand<float> norm;               // null unless it clips by the norm
  ScalarOperand<float> scaled_norm;        // as norm
  ScalarOperand<int> nonfinite;            // null unless a non-finite gradient skips the step
  const Word32* noise = nullptr;           // null unless something is rounded stochastically
  int noise_rows = 0;
  bool noise_per_member = false;
  ScalarOperand<int> skipped;
  ScalarOperand<int> consecutive;
  CounterResults new_counts;

  JFA_HOST_DEVICE bool Skips(long long member) const {
    const bool is_nonfinite = nonfinite.data != nullptr && nonfinite.Read(member) != 0;
    return is_nonfinite || skip_update.Read(member) != 0;
  }

  JFA_HOST_DEVICE bool counts_step() const { return new_counts.count != nullptr; }
  // Counters are per member if count is.
  JFA_HOST_DEVICE long long num_counts(long long members) const {
    return count.per_member ? members : 1;
  }

  JFA_HOST_DEVICE StepCounts ReadCounts(long long member) const {
    return {count.Read(member), skipped.Read(member), consecutive.Read(member)};
  }

  JFA_HOST_DEVICE void WriteCounts(long long member, StepCounts old, bool skips) const {
    const StepCounts next = NextCounts(old, skips);
    new_counts.count[member] = next.count;
    new_counts.skipped[member] = next.skipped;
    new_counts.consecutive[member] = next.consecutive;
  }

  // A hyperparameter as it lies in memory; `index` is a Hyper.
  JFA_HOST_DEVICE RawHyper ReadRaw(int index, long long member) const {
    if (traced[index].data != nullptr) return {FloatToBits(traced[index].Read(member)), 0};
    const long long row = (hyper_bits_per_member ? member * kNumHyper : 0) + index;
    return {hyper_bits[2 * row], hyper_bits[2 * row + 1]};
  }

  // A hyperparameter as ReadRaw has it.
  JFA_HOST_DEVICE double Decode(int index, RawHyper raw) const {
    return traced[index].data != nullptr
               ? BitsToFloat(raw.low)
               : BitsToDouble(raw.low | static_cast<Word64>(raw.high) << 32);
  }

  // Fills in the terms of a hyperparameter, for a leaf with this factor of the learning rate.
  template <bool kNesterov, typename Real>
  JFA_HOST_DEVICE void SetTerms(int index, RawHyper raw, int count, bool maximize, double lr_scale,
                                HyperTerms<Real>* terms) const {
    double value = Decode(index, raw);
    if (index == static_cast<int>(Hyper::kLearningRate)) value *= lr_scale;
    if (index == static_cast<int>(Hyper::kGradientScale)) value = GradientDivisor(value, maximize);
    jfa::SetTerms<kNesterov>(index, value, NextCount(count), terms);
  }

  JFA_HOST_DEVICE Word64 ReadNoiseRow(int row, long long member) const {
    const long long place = (noise_per_member ? member * noise_rows : 0) + row;
    return noise[2 * place] | static_cast<Word64>(noise[2 * place + 1]) << 32;
  }
  JFA_HOST_DEVICE PhiloxKey ReadSeed(long long member) const {
    const Word64 seed = ReadNoiseRow(0, member);
    return {static_cast<Word32>(seed), static_cast<Word32>(seed >> 32)};
  }
  // `leaf` counts the call's leaves.
  JFA_HOST_DEVICE Word64 ReadFirstIndex(int leaf, long long member) const {
    return ReadNoiseRow(1 + leaf, member);
  }

  // Of the norm or of values.
  template <typename Real>
  JFA_HOST_DEVICE Real ReadClipLimit(long long member) const {
    constexpr int kIndex = static_cast<int>(Hyper::kMaxGrad);
    return static_cast<Real>(Decode(kIndex, ReadRaw(kIndex, member)));
  }

  template <typename Real>
  JFA_HOST_DEVICE GradientClip<Real> ReadClip(Clip clip, long long member) const {
    const Real limit = ReadClipLimit<Real>(member);
    if (clip == Clip::kValue) return ClipByValue(limit);
    return ClipByNorm(norm.Read(member), scaled_norm.Read(member), limit);
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_
