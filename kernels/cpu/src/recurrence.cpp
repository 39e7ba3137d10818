// Recurrent layers: their convolutions, their states in blocks, and the gates behind them.
#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "buffers.h"
#include "graph.h"
#include "pool.h"

namespace ec {
constexpr int64_t most_state_heads = 4;  // of values a task
}

#define EC_BODY "recurrence_body.h"
#include "every_isa.h"

namespace ec {
namespace {

int64_t recurrent_floats(const RecurrentLayer& layer, int64_t S) {
    const int64_t N = layer.key_size, P = layer.value_size, D = layer.decay_size;
    return S * (4 * N + 2 * P) + most_state_heads * (S * P + N * P + S * D) + N + most_state_rows;
}

// Every block that is read or written is there. `in_order`: whether a request reads what another
// before it writes.
const char* check_tables(const AttentionGeometry& g, const RecurrentLayer& layer, bool& in_order) {
    if (g.block_size < 1 || g.block_size > most_state_rows)
        return refuse("blocks of %ld tokens, recurrent layers take 1 to %ld", g.block_size,
                      most_state_rows);
    thread_local std::vector<char> is_written;
    is_written.assign(static_cast<size_t>(layer.num_blocks), 0);
    in_order = false;
    for (int64_t r = 0; r < g.num_requests; ++r) {
        const int64_t num_tokens = g.starts[r + 1] - g.starts[r], end = g.lengths[r];
        if (num_tokens <= 0) continue;
        if (num_tokens > end || end > g.table_width * g.block_size || g.starts[r + 1] > g.num_tokens)
            return refuse("request %ld ends at %ld with %ld tokens in a table of %ld blocks", r, end,
                          num_tokens, g.table_width);
        const int32_t* table = g.table + r * g.table_width;
        const int64_t begin = end - num_tokens, last = (end - 1) / g.block_size;
        const int64_t read = begin % g.block_size > 0 ? begin / g.block_size : begin / g.block_size - 1;
        for (int64_t block = std::max<int64_t>(0, read); block <= last; ++block) {
            if (table[block] < 0 || table[block] >= layer.num_blocks)
                return refuse("block %ld of request %ld is %ld, outside the cache of %ld", block, r,
                              long{table[block]}, layer.num_blocks);
            if (table[block] == 0 && (block == read || block == last))
                return refuse("block %ld of request %ld is the null block, it has a state that is %s",
                              block, r, block == read ? "read" : "kept");
        }
        if (read >= 0 && is_written[table[read]]) in_order = true;
        for (int64_t block = begin / g.block_size; block <= last; ++block)
            if (table[block] != 0) is_written[table[block]] = 1;
    }
    return nullptr;
}

// run(task, request) for each task of each request that has tokens: in the requests' order if need be.
template <typename Fn>
void over_requests(const AttentionGeometry& g, bool in_order, int64_t num_tasks, Fn&& run) {
    const auto has_tokens = [&](int64_t r) { return g.starts[r + 1] > g.starts[r]; };
    if (in_order) {
        parallel(num_tasks, [&](int64_t task, int) {
            for (int64_t r = 0; r < g.num_requests; ++r)
                if (has_tokens(r)) run(task, r);
        });
        return;
    }
    parallel(num_tasks * g.num_requests, [&](int64_t task, int) {
        if (has_tokens(task / num_tasks)) run(task % num_tasks, task / num_tasks);
    });
}

}  // namespace

const char* recur(const AttentionGeometry& g, const RecurrentLayer& layer, float* out) {
    bool in_order;
    if (const char* refusal = check_tables(g, layer, in_order)) return refusal;
    const auto run = EC_CHOOSE(recur_heads);
    const int64_t num_shared = layer.num_heads / layer.num_key_heads;
    const int64_t num_parts = (num_shared + most_state_heads - 1) / most_state_heads;
    over_requests(g, in_order, layer.num_key_heads * num_parts, [&](int64_t task, int64_t r) {
        const int64_t key_head = task / num_parts, part = task % num_parts * most_state_heads;
        const int64_t count = std::min(most_state_heads, num_shared - part);
        thread_local Buffer memory;
        // in order each task reads the keys that it has written itself, equal to the others'
        run(g, layer, out, r, key_head, key_head * num_shared + part, count, in_order || part == 0,
            memory.reserve<float>(recurrent_floats(layer, g.block_size)));
    });
    return nullptr;
}

const char* convolve(const AttentionGeometry& g, const RecurrentLayer& layer, float* out) {
    bool in_order;
    if (const char* refusal = check_tables(g, layer, in_order)) return refusal;
    constexpr int64_t piece = 512;
    const auto run = EC_CHOOSE(convolve_channels);
    const int64_t num_pieces = (layer.num_channels + piece - 1) / piece;
    over_requests(g, in_order, num_pieces, [&](int64_t task, int64_t r) {
        const int64_t first = task * piece;
        run(g, layer, out, r, first, std::min(first + piece, layer.num_channels));
    });
    return nullptr;
}

void gated_norm(const GatedNorm& call, const float* x, int64_t x_stride, int64_t num_rows,
                int64_t num_columns, float* out) {
    const auto run = EC_CHOOSE(gated_norm_row);
    parallel(num_rows, [&](int64_t row, int) {
        run(call, x + row * x_stride, call.gate + row * call.gate_stride, num_columns,
            out + row * num_columns);
    });
}

void gate(const float* x, int64_t x_stride, const float* by, int64_t by_stride, bool sigmoid,
          int64_t num_rows, int64_t num_columns, float* out) {
    const auto run = EC_CHOOSE(gate_row);
    parallel(num_rows, [&](int64_t row, int) {
        run(x + row * x_stride, by + row * by_stride, sigmoid, num_columns, out + row * num_columns);
    });
}

}  // namespace ec

EC_EXPORT const char* ec_recur(const AttentionGeometry* geometry, const ec::RecurrentLayer* layer,
                               float* out) {
    return ec::recur(*geometry, *layer, out);
}

EC_EXPORT const char* ec_convolve(const AttentionGeometry* geometry,
                                  const ec::RecurrentLayer* layer, float* out) {
    return ec::convolve(*geometry, *layer, out);
}

EC_EXPORT const char* ec_gated_norm(const ec::GatedNorm* call, const float* x, int64_t x_stride,
                                    int64_t num_rows, int64_t num_columns, float* out) {
    ec::gated_norm(*call, x, x_stride, num_rows, num_columns, out);
    return nullptr;
}

EC_EXPORT const char* ec_gate(const float* x, int64_t x_stride, const float* by, int64_t by_stride,
                              int64_t sigmoid, int64_t num_rows, int64_t num_columns, float* out) {
    ec::gate(x, x_stride, by, by_stride, sigmoid != 0, num_rows, num_columns, out);
    return nullptr;
}
