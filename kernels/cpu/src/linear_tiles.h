// Products on the matrix unit (instruction sets from `Isa::amx` on). See linear_tiles.cpp.
#pragma once

#include "linear.h"

namespace ec {

constexpr int64_t block_rows = 32;  // two tiles
constexpr int64_t step_bytes = panel_outputs * 4;

// What is read again for every panel should lie in the second cache.
inline int64_t rows_at_once(int64_t row_bytes) {
    constexpr int64_t most_cached_bytes = 512 << 10;
    return std::max<int64_t>(1, most_cached_bytes / row_bytes / block_rows) * block_rows;
}

// x has memory for whole tiles of 16 rows.
void linear_bf16_tiles(const LinearWeight& w, const PairedActivations& x, const Results& out,
                       const LinearTask& task);

// The first row that is left to the vector units.
int64_t linear_bytes_tiles(const LinearWeight& w, const Activations& x, const Results& out,
                           const LinearTask& task);

}  // namespace ec
