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
#pragma once

#include <cstdint>
#include <type_traits>

namespace ec {

int num_threads();

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
