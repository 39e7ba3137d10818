// What one call of rotary_and_cache works on; see rope.cpp.
#pragma once

#include <cstdint>

#include "kv_cache.h"

namespace ec {

// Mirrored by `Rotary` in kernels/cpu/attention.py.
struct Rotary {
    float* qkv;  // [T, (H + 2 K) D], rows qkv_stride floats apart; (H + K) D without v_cache
    const float* cos_sin;  // [num_positions, 2 * half]
    const int64_t* positions;
    const int64_t* slots;
    uint8_t* k_cache;  // of num_slots, see kv_cache.h; without heads of keys none
    uint8_t* v_cache;  // null: values are in the keys, which lie in rows
    const float* q_weight;  // [D] or null
    const float* k_weight;
    const float* v_weight;
    int64_t num_tokens, qkv_stride, num_positions, num_slots;
    int64_t num_query_heads, num_kv_heads, head_size, half;
    int64_t kv_format, block_size, block_stride;  // bytes from a block of either to the next
    float eps;

    int64_t num_heads() const {
        return num_query_heads + (v_cache == nullptr ? 1 : 2) * num_kv_heads;
    }
    bool has_bytes() const {
        return v_cache != nullptr && has_byte_panels(kv_format, block_size, head_size);
    }
    bool has_floats() const {
        return v_cache != nullptr && has_float_panels(kv_format, block_size);
    }
};

// Null, or why it cannot be done.
const char* check_rotary(const Rotary* rotary);

// One head of tokens [token, token_stop), those of q, then of k, then of v; and, before, a fetch of
// the cache's lines that it will write.
void rotate(const Rotary& rotary, int64_t head, int64_t token, int64_t token_stop);
void fetch_slots(const Rotary& rotary, int64_t head, int64_t token, int64_t token_stop);

}  // namespace ec
