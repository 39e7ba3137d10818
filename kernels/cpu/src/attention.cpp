// The exported attention: checks, and the threads that compute its items. See attention.h.
#include "attention.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "buffers.h"
#include "dispatch.h"
#include "pool.h"
#include "graph.h"
#include "tiles.h"

#define EC_BODY "attention_body.h"
#include "every_isa.h"

namespace ec {
namespace {

const char* check_requests(const Attention& a, int64_t num_requests, int64_t num_tokens,
                           int64_t num_blocks) {
    if (a.starts[0] != 0 || a.starts[num_requests] != num_tokens) {
        return refuse("query_start_loc runs from %d to %d, it must run from 0 to the %ld tokens of "
                      "q", a.starts[0], a.starts[num_requests], num_tokens);
    }
    for (int64_t r = 0; r < num_requests; ++r) {
        const int64_t queries = int64_t{a.starts[r + 1]} - a.starts[r];
        const int64_t length = a.lengths[r];
        if (queries < 0 || (queries > 0 && length < queries)) {
            return refuse("request %ld has %ld tokens in the step and a sequence of %ld; the "
                          "sequence holds them and all before", r, queries, length);
        }
        if (queries == 0) continue;
        if (a.bidirectional && length != queries) {
            return refuse("request %ld has %ld of its %ld tokens in the step; bidirectional "
                          "attention needs all of them", r, queries, length);
        }
        for (int64_t q = 0, last = 0; a.ends != nullptr && q < queries; ++q) {
            const int64_t end = a.ends[a.starts[r] + q];
            if (end <= length - queries + q || end > length || end < last) {
                return refuse("query %ld of request %ld sees keys before %ld of %ld; ends never "
                              "fall, and are behind the query", q, r, end, length);
            }
            last = end;
        }
        if ((length + a.block_size - 1) / a.block_size > a.table_width) {
            return refuse("request %ld has %ld tokens, its block table of %ld x %ld slots is too "
                          "short", r, length, a.table_width, a.block_size);
        }
        for (int64_t b = a.first_key(r, 0) / a.block_size; b * a.block_size < length; ++b) {
            const int64_t block = a.table[r * a.table_width + b];
            if (block < 0 || block >= num_blocks) {
                return refuse("block %ld of request %ld is %ld, the cache has blocks [0, %ld)", b,
                              r, block, num_blocks);
            }
        }
    }
    return nullptr;
}

thread_local Buffer item_scratch;
thread_local Buffer partial_states;
thread_local AttentionPlan own_plan;

// Of the pass that this thread runs, one for all layers that share a geometry.
struct PassPlan {
    const AttentionGeometry* geometry;
    int64_t num_blocks;  // of the cache that it was checked against
    AttentionPlan plan;
};
thread_local std::vector<PassPlan> pass_plans;
thread_local size_t num_pass_plans = 0;

// `is_planned`: `plan` is the one of this geometry, which is right.
const char* run(const AttentionGeometry* g, AttentionPlan& plan, bool is_planned, const float* q,
                int64_t q_stride, const AttentionOperands& call, float* out) {
    if (g->num_kv_heads < 1 || g->num_query_heads % g->num_kv_heads != 0 || g->head_size < 1 ||
        g->block_size < 1 || g->window < 0 || g->value_size < 1 || g->value_size > g->head_size || g->num_requests < 0 ||
        !is_kv_format(g->kv_format)) {
        return refuse("%ld query heads over %ld key/value heads of %ld, blocks of %ld: counts must "
                      "be positive, and the first a multiple of the second", g->num_query_heads,
                      g->num_kv_heads, g->head_size, g->block_size);
    }
    const Attention a{q, q_stride, call.k, call.v, call.block_stride, out, g->starts, g->lengths, g->table,
                      g->table_width, g->block_size, g->num_query_heads, g->num_kv_heads,
                      g->head_size, g->value_size, g->window, g->bidirectional != 0, g->kv_format, g->rounds != 0,
                      call.scale, call.softcap, call.sinks, call.slopes,
                      call.distance_biases, call.reach, call.query_positions, call.key_positions,
                      call.buckets, call.num_buckets, g->ends};
    if (!is_planned) {
        const char* refusal = check_requests(a, g->num_requests, g->num_tokens, call.num_blocks);
        if (refusal != nullptr) return refusal;
        plan.make(a, g->num_requests);
    }
    const AttentionPlan& made = plan;  // a thread_local of the caller: a lambda's thread has its own
    float* partials = partial_states.reserve<float>(made.partial_floats);
    const int64_t scratch = scratch_floats(a, made);
    const auto attend = EC_CHOOSE(attend);
    parallel(static_cast<int64_t>(made.items.size()), [&](int64_t i, int) {
        attend(a, made, i, partials, item_scratch.reserve<float>(scratch));
    });
    if (made.joins.empty()) return nullptr;
    const auto join = EC_CHOOSE(join_tiles);
    // a task joins all heads of a request: one alone is not worth a thread's while
    const int64_t num_joins = static_cast<int64_t>(made.joins.size()) / a.num_kv_heads;
    parallel(num_joins, [&](int64_t i, int) {
        for (int64_t head = 0; head < a.num_kv_heads; ++head)
            join(a, made.joins[static_cast<size_t>(i * a.num_kv_heads + head)], partials);
    });
    return nullptr;
}

}  // namespace

void begin_pass() { num_pass_plans = 0; }

const char* attention_of_pass(const AttentionGeometry* geometry, const float* q, int64_t q_stride,
                              const AttentionOperands& call, float* out) {
    size_t place = 0;
    while (place < num_pass_plans && (pass_plans[place].geometry != geometry ||
                                      pass_plans[place].num_blocks != call.num_blocks))
        ++place;
    const bool is_planned = place < num_pass_plans;
    if (place == pass_plans.size()) pass_plans.emplace_back();
    PassPlan& own = pass_plans[place];
    const char* refusal = run(geometry, own.plan, is_planned, q, q_stride, call, out);
    if (refusal != nullptr || is_planned) return refusal;
    own.geometry = geometry;
    own.num_blocks = call.num_blocks;
    ++num_pass_plans;
    return nullptr;
}

}  // namespace ec

EC_EXPORT const char* ec_attention(const AttentionGeometry* g, const float* q, int64_t q_stride,
                                   const ec::AttentionOperands* call, float* out) {
    return ec::run(g, ec::own_plan, false, q, q_stride, *call, out);
}
