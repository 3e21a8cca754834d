// Python module jax_fused_adamw._cpu: the handler's address and what it was built against.
#include <nanobind/nanobind.h>

#include "cpu/handlers.h"
#include "cpu/kernels.h"

namespace nb = nanobind;

NB_MODULE(_cpu, module) {
  module.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.def("registrations", [] {
    nb::dict targets;
    targets["jax_fused_adamw_update_v1"] =
        nb::capsule(reinterpret_cast<void*>(jfa::cpu::UpdateHandler()));
    return targets;
  });
  // For kernel_info().
  module.def("details", [] {
    int count = 0;
    const jfa::cpu::InstructionSet* sets = jfa::cpu::SupportedInstructionSets(&count);
    nb::list supported;
    for (int i = 0; i < count; ++i) supported.append(sets[i].name);
    nb::dict details;
    details["instruction_set"] = jfa::cpu::SelectInstructionSet().name;
    details["supported"] = supported;
    return details;
  });
}
