// What one call of rotary_and_cache works on; see rope.cpp.
#pragma once

#include <cstdint>

namespace ec {

// Mirrored by `Rotary` in kernels/cpu/attention.py.
struct Rotary {
    float* qkv;  // [T, (H + 2 K) D], rows qkv_stride floats apart
    const float* cos_sin;  // [num_positions, 2 * half]
    const int64_t* positions;
    const int64_t* slots;
    uint8_t* k_cache;  // of num_slots, see kv_cache.h; without heads of keys none
    uint8_t* v_cache;
    const float* q_weight;  // [D] or null
    const float* k_weight;
    int64_t num_tokens, qkv_stride, num_positions, num_slots;
    int64_t num_query_heads, num_kv_heads, head_size, half;
    int64_t kv_format, block_size, block_stride;  // bytes from a block of either to the next
    float eps;
};

// Null, or why it cannot be done.
const char* check_rotary(const Rotary* rotary);

// One head of tokens [token, token_stop), those of q, then of k, then of v; and, before, a fetch of
// the cache's lines that it will write.
void rotate(const Rotary& rotary, int64_t head, int64_t token, int64_t token_stop);
void fetch_slots(const Rotary& rotary, int64_t head, int64_t token, int64_t token_stop);

}  // namespace ec
