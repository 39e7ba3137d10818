// One job at a time. Its state, and who changes it:
//
//   open_       caller   the job takes helpers
//   queues_[n]  all      the next task of a node's share to be taken, and where it ends; the shares
//                        of all nodes follow one another
//   seats_[i]   thread i whether it may be reading the job; a line of its own, so that many threads
//                        that come and go do not wait for each other's
//   signal_     caller   goes up with every job; sleepers wait for it to change (futex)
//
// A helper takes its seat, and only then looks whether the job is open; the caller closes the job,
// and only then waits for empty seats. Both are sequentially consistent, so no helper reads a job
// that its caller has left, and a helper that sleeps through a job delays no other.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "tiles.h"

namespace ec {
namespace {

constexpr auto spin_time = std::chrono::microseconds(50);
constexpr int max_threads = 1024, max_nodes = 64;

inline void pause() {
#if EC_X86
    __builtin_ia32_pause();
#elif EC_ARM
    asm volatile("isb" : : : "memory");  // waits longer than `yield`, which most ignore
#else
    std::this_thread::yield();
#endif
}

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value,
            nullptr, nullptr, 0);
}

struct alignas(64) Seat {
    std::atomic<bool> is_taken{false};
};

struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    int64_t stop = 0;
};

class Pool {
public:
    int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

    // `place_of_cpu`: the number of each CPU's place, -1 for one that this process may not use.
    // Where there are as many places as threads, every helper has a place of its own, and the
    // caller moves as the system likes. Where there are more, other processes may have theirs
    // there: the system finds the threads CPUs that are idle.
    // `node_of_cpu`: the node of each CPU, from 0 on without gaps; of use where helpers have places.
    void start(int num_threads, const int32_t* place_of_cpu, const int32_t* node_of_cpu,
               int num_cpus) {
        while (busy_.exchange(true)) sched_yield();  // a job reads what changes here
        if (num_threads > num_threads_.load()) {
            place_of_cpu_.assign(place_of_cpu, place_of_cpu + num_cpus);
            const auto last = std::max_element(place_of_cpu_.begin(), place_of_cpu_.end());
            is_pinned_ = num_cpus > 0 && *last + 1 == num_threads;
            places_.resize(static_cast<size_t>(num_threads));
            for (int i = 0; i < num_threads; ++i) places_[static_cast<size_t>(i)] = i;
            node_of_place_.assign(static_cast<size_t>(num_threads), 0);
            for (int cpu = 0; is_pinned_ && cpu < num_cpus; ++cpu) {
                if (place_of_cpu[cpu] >= 0)
                    node_of_place_[static_cast<size_t>(place_of_cpu[cpu])] = node_of_cpu[cpu];
            }
            int before = 0, nodes = 0;
            while (before < num_threads) {
                before += static_cast<int>(
                    std::count(node_of_place_.begin(), node_of_place_.end(), nodes));
                threads_to_[nodes++].store(before, std::memory_order_relaxed);
            }
            num_nodes_.store(nodes, std::memory_order_relaxed);
        }
        while (num_threads_.load() < num_threads) {
            const int index = num_threads_.load();
            std::thread helper([this, index] { help(index); });
            handles_.push_back(helper.native_handle());
            helper.detach();
            num_threads_.store(index + 1);
        }
        for (int i = 1; i < num_threads_.load(); ++i) pin(i);
        most_helpers_.store(num_threads_.load() - 1);
        busy_.store(false);
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
        for (int node = 0; node < num_nodes(); ++node) {
            const Share share = share_at(num_tasks, node);
            queues_[node].next.store(share.first, std::memory_order_relaxed);
            queues_[node].stop = share.stop;
        }
        open_.store(true);
        wake(num_tasks - 1);
        work(0);
        open_.store(false);
        wait_until_left();
        working_ = false;
        busy_.store(false);
    }

    int num_nodes() const { return num_nodes_.load(std::memory_order_relaxed); }

    Share share_at(int64_t num_tasks, int node) const {
        const auto threads_to = [&](int i) -> int64_t {
            return i < 0 ? 0 : threads_to_[i].load(std::memory_order_relaxed);
        };
        const int64_t before = threads_to(node - 1), to = threads_to(node);
        const int64_t all = threads_to(num_nodes() - 1);
        return {num_tasks * before / all, num_tasks * to / all, static_cast<int>(to - before)};
    }

    // So many helpers that sleep wake and spin, if there are, and no more than have a CPU.
    void wake(int64_t wanted) {
        signal_.fetch_add(1);
        wanted = std::min<int64_t>(wanted, most_helpers_.load(std::memory_order_relaxed));
        if (wanted > 0 && sleepers_.load() > 0) {
            futex(&signal_, FUTEX_WAKE, static_cast<uint32_t>(wanted));
        }
    }

    // The CPUs of the process may have become fewer since the start: a container's are changed,
    // or someone has called taskset.
    void count_cpus() {
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        most_helpers_.store(std::min(num_threads(), CPU_COUNT(&allowed)) - 1);
    }

    // The threads of a parent do not exist in its child.
    void forget_threads() {
        num_threads_.store(1);
        handles_.clear();
        for (Seat& seat : seats_) seat.is_taken.store(false);
        sleepers_.store(0);
        open_.store(false);
        busy_.store(false);
    }

private:
    // Thread i belongs on places_[i]; 0 is the caller, whose place is only kept free. A system that
    // has taken the place from the process meanwhile leaves the thread where it is.
    void pin(int index) {
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        for (size_t cpu = 0; cpu < place_of_cpu_.size(); ++cpu) {
            const int place = place_of_cpu_[cpu];
            if (is_pinned_ ? place == places_[static_cast<size_t>(index)] : place >= 0)
                CPU_SET(cpu, &cpus);
        }
        pthread_setaffinity_np(handles_[static_cast<size_t>(index) - 1], sizeof cpus, &cpus);
    }

