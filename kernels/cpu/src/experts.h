// A layer's mixture of experts (arXiv:1701.06538): routing, and the products of all experts.
#pragma once

#include "linear.h"

namespace ec {

// Mirrored by `ExpertLayer` in kernels/cpu/experts.py.
struct ExpertLayer {
    const LinearWeight* gate_up;  // [num_here], 2F outputs each: gate, then up; of one kind
    const LinearWeight* down;     // [num_here], of one kind
    const float* logits;          // [num_rows, num_experts]
    int64_t num_experts, num_here, first_expert;  // those here are [first, first + num_here)
    int64_t top_k;
    int64_t renormalise;  // 1: a token's weights are divided by their sum
};

}  // namespace ec

// out [num_rows, E] = sum over a token's top_k experts, in falling order of their weights w (a tie: the
// lower first), of w * down(silu(gate(x)) * up(x)). Rows are contiguous.
EC_EXPORT const char* ec_experts(const ec::ExpertLayer* layer, const float* x, int64_t num_rows,
                                 int64_t num_inputs, float* out);
