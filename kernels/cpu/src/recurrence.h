// Recurrent layers whose state lies in blocks: kernels/interface/recurrence.py has the rule.
#pragma once

#include <cstdint>

#include "dispatch.h"

struct AttentionGeometry;

namespace ec {

constexpr int64_t most_state_rows = 64;
constexpr int64_t most_taps = 16;

// What is written of a value.
enum class Rule : int64_t { plain = 0, delta = 1, discretised = 2 };

// A layer's tensors in blocks, [H, N, P] and so on as in kernels/interface/recurrence.py. Mirrored
// by `RecurrentLayer` in kernels/cpu/recurrence.py.
struct RecurrentLayer {
    int64_t num_key_heads, num_heads, key_size, value_size, decay_size;
    int64_t num_channels, width;
    uint8_t *states, *tails, *keys, *updates, *decays, *inputs;  // float
    int64_t block_stride, num_blocks;  // bytes from a block to the next
    const float* weight;  // of the convolution: [width, C], and [C] or null; silu: 1
    const float* bias;
    int64_t silu;
    // log decay = -rate * softplus(x + bias), [H] and [H, decay_size]; without a bias: -rate
    const float* rates;
    const float* rate_biases;
    const float* skips;  // [H]: out += skip * v; null: none
    int64_t rule;        // a `Rule`
    int64_t normed;      // 1: q and k are divided by their lengths, then q is multiplied by q_scale
    int64_t q_start, k_start, v_start;  // columns of the first argument
    float q_scale;
    int64_t stride, a_stride, b_stride;  // floats from a token's row to the next
    const float *qkv, *a, *b;            // a, b: null where the rule has none
};

// x and gate [num_rows, N], N a multiple of `size`. Mirrored by `GatedNorm` there.
struct GatedNorm {
    const float* gate;
    const float* weight;
    int64_t gate_stride, size, weight_size, transposed;
    int64_t sigmoid;     // 1: of the gate; 0: silu
    int64_t gate_first;  // 1: before the norm
    float eps;
};

// [num_tokens, H * P], what `qkv`, `a` and `b` are of.
const char* recur(const AttentionGeometry& g, const RecurrentLayer& layer, float* out);
// x: `qkv`; out [num_tokens, C].
const char* convolve(const AttentionGeometry& g, const RecurrentLayer& layer, float* out);
void gated_norm(const GatedNorm& call, const float* x, int64_t x_stride, int64_t num_rows,
                int64_t num_columns, float* out);
// out = x * sigmoid(gate), or x * gate.
void gate(const float* x, int64_t x_stride, const float* by, int64_t by_stride, bool sigmoid,
          int64_t num_rows, int64_t num_columns, float* out);

}  // namespace ec
