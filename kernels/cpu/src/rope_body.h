// Rotation of one head, and one token's norm, rotation and cache write. See rope.cpp. Included by
// every_isa.h: no include guard.

#include "norm_body.h"
#include "kv_cache_body.h"

// In place; pairs are (d, d + half), elements past 2 * half stay.
EC_INLINE void rotate_head(float* x, const float* angles, int64_t half) {
    int64_t d = 0;
    for (; d + W <= half; d += W) {
        const vf left = load(x + d), right = load(x + half + d);
        const vf cosine = load(angles + d), sine = load(angles + half + d);
        store(x + d, left * cosine - right * sine);
        store(x + half + d, right * cosine + left * sine);
    }
    for (; d < half; ++d) {
        const float left = x[d], right = x[half + d];
        x[d] = left * angles[d] - right * angles[half + d];
        x[half + d] = right * angles[d] + left * angles[half + d];
    }
}

// Also norms q and k if there are weights, and writes k and v to their slot.
static void rotate_token(const Rotary& r, int64_t token) {
    float* qkv = r.qkv + token * r.qkv_stride;
    const float* angles = r.cos_sin + r.positions[token] * 2 * r.half;
    const int64_t kv_size = r.num_kv_heads * r.head_size;
    for (int64_t head = 0; head < r.num_query_heads; ++head) {
        float* q = qkv + head * r.head_size;
        if (r.q_weight != nullptr) norm_row(q, r.q_weight, r.head_size, r.eps, q);
        rotate_head(q, angles, r.half);
    }
    float* k = qkv + r.num_query_heads * r.head_size;
    const int64_t row_bytes = kv_row_bytes(r.kv_format, r.head_size);
    const int64_t slot = r.slots[token], row = slot * r.num_kv_heads * row_bytes;
    const bool has_floats = has_float_panels(r.kv_format, r.block_size);
    const bool has_bytes = has_byte_panels(r.kv_format, r.block_size, r.head_size);
    const int64_t lane = slot % panel_tokens;
    for (int64_t head = 0; head < r.num_kv_heads; ++head, k += r.head_size) {
        if (r.k_weight != nullptr) norm_row(k, r.k_weight, r.head_size, r.eps, k);
        rotate_head(k, angles, r.half);
        const int64_t panel = panel_offset(slot, head, r.num_kv_heads, row_bytes);
        if (has_bytes) {
            store_lane<true>(k, r.head_size, lane, r.k_cache + panel);
            store_lane<false>(k + kv_size, r.head_size, lane, r.v_cache + panel);
            continue;
        }
        if (has_floats) {
            auto* to = reinterpret_cast<float*>(r.k_cache + panel) + lane;
            for (int64_t d = 0; d < r.head_size; ++d) to[d * panel_tokens] = k[d];
        } else {
            store_row(r.kv_format, k, r.head_size, r.k_cache + row + head * row_bytes);
        }
        store_row(r.kv_format, k + kv_size, r.head_size, r.v_cache + row + head * row_bytes);
    }
}
