# CUDA kernels without CMake's CUDA language: nvcc compiles .cu files to objects, so that no device test or toolkit library is needed to configure.
# nvcc comes from the machine's toolkit or from the wheels of tools/setup; headers of the CUDA runtime, cuBLAS and NCCL for .cpp files and the
# libraries that we link are those of the torch wheel.
set(SF_CUDA_ARCHITECTURES "80;90a" CACHE STRING "compute capabilities with machine code; PTX for compute_80 stands beside them for newer cards")
find_program(SF_NVCC nvcc HINTS $ENV{SF_NVCC_ROOT}/bin $ENV{CUDA_HOME}/bin PATHS /usr/local/cuda/bin)
if(SF_NVCC)
  message(STATUS "CUDA kernels: ${SF_NVCC} for ${SF_CUDA_ARCHITECTURES}")
else()
  message(WARNING "CUDA kernels are left out: there is no nvcc. Runs on a GPU will use LibTorch's own operations, several times slower. "
                  "tools/setup installs nvcc; or name one with -DSF_NVCC=/path/to/nvcc.")
endif()

get_filename_component(SF_NVIDIA_ROOT "${Sf_TORCH_ROOT}/../nvidia" ABSOLUTE)
set(SF_CUDA_INCLUDE ${SF_NVIDIA_ROOT}/cu13/include ${SF_NVIDIA_ROOT}/nccl/include)
# The runtime's headers include crt/*.h and nv/target, which come with the compiler, in its own wheels or its toolkit.
if(SF_NVCC)
  file(REAL_PATH ${SF_NVCC} nvcc)
  get_filename_component(nvcc_root ${nvcc}/../.. ABSOLUTE)
endif()
find_path(SF_CUDA_CRT crt/host_defines.h PATHS ${nvcc_root}/include ${nvcc_root}/targets/x86_64-linux/include $ENV{SF_NVCC_ROOT}/include $ENV{CUDA_HOME}/include
          /usr/local/cuda/include NO_DEFAULT_PATH NO_CACHE)
if(NOT SF_CUDA_CRT)
  message(FATAL_ERROR "there is no crt/host_defines.h, which headers of the CUDA runtime include, beside nvcc ('${SF_NVCC}'). tools/setup installs it on machines without "
                      "nvcc and tools/setup --print names the folder, SF_NVCC_ROOT; or name the folder above crt with -DSF_CUDA_CRT=/path/to/include.")
endif()
list(APPEND SF_CUDA_INCLUDE ${SF_CUDA_CRT})
set(SF_CUDA_LIBRARIES ${SF_NVIDIA_ROOT}/cu13/lib/libcudart.so.13 ${SF_NVIDIA_ROOT}/cu13/lib/libcublas.so.13 ${SF_NVIDIA_ROOT}/cu13/lib/libcublasLt.so.13)
set(SF_NCCL_LIBRARY ${SF_NVIDIA_ROOT}/nccl/lib/libnccl.so.2)

set(SF_NVCC_FLAGS -std=c++20 -O3 -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra -cudart=shared --threads=1)
foreach(architecture ${SF_CUDA_ARCHITECTURES})
  list(APPEND SF_NVCC_FLAGS -gencode=arch=compute_${architecture},code=sm_${architecture})
endforeach()
list(APPEND SF_NVCC_FLAGS -gencode=arch=compute_80,code=compute_80)
if(DEFINED ENV{CI})
  list(APPEND SF_NVCC_FLAGS -Werror=all-warnings)
endif()

# sf_cuda_objects(out_variable a.cu ...): one object for each file; none without nvcc.
function(sf_cuda_objects out_variable)
  set(objects)
  if(SF_NVCC)
    foreach(source ${ARGN})
      get_filename_component(source ${source} ABSOLUTE)
      get_filename_component(name ${source} NAME_WE)
      set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}.cu.o)
      add_custom_command(OUTPUT ${object}
        COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${SF_NVCC} ${SF_NVCC_FLAGS} -I${CMAKE_SOURCE_DIR} -I${CMAKE_SOURCE_DIR}/sdk/include
                -MD -MF ${object}.d -c ${source} -o ${object}
        DEPENDS ${source} DEPFILE ${object}.d COMMENT "nvcc ${name}.cu" VERBATIM)
      list(APPEND objects ${object})
    endforeach()
  endif()
  set(${out_variable} ${objects} PARENT_SCOPE)
endfunction()
