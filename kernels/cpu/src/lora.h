// Low-rank adapters beside a product, many in one step: out[t] += B (A x[t]) with the A and B of
// t's adapter, in float32. Both are `f32` weights, so a row's bits do not depend on the others.
#pragma once

#include <cstdint>

#include "linear.h"

namespace ec {

// What an adapter adds to one product: the parts of the product that it changes, side by side in A.
// Mirrored by `LoraSlot` in kernels/cpu/lora.py.
struct LoraSlot {
    const LinearWeight* a;   // [sum of ranks, num_inputs]; null: the slot is empty
    const LinearWeight* b;   // [num_parts], each [outputs of the part, its rank]
    const int64_t* columns;  // [num_parts], where a part's outputs begin
    int64_t num_parts;
};

// Rows [start, stop) of a step have the adapter in `slot`. Mirrored by an array of int64 there.
struct LoraSegment {
    int64_t slot, start, stop;
};

// Mirrored by `LoraStep` there. Segments do not overlap.
struct LoraStep {
    const LoraSegment* segments;
    int64_t num_segments;
};

// Mirrored by `LoraStack` there.
struct LoraStack {
    const LoraSlot* slots;
    int64_t num_slots;
    const LoraStep* step;
};

}  // namespace ec

// x [num_rows, inputs], out [num_rows, outputs]; strides are floats from a row to the next.
EC_EXPORT const char* ec_lora(const ec::LoraStack* stack, const float* x, int64_t x_stride,
                              int64_t num_rows, float* out, int64_t out_stride);
