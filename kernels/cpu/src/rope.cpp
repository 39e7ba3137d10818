// Norm of heads, rotation of q and k, and the write of k and v to the cache, in one pass
// (arXiv:2104.09864; pairs are halves of a head, as transformers has them).
#include "rope.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "dispatch.h"
#include "graph.h"
#include "row_chunks.h"
#include "kv_cache.h"

#define EC_BODY "rope_body.h"
#include "every_isa.h"

namespace ec {

const char* check_rotary(const Rotary* r) {
    if (2 * r->half > r->head_size) {
        return refuse("angles of %ld elements for heads of %ld: at most the whole head turns",
                      2 * r->half, r->head_size);
    }
    if (!is_kv_format(r->kv_format)) {
        return refuse("a cache of kind %ld, known are 0 to 2", r->kv_format);
    }
    for (int64_t t = 0; t < r->num_tokens; ++t) {
        if (r->positions[t] < 0 || r->positions[t] >= r->num_positions) {
            return refuse("position %ld of token %ld is outside the table of %ld angles",
                          r->positions[t], t, r->num_positions);
        }
        if (r->num_kv_heads != 0 && (r->slots[t] < 0 || r->slots[t] >= r->num_slots)) {
            return refuse("slot %ld of token %ld is outside the cache of %ld slots", r->slots[t], t,
                          r->num_slots);
        }
    }
    return nullptr;
}

void fetch_slots(const Rotary& r, int64_t head, int64_t token, int64_t token_stop) {
    if (head < r.num_query_heads) return;
    const int64_t own = (head - r.num_query_heads) % r.num_kv_heads;
    const bool is_value = head >= r.num_query_heads + r.num_kv_heads;
    const int64_t row_bytes = kv_row_bytes(r.kv_format, r.head_size);
    const bool has_panels = r.has_bytes() || (!is_value && r.has_floats());
    const uint8_t* cache = is_value ? r.v_cache : r.k_cache;
    for (int64_t last = -1; token < token_stop; ++token) {
        const int64_t block = r.slots[token] / r.block_size, panel = r.slots[token] / panel_tokens;
        const int64_t slot = r.slots[token] - block * r.block_size;
        if (has_panels && panel == last) continue;
        last = panel;
        const int64_t bytes = has_panels ? panel_tokens * row_bytes : row_bytes;
        const uint8_t* at = cache + block * r.block_stride +
                            (has_panels
                                 ? panel_offset(slot, own, r.num_kv_heads, row_bytes)
                                 : (slot * r.num_kv_heads + own) * row_bytes);
        for (int64_t line = 0; line < bytes; line += 64) fetch_to_write(at + line);
    }
}

void rotate(const Rotary& r, int64_t head, int64_t token, int64_t token_stop) {
    EC_CHOOSE(rotate_rows)(r, head, head + 1, token, token_stop);
}

}  // namespace ec

EC_EXPORT const char* ec_rotary_and_cache(const ec::Rotary* r) {
    if (const char* refusal = ec::check_rotary(r)) return refusal;
    const auto rotate_rows = EC_CHOOSE(rotate_rows);
    const int64_t num_heads = r->num_heads();
    ec::for_rows(r->num_tokens, num_heads * r->head_size,
                 [&](int64_t token) { rotate_rows(*r, 0, num_heads, token, token + 1); });
    return nullptr;
}

// rows of weight [num_rows, size] -> out [num_ids, size]
EC_EXPORT const char* ec_embedding(const int64_t* ids, int64_t num_ids, const float* weight,
                                   int64_t num_rows, int64_t size, float* out) {
    for (int64_t i = 0; i < num_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= num_rows) {
            return ec::refuse("token id %ld at %ld is outside the vocabulary of %ld", ids[i], i,
                              num_rows);
        }
    }
    ec::for_rows(num_ids, size, [&](int64_t i) {
        std::memcpy(out + i * size, weight + ids[i] * size,
                    static_cast<size_t>(size) * sizeof(float));
    });
    return nullptr;
}
