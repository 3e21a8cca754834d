#include "cuda/kernels.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/embedded.h"
#include "cuda/kernel_cache.h"
#include "cuda/nvrtc.h"

namespace jfa::cuda {
namespace {

// nvcc's module, which holds all kernels, has the group "".
using ModuleKey = std::pair<CuContext, std::string>;
using FunctionKey = std::pair<CuContext, std::string>;

struct Loaded {
  std::mutex mutex;
  std::map<ModuleKey, CuModule> modules;
  std::map<FunctionKey, CuFunction> functions;
};

// Never destroyed: the driver may be gone before static destructors run.
Loaded& All() {
  static auto* loaded = new Loaded();
  return *loaded;
}

struct ModuleOrError {
  CuModule module = nullptr;
  std::string error;
};

int Architecture(const Driver& driver, std::string* error) {
  CuDevice device = 0;
  int major = 0;
  int minor = 0;
  CuResult result = driver.CtxGetDevice(&device);
  if (result == 0) result = driver.DeviceGetAttribute(&major, kComputeCapabilityMajor, device);
  if (result == 0) result = driver.DeviceGetAttribute(&minor, kComputeCapabilityMinor, device);
  if (result != 0) *error = "reading the compute capability: " + driver.Describe(result);
  return 10 * major + minor;
}

ModuleOrError LoadImage(const Driver& driver, const void* image) {
  ModuleOrError loaded;
  const CuResult result = driver.ModuleLoadData(&loaded.module, image);
  if (result != 0) loaded.error = "loading the kernels: " + driver.Describe(result);
  return loaded;
}

ModuleOrError LoadFatbin(const Driver& driver) {
  ModuleOrError loaded = LoadImage(driver, EmbeddedFatbin());
  if (loaded.error.empty()) return loaded;
  std::string ignored;
  loaded.error += "; they were compiled for sm " + std::string(EmbeddedFatbinArchitectures()) +
                  " and this device is sm_" + std::to_string(Architecture(driver, &ignored)) +
                  ": set JAX_FUSED_ADAMW_CUDA_COMPILER=nvrtc, or build for it";
  return loaded;
}

ModuleOrError LoadWithNvrtc(const Driver& driver, const KernelName& name) {
  std::string error;
  const int architecture = Architecture(driver, &error);
  if (!error.empty()) return {nullptr, error};
  const std::string key = std::string(EmbeddedSourceHash()) + "-nvrtc" + NvrtcVersion() + "-sm" +
                          std::to_string(architecture) + "-" + name.Group();
  const std::vector<char> cached = ReadCachedKernel(key);
  if (!cached.empty()) {
    ModuleOrError loaded = LoadImage(driver, cached.data());
    if (loaded.error.empty()) return loaded;
  }
  const Compilation compilation =
      CompileWithNvrtc(name.Rule(), static_cast<int>(name.leaf_class), architecture);
  if (!compilation.ok()) return {nullptr, compilation.error};
  WriteCachedKernel(key, compilation.cubin);
  return LoadImage(driver, compilation.cubin.data());
}

// The caller holds the mutex.
ModuleOrError GetModule(const Driver& driver, CuContext context, const KernelName& name) {
  std::string error;
  const Compiler compiler = ChooseCompiler(&error);
  if (compiler == Compiler::kNone) return {nullptr, error};
  const ModuleKey key{context, compiler == Compiler::kNvcc ? "" : name.Group()};
  const auto found = All().modules.find(key);
  if (found != All().modules.end()) return {found->second, ""};
  ModuleOrError loaded =
      compiler == Compiler::kNvcc ? LoadFatbin(driver) : LoadWithNvrtc(driver, name);
  if (loaded.error.empty()) All().modules[key] = loaded.module;
  return loaded;
}

Kernel GetFunction(const KernelName& name, const std::string& entry_point) {
  const Driver& driver = GetDriver();
  Kernel kernel;
  kernel.error = driver.error;
  if (!kernel.ok()) return kernel;
  CuContext context = nullptr;
  const CuResult current = driver.CtxGetCurrent(&context);
  if (current != 0) kernel.error = "asking for the CUDA context: " + driver.Describe(current);
  if (current == 0 && context == nullptr) kernel.error = "no CUDA context is current";
  if (!kernel.ok()) return kernel;
  const FunctionKey key{context, name.Group() + entry_point};
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto found = All().functions.find(key);
  if (found != All().functions.end()) {
    kernel.function = found->second;
    return kernel;
  }
  const ModuleOrError loaded = GetModule(driver, context, name);
  kernel.error = loaded.error;
  if (!kernel.ok()) return kernel;
  const CuResult result =
      driver.ModuleGetFunction(&kernel.function, loaded.module, entry_point.c_str());
  if (result != 0) {
    kernel.error = "finding " + entry_point + ": " + driver.Describe(result);
  } else {
    All().functions[key] = kernel.function;
  }
  return kernel;
}

}  // namespace

Compiler ChooseCompiler(std::string* error) {
  const char* wanted = std::getenv("JAX_FUSED_ADAMW_CUDA_COMPILER");
  if (wanted == nullptr || *wanted == '\0') wanted = EmbeddedFatbin() ? "nvcc" : "nvrtc";
  if (std::strcmp(wanted, "nvcc") == 0) {
    if (EmbeddedFatbin() != nullptr) return Compiler::kNvcc;
    *error = "JAX_FUSED_ADAMW_CUDA_COMPILER=nvcc, but this build found no nvcc";
  } else if (std::strcmp(wanted, "nvrtc") == 0) {
    *error = NvrtcError();
    if (error->empty()) return Compiler::kNvrtc;
  } else {
    *error = std::string("JAX_FUSED_ADAMW_CUDA_COMPILER must be nvcc or nvrtc, not ") + wanted;
  }
  return Compiler::kNone;
}

std::string KernelName::Group() const {
  const char* names[] = {"Float32", "AnyDType", "FirstStep"};
  return std::string(names[static_cast<int>(leaf_class)]) + "Rule" + std::to_string(Rule());
}

std::string KernelName::String() const {
  return std::string("Update") + (small_grid ? "Small" : "Large") + Group();
}

Kernel GetKernel(const KernelName& name) { return GetFunction(name, name.String()); }

Kernel GetCountStepKernel(const KernelName& same_module) {
  return GetFunction(same_module, "CountStep");
}

}  // namespace jfa::cuda
