// core/kernels/crew.hpp
//
// Threads for many small pieces of work in a row, as a decoding step on a CPU is made of: some four a layer, each shorter than a sleeping thread takes to wake (50 us and more on
// a virtual machine). A crew's threads look for the next piece for about 0.1 ms before they sleep, and nobody waits for one that sleeps or has been put aside: each thread begins
// with a share of its own, which lies together, and then takes what others have not begun.
//
// Work must not throw, and what it does for a task may not depend on who does it. One piece runs at a time; what is asked from inside one, or while another thread's is
// running, is done by the asking thread alone. A forked child has no threads of it and works alone as well.
#pragma once

#include <cstdint>

namespace sf {

/// work(context, task) for 0 .. tasks - 1, each once, by at most `threads` threads of which the caller is one; returns when all are done. At most kCrewTasks of them.
void crew_run(int64_t tasks, int threads, void (*work)(const void* context, int64_t task), const void* context);
constexpr int64_t kCrewTasks = int64_t{1} << 20;

template <class Work>
void in_crew(int64_t tasks, int threads, const Work& work) {
  crew_run(tasks, threads, [](const void* context, int64_t task) { (*static_cast<const Work*>(context))(task); }, &work);
}

}  // namespace sf
