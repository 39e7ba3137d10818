// How operations on rows that do not touch each other are shared between threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.h"

namespace ec {

// Calls fn(row) for every row. Waking a thread costs some microseconds, so a piece has about 16,384
// numbers (some microseconds of work) at least.
template <typename Fn>
void for_rows(int64_t num_rows, int64_t row_size, Fn&& fn) {
    const int64_t rows_at_once = std::max(int64_t{1}, 16384 / std::max(int64_t{1}, row_size));
    const int64_t num_pieces = (num_rows + rows_at_once - 1) / rows_at_once;
    parallel(num_pieces, [&](int64_t piece, int) {
        const int64_t stop = std::min(num_rows, (piece + 1) * rows_at_once);
        for (int64_t row = piece * rows_at_once; row < stop; ++row) fn(row);
    });
}

}  // namespace ec
