// The gated activations of rows.
#pragma once

#include <cstdint>

namespace ec {

// out = activation(gate) * up, rows of `size` floats; out may be gate.
using GatedRows = void(const float* gate, const float* up, int64_t stride, int64_t num_rows,
                       int64_t size, float* out, int64_t out_stride);

// (up + 1) * gate * sigmoid(1.702 gate) in place of those; gates are cut at 7, ups at -7 and 7 (gpt-oss).
GatedRows swiglu_oai;

// 0: SiLU, 1: GELU's tanh approximation, 2: GELU; null for others.
GatedRows* gated_rows(int64_t kind);

}  // namespace ec
