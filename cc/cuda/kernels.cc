#include "cuda/kernels.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/kernel_cache.h"
#include "cuda/nvrtc.h"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

// The source and the group; nvcc's module, which holds all of a source, has the group "".
using ModuleKey = std::pair<CuContext, std::string>;
using FunctionKey = std::pair<CuContext, std::string>;

struct Loaded {
  std::mutex mutex;
  std::map<ModuleKey, CuModule> modules;
  std::map<FunctionKey, CuFunction> functions;
  std::map<std::pair<CuFunction, unsigned>, long long> resident_blocks;  // by threads of a block
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

bool HasFatbin() { return embedded::update_kernel.fatbin != nullptr; }

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

ModuleOrError LoadFatbin(const Driver& driver, const EntryPoint& entry_point) {
  ModuleOrError loaded = LoadImage(driver, entry_point.kernels->fatbin);
  if (loaded.error.empty()) return loaded;
  std::string ignored;
  loaded.error += "; they were compiled for sm " + std::string(EmbeddedFatbinArchitectures()) +
                  " and this device is sm_" + std::to_string(Architecture(driver, &ignored)) +
                  ": set JAX_FUSED_ADAMW_CUDA_COMPILER=nvrtc, or build for it";
  return loaded;
}

ModuleOrError LoadWithNvrtc(const Driver& driver, const EntryPoint& entry_point) {
  std::string error;
  const int architecture = Architecture(driver, &error);
  if (!error.empty()) return {nullptr, error};
  const EmbeddedKernels& kernels = *entry_point.kernels;
  const std::string key = std::string(kernels.hash) + "-nvrtc" + NvrtcVersion() + "-sm" +
                          std::to_string(architecture) + "-" + entry_point.group;
  const std::vector<char> cached = ReadCachedKernel(key);
  if (!cached.empty()) {
    ModuleOrError loaded = LoadImage(driver, cached.data());
    if (loaded.error.empty()) return loaded;
  }
  const Compilation compilation = CompileWithNvrtc(kernels, entry_point.macros, architecture);
  if (!compilation.ok()) return {nullptr, compilation.error};
  WriteCachedKernel(key, compilation.cubin);
  return LoadImage(driver, compilation.cubin.data());
}

// The caller holds the mutex.
ModuleOrError GetModule(const Driver& driver, CuContext context, const EntryPoint& entry_point) {
  std::string error;
  const Compiler compiler = ChooseCompiler(&error);
  if (compiler == Compiler::kNone) return {nullptr, error};
  const bool with_nvcc = compiler == Compiler::kNvcc;
  const ModuleKey key{context, entry_point.kernels->name + (with_nvcc ? "" : entry_point.group)};
  const auto found = All().modules.find(key);
  if (found != All().modules.end()) return {found->second, ""};
  ModuleOrError loaded =
      with_nvcc ? LoadFatbin(driver, entry_point) : LoadWithNvrtc(driver, entry_point);
  if (loaded.error.empty()) All().modules[key] = loaded.module;
  return loaded;
}

}  // namespace

Kernel GetKernel(const EntryPoint& entry_point) {
  const Driver& driver = GetDriver();
  Kernel kernel;
  kernel.error = driver.error;
  if (!kernel.ok()) return kernel;
  CuContext context = nullptr;
  const CuResult current = driver.CtxGetCurrent(&context);
  if (current != 0) kernel.error = "asking for the CUDA context: " + driver.Describe(current);
  if (current == 0 && context == nullptr) kernel.error = "no CUDA context is current";
  if (!kernel.ok()) return kernel;
  const FunctionKey key{context, entry_point.kernels->name + entry_point.group + entry_point.name};
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto found = All().functions.find(key);
  if (found != All().functions.end()) {
    kernel.function = found->second;
    return kernel;
  }
  const ModuleOrError loaded = GetModule(driver, context, entry_point);
  kernel.error = loaded.error;
  if (!kernel.ok()) return kernel;
  const CuResult result =
      driver.ModuleGetFunction(&kernel.function, loaded.module, entry_point.name.c_str());
  if (result != 0) {
    kernel.error = "finding " + entry_point.name + ": " + driver.Describe(result);
  } else {
    All().functions[key] = kernel.function;
  }
  return kernel;
}

