# LibTorch from a torch wheel, for the trainer itself and for plugins out of tree: the target sf_torch, SF_TORCH_VARIANT ("2.11.0+cu130"), SF_NVIDIA_DIRS
# (folders of the CUDA libraries that come with it) and SF_TORCH_RPATH. Sf_TORCH_ROOT names the wheel's torch folder.
if(NOT EXISTS "${Sf_TORCH_ROOT}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "Sf_TORCH_ROOT ('${Sf_TORCH_ROOT}') has no lib/libtorch_cpu.so. Name the torch folder of an installed torch wheel: "
                      "tools/setup --print says where it put one, python3 -c 'import torch; print(torch.__path__[0])' where another is.")
endif()
file(STRINGS "${Sf_TORCH_ROOT}/version.py" version_line REGEX "^__version__ *=")
string(REGEX MATCH "[0-9][0-9a-z.+]+" SF_TORCH_VARIANT "${version_line}")
message(STATUS "LibTorch ${SF_TORCH_VARIANT}: ${Sf_TORCH_ROOT}")

get_filename_component(site "${Sf_TORCH_ROOT}" DIRECTORY)
file(GLOB SF_NVIDIA_DIRS ${site}/nvidia/*/lib)
set(SF_TORCH_RPATH ${Sf_TORCH_ROOT}/lib ${SF_NVIDIA_DIRS})
if(NOT TARGET sf_torch)
  add_library(sf_torch INTERFACE)
  # Shared libraries only, headers as SYSTEM.
  target_include_directories(sf_torch SYSTEM INTERFACE ${Sf_TORCH_ROOT}/include ${Sf_TORCH_ROOT}/include/torch/csrc/api/include)
  # at::parallel_for is a template over OpenMP pragmas: without -fopenmp it runs on one thread wherever we call it. The runtime is LibTorch's own.
  target_compile_options(sf_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  target_link_libraries(sf_torch INTERFACE ${Sf_TORCH_ROOT}/lib/libtorch_cpu.so ${Sf_TORCH_ROOT}/lib/libc10.so ${Sf_TORCH_ROOT}/lib/libgomp.so.1)
  foreach(dir ${SF_NVIDIA_DIRS})
    target_link_options(sf_torch INTERFACE -Wl,-rpath-link,${dir})
  endforeach()
endif()
