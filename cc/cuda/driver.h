// The few functions of the CUDA driver that the handlers call, found at run time: the module builds
// without CUDA headers and loads on a machine without a driver.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_DRIVER_H_
#define JAX_FUSED_ADAMW_CC_CUDA_DRIVER_H_

#include <cstddef>
#include <string>

namespace jfa::cuda {

using CuResult = int;  // 0 is success
using CuDevice = int;
using CuContext = struct CuContextOpaque*;
using CuModule = struct CuModuleOpaque*;
using CuFunction = struct CuFunctionOpaque*;
using CuStream = struct CuStreamOpaque*;

// Values of CUdevice_attribute.
inline constexpr int kMultiprocessorCount = 16;
inline constexpr int kComputeCapabilityMajor = 75;
inline constexpr int kComputeCapabilityMinor = 76;
inline constexpr int kCooperativeLaunch = 95;

// Of CUresult: more blocks than can run at the same time.
inline constexpr CuResult kCooperativeLaunchTooLarge = 720;

struct Driver {
  CuResult (*DriverGetVersion)(int*) = nullptr;
  CuResult (*CtxGetCurrent)(CuContext*) = nullptr;
  CuResult (*CtxGetDevice)(CuDevice*) = nullptr;
  CuResult (*DeviceGetAttribute)(int*, int, CuDevice) = nullptr;
  CuResult (*ModuleLoadData)(CuModule*, const void*) = nullptr;
  CuResult (*ModuleGetFunction)(CuFunction*, CuModule, const char*) = nullptr;
  CuResult (*LaunchKernel)(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, CuStream, void**, void**) = nullptr;
  CuResult (*LaunchCooperativeKernel)(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                      unsigned, unsigned, CuStream, void**) = nullptr;
  CuResult (*OccupancyMaxActiveBlocksPerMultiprocessor)(int*, CuFunction, int,
                                                        std::size_t) = nullptr;
  CuResult (*GetErrorString)(CuResult, const char**) = nullptr;
  std::string error;  // why there is none, if so

  bool ok() const { return error.empty(); }
  int Version() const;  // 1000 * major + 10 * minor, 0 without a driver
  std::string Describe(CuResult result) const;
};

const Driver& GetDriver();

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_DRIVER_H_
