sf_test(parity_dflash TORCH
  SOURCES parity_dflash.cpp ${CMAKE_SOURCE_DIR}/tests/draft/algorithm_run.cpp ${CMAKE_SOURCE_DIR}/tests/kernels/gpu.cpp ${CMAKE_SOURCE_DIR}/tests/dflash2/draft_run.cpp ${CMAKE_SOURCE_DIR}/tests/dflash2/candidate_ops.cpp ${CMAKE_SOURCE_DIR}/plugins/sharding/single/single.cpp
  LINK sf_dflash2 sf_train sf_kernels
  TIMEOUT 60)
