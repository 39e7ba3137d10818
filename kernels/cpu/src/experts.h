// A layer's mixture of experts (arXiv:1701.06538): routing, and the products of all experts.
#pragma once

#include "linear.h"

namespace ec {

// Mirrored by `ExpertLayer` in kernels/cpu/experts.py.
struct ExpertLayer {
    const LinearWeight* gate_up;  // [num_here], 2F outputs each: gate, then up; or F; of one kind
    const LinearWeight* down;     // [num_here], of one kind
    const float* logits;          // [num_rows, num_experts]
    int64_t num_experts, num_here, first_expert;  // those here are [first, first + num_here)
    int64_t top_k;
    int64_t renormalise;  // 1: a token's weights are divided by their sum + epsilon
    const float* bias;    // [num_experts], on scores where experts are chosen; may be null
    const float* scales;  // [num_experts], on weights of each; may be null
    int64_t by_sigmoid;   // 1: a score is a logit's sigmoid; 0: softmax of all
    int64_t num_groups, top_groups;  // a token's experts are of those, ranked by the sum of
    int64_t best_of_group;           // this many of their scores, 1 or 2
    int64_t activation;  // 0: silu(gate) * up; 1: relu(up)^2, without a gate; 2: swiglu_oai;
                         // 3: gelu(gate, tanh) * up
    float epsilon, scale;            // the latter on weights

    int64_t halves() const { return activation == 1 ? 1 : 2; }
};

}  // namespace ec

// out [num_rows, E] = sum over a token's top_k experts, in falling order of what they are chosen by (a
// tie: the lower first), of their weights w * down(silu(gate(x)) * up(x)). Rows are contiguous.
EC_EXPORT const char* ec_experts(const ec::ExpertLayer* layer, const float* x, int64_t num_rows,
                                 int64_t num_inputs, float* out);
