# JFA_CUDA_EMBEDDED: the source file that holds the kernels, as text for NVRTC and, where nvcc is
# used, as a fatbin.

set(JFA_CUDA_HEADERS
  core/adamw.h core/chunks.h core/dtype.h core/macros.h core/scalars.h
  cuda/io.cuh cuda/table.h cuda/tuning.h)
set(JFA_CUDA_KERNEL cuda/update_kernel.cu)
set(JFA_CUDA_EMBEDDED ${CMAKE_CURRENT_BINARY_DIR}/embedded.cc)
list(TRANSFORM JFA_CUDA_HEADERS PREPEND ${PROJECT_SOURCE_DIR}/cc/ OUTPUT_VARIABLE jfa_cuda_sources)
list(APPEND jfa_cuda_sources ${PROJECT_SOURCE_DIR}/cc/${JFA_CUDA_KERNEL})

set(jfa_fatbin "")
set(jfa_architectures "")
if(NOT JAX_FUSED_ADAMW_CUDA STREQUAL "OFF")
  find_program(JFA_NVCC nvcc HINTS $ENV{CUDACXX} $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin
    /usr/local/cuda/bin)
  if(JFA_NVCC)
    execute_process(COMMAND ${JFA_NVCC} --list-gpu-arch OUTPUT_VARIABLE jfa_known
      COMMAND_ERROR_IS_FATAL ANY)
    set(jfa_gencode "")
    foreach(arch IN LISTS JAX_FUSED_ADAMW_CUDA_ARCHITECTURES)
      if(jfa_known MATCHES "compute_${arch}\n")
        list(APPEND jfa_architectures ${arch})
        list(APPEND jfa_gencode -gencode=arch=compute_${arch},code=sm_${arch})
        set(jfa_last ${arch})
      endif()
    endforeach()
    if(JAX_FUSED_ADAMW_CUDA_PTX_ONLY)
      set(jfa_gencode "")
      set(jfa_architectures "")
    endif()
    list(APPEND jfa_gencode -gencode=arch=compute_${jfa_last},code=compute_${jfa_last})
    list(APPEND jfa_architectures "${jfa_last}-ptx")
    set(jfa_fatbin ${CMAKE_CURRENT_BINARY_DIR}/update_kernel.fatbin)
    # --fmad=false: each operation rounds as on every other platform (cc/core/adamw.h).
    add_custom_command(OUTPUT ${jfa_fatbin}
      COMMAND ${JFA_NVCC} -fatbin -std=c++17 -O3 --fmad=false --threads 0 ${jfa_gencode}
        -I${PROJECT_SOURCE_DIR}/cc -o ${jfa_fatbin} ${PROJECT_SOURCE_DIR}/cc/${JFA_CUDA_KERNEL}
      DEPENDS ${jfa_cuda_sources} VERBATIM)
    list(JOIN jfa_architectures " " jfa_architectures)
    message(STATUS "CUDA kernels: ${JFA_NVCC} for ${jfa_architectures}")
  elseif(JAX_FUSED_ADAMW_CUDA STREQUAL "ON")
    message(FATAL_ERROR "JAX_FUSED_ADAMW_CUDA=ON, but there is no nvcc. Put it on the PATH or set "
                        "CUDA_HOME, or use AUTO: the kernels are then compiled at run time by "
                        "the NVRTC of jax[cuda12] or jax[cuda13].")
  else()
    message(STATUS "CUDA kernels: no nvcc, so NVRTC will compile them at run time")
  endif()
endif()

list(JOIN JFA_CUDA_HEADERS "\\;" jfa_headers)
add_custom_command(OUTPUT ${JFA_CUDA_EMBEDDED}
  COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR}/cc -DKERNEL=${JFA_CUDA_KERNEL}
    "-DHEADERS=${jfa_headers}" -DFATBIN=${jfa_fatbin} "-DARCHITECTURES=${jfa_architectures}"
    -DOUTPUT=${JFA_CUDA_EMBEDDED} -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${jfa_cuda_sources} ${jfa_fatbin} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
