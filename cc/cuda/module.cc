// Python module jax_fused_adamw._cuda. Importing it touches no device.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "cuda/driver.h"
#include "cuda/embedded.h"
#include "cuda/handlers.h"
#include "cuda/kernel_cache.h"
#include "cuda/kernels.h"
#include "cuda/nvrtc.h"
#include "ffi/operands.h"
#include "ladder/checks.h"
#include "ladder/handlers.h"

namespace nb = nanobind;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

std::string UnavailableReason() {
  std::string error = jfa::cuda::GetDriver().error;
  if (error.empty()) jfa::cuda::ChooseCompiler(&error);
  return error;
}

// For kernel_info().
nb::dict Details() {
  nb::dict details;
  std::string error;
  switch (jfa::cuda::ChooseCompiler(&error)) {
    case jfa::cuda::Compiler::kNvcc:
      details["compiler"] = "nvcc";
      details["architectures"] = jfa::cuda::EmbeddedFatbinArchitectures();
      break;
    case jfa::cuda::Compiler::kNvrtc:
      details["compiler"] = "nvrtc " + jfa::cuda::NvrtcVersion();
      details["cache"] = jfa::cuda::KernelCacheDirectory();
      break;
    case jfa::cuda::Compiler::kNone:
      details["compiler"] = error;
      break;
  }
  const int version = jfa::cuda::GetDriver().Version();
  details["driver"] =
      "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  return details;
}

}  // namespace

NB_MODULE(_cuda, module) {
  module.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.def("set_nvrtc_libraries", &jfa::cuda::SetNvrtcLibraries);
  // Why no kernel can run here; empty if one can.
  module.def("unavailable_reason", &UnavailableReason);
  module.def("registrations", [] {
    nb::dict stages;
    stages["initialize"] = Capsule(jfa::cuda::UpdateInitializeHandler());
    stages["execute"] = Capsule(jfa::cuda::UpdateExecuteHandler());
    nb::dict targets;
    targets[jfa::kUpdateTarget] = stages;
    return targets;
  });
  // The bench's, not registered before its ladder is run.
  module.def("ladder_registrations", [] {
    nb::dict stages;
    stages["initialize"] = Capsule(jfa::cuda::LadderInitializeHandler());
    stages["execute"] = Capsule(jfa::cuda::LadderExecuteHandler());
    nb::dict targets;
    targets[jfa::kLadderTarget] = stages;
    return targets;
  });
  module.def("details", &Details);
}
