// One job at a time. Its state, and who changes it:
//
//   open_       caller   the job takes helpers
//   next_       all      the next task to be taken
//   inside_     threads  helpers that may be reading the job
//   signal_     caller   goes up with every job; sleepers wait for it to change (futex)
//
// A helper enters (inside_ + 1), and only then looks whether the job is open; the caller closes
// the job, and only then waits for inside_ = 0. Both are sequentially consistent, so no helper
// reads a job that its caller has left, and a helper that sleeps through a job delays no other.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "tiles.h"

namespace ec {
namespace {

constexpr auto spin_time = std::chrono::microseconds(50);
constexpr int max_threads = 1024;

inline void pause() {
#if EC_X86
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value,
            nullptr, nullptr, 0);
}

class Pool {
public:
    int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

    // Every helper has a CPU of its own among the process's; the caller moves as the system likes.
    int start(int num_threads) {
        while (busy_.exchange(true)) sched_yield();  // a job reads what changes here
        if (cpus_.empty()) {
            cpu_set_t allowed;
            CPU_ZERO(&allowed);
            if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
                for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
                    if (CPU_ISSET(cpu, &allowed)) cpus_.push_back(cpu);
                }
            }
        }
        if (!cpus_.empty() && num_threads > static_cast<int>(cpus_.size())) {
            num_threads = static_cast<int>(cpus_.size());
        }
        while (num_threads_.load() < num_threads) {
            const int index = num_threads_.load();
            std::thread helper([this, index] { help(index); });
            handles_.push_back(helper.native_handle());
            if (!cpus_.empty()) pin(index);
            helper.detach();
            num_threads_.store(index + 1);
        }
        busy_.store(false);
        return num_threads_.load();
    }

    void run(int64_t num_tasks, Task task, void* context) {
        if (num_tasks <= 0) return;
        if (num_tasks == 1 || num_threads() == 1 || working_ || busy_.exchange(true)) {
            const int thread = working_ ? own_index_ : 0;
            for (int64_t i = 0; i < num_tasks; ++i) task(context, i, thread);
            return;
        }
        working_ = true;
        own_index_ = 0;
        make_room();
        task_ = task;
        context_ = context;
        num_tasks_ = num_tasks;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true);
        wake();
        work(0);
        open_.store(false);
        wait_until_left();
        working_ = false;
        busy_.store(false);
    }

    // Helpers that sleep wake and spin.
    void wake() {
        signal_.fetch_add(1);
        if (sleepers_.load() > 0) futex(&signal_, FUTEX_WAKE, INT_MAX);
    }

    // The threads of a parent do not exist in its child.
    void forget_threads() {
        num_threads_.store(1);
        handles_.clear();
        inside_.store(0);
        sleepers_.store(0);
        open_.store(false);
        busy_.store(false);
    }

private:
    // Thread i belongs on cpus_[i]; 0 is the caller, whose place is only kept free.
    void pin(int index) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpus_[static_cast<size_t>(index)], &one);
        pthread_setaffinity_np(handles_[static_cast<size_t>(index) - 1], sizeof one, &one);
    }

    // The system may have moved the caller onto a helper's CPU, where one would wait for the
    // other for milliseconds: the helper takes the place that is kept free.
    void make_room() {
        const int cpu = sched_getcpu();
        if (cpus_.empty() || cpu == cpus_[0]) return;
        const int num_threads = num_threads_.load(std::memory_order_relaxed);
        for (int i = 1; i < num_threads; ++i) {
            if (cpus_[static_cast<size_t>(i)] != cpu) continue;
            std::swap(cpus_[0], cpus_[static_cast<size_t>(i)]);
            pin(i);
            return;
        }
    }

    void work(int thread) {
        for (;;) {
            const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
            if (task >= num_tasks_) return;
            task_(context_, task, thread);
        }
    }

    void help(int index) {
        working_ = true;
        own_index_ = index;
        uint32_t done = 0;  // the signal of the last job that this thread has helped with
        for (;;) {
            const uint32_t seen = wait_for_signal(done);
            done = seen;
            inside_.fetch_add(1);
            if (open_.load()) work(index);
            inside_.fetch_sub(1);
        }
    }

    // A helper that another program has driven from its CPU may stand in the way of its own task.
    void wait_until_left() {
        for (int i = 0; inside_.load() != 0; ++i) {
            if (i < 4096) {
                pause();
            } else {
                sched_yield();
            }
        }
    }

    uint32_t wait_for_signal(uint32_t done) {
        const auto stop = std::chrono::steady_clock::now() + spin_time;
        do {
            for (int i = 0; i < 32; ++i) {
                const uint32_t signal = signal_.load(std::memory_order_acquire);
                if (signal != done) return signal;
                pause();
            }
        } while (std::chrono::steady_clock::now() < stop);
        release_tiles();
        sleepers_.fetch_add(1);
        uint32_t signal = signal_.load();
        while (signal == done) {
            futex(&signal_, FUTEX_WAIT, done);
            signal = signal_.load();
        }
        sleepers_.fetch_sub(1);
        return signal;
    }

    std::vector<int> cpus_;           // of threads 0, 1, ...; those behind are not in use
    std::vector<pthread_t> handles_;  // of threads 1, 2, ...
    std::atomic<int> num_threads_{1};
    std::atomic<bool> busy_{false};
    Task task_ = nullptr;
    void* context_ = nullptr;
    int64_t num_tasks_ = 0;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<bool> open_{false};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<uint32_t> signal_{0};
    std::atomic<int> sleepers_{0};

    static thread_local bool working_;
    static thread_local int own_index_;
};

thread_local bool Pool::working_ = false;
thread_local int Pool::own_index_ = 0;

// Never destroyed: its threads outlive static objects.
Pool& pool() {
    static Pool* const only = [] {
        auto* made = new Pool;
        pthread_atfork(nullptr, nullptr, [] {
            pool().forget_threads();
            release_tiles();  // a child begins without their shapes
        });
        return made;
    }();
    return *only;
}

}  // namespace

int num_threads() { return pool().num_threads(); }

void run_tasks(int64_t num_tasks, Task run, void* context) {
    pool().run(num_tasks, run, context);
}

}  // namespace ec

EC_EXPORT int ec_num_threads() { return ec::num_threads(); }

// Starts threads until there are `num_threads` with the caller, and no more than the CPUs that
// this process may use; a pool never shrinks.
EC_EXPORT const char* ec_pool_start(int num_threads) {
    if (num_threads < 1 || num_threads > ec::max_threads) {
        return ec::refuse("num_threads is %d, it must be in [1, %d]", num_threads, ec::max_threads);
    }
    ec::pool().start(num_threads);
    return nullptr;
}

// A job comes within some 100 us: a thread takes longer to wake than most tasks.
EC_EXPORT const char* ec_pool_wake() {
    ec::pool().wake();
    return nullptr;
}

// For tests: out[task] += task + 1, every task `repeats` times in nested and outer calls.
EC_EXPORT const char* ec_pool_prove(int64_t num_tasks, int64_t* out, int64_t* threads_seen) {
    ec::parallel(num_tasks, [&](int64_t task, int thread) {
        ec::parallel(2, [&](int64_t, int) { out[task] += task + 1; });
        threads_seen[thread] += 1;
    });
    return nullptr;
}
