// Memory that grows to the largest use and then stays: nothing is allocated in the steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace ec {

// For a `thread_local` variable: no two threads may share one.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(memory_); }

    // What it held before is lost when it has to grow.
    float* floats(int64_t count) {
        if (count > count_) {
            const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
            std::free(memory_);
            memory_ = static_cast<float*>(std::aligned_alloc(64, bytes));
            count_ = memory_ == nullptr ? 0 : count;
            if (memory_ == nullptr) throw std::bad_alloc();
        }
        return memory_;
    }

private:
    float* memory_ = nullptr;
    int64_t count_ = 0;
};

}  // namespace ec
