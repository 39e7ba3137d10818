// A captured forward pass: a list of operations, and the exported functions that they call.
// kernels/cpu/graph_capture.py writes the list.
#pragma once

#include <cstdint>

#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "recurrence.h"
#include "rope.h"

// What attention must know of a step. Mirrored by `AttentionGeometry` in kernels/cpu/attention.py.
struct AttentionGeometry {
    int64_t num_requests, num_tokens, table_width, block_size;
    int64_t num_query_heads, num_kv_heads, head_size, value_size, window;
    int64_t kv_format;     // of the cache, see kv_cache.h
    int64_t rounds;        // 1: queries and weights may be rounded to bfloat16
    int64_t bidirectional;  // 1: queries see keys behind them, too
    const int32_t* starts;   // [num_requests + 1]
    const int32_t* lengths;  // [num_requests]
    const int32_t* table;    // [num_requests, table_width]
    const int64_t* slots;    // [num_tokens], where keys and values are written
    const int32_t* ends;     // [num_tokens], behind the last key that each sees; null: itself
};

namespace ec {

enum class GraphOpKind : int64_t {
    embedding = 0,     // out = rows of operand [stride, size] at the step's token ids
    rms_norm = 1,      // out = norm of subject
    add_rms_norm = 2,  // out += subject; subject = norm of out
    linear = 3,        // out = subject times operand (a LinearWeight)
    rotary = 4,        // operand: Rotary; the step fills in tokens, positions and slots
    attention = 5,     // out = attention of subject; operand: AttentionOperands
    silu = 6,          // out = silu(left half of subject) * right half; number 1: subject is the
                       // product just before it, which nothing else reads
    gelu_tanh = 7,
    scale = 8,  // out *= number
    embedding_packed = 9,  // out = rows of operand (a LinearWeight) at the step's token ids
    lora = 10,  // out += the adapters' part of subject; operand: LoraStack
    given_rows = 11,  // the rows of out that the step gives
    copy = 12,  // out = subject
    layer_norm = 13,      // out = norm of subject; operand: weight, then bias
    add_layer_norm = 14,  // out += subject; subject = norm of out
    gelu = 15,            // as silu
    activate = 16,        // out = activation of itself; stride: which
    embedding_at = 17,    // out = rows of operand [stride, size] at the step's positions
    host = 18,            // out is changed in place by operand, a HostFunction
    experts = 19,         // out = mixture of experts of subject; operand: ExpertLayer
    take_rows = 20,       // out = its rows that the step puts out; what follows has these alone
    convolve = 21,        // out = convolution of subject; operand: RecurrentLayer
    recur = 22,           // out = recurrence over subject; operand: RecurrentLayer
    gated_norm = 23,      // out = gated norm of subject; operand: GatedNorm
    gate = 24,            // out = subject times sigmoid(operand), rows `number` floats apart
    multiply = 25,        // out = subject times operand, likewise
    add = 26,             // out += subject, both without gaps between rows
    choose_keys = 27,     // out = keys chosen for subject, as int32; operand: KeyChoice
};

// Mirrored by `GraphOp` in kernels/cpu/graph_ops.py. Strides are floats from a token's row of
// subject or out to the next; `size` is what a row of out has.
struct GraphOp {
    int64_t kind;
    float* subject;
    void* operand;
    float* out;
    const AttentionGeometry* geometry;
    int64_t stride, out_stride, size;
    float number;
};

// Given the number of rows; other than 0: it failed.
using HostFunction = int64_t (*)(int64_t num_rows);

// Mirrored by `AttentionOperands` there.
struct AttentionOperands {
    const uint8_t* k;
    const uint8_t* v;
    const float* sinks;
    const float* slopes;
    const float* distance_biases;
    int64_t num_blocks, block_stride;  // bytes from a block of either to the next
    int64_t reach;  // of the biases, or the buckets
    float scale, softcap;
    const float* const* query_positions;
    const float* const* key_positions;
    const int32_t* buckets;
    int64_t num_buckets;
    const int32_t* chosen;  // [num_tokens, top_k] of `choose_keys`; null: all keys are attended
    int64_t top_k;
};

// Mirrored by `KeyChoice` there. One head of keys, in rows; see kv_cache.h.
struct KeyChoice {
    const uint8_t* keys;
    const float* weights;  // [num_tokens, num_heads], rows `weights_stride` floats apart
    int64_t weights_stride, num_blocks, block_stride, num_heads, head_size, top_k;
};

// Mirrored by `GraphStep` in kernels/cpu/captured_forward.py.
struct GraphStep {
    const GraphOp* ops;
    int64_t num_ops;
    int64_t capacity;  // tokens that the operations' memory holds
    const int64_t* token_ids;
    const int64_t* positions;
    int64_t num_tokens;
    const int64_t* given_places;  // [num_given], rows that operation `given_rows` overwrites
    const float* given_rows;      // [num_given, given_size], contiguous
    int64_t num_given, given_size;
    const int64_t* output_rows;  // [num_output_rows], rising; null: all
    const AttentionGeometry* output_geometry;  // of attention behind operation `take_rows`
    int64_t num_output_rows;
};

enum class Norm { rms, layer };

// Attention in a pass of this thread, of [num_tokens, H, D]: what is planned for a layer serves all
// with its geometry.
const char* attention_of_pass(const AttentionGeometry* geometry, const float* q, int64_t q_stride,
                              const AttentionOperands& call, float* out);
// Null, or why the tables do not fit each other and a cache of so many blocks.
const char* check_geometry(const AttentionGeometry& geometry, int64_t num_blocks);
// Geometries have changed.
void begin_pass();

// The operations of the functions below; `then`: their rows are written there, too, or null.
// x and out [num_rows, size], rows of x `x_stride` floats apart. weight [size] of a layer norm is
// followed by what is added.
const char* norm(Norm kind, const float* x, int64_t x_stride, const float* weight, float* out,
                 int64_t num_rows, int64_t size, float eps, const InputRows* then);
// residual += x; x = norm(residual). Both [num_rows, size], without gaps, apart from each other.
const char* add_norm(Norm kind, float* x, float* residual, const float* weight, int64_t num_rows,
                     int64_t size, float eps, const InputRows* then);
// gate_up [num_rows, 2 * size], out [num_rows, size]; kinds as of `gated_rows`.
const char* gated_activation(const float* gate_up, float* out, int64_t num_rows, int64_t size,
                             int kind, const InputRows* then);

}  // namespace ec

// The keys of each token that has more than top_k, rising, by scores of q [num_tokens, num_heads,
// head_size], into chosen [num_tokens, top_k].
EC_EXPORT const char* ec_choose_keys(const AttentionGeometry* geometry, const float* q,
                                     int64_t q_stride, const ec::KeyChoice* call, int32_t* chosen);
EC_EXPORT const char* ec_embedding_packed(const ec::LinearWeight* weight, const int64_t* ids,
                                          int64_t num_ids, float* out);
EC_EXPORT const char* ec_embedding(const int64_t* ids, int64_t num_ids, const float* weight,
                         int64_t num_rows, int64_t size, float* out);
EC_EXPORT const char* ec_rotary_and_cache(const ec::Rotary* rotary);
EC_EXPORT const char* ec_activation(float* x, int64_t num_rows, int64_t size, int kind);
