#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"

namespace jfa::cpu {
namespace {

struct Supported {
  InstructionSet sets[3];
  int count = 0;

  void Add(const InstructionSet& set) { sets[count++] = set; }
};

Supported Detect() {
  Supported supported;
#if defined(JFA_X86_KERNELS)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    supported.Add({"avx512", avx512::UpdateOneBlock, avx512::AnalyzeChunk});
  }
  if (__builtin_cpu_supports("avx2"))
    supported.Add({"avx2", avx2::UpdateOneBlock, avx2::AnalyzeChunk});
#endif
  supported.Add({"portable", portable::UpdateOneBlock, portable::AnalyzeChunk});
  return supported;
}

const Supported& Detected() {
  static const Supported supported = Detect();
  return supported;
}

}  // namespace

const InstructionSet* SupportedInstructionSets(int* count) {
  *count = Detected().count;
  return Detected().sets;
}

const InstructionSet* SelectInstructionSet() {
  static const InstructionSet* const selected = []() -> const InstructionSet* {
    const char* wanted = std::getenv("JAX_FUSED_ADAMW_CPU_ISA");
    if (wanted == nullptr || *wanted == '\0') return &Detected().sets[0];
    for (int i = 0; i < Detected().count; ++i) {
      if (std::strcmp(wanted, Detected().sets[i].name) == 0) return &Detected().sets[i];
    }
    return nullptr;
  }();
  return selected;
}

}  // namespace jfa::cpu
