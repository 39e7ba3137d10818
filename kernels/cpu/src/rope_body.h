// Rotation of one head, and its norm, rotation and cache write. See rope.cpp. Included by
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

// Norms a head, rotates one of q or k, writes one of k or v to its token's slot.
EC_INLINE void rotate_one(const Rotary& r, int64_t token, int64_t head) {
    float* x = r.qkv + token * r.qkv_stride + head * r.head_size;
    const bool is_query = head < r.num_query_heads;
    const bool is_value = head >= r.num_query_heads + r.num_kv_heads;
    const float* weight = is_query ? r.q_weight : is_value ? r.v_weight : r.k_weight;
    if (weight != nullptr) norm_row(x, weight, r.head_size, r.eps, x);
    if (!is_value) rotate_head(x, r.cos_sin + r.positions[token] * 2 * r.half, r.half);
    if (is_query) return;
    const int64_t own = (head - r.num_query_heads) % r.num_kv_heads;
    const int64_t block = r.slots[token] / r.block_size, slot = r.slots[token] - block * r.block_size;
    const int64_t row_bytes = kv_row_bytes(r.kv_format, r.head_size), lane = slot % panel_tokens;
    uint8_t* cache = (is_value ? r.v_cache : r.k_cache) + block * r.block_stride;
    uint8_t* panel = cache + panel_offset(slot, own, r.num_kv_heads, row_bytes);
    if (r.has_bytes()) {
        if (is_value) return store_lane<false>(x, r.head_size, lane, panel);
        return store_lane<true>(x, r.head_size, lane, panel);
    }
    if (!is_value && r.has_floats()) {
        auto* to = reinterpret_cast<float*>(panel) + lane;
        for (int64_t d = 0; d < r.head_size; ++d) to[d * panel_tokens] = x[d];
        return;
    }
    store_row(r.kv_format, x, r.head_size, cache + (slot * r.num_kv_heads + own) * row_bytes);
}

static void rotate_rows(const Rotary& r, int64_t head, int64_t head_stop, int64_t token,
                        int64_t token_stop) {
    for (; token < token_stop; ++token)
        for (int64_t each = head; each < head_stop; ++each) rotate_one(r, token, each);
}
