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

    // Aligned to 64 bytes, or null. What it held before is lost when it has to grow.
    template <typename T>
    T* try_reserve(int64_t count) {
        const auto bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > capacity_) {
            std::free(memory_);
            memory_ = std::aligned_alloc(64, bytes);
            capacity_ = memory_ == nullptr ? 0 : bytes;
        }
        return static_cast<T*>(memory_);
    }

    template <typename T>
    T* reserve(int64_t count) {
        T* memory = try_reserve<T>(count);
        if (memory == nullptr && count > 0) throw std::bad_alloc();
        return memory;
    }

private:
    void* memory_ = nullptr;
    size_t capacity_ = 0;
};

}  // namespace ec
