#include "cuda/nvrtc.h"

#include <dlfcn.h>

#include <utility>

#include "cuda/driver.h"

namespace jfa::cuda {
namespace {

using Program = struct ProgramOpaque*;

struct Nvrtc {
  int (*Version)(int*, int*) = nullptr;
  int (*CreateProgram)(Program*, const char*, const char*, int, const char* const*,
                       const char* const*) = nullptr;
  int (*CompileProgram)(Program, int, const char* const*) = nullptr;
  int (*GetCUBINSize)(Program, std::size_t*) = nullptr;
  int (*GetCUBIN)(Program, char*) = nullptr;
  int (*GetProgramLogSize)(Program, std::size_t*) = nullptr;
  int (*GetProgramLog)(Program, char*) = nullptr;
  int (*DestroyProgram)(Program*) = nullptr;
  std::string error;
};

std::vector<std::string>& Libraries() {
  static auto* paths = new std::vector<std::string>();
  return *paths;
}

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

bool FindAll(void* library, Nvrtc* nvrtc) {
  return Find(library, "nvrtcVersion", &nvrtc->Version) &&
         Find(library, "nvrtcCreateProgram", &nvrtc->CreateProgram) &&
         Find(library, "nvrtcCompileProgram", &nvrtc->CompileProgram) &&
         Find(library, "nvrtcGetCUBINSize", &nvrtc->GetCUBINSize) &&
         Find(library, "nvrtcGetCUBIN", &nvrtc->GetCUBIN) &&
         Find(library, "nvrtcGetProgramLogSize", &nvrtc->GetProgramLogSize) &&
         Find(library, "nvrtcGetProgramLog", &nvrtc->GetProgramLog) &&
         Find(library, "nvrtcDestroyProgram", &nvrtc->DestroyProgram);
}

Nvrtc Load() {
  std::vector<std::string> paths = Libraries();
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) paths.emplace_back(name);
  Nvrtc nvrtc;
  const int driver_major = GetDriver().Version() / 1000;
  std::string too_new;
  for (const std::string& path : paths) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    int major = 0;
    int minor = 0;
    const bool found =
        library != nullptr && FindAll(library, &nvrtc) && nvrtc.Version(&major, &minor) == 0;
    if (!found) continue;
    if (driver_major == 0 || major <= driver_major) return nvrtc;
    // A driver may refuse what a newer major release compiled.
    too_new = std::to_string(major) + "." + std::to_string(minor);
  }
  if (too_new.empty()) {
    nvrtc.error =
        "no NVRTC library was found; install jax[cuda12] or jax[cuda13], which bring it, or build "
        "where nvcc is";
  } else {
    nvrtc.error = "NVRTC " + too_new + " is newer than the driver, which is for CUDA " +
                  std::to_string(driver_major) + ": update the driver, or install jax[cuda" +
                  std::to_string(driver_major) + "]";
  }
  return nvrtc;
}

const Nvrtc& Get() {
  static const Nvrtc nvrtc = Load();
  return nvrtc;
}

std::string ProgramLog(const Nvrtc& nvrtc, Program program) {
  std::size_t size = 0;
  if (nvrtc.GetProgramLogSize(program, &size) != 0 || size == 0) return "no log";
  std::string log(size, '\0');
  nvrtc.GetProgramLog(program, log.data());
  return log.c_str();
}

std::vector<char> Cubin(const Nvrtc& nvrtc, Program program) {
  std::size_t size = 0;
  if (nvrtc.GetCUBINSize(program, &size) != 0) return {};
  std::vector<char> cubin(size);
  if (size == 0 || nvrtc.GetCUBIN(program, cubin.data()) != 0) return {};
  return cubin;
}

}  // namespace

void SetNvrtcLibraries(std::vector<std::string> paths) { Libraries() = std::move(paths); }

std::string NvrtcError() { return Get().error; }

std::string NvrtcVersion() {
  int major = 0;
  int minor = 0;
  if (!Get().error.empty() || Get().Version(&major, &minor) != 0) return "";
  return std::to_string(major) + "." + std::to_string(minor);
}

Compilation CompileWithNvrtc(const EmbeddedKernels& kernels, const std::vector<std::string>& macros,
                             int architecture) {
  const Nvrtc& nvrtc = Get();
  Compilation result;
  result.error = nvrtc.error;
  if (!result.ok()) return result;
  std::vector<const char*> names;
  std::vector<const char*> headers;
  for (const EmbeddedFile* file = EmbeddedHeaders(); file->name != nullptr; ++file) {
    names.push_back(file->name);
    headers.push_back(file->text);
  }
  Program program = nullptr;
  if (nvrtc.CreateProgram(&program, kernels.source, kernels.name, static_cast<int>(names.size()),
                          headers.data(), names.data()) != 0) {
    result.error = "NVRTC could not create a program";
    return result;
  }
  // NVRTC before 13.1 takes a generic lambda for a function of the host, unless told otherwise.
  std::vector<std::string> options = {"-arch=sm_" + std::to_string(architecture), "-std=c++17",
                                      "--fmad=false", "-default-device"};
  for (const std::string& macro : macros) options.push_back("-D" + macro);
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());
  const int status =
      nvrtc.CompileProgram(program, static_cast<int>(arguments.size()), arguments.data());
  if (status == 0) result.cubin = Cubin(nvrtc, program);
  if (result.cubin.empty()) {
    result.error = "NVRTC " + NvrtcVersion() + " could not compile for sm_" +
                   std::to_string(architecture) + ": " + ProgramLog(nvrtc, program);
  }
  nvrtc.DestroyProgram(&program);
  return result;
}

}  // namespace jfa::cuda
