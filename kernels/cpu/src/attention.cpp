// Cuts a step's attention into items, has them computed, and joins them. See attention.h.
#include "attention.h"

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "buffers.h"
#include "dispatch.h"
#include "pool.h"
#include "program.h"

#define EC_BODY "attention_body.h"
#include "every_isa.h"

namespace ec {
namespace {

constexpr int64_t most_item_rows = 96;
constexpr int64_t most_split_rows = 32;  // rows of a head up to which segments are items

struct Plan {
    std::vector<AttentionItem> items;
    std::vector<AttentionJoin> joins;
    int64_t partial_floats;
    int64_t most_rows;
};

struct Request {
    int64_t num_queries, length, first_segment, stop_segment;
};

Request request_of(const Attention& a, int64_t r) {
    Request found;
    found.num_queries = a.starts[r + 1] - a.starts[r];
    found.length = a.lengths[r];
    int64_t first_key = 0;
    if (a.window != 0) first_key = found.length - found.num_queries - a.window + 1;
    found.first_segment = first_key > 0 ? first_key / segment_keys : 0;
    found.stop_segment = (found.length + segment_keys - 1) / segment_keys;
    return found;
}

bool is_split(const Attention& a, const Request& request) {
    return request.num_queries * a.group() <= most_split_rows;
}

const char* check_requests(const Attention& a, int64_t num_requests, int64_t num_tokens,
                           int64_t num_blocks) {
    if (a.starts[0] != 0 || a.starts[num_requests] != num_tokens) {
        return refuse("query_start_loc runs from %d to %d, it must run from 0 to the %lld tokens "
                      "of q", a.starts[0], a.starts[num_requests],
                      static_cast<long long>(num_tokens));
    }
    for (int64_t r = 0; r < num_requests; ++r) {
        const int64_t queries = int64_t{a.starts[r + 1]} - a.starts[r];
        const int64_t length = a.lengths[r];
        if (queries < 0 || (queries > 0 && length < queries)) {
            return refuse("request %lld has %lld tokens in the step and a sequence of %lld; the "
                          "sequence holds them and all before",
                          static_cast<long long>(r), static_cast<long long>(queries),
                          static_cast<long long>(length));
        }
        if (queries == 0) continue;
        if ((length + a.block_size - 1) / a.block_size > a.table_width) {
            return refuse("request %lld has %lld tokens, its block table of %lld x %lld slots is "
                          "too short",
                          static_cast<long long>(r), static_cast<long long>(length),
                          static_cast<long long>(a.table_width),
                          static_cast<long long>(a.block_size));
        }
        int64_t first_key = 0;
        if (a.window != 0) first_key = length - queries - a.window + 1;
        for (int64_t b = first_key > 0 ? first_key / a.block_size : 0; b * a.block_size < length;
             ++b) {
            const int64_t block = a.table[r * a.table_width + b];
            if (block < 0 || block >= num_blocks) {
                return refuse("block %lld of request %lld is %lld, the cache has blocks [0, %lld)",
                              static_cast<long long>(b), static_cast<long long>(r),
                              static_cast<long long>(block), static_cast<long long>(num_blocks));
            }
        }
    }
    return nullptr;
}

void add_split(const Attention& a, const Request& request, int64_t r, int64_t heads_at_once,
               Plan& plan) {
    const int64_t num_segments = request.stop_segment - request.first_segment;
    for (int64_t head = 0; head < a.num_kv_heads; head += heads_at_once) {
        AttentionItem item;
        item.request = static_cast<int32_t>(r);
        item.query = 0;
        item.query_stop = static_cast<int32_t>(request.num_queries);
        item.head = static_cast<int32_t>(head);
        item.head_stop = static_cast<int32_t>(std::min(head + heads_at_once, a.num_kv_heads));
        if (num_segments > 1) {
            plan.joins.push_back({static_cast<int64_t>(plan.items.size()), num_segments});
        }
        for (int64_t s = request.first_segment; s < request.stop_segment; ++s) {
            item.segment = static_cast<int32_t>(s);
            item.segment_stop = item.segment + 1;
            item.partial = num_segments > 1 ? plan.partial_floats : -1;
            if (num_segments > 1) plan.partial_floats += item.rows(a) * a.state();
            plan.items.push_back(item);
        }
        plan.most_rows = std::max(plan.most_rows, item.rows(a));
    }
}

// Larger items first would not help: the last ones of a long prompt are the largest.
void add_whole(const Attention& a, const Request& request, int64_t r, Plan& plan) {
    const int64_t most_queries = std::max(int64_t{1}, most_item_rows / a.group());
    const int64_t num_tiles = (request.num_queries + most_queries - 1) / most_queries;
    const int64_t position = request.length - request.num_queries;
    for (int64_t t = num_tiles - 1; t >= 0; --t) {
        for (int64_t head = 0; head < a.num_kv_heads; ++head) {
            AttentionItem item;
            item.request = static_cast<int32_t>(r);
            item.query = static_cast<int32_t>(request.num_queries * t / num_tiles);
            item.query_stop = static_cast<int32_t>(request.num_queries * (t + 1) / num_tiles);
            item.head = static_cast<int32_t>(head);
            item.head_stop = item.head + 1;
            int64_t first_key = 0;
            if (a.window != 0) first_key = position + item.query - a.window + 1;
            item.segment = static_cast<int32_t>(first_key > 0 ? first_key / segment_keys : 0);
            item.segment_stop = static_cast<int32_t>(
                (position + item.query_stop + segment_keys - 1) / segment_keys);
            item.partial = -1;
            plan.items.push_back(item);
            plan.most_rows = std::max(plan.most_rows, item.rows(a));
        }
    }
}

void make_plan(const Attention& a, int64_t num_requests, Plan& plan) {
    plan.items.clear();
    plan.joins.clear();
    plan.partial_floats = plan.most_rows = 0;
    int64_t num_split = 0;
    for (int64_t r = 0; r < num_requests; ++r) {
        const Request request = request_of(a, r);
        if (request.num_queries == 0) continue;
        if (is_split(a, request)) {
            num_split += request.stop_segment - request.first_segment;
        } else {
            add_whole(a, request, r, plan);
        }
    }
    // One item for all heads reads the cache in one stream; few items are cut to feed the threads.
    const bool is_crowd = num_split >= 8 * num_threads();
    for (int64_t r = 0; r < num_requests; ++r) {
        const Request request = request_of(a, r);
        if (request.num_queries == 0 || !is_split(a, request)) continue;
        const int64_t rows = request.num_queries * a.group();
        const int64_t heads = is_crowd ? std::max(int64_t{1}, most_item_rows / rows) : 1;
        add_split(a, request, r, heads, plan);
    }
}

thread_local Buffer item_scratch;
thread_local Buffer partial_states;
thread_local Plan plan;

}  // namespace
}  // namespace ec

