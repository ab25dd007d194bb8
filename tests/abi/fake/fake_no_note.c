/* A shared library that is no plugin. */
__attribute__((visibility("default"))) int sf_test_nothing = 1;
