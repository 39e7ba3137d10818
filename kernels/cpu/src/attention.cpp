// The exported attention: checks, and the threads that compute its items. See attention.h.
#include "attention.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <numeric>
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

bool is_longer(const AttentionGeometry& g, int64_t limit) {
    for (int64_t r = 0; r < g.num_requests; ++r)
        if (g.starts[r + 1] > g.starts[r] && g.lengths[r] > limit) return true;
    return false;
}

const char* run(const AttentionGeometry* g, AttentionPlan& plan, bool is_planned, const float* q,
                int64_t q_stride, const AttentionOperands& call, float* out);

// A token to its chosen keys is a request of its own whose blocks are rows; those before it that see
// all of theirs stay one request. Rows lie at multiples of `unit` from the cache's start:
//
//   request of r   tokens [first, top_k): keys [0, top_k)   token top_k: chosen   token top_k + 1 ...
const char* run_chosen(const AttentionGeometry& g, const float* q, int64_t q_stride,
                       AttentionOperands call, float* out) {
    if (const char* refusal = check_geometry(g, call.num_blocks)) return refusal;
    const int64_t row_bytes = kv_row_bytes(g.kv_format, g.head_size), top_k = call.top_k;
    const int64_t unit = std::gcd(call.block_stride, row_bytes), step = call.block_stride / unit;
    if (g.num_kv_heads != 1 || g.value_size == g.head_size || g.window != 0 || top_k < 1 ||
        g.ends != nullptr || g.bidirectional != 0 || call.num_blocks * step > INT32_MAX) {
        return refuse("%ld chosen keys of %ld heads in %ld blocks of %ld rows: they are keys of one "
                      "head with values in them, all before a token, in fewer rows than 2^31",
                      top_k, g.num_kv_heads, call.num_blocks, step);
    }
    thread_local std::vector<int32_t> starts, lengths, table;
    starts.assign(1, 0);
    lengths.clear();
    table.clear();
    for (int64_t r = 0; r < g.num_requests; ++r) {
        const int64_t begin = g.starts[r], count = g.starts[r + 1] - begin;
        const int64_t first = g.lengths[r] - count;
        const int64_t whole = std::clamp(top_k - first, int64_t{0}, count);
        const auto add = [&](int64_t queries, int64_t length, const auto& position_of) {
            starts.push_back(static_cast<int32_t>(starts.back() + queries));
            lengths.push_back(static_cast<int32_t>(length));
            const size_t row = table.size();
            table.resize(row + static_cast<size_t>(top_k));
            for (int64_t key = 0; key < length; ++key) {
                const int64_t position = position_of(key), block = position / g.block_size;
                table[row + static_cast<size_t>(key)] = static_cast<int32_t>(
                    g.table[r * g.table_width + block] * step +
                    (position - block * g.block_size) * (row_bytes / unit));
            }
        };
        if (whole > 0) add(whole, first + whole, [](int64_t key) { return key; });
        for (int64_t query = whole; query < count; ++query) {
            const int32_t* own = call.chosen + (begin + query) * top_k;
            for (int64_t key = 0, next = 0; key < top_k; next = own[key++] + 1) {
                if (own[key] < next || own[key] > first + query) {
                    return refuse("chosen key %ld of token %ld is %d, it must rise within [%ld, %ld]",
                                  key, begin + query, own[key], next, first + query);
                }
            }
            add(1, top_k, [&](int64_t key) { return own[key]; });
        }
    }
    AttentionGeometry rows = g;
    rows.num_requests = static_cast<int64_t>(lengths.size());
    rows.starts = starts.data(), rows.lengths = lengths.data(), rows.table = table.data();
    rows.table_width = top_k, rows.block_size = 1;
    call.num_blocks = (call.num_blocks - 1) * step + (g.block_size - 1) * (row_bytes / unit) + 1;
    call.block_stride = unit;
    return run(&rows, own_plan, false, q, q_stride, call, out);
}

// `is_planned`: `plan` is the one of this geometry, which is right.
const char* run(const AttentionGeometry* g, AttentionPlan& plan, bool is_planned, const float* q,
                int64_t q_stride, const AttentionOperands& call, float* out) {
    if (call.chosen != nullptr && is_longer(*g, call.top_k))
        return run_chosen(*g, q, q_stride, call, out);
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
                      call.buckets, call.num_buckets, g->ends,
                      // many tokens to chosen keys: what tiles apart would leave is too much memory
                      call.chosen == nullptr || g->num_requests < 8 * num_threads()};
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

const char* check_geometry(const AttentionGeometry& g, int64_t num_blocks) {
    Attention a{};
    a.starts = g.starts, a.lengths = g.lengths, a.table = g.table, a.ends = g.ends;
    a.table_width = g.table_width, a.block_size = g.block_size, a.window = g.window;
    a.bidirectional = g.bidirectional != 0;
    return check_requests(a, g.num_requests, g.num_tokens, num_blocks);
}

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