    // The system may have moved the caller onto a helper's place, where one would wait for the
    // other for milliseconds: the helper takes the place that is kept free.
    void make_room() {
        const int cpu = sched_getcpu();
        caller_cpu_.store(cpu, std::memory_order_relaxed);
        if (!is_pinned_ || cpu < 0 || static_cast<size_t>(cpu) >= place_of_cpu_.size()) return;
        const int place = place_of_cpu_[static_cast<size_t>(cpu)];
        if (place == places_[0]) return;
        const auto found = std::find(places_.begin() + 1, places_.end(), place);
        if (found == places_.end()) return;
        std::swap(places_[0], *found);
        pin(static_cast<int>(found - places_.begin()));
    }

    void work(int thread) {
        const int nodes = num_nodes();
        int own = 0;
        if (nodes > 1) {
            const int place = places_[static_cast<size_t>(thread)];
            own = node_of_place_[static_cast<size_t>(place)];
        }
        for (int i = 0; i < nodes; ++i) {
            Queue& queue = queues_[(own + i) % nodes];
            for (;;) {
                const int64_t task = queue.next.fetch_add(1, std::memory_order_relaxed);
                if (task >= queue.stop) break;
                task_(context_, task, thread);
            }
        }
    }

    void help(int index) {
        working_ = true;
        own_index_ = index;
        Seat& seat = seats_[index];
        uint32_t done = 0;  // the signal of the last job that this thread has helped with
        for (;;) {
            const uint32_t seen = wait_for_signal(done);
            done = seen;
            seat.is_taken.store(true);
            if (open_.load()) work(index);
            seat.is_taken.store(false, std::memory_order_release);
        }
    }

    // A helper that another program has driven from its CPU may stand in the way of its own task.
    void wait_until_left() {
        const int num_threads = num_threads_.load(std::memory_order_relaxed);
        for (int i = 1; i < num_threads; ++i) {
            for (int spins = 0; seats_[i].is_taken.load(); ++spins) {
                if (spins < 4096) {
                    pause();
                } else {
                    sched_yield();
                }
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
            // there it would spin in its caller's time
            if (sched_getcpu() == caller_cpu_.load(std::memory_order_relaxed)) break;
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

    std::vector<int32_t> place_of_cpu_;
    std::vector<int> places_;         // of threads 0, 1, ...
    std::vector<int> node_of_place_;
    std::atomic<int> threads_to_[max_nodes] = {1};  // of nodes 0 to this one
    std::atomic<int> num_nodes_{1};
    std::vector<pthread_t> handles_;  // of threads 1, 2, ...
    bool is_pinned_ = false;
    std::atomic<int> num_threads_{1};
    std::atomic<bool> busy_{false};
    Task task_ = nullptr;
    void* context_ = nullptr;
    Queue queues_[max_nodes];
    alignas(64) std::atomic<bool> open_{false};
    Seat seats_[max_threads];
    alignas(64) std::atomic<uint32_t> signal_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<int> caller_cpu_{-1};
    std::atomic<int> most_helpers_{0};

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

Share share_at(int64_t num_tasks, int index) { return pool().share_at(num_tasks, index); }

Share share_of(int64_t num_tasks, int64_t task, int* index) {
    for (*index = 0;; ++*index) {
        const Share share = pool().share_at(num_tasks, *index);
        if (task < share.stop || *index + 1 == pool().num_nodes()) return share;
    }
}

void run_tasks(int64_t num_tasks, Task run, void* context) {
    pool().run(num_tasks, run, context);
}

}  // namespace ec

EC_EXPORT int ec_num_threads() { return ec::num_threads(); }

// Starts threads until there are `num_threads` with the caller; a pool never shrinks. Places
// and nodes: `Pool::start`.
EC_EXPORT const char* ec_pool_start(int num_threads, const int32_t* place_of_cpu,
                                    const int32_t* node_of_cpu, int num_cpus) {
    if (num_threads < 1 || num_threads > ec::max_threads) {
        return ec::refuse("num_threads is %d, it must be in [1, %d]", num_threads, ec::max_threads);
    }
    if (num_cpus < 0 || num_cpus > CPU_SETSIZE) {
        return ec::refuse("num_cpus is %d, it must be in [0, %d]", num_cpus, CPU_SETSIZE);
    }
    for (int cpu = 0; cpu < num_cpus; ++cpu) {
        if (node_of_cpu[cpu] < 0 || node_of_cpu[cpu] >= ec::max_nodes) {
            return ec::refuse("node_of_cpu[%d] is %d, it must be in [0, %d)", cpu,
                              node_of_cpu[cpu], ec::max_nodes);
        }
    }
    ec::pool().start(num_threads, place_of_cpu, node_of_cpu, num_cpus);
    return nullptr;
}

// A job comes within some 100 us: a thread takes longer to wake than most tasks.
EC_EXPORT const char* ec_pool_wake() {
    ec::pool().count_cpus();
    ec::pool().wake(ec::max_threads);
    return nullptr;
}

// For tests: the thread of each task, one of which takes 1 ms times 1 + `more` * `thread`.
EC_EXPORT const char* ec_pool_show(int64_t num_tasks, int64_t* out, int more) {
    ec::parallel(num_tasks, [&](int64_t task, int thread) {
        out[task] = thread;
        std::this_thread::sleep_for(std::chrono::milliseconds(1 + more * thread));
    });
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
