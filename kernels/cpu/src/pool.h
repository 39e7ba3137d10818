// The threads that share the work of one operation.
//
//     ec::parallel(num_tasks, [&](int64_t task, int thread) { ... });
//
// calls the function once for every task in [0, num_tasks), on the calling thread and the pool's,
// in no fixed order, and returns when all are done. `thread` is in [0, num_threads()), and no two
// tasks run at once with the same one, so it may choose a buffer. A task must not throw. A call
// within a task, or while another thread's call is running, runs all its tasks on its own thread:
// then `thread` is 0 for a foreign thread, so buffers chosen by it are `thread_local` or the
// callers take turns (one thread drives the engine, so they do).
//
// A thread that finds nothing to do spins for about 50 us, then sleeps in the kernel.
//
// Where the threads are told by node of memory (`ec_pool_start`), each node has a share of the tasks:
// the first so many for the first node, as large as its part of the threads. A thread takes its
// node's tasks first and helps the others when they are gone, so of equal jobs a node has the same
// tasks each time, and pages that a job touches first lie where the next one reads them.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ec {

int num_threads();

// The tasks of a node.
struct Share {
    int64_t first, stop;
    int threads;  // that take these first
};

// The share that `task` of a job of `num_tasks` is in, or the one of that index.
Share share_of(int64_t num_tasks, int64_t task, int* index);
Share share_at(int64_t num_tasks, int index);

using Task = void (*)(void* context, int64_t task, int thread);
void run_tasks(int64_t num_tasks, Task run, void* context);

template <typename Fn>
void parallel(int64_t num_tasks, Fn&& fn) {
    using Function = std::remove_reference_t<Fn>;
    run_tasks(
        num_tasks,
        [](void* context, int64_t task, int thread) {
            (*static_cast<Function*>(context))(task, thread);
        },
        const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace ec
