// Python module jax_fused_adamw._cpu: the handler's address and what it was built against.
#include <nanobind/nanobind.h>

#include "cpu/handlers.h"
#include "cpu/kernels.h"
#include "ffi/operands.h"
#include "ladder/checks.h"
#include "ladder/handlers.h"

namespace nb = nanobind;

NB_MODULE(_cpu, module) {
  module.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.def("registrations", [] {
    nb::dict targets;
    targets[jfa::kUpdateTarget] = nb::capsule(reinterpret_cast<void*>(jfa::cpu::UpdateHandler()));
    return targets;
  });
  // The bench's, not registered before its ladder is run.
  module.def("ladder_registrations", [] {
    nb::dict targets;
    targets[jfa::kLadderTarget] = nb::capsule(reinterpret_cast<void*>(jfa::cpu::LadderHandler()));
    return targets;
  });
  // Why the kernel cannot run here; empty if it can.
  module.def("unavailable_reason", [] {
    if (jfa::cpu::SelectInstructionSet() != nullptr) return "";
    return "JAX_FUSED_ADAMW_CPU_ISA names an instruction set that this processor or build does "
           "not have";
  });
  // For kernel_info(), where there is no such reason.
  module.def("details", [] {
    int count = 0;
    const jfa::cpu::InstructionSet* sets = jfa::cpu::SupportedInstructionSets(&count);
    nb::list supported;
    for (int i = 0; i < count; ++i) supported.append(sets[i].name);
    nb::dict details;
    details["instruction_set"] = jfa::cpu::SelectInstructionSet()->name;
    details["supported"] = supported;
    return details;
  });
}
