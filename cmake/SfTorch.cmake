# LibTorch for the trainer: what plugins out of tree use, too, with one precompiled header for all targets.
if(NOT EXISTS "${Sf_TORCH_ROOT}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "SF_TORCH is ON, but Sf_TORCH_ROOT ('${Sf_TORCH_ROOT}') has no lib/libtorch_cpu.so. "
                      "Run tools/setup and set Sf_TORCH_ROOT as tools/setup --print says, or configure with -DSF_TORCH=OFF.")
endif()
include(${CMAKE_SOURCE_DIR}/sdk/cmake/SfTorch.cmake)
if(NOT SF_TORCH_VARIANT MATCHES "^2\\.11\\.0")
  message(WARNING "LibTorch ${SF_TORCH_VARIANT} is not tested; 2.11.0 is")
endif()

# Where an installed library looks for LibTorch: first in a wheel that was installed beside it (pip install --target PREFIX), then where this build found
# its own. cpack takes the second part out: SfPackage.cmake.
set(SF_INSTALL_RPATH "$ORIGIN/../../torch/lib")
foreach(dir ${SF_NVIDIA_DIRS})
  file(RELATIVE_PATH below ${Sf_TORCH_ROOT}/.. ${dir})
  list(APPEND SF_INSTALL_RPATH "$ORIGIN/../../${below}")
endforeach()
set(SF_PACKAGE_RPATH ${SF_INSTALL_RPATH})
list(APPEND SF_INSTALL_RPATH ${SF_TORCH_RPATH})

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
  set_target_properties(${name} PROPERTIES BUILD_RPATH "${SF_TORCH_RPATH}" INSTALL_RPATH "${SF_INSTALL_RPATH}")
endfunction()
