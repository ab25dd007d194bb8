#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#ifdef __SANITIZE_THREAD__   // its runtime writes what stdout still holds when a forked child ends by _exit
#include <cstdio>
[[maybe_unused]] static const int kUnbuffered = std::setvbuf(stdout, nullptr, _IONBF, 0);
#endif
