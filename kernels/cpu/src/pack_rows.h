// Rows as a model's file has them, on their way into the panels of a weight (linear.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace ec {

struct RowType {
    int64_t inputs, bytes;  // of a block
};

// By the numbers in kernels/cpu/weights.py: f32, f16, bf16, GGUF's blocks
// (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h), and the codes of i8_row.
constexpr RowType row_types[] = {
    {1, 4},     {1, 2},                                            // f32, f16
    {1, 2},                                                        // bf16
    {32, 18},   {32, 20},   {32, 22},   {32, 34},                  // Q4_0, Q4_1, Q5_0, Q8_0
    {256, 144}, {256, 176}, {256, 210}, {32, 17},                  // Q4_K, Q5_K, Q6_K, MXFP4
    {32, 32},                                                      // codes of i8_row
    {32, 24},   {32, 18},   {256, 136},                            // Q5_1, IQ4_NL, IQ4_XS
    {256, 110}, {256, 84},  {256, 168},                            // Q3_K, Q2_K, table_k
};

// Rows [num_stored, row_bytes], contiguous; row i of them is `order[i]` (null: i).
struct Rows {
    const uint8_t* at;
    int64_t type;
    int64_t row_bytes;
    const int64_t* order;
    int64_t num_rows;

    // Where row `i` has its blocks from `input` on, a multiple of a block's.
    const uint8_t* block(int64_t i, int64_t input) const {
        const RowType& t = row_types[type];
        return at + (order == nullptr ? i : order[i]) * row_bytes + input / t.inputs * t.bytes;
    }
};

// Calls `fill(panel, lane, i, lanes)` for each panel of outputs [first, first + num_rows), on all
// threads: rows [i, i + lanes) become its outputs from `lane` on.
template <typename Fn>
void each_panel(int64_t first, int64_t num_rows, Fn&& fill) {
    const int64_t first_panel = first / panel_outputs, end = first + num_rows;
    parallel((end + panel_outputs - 1) / panel_outputs - first_panel, [&](int64_t task, int) {
        const int64_t panel = first_panel + task;
        const int64_t start = std::max(panel * panel_outputs, first);
        const int64_t stop = std::min((panel + 1) * panel_outputs, end);
        fill(panel, start % panel_outputs, start - first, stop - start);
    });
}

// Fill outputs [first, first + rows.num_rows) of panels. All is checked but that rows of the type
// become this kind of weight: null, or a refusal.
const char* pack_floats(const Rows& rows, const LinearWeight& w, int64_t first, uint8_t* panels);
const char* pack_blocks(const Rows& rows, const LinearWeight& w, int64_t first, uint8_t* panels);

}  // namespace ec
