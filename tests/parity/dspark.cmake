sf_test(parity_dspark TORCH
  SOURCES parity_dspark.cpp ${CMAKE_SOURCE_DIR}/tests/draft/algorithm_run.cpp ${CMAKE_SOURCE_DIR}/tests/kernels/gpu.cpp ${CMAKE_SOURCE_DIR}/plugins/sharding/single/single.cpp
  LINK sf_dspark sf_train sf_kernels
  TIMEOUT 60)
