sf_test(parity_target SOURCES parity_target.cpp LINK sf_model TORCH LABELS parity)
