sf_test(parity_eagle3 TORCH
  SOURCES parity_eagle3.cpp ${CMAKE_SOURCE_DIR}/tests/draft/algorithm_run.cpp ${CMAKE_SOURCE_DIR}/tests/kernels/gpu.cpp ${CMAKE_SOURCE_DIR}/plugins/sharding/single/single.cpp
  LINK sf_eagle3 sf_train sf_kernels
  TIMEOUT 60)
