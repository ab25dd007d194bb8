# cmake -D FROM=kernel.cu -D TO=kernel.cpp -P sources_on_cpu.cmake: a kernel's source for fibers.hpp. Launches become calls, dynamic shared memory a pointer.
file(READ "${FROM}" text)
string(REGEX REPLACE "(\n *)([^\n]+)<<<([^\n]+)>>>\\(([^\n]*)\\);" "\\1::sf::test::fibers::launch(\\3)([&] { (\\2)(\\4); });" text "${text}")
string(REGEX REPLACE "extern __shared__ float ([a-z]+)\\[\\];" "float* const \\1 = reinterpret_cast<float*>(::sf::test::fibers::dynamic_memory.data());" text "${text}")
file(WRITE "${TO}" "#include \"tests/kernels/fibers.hpp\"\n${text}")