Compiler ChooseCompiler(std::string* error) {
  const char* wanted = std::getenv("JAX_FUSED_ADAMW_CUDA_COMPILER");
  if (wanted == nullptr || *wanted == '\0') wanted = HasFatbin() ? "nvcc" : "nvrtc";
  if (std::strcmp(wanted, "nvcc") == 0) {
    if (HasFatbin()) return Compiler::kNvcc;
    *error = "JAX_FUSED_ADAMW_CUDA_COMPILER=nvcc, but this build found no nvcc";
  } else if (std::strcmp(wanted, "nvrtc") == 0) {
    *error = NvrtcError();
    if (error->empty()) return Compiler::kNvrtc;
  } else {
    *error = std::string("JAX_FUSED_ADAMW_CUDA_COMPILER must be nvcc or nvrtc, not ") + wanted;
  }
  return Compiler::kNone;
}

std::string KernelName::ClassAndRule() const {
  const char* names[] = {"Float32",       "AnyDType", "FirstStep", "Bf16Moments",
                         "Float32Extras", "General",  "Float64"};
  return std::string(names[static_cast<int>(leaf_class)]) + "Rule" + std::to_string(Rule());
}

std::string KernelName::Group() const {
  return (grid == Grid::kAnalyzing ? "AnalyzeAndUpdate" : "Update") + ClassAndRule();
}

std::string KernelName::String() const {
  const char* names[] = {"UpdateLarge", "UpdateSmall", "AnalyzeAndUpdate"};
  return names[static_cast<int>(grid)] + ClassAndRule();
}

EntryPoint KernelName::InGroup(const std::string& name) const {
  return {&embedded::update_kernel,
          Group(),
          {"JFA_ONLY_RULE=" + std::to_string(Rule()),
           "JFA_ONLY_CLASS=" + std::to_string(static_cast<int>(leaf_class)),
           "JFA_ONLY_ANALYZING=" + std::to_string(grid == Grid::kAnalyzing ? 1 : 0)},
          name};
}

Kernel GetKernel(const KernelName& name) { return GetKernel(name.InGroup(name.String())); }

Kernel GetCountStepKernel(const KernelName& same_module) {
  return GetKernel(same_module.InGroup("CountStep"));
}

std::string Launch(CuStream stream, const Kernel& kernel, long long blocks, void** parameters,
                   unsigned threads) {
  const Driver& driver = GetDriver();
  const CuResult result = driver.LaunchKernel(kernel.function, static_cast<unsigned>(blocks), 1, 1,
                                              threads, 1, 1, 0, stream, parameters, nullptr);
  return result == 0 ? "" : "launching a kernel: " + driver.Describe(result);
}

std::string LaunchTogether(CuStream stream, const Kernel& kernel, long long blocks,
                           void** parameters, unsigned threads, bool* refused) {
  const Driver& driver = GetDriver();
  const CuResult result = driver.LaunchCooperativeKernel(
      kernel.function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, 0, stream, parameters);
  *refused = result == kCooperativeLaunchTooLarge;
  if (*refused) {
    const std::lock_guard<std::mutex> lock(All().mutex);
    All().resident_blocks[{kernel.function, threads}] = 0;
  }
  return result == 0 ? "" : "launching a cooperative kernel: " + driver.Describe(result);
}

long long ResidentBlocks(const Kernel& kernel, unsigned threads) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto found = All().resident_blocks.find({kernel.function, threads});
  if (found != All().resident_blocks.end()) return found->second;
  const Driver& driver = GetDriver();
  CuDevice device = 0;
  int cooperates = 0;
  int multiprocessors = 0;
  int blocks = 0;
  const bool known =
      driver.CtxGetDevice(&device) == 0 &&
      driver.DeviceGetAttribute(&cooperates, kCooperativeLaunch, device) == 0 &&
      driver.DeviceGetAttribute(&multiprocessors, kMultiprocessorCount, device) == 0 &&
      driver.OccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function,
                                                       static_cast<int>(threads), 0) == 0;
  if (!known) return 0;
  const long long resident = cooperates != 0 ? 1LL * blocks * multiprocessors : 0;
  All().resident_blocks[{kernel.function, threads}] = resident;
  return resident;
}

}  // namespace jfa::cuda
