#include "cuda/driver.h"

#include <dlfcn.h>

namespace jfa::cuda {
namespace {

// Kernel parameters above 4 KB, which the leaf tables need, came with CUDA 12.1.
constexpr int kOldestDriver = 12010;

template <typename Function>
void Find(void* library, const char* name, Function* function, std::string* error) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && error->empty()) {
    *error = std::string("the NVIDIA driver has no ") + name + "; update it";
  }
}

Driver Load() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver.error = "there is no NVIDIA driver here (libcuda.so.1)";
    return driver;
  }
  Find(library, "cuDriverGetVersion", &driver.DriverGetVersion, &driver.error);
  Find(library, "cuCtxGetCurrent", &driver.CtxGetCurrent, &driver.error);
  Find(library, "cuCtxGetDevice", &driver.CtxGetDevice, &driver.error);
  Find(library, "cuDeviceGetAttribute", &driver.DeviceGetAttribute, &driver.error);
  Find(library, "cuModuleLoadData", &driver.ModuleLoadData, &driver.error);
  Find(library, "cuModuleGetFunction", &driver.ModuleGetFunction, &driver.error);
  Find(library, "cuLaunchKernel", &driver.LaunchKernel, &driver.error);
  Find(library, "cuLaunchCooperativeKernel", &driver.LaunchCooperativeKernel, &driver.error);
  Find(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor",
       &driver.OccupancyMaxActiveBlocksPerMultiprocessor, &driver.error);
  Find(library, "cuGetErrorString", &driver.GetErrorString, &driver.error);
  if (driver.ok() && driver.Version() < kOldestDriver) {
    driver.error = "the NVIDIA driver supports CUDA " + std::to_string(driver.Version() / 1000) +
                   "." + std::to_string(driver.Version() % 1000 / 10) +
                   ", and the kernels need 12.1; update it";
  }
  return driver;
}

}  // namespace

int Driver::Version() const {
  int version = 0;
  if (DriverGetVersion == nullptr || DriverGetVersion(&version) != 0) return 0;
  return version;
}

std::string Driver::Describe(CuResult result) const {
  const char* text = nullptr;
  if (GetErrorString == nullptr || GetErrorString(result, &text) != 0 || text == nullptr) {
    return "CUDA error " + std::to_string(result);
  }
  return text;
}

const Driver& GetDriver() {
  static const Driver driver = Load();
  return driver;
}

}  // namespace jfa::cuda
