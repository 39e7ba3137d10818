// The gated activations of a row.
#pragma once

#include <cstdint>

namespace ec {

// out = activation(gate) * up, `size` floats each.
using GatedRow = void(const float* gate, const float* up, int64_t size, float* out);

// 0: SiLU, 1: GELU's tanh approximation, 2: GELU; null for others.
GatedRow* gated_row(int64_t kind);

}  // namespace ec
