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

// The order of jax_fused_adamw/_operands.py: HYPERPARAMETERS.
enum class Hyper {
  kLearningRate,
  kB1,
  kB2,
  kEps,
  kEpsRoot,
  kWeightDecay,
  kGradientScale,
};
constexpr int kNumHyper = 7;

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

  JFA_HOST_DEVICE double Read(Hyper hyper, long long member) const {
    const int index = static_cast<int>(hyper);
    if (traced[index].data != nullptr) return traced[index].Read(member);
    const long long row = (hyper_bits_per_member ? member * kNumHyper : 0) + index;
    const unsigned long long low = hyper_bits[2 * row];
    const unsigned long long bits = low | static_cast<unsigned long long>(hyper_bits[2 * row + 1])
                                              << 32;
    double value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }

  JFA_HOST_DEVICE AdamWHyper ReadHyper(long long member) const {
    AdamWHyper hyper;
    hyper.learning_rate = Read(Hyper::kLearningRate, member);
    hyper.b1 = Read(Hyper::kB1, member);
    hyper.b2 = Read(Hyper::kB2, member);
    hyper.eps = Read(Hyper::kEps, member);
    hyper.eps_root = Read(Hyper::kEpsRoot, member);
    hyper.weight_decay = Read(Hyper::kWeightDecay, member);
    hyper.gradient_scale = Read(Hyper::kGradientScale, member);
    return hyper;
  }
};

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_SCALARS_H_
