// A forward pass as a list of commands, and the exported operations that they call.
//
// Owns the form of a command. Must not know models: kernels/cpu/recorder.py writes the list.
#pragma once

#include <cstdint>

#include "linear.h"
#include "rope.h"

// What attention must know of a step. Mirrored by `Geometry` in kernels/cpu/attention.py.
struct AttentionGeometry {
    int64_t num_requests, num_tokens, table_width, num_blocks, block_size;
    int64_t num_query_heads, num_kv_heads, head_size, window;
    int64_t stored_kind;     // of the cache, see stored_rows.h
    const int32_t* starts;   // [num_requests + 1]
    const int32_t* lengths;  // [num_requests]
    const int32_t* table;    // [num_requests, table_width]
    const int64_t* slots;    // [num_tokens], where keys and values are written
};

namespace ec {

enum class CommandKind : int64_t {
    embedding = 0,     // out = rows of operand [stride, size] at the step's token ids
    rms_norm = 1,      // out = norm of subject
    add_rms_norm = 2,  // out += subject; subject = norm of out
    linear = 3,        // out = subject times operand (a LinearWeight)
    rotary = 4,        // operand: Rotary; the step fills in tokens, positions and slots
    attention = 5,     // out = attention of subject; operand: AttentionCall
    silu = 6,          // out = silu(left half of subject) * right half
    gelu_tanh = 7,
    scale = 8,  // out *= number
    embedding_packed = 9,  // out = rows of operand (a LinearWeight) at the step's token ids
};

// Mirrored by `Command` in kernels/cpu/commands.py. Strides are floats from a token's row of
// subject or out to the next; `size` is what a row of out has.
struct Command {
    int64_t kind;
    float* subject;
    void* operand;
    float* out;
    const AttentionGeometry* geometry;
    int64_t stride, out_stride, size;
    float number;
};

// Mirrored by `AttentionCall` there.
struct AttentionCall {
    const uint8_t* k;
    const uint8_t* v;
    const float* sinks;
    const float* slopes;
    int64_t num_blocks;
    float scale, softcap;
};

// Mirrored by `Step` there.
struct Step {
    const Command* commands;
    int64_t num_commands;
    int64_t capacity;  // tokens that the commands' memory holds
    const int64_t* token_ids;
    const int64_t* positions;
    int64_t num_tokens;
};

}  // namespace ec

EC_EXPORT const char* ec_embedding_packed(const ec::LinearWeight* weight, const int64_t* ids,
                                          int64_t num_ids, float* out);
EC_EXPORT const char* ec_embedding(const int64_t* ids, int64_t num_ids, const float* weight,
                         int64_t num_rows, int64_t size, float* out);
EC_EXPORT const char* ec_rms_norm(const float* x, int64_t x_stride, const float* weight, float* out,
                        int64_t num_rows, int64_t size, float eps);
EC_EXPORT const char* ec_add_rms_norm(float* x, float* residual, const float* weight, int64_t num_rows,
                            int64_t size, float eps);
EC_EXPORT const char* ec_rotary_and_cache(const ec::Rotary* rotary);
EC_EXPORT const char* ec_attention(const AttentionGeometry* geometry, const float* q, int64_t q_stride,
                         const uint8_t* k, const uint8_t* v, float* out, float scale, float softcap,
                         const float* sinks, const float* slopes);
EC_EXPORT const char* ec_gated_activation(const float* gate_up, float* out, int64_t num_rows, int64_t size,
                                int kind);