EC_EXPORT const char* ec_attention(const AttentionGeometry* g, const float* q, int64_t q_stride,
                                   const uint8_t* k, const uint8_t* v, float* out, float scale,
                                   float softcap, const float* sinks, const float* slopes) {
    using namespace ec;
    if (g->num_kv_heads < 1 || g->num_query_heads % g->num_kv_heads != 0 || g->head_size < 1 ||
        g->block_size < 1 || g->window < 0 || g->num_requests < 0 ||
        !is_stored_kind(g->stored_kind)) {
        return refuse("%lld query heads over %lld key/value heads of %lld, blocks of %lld: counts "
                      "must be positive, and the first a multiple of the second",
                      static_cast<long long>(g->num_query_heads),
                      static_cast<long long>(g->num_kv_heads),
                      static_cast<long long>(g->head_size), static_cast<long long>(g->block_size));
    }
    const Attention a{q, q_stride, k, v, out, g->starts, g->lengths, g->table, g->table_width,
                      g->block_size, g->num_query_heads, g->num_kv_heads, g->head_size, g->window,
                      g->stored_kind, scale, softcap, sinks, slopes};
    const char* refusal = check_requests(a, g->num_requests, g->num_tokens, g->num_blocks);
    if (refusal != nullptr) return refusal;
    make_plan(a, g->num_requests, plan);
    const Plan& made = plan;  // a thread_local of the caller: a lambda's thread has its own
    float* partials = partial_states.floats(made.partial_floats);
    const int64_t scratch = scratch_floats(a, made.most_rows);
    const auto attend = EC_CHOOSE(attend);
    parallel(static_cast<int64_t>(made.items.size()), [&](int64_t i, int) {
        attend(a, made.items[static_cast<size_t>(i)], partials, item_scratch.floats(scratch));
    });
    if (made.joins.empty()) return nullptr;
    const auto join = EC_CHOOSE(join_items);
    parallel(static_cast<int64_t>(made.joins.size()), [&](int64_t i, int) {
        const AttentionJoin& one = made.joins[static_cast<size_t>(i)];
        join(a, &made.items[static_cast<size_t>(one.item)], one.num_segments, partials);
    });
    return nullptr;
}
