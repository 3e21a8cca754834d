// How the step's scalars travel: as operands in the memory of the device that runs the kernel,
// never read by a host that launches for another device.
//
//   count        int32[]       steps applied before this one
//   skip_update  bool[]
//   hyper_bits   uint32[7, 2]  a row for each Hyper: the bit pattern of a float64, low word first,
//                              so that what the host knows loses nothing before the last rounding
//   traced...    float32[]     one for each hyperparameter that only the device knows (a schedule,
//                              an injected value); its row of hyper_bits is not read
//   skipped, consecutive  int32[]   in the call that counts the step: core/counts.h
//
// That call returns the three counters too. A step of several calls is counted by the last, since
// the counters may be updated in place and all calls read count.
//
// Under vmap any of them may have one value for each member: a leading dimension [members].
#ifndef JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_
#define JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_

#include "core/adamw.h"
#include "core/counts.h"
#include "core/macros.h"

namespace jfa {

template <typename T>
struct ScalarOperand {
  const T* data = nullptr;
  bool per_member = false;

  JFA_HOST_DEVICE T Read(long long member) const { return data[per_member ? member : 0]; }
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
  ScalarOperand<int> skipped;
  ScalarOperand<int> consecutive;
  CounterResults new_counts;

  JFA_HOST_DEVICE bool counts_step() const { return new_counts.count != nullptr; }
  // Counters are per member if count is.
  JFA_HOST_DEVICE long long num_counts(long long members) const {
    return count.per_member ? members : 1;
  }

  JFA_HOST_DEVICE StepCounts ReadCounts(long long member) const {
    return {count.Read(member), skipped.Read(member), consecutive.Read(member)};
  }

  JFA_HOST_DEVICE void WriteCounts(long long member, StepCounts old) const {
    const StepCounts next = CountStep(old, skip_update.Read(member) != 0);
    new_counts.count[member] = next.count;
    new_counts.skipped[member] = next.skipped;
    new_counts.consecutive[member] = next.consecutive;
  }

  // The hyperparameter at `index`, a Hyper.
  JFA_HOST_DEVICE double Read(int index, long long member) const {
    if (traced[index].data != nullptr) return traced[index].Read(member);
    const long long row = (hyper_bits_per_member ? member * kNumHyper : 0) + index;
    const Word64 low = hyper_bits[2 * row];
    const Word64 high = hyper_bits[2 * row + 1];
    return BitsToDouble(low | high << 32);
  }

  template <bool kNesterov>
  JFA_HOST_DEVICE void SetTerms(int index, long long member, bool maximize,
                                HyperTerms* terms) const {
    SetTermsOf<kNesterov>(index, Read(index, member), count.Read(member), maximize, terms);
  }

  // The same of a hyperparameter and a count that have been read already.
  template <bool kNesterov>
  JFA_HOST_DEVICE static void SetTermsOf(int index, double value, int count, bool maximize,
                                         HyperTerms* terms) {
    if (index == static_cast<int>(Hyper::kGradientScale)) value = GradientDivisor(value, maximize);
    jfa::SetTerms<kNesterov>(index, value, NextCount(count), terms);
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_
