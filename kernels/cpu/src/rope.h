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
    uint8_t* k_cache;  // of num_slots, see kv_cache.h
    uint8_t* v_cache;
    const float* q_weight;  // [D] or null
    const float* k_weight;
    int64_t num_tokens, qkv_stride, num_positions, num_slots;
    int64_t num_query_heads, num_kv_heads, head_size, half;
    int64_t kv_format, block_size;
    float eps;
};

}  // namespace ec
