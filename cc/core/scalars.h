// How the step's scalars travel: as operands in the memory of the device that runs the kernel,
// never read by a host that launches for another device.
//
//   step         int32[]       1-based number of this step if it is applied
//   skip_update  bool[]
//   hyper_bits   uint32[7, 2]  a row for each Hyper: the bit pattern of a float64, low word first,
//                              so that what the host knows loses nothing before the last rounding
//   traced...    float32[]     one for each hyperparameter that only the device knows (a schedule,
//                              an injected value); its row of hyper_bits is not read
//
// Under vmap any of them may have one value for each member: a leading dimension [members].
#ifndef JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_
#define JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_

#include "core/adamw.h"
#include "core/macros.h"

namespace jfa {

template <typename T>
struct ScalarOperand {
  const T* data = nullptr;
  bool per_member = false;

  JFA_HOST_DEVICE T Read(long long member) const { return data[per_member ? member : 0]; }
};

struct StepOperands {
  ScalarOperand<int> step;
  ScalarOperand<unsigned char> skip_update;
  const Word32* hyper_bits = nullptr;
  bool hyper_bits_per_member = false;
  ScalarOperand<float> traced[kNumHyper];  // null where hyper_bits holds the value

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
    double value = Read(index, member);
    if (index == static_cast<int>(Hyper::kGradientScale)) value = GradientDivisor(value, maximize);
    jfa::SetTerms<kNesterov>(index, value, step.Read(member), terms);
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_
