// How operations on rows that do not touch each other are shared between threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.h"

namespace ec {

// Calls fn(row) for every row. Waking a thread costs some microseconds, so a piece has about 8,192
// numbers (some microseconds of work) at least, unless threads would get fewer pieces than others.
template <typename Fn>
void for_rows(int64_t num_rows, int64_t row_size, Fn&& fn) {
    int64_t num_pieces = (num_rows * row_size + 8191) / 8192;
    if (num_pieces > num_threads())
        num_pieces = (num_pieces + num_threads() - 1) / num_threads() * num_threads();
    num_pieces = std::min(num_pieces, num_rows);
    parallel(num_pieces, [&](int64_t piece, int) {
        const int64_t stop = num_rows * (piece + 1) / num_pieces;
        for (int64_t row = num_rows * piece / num_pieces; row < stop; ++row) fn(row);
    });
}

}  // namespace ec
