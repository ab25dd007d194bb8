__attribute__((visibility("default"))) int ncclTestFunction(void);
int ncclTestFunction(void) { return 2; }
