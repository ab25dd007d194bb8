# LibTorch from a torch wheel: shared libraries only, headers as SYSTEM, one precompiled header for all targets.
if(NOT EXISTS "${Sf_TORCH_ROOT}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "SF_TORCH is ON, but Sf_TORCH_ROOT ('${Sf_TORCH_ROOT}') has no lib/libtorch_cpu.so. "
                      "Run tools/setup and set Sf_TORCH_ROOT as tools/setup --print says, or configure with -DSF_TORCH=OFF.")
endif()
file(STRINGS "${Sf_TORCH_ROOT}/version.py" version_line REGEX "^__version__ *=")
string(REGEX MATCH "[0-9][0-9a-z.+]+" SF_TORCH_VARIANT "${version_line}")
if(NOT SF_TORCH_VARIANT MATCHES "^2\\.11\\.0")
  message(WARNING "LibTorch ${SF_TORCH_VARIANT} is not tested; 2.11.0 is")
endif()
message(STATUS "LibTorch ${SF_TORCH_VARIANT}: ${Sf_TORCH_ROOT}")

get_filename_component(site "${Sf_TORCH_ROOT}" DIRECTORY)
file(GLOB nvidia_dirs ${site}/nvidia/*/lib)
add_library(sf_torch INTERFACE)
target_include_directories(sf_torch SYSTEM INTERFACE ${Sf_TORCH_ROOT}/include ${Sf_TORCH_ROOT}/include/torch/csrc/api/include)
# at::parallel_for is a template over OpenMP pragmas: without -fopenmp it runs on one thread wherever we call it. The runtime is LibTorch's own.
target_compile_options(sf_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_libraries(sf_torch INTERFACE ${Sf_TORCH_ROOT}/lib/libtorch_cpu.so ${Sf_TORCH_ROOT}/lib/libc10.so ${Sf_TORCH_ROOT}/lib/libgomp.so.1)
set(SF_TORCH_RPATH ${Sf_TORCH_ROOT}/lib ${nvidia_dirs})
foreach(dir ${nvidia_dirs})
  target_link_options(sf_torch INTERFACE -Wl,-rpath-link,${dir})
endforeach()

# Without CUDA headers on the machine LibTorch's CPU headers still compile; nothing here includes a CUDA header.
file(WRITE ${CMAKE_BINARY_DIR}/sf_torch_pch.cpp.in "// compiled once for the precompiled header\n")
configure_file(${CMAKE_BINARY_DIR}/sf_torch_pch.cpp.in ${CMAKE_BINARY_DIR}/sf_torch_pch.cpp COPYONLY)
add_library(sf_torch_pch OBJECT ${CMAKE_BINARY_DIR}/sf_torch_pch.cpp)
target_link_libraries(sf_torch_pch PRIVATE sf_torch)
target_compile_options(sf_torch_pch PRIVATE -fPIC -fpch-preprocess -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers)
target_precompile_headers(sf_torch_pch PRIVATE <ATen/ATen.h> <torch/csrc/autograd/custom_function.h>)

# Gives a target LibTorch, the shared precompiled header and the RPATHs of LibTorch's folders.
function(sf_use_torch name)
  target_link_libraries(${name} PUBLIC sf_torch)
  target_compile_options(${name} PRIVATE -fPIC -fpch-preprocess)
  target_precompile_headers(${name} REUSE_FROM sf_torch_pch)
  set_target_properties(${name} PROPERTIES BUILD_RPATH "${SF_TORCH_RPATH}" INSTALL_RPATH "${SF_TORCH_RPATH}")
endfunction()
