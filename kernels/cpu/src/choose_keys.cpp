// The keys that an indexer chooses for each token (DeepSeek sparse attention, arXiv:2512.02556).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "buffers.h"
#include "dispatch.h"
#include "graph.h"
#include "pool.h"

namespace ec {

constexpr int64_t head_lanes = 16;  // heads are padded to so many

// A token and its keys [0, num_keys), of which blocks [num_keys / block size] say where they lie.
struct ChoosingToken {
    const float* q;
    const float* weights;
    const int32_t* blocks;
    int64_t token, num_keys;
    float* scores;
};

// Floats that `score_keys` needs.
inline int64_t choosing_floats(const KeyChoice& c) {
    const int64_t padded = (c.num_heads + head_lanes - 1) / head_lanes * head_lanes;
    return (c.head_size + 1) * padded + 4 * c.head_size;
}

}  // namespace ec

#define EC_BODY "choose_keys_body.h"
#include "every_isa.h"

namespace ec {
namespace {

constexpr int64_t piece_keys = 1024;           // that a task scores
constexpr int64_t most_scores = int64_t{1} << 22;  // that are kept at a time

thread_local Buffer task_scratch;
thread_local Buffer all_scores;

// Positions of the `top_k` largest scores, rising; of equal ones the first.
void take_best(const float* scores, int64_t num_keys, int64_t top_k, int32_t* chosen) {
    float* order = task_scratch.reserve<float>(num_keys);
    std::copy_n(scores, num_keys, order);
    std::nth_element(order, order + top_k - 1, order + num_keys, std::greater<>());
    const float least = order[top_k - 1];
    int64_t equal = top_k - std::count_if(order, order + top_k, [&](float x) { return x > least; });
    for (int64_t key = 0; key < num_keys; ++key) {
        if (scores[key] > least || (scores[key] == least && equal-- > 0))
            *chosen++ = static_cast<int32_t>(key);
    }
}

}  // namespace
}  // namespace ec

EC_EXPORT const char* ec_choose_keys(const AttentionGeometry* g, const float* q, int64_t q_stride,
                                     const ec::KeyChoice* call, int32_t* chosen) {
    using namespace ec;
    if (call->num_heads < 1 || call->head_size < 1 || call->top_k < 1 || g->block_size < 1 ||
        (g->kv_format != static_cast<int64_t>(KVCacheFormat::f32) &&
         g->kv_format != static_cast<int64_t>(KVCacheFormat::bf16))) {
        return refuse("%ld keys by %ld heads of %ld in a cache of kind %ld: counts must be positive, "
                      "keys float32 or bfloat16", call->top_k, call->num_heads, call->head_size,
                      g->kv_format);
    }
    if (const char* refusal = check_geometry(*g, call->num_blocks)) return refusal;
    thread_local std::vector<ChoosingToken> tokens;
    tokens.clear();
    for (int64_t r = 0; r < g->num_requests; ++r) {
        for (int64_t t = g->starts[r]; t < g->starts[r + 1]; ++t) {
            const int64_t num_keys = g->lengths[r] - (g->starts[r + 1] - 1 - t);
            if (num_keys <= call->top_k) continue;
            tokens.push_back({q + t * q_stride, call->weights + t * call->weights_stride,
                              g->table + r * g->table_width, t, num_keys, nullptr});
        }
    }
    const auto score_keys = EC_CHOOSE(score_keys);
    const int64_t scratch = choosing_floats(*call);
    thread_local std::vector<std::pair<const ChoosingToken*, int64_t>> pieces;
    for (size_t first = 0, stop = 0; first < tokens.size(); first = stop) {
        int64_t num_scores = 0;
        pieces.clear();
        for (; stop < tokens.size(); ++stop) {
            if (stop > first && num_scores + tokens[stop].num_keys > most_scores) break;
            num_scores += tokens[stop].num_keys;
            for (int64_t key = 0; key < tokens[stop].num_keys; key += piece_keys)
                pieces.emplace_back(&tokens[stop], key);
        }
        float* scores = all_scores.reserve<float>(num_scores);
        for (size_t i = first; i < stop; scores += tokens[i++].num_keys) tokens[i].scores = scores;
        const auto* parts = pieces.data();
        parallel(static_cast<int64_t>(pieces.size()), [&](int64_t i, int) {
            const ChoosingToken& own = *parts[i].first;
            const int64_t last = std::min(parts[i].second + piece_keys, own.num_keys);
            score_keys(*g, *call, own, parts[i].second, last, task_scratch.reserve<float>(scratch));
        });
        const ChoosingToken* own = tokens.data() + first;
        parallel(static_cast<int64_t>(stop - first), [&](int64_t i, int) {
            take_best(own[i].scores, own[i].num_keys, call->top_k,
                      chosen + own[i].token * call->top_k);
        });
    }
    return nullptr;
}
