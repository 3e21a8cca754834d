# JFA_CUDA_EMBEDDED: the source file that holds the kernels, as text for NVRTC and, where nvcc is
# used, as fatbins.

set(JFA_CUDA_HEADERS
  core/adamw.h core/chunks.h core/clip.h core/counts.h core/dtype.h core/macros.h core/noise.h
  core/scalars.h core/stats.h
  cuda/analyze_and_update.cuh cuda/elements.cuh cuda/instance.cuh cuda/io.cuh cuda/noise.cuh
  cuda/stats_tile.cuh cuda/table.h cuda/tuning.h cuda/update_chunk.cuh)
set(JFA_CUDA_KERNELS cuda/update_kernel.cu cuda/stats_kernel.cu ladder/ladder_kernel.cu)
set(JFA_CUDA_EMBEDDED ${CMAKE_CURRENT_BINARY_DIR}/embedded.cc)
set(jfa_cuda_sources ${JFA_CUDA_HEADERS} ${JFA_CUDA_KERNELS})
list(TRANSFORM jfa_cuda_sources PREPEND ${PROJECT_SOURCE_DIR}/cc/)

# Whether nvcc can compile the kernels: CUDA 12.1 allows their parameters, and the host compiler
# must suit it. Leaves the reason in REASON otherwise.
function(jfa_check_nvcc nvcc reason)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(NOT version MATCHES "release ([0-9]+\\.[0-9]+)" OR CMAKE_MATCH_1 VERSION_LESS 12.1)
    set(${reason} "${nvcc} is older than 12.1" PARENT_SCOPE)
    return()
  endif()
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/nvcc_probe.cu)
  file(WRITE ${probe} "__global__ void Probe() {}\n")
  execute_process(COMMAND ${nvcc} -std=c++17 -cubin -arch=sm_75 -o ${probe}.cubin ${probe}
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  if(status)
    set(${reason} "${nvcc} cannot compile here (does it know the host compiler?)" PARENT_SCOPE)
  endif()
endfunction()

set(jfa_fatbins "")
set(jfa_architectures "")
set(jfa_no_nvcc "")
if(JAX_FUSED_ADAMW_CUDA STREQUAL "OFF")
  set(jfa_no_nvcc "JAX_FUSED_ADAMW_CUDA is OFF")
else()
  if(DEFINED ENV{CUDACXX})
    set(JFA_NVCC $ENV{CUDACXX})
  else()
    find_program(JFA_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
  endif()
  if(JFA_NVCC)
    jfa_check_nvcc(${JFA_NVCC} jfa_no_nvcc)
  else()
    set(jfa_no_nvcc "there is no nvcc")
  endif()
  if(jfa_no_nvcc AND JAX_FUSED_ADAMW_CUDA STREQUAL "ON")
    message(FATAL_ERROR "JAX_FUSED_ADAMW_CUDA=ON, but ${jfa_no_nvcc}. Put nvcc 12.1 or newer on the "
                        "PATH or set CUDACXX, or use AUTO: the kernels are then compiled at run "
                        "time by the NVRTC of jax[cuda12] or jax[cuda13].")
  endif()
endif()

if(jfa_no_nvcc)
  message(STATUS "CUDA kernels: ${jfa_no_nvcc}, so NVRTC will compile them at run time")
else()
  execute_process(COMMAND ${JFA_NVCC} --list-gpu-arch OUTPUT_VARIABLE jfa_known
    COMMAND_ERROR_IS_FATAL ANY)
  set(jfa_gencode "")
  set(jfa_last "")
  foreach(arch IN LISTS JAX_FUSED_ADAMW_CUDA_ARCHITECTURES)
    if(jfa_known MATCHES "compute_${arch}\n")
      list(APPEND jfa_architectures ${arch})
      list(APPEND jfa_gencode -gencode=arch=compute_${arch},code=sm_${arch})
      set(jfa_last ${arch})
    endif()
  endforeach()
  if(NOT jfa_last)
    message(FATAL_ERROR "JAX_FUSED_ADAMW_CUDA_ARCHITECTURES=${JAX_FUSED_ADAMW_CUDA_ARCHITECTURES}: "
                        "none of them is known to ${JFA_NVCC}; write numbers such as 80;90")
  endif()
  if(JAX_FUSED_ADAMW_CUDA_PTX_ONLY)
    set(jfa_gencode "")
    set(jfa_architectures "")
  endif()
  list(APPEND jfa_gencode -gencode=arch=compute_${jfa_last},code=compute_${jfa_last})
  list(APPEND jfa_architectures "${jfa_last}-ptx")
  foreach(kernel IN LISTS JFA_CUDA_KERNELS)
    get_filename_component(name ${kernel} NAME_WE)
    set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
    # --fmad=false: each operation rounds as on every other platform (cc/core/adamw.h).
    add_custom_command(OUTPUT ${fatbin}
      COMMAND ${JFA_NVCC} -fatbin -std=c++17 -O3 --fmad=false --threads 0 ${jfa_gencode}
        -I${PROJECT_SOURCE_DIR}/cc -o ${fatbin} ${PROJECT_SOURCE_DIR}/cc/${kernel}
      DEPENDS ${jfa_cuda_sources} VERBATIM)
    list(APPEND jfa_fatbins ${fatbin})
  endforeach()
  list(JOIN jfa_architectures " " jfa_architectures)
  message(STATUS "CUDA kernels: ${JFA_NVCC} for ${jfa_architectures}")
endif()

foreach(files JFA_CUDA_HEADERS JFA_CUDA_KERNELS jfa_fatbins)
  list(JOIN ${files} "\\;" ${files}_argument)
endforeach()
add_custom_command(OUTPUT ${JFA_CUDA_EMBEDDED}
  COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR}/cc
    "-DKERNELS=${JFA_CUDA_KERNELS_argument}" "-DHEADERS=${JFA_CUDA_HEADERS_argument}"
    "-DFATBINS=${jfa_fatbins_argument}" "-DARCHITECTURES=${jfa_architectures}"
    -DOUTPUT=${JFA_CUDA_EMBEDDED} -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${jfa_cuda_sources} ${jfa_fatbins} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    ${PROJECT_SOURCE_DIR}/cc/cuda/nvrtc.cc)
