// The arithmetic of paged attention; see attention.h. Included by every_isa.h: no include guard.
//
// A tile's keys are transposed once, [D][64], and serve all rows; a row's scores are then chains
// over D, and its values chains over the keys: the order is that of the indices for any number of
// rows at once.

#include "stored_rows_body.h"

constexpr int COLUMNS = EC_LEVEL == 2 ? 4 : 2;  // registers beside each other in a product
constexpr int REGISTERS = tile_keys / W;        // of a row of scores

typedef float v4 __attribute__((vector_size(16)));
typedef float v4_unaligned __attribute__((vector_size(16), aligned(4), may_alias));

// keys[j][d] -> out[d][j] for j in whole fours around [first, stop).
static void transpose(const float* const* keys, int64_t first, int64_t stop, int64_t head_size,
                      float* out) {
    for (int64_t j = first / 4 * 4; j < stop; j += 4) {
        const float *a = keys[j], *b = keys[j + 1], *c = keys[j + 2], *e = keys[j + 3];
        int64_t d = 0;
        for (; d + 4 <= head_size; d += 4) {
            const v4 va = *reinterpret_cast<const v4_unaligned*>(a + d);
            const v4 vb = *reinterpret_cast<const v4_unaligned*>(b + d);
            const v4 vc = *reinterpret_cast<const v4_unaligned*>(c + d);
            const v4 ve = *reinterpret_cast<const v4_unaligned*>(e + d);
            const v4 ab_low = EC_SHUFFLE_4(va, vb, 0, 4, 1, 5);
            const v4 ab_high = EC_SHUFFLE_4(va, vb, 2, 6, 3, 7);
            const v4 ce_low = EC_SHUFFLE_4(vc, ve, 0, 4, 1, 5);
            const v4 ce_high = EC_SHUFFLE_4(vc, ve, 2, 6, 3, 7);
            float* to = out + d * tile_keys + j;
            *reinterpret_cast<v4_unaligned*>(to) = EC_SHUFFLE_4(ab_low, ce_low, 0, 1, 4, 5);
            to += tile_keys;
            *reinterpret_cast<v4_unaligned*>(to) = EC_SHUFFLE_4(ab_low, ce_low, 2, 3, 6, 7);
            to += tile_keys;
            *reinterpret_cast<v4_unaligned*>(to) =
                EC_SHUFFLE_4(ab_high, ce_high, 0, 1, 4, 5);
            to += tile_keys;
            *reinterpret_cast<v4_unaligned*>(to) =
                EC_SHUFFLE_4(ab_high, ce_high, 2, 3, 6, 7);
        }
        for (; d < head_size; ++d) {
            float* to = out + d * tile_keys + j;
            to[0] = a[d];
            to[1] = b[d];
            to[2] = c[d];
            to[3] = e[d];
        }
    }
}

// scores[r][j] = q[r] . keys[:, j] for the whole tile.
template <int ROWS>
static void score(const float* q, int64_t head_size, const float* keys, float* scores) {
    for (int64_t at = 0; at < tile_keys; at += COLUMNS * W) {
        vf sums[ROWS][COLUMNS];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] = vf{};
        for (int64_t d = 0; d < head_size; ++d) {
            vf key[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c) key[c] = load(keys + d * tile_keys + at + c * W);
            for (int r = 0; r < ROWS; ++r) {
                const vf value = splat(q[r * head_size + d]);
                for (int c = 0; c < COLUMNS; ++c) sums[r][c] = fma(value, key[c], sums[r][c]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) store(scores + r * tile_keys + at + c * W, sums[r][c]);
    }
}

// states[r][d...] = scale[r] * states[r][d...] + sum over j of weights[r][j] * values[j][d...].
template <int ROWS, int WIDTH>
EC_INLINE void add_columns(const float* const* values, int64_t first, int64_t stop, int64_t d,
                           const float* weights, const float* scales, float* states,
                           int64_t state) {
    vf sums[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < WIDTH; ++c)
            sums[r][c] = load(states + r * state + d + c * W) * splat(scales[r]);
    for (int64_t j = first; j < stop; ++j) {
        vf value[WIDTH];
        for (int c = 0; c < WIDTH; ++c) value[c] = load(values[j] + d + c * W);
        for (int r = 0; r < ROWS; ++r) {
            const vf weight = splat(weights[r * tile_keys + j]);
            for (int c = 0; c < WIDTH; ++c) sums[r][c] = fma(weight, value[c], sums[r][c]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < WIDTH; ++c) store(states + r * state + d + c * W, sums[r][c]);
}

template <int ROWS>
static void add_values(const float* const* values, int64_t first, int64_t stop, int64_t padded,
                       const float* weights, const float* scales, float* states, int64_t state) {
    int64_t d = 0;
    for (; d + COLUMNS * W <= padded; d += COLUMNS * W)
        add_columns<ROWS, COLUMNS>(values, first, stop, d, weights, scales, states, state);
    for (; d < padded; d += W)
        add_columns<ROWS, 1>(values, first, stop, d, weights, scales, states, state);
}

// Scores of one row to weights, in place; `state` points to (largest score, sum of weights).
// Returns what the sum of values so far must be multiplied with. Keys outside [low, high) of the
// tile are hidden.
EC_INLINE float soften(const Attention& a, int64_t query_head, int64_t distance, int64_t low,
                       int64_t high, float* scores, float* state) {
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const vf hidden = splat(-INFINITY);
    vf x[REGISTERS], top = hidden;
    for (int c = 0; c < REGISTERS; ++c) {
        x[c] = load(scores + c * W);
        if (a.softcap != 0.0f) {  // tanh(y) = 1 - 2 / (e^2y + 1)
            const vf power = exp_of(x[c] * splat(2.0f / a.softcap));
            x[c] = splat(a.softcap) * (splat(1.0f) - splat(2.0f) / (power + splat(1.0f)));
        }
        const vi key = lane + c * W;
        if (a.slopes != nullptr) {
            const vf steps = __builtin_convertvector(key + static_cast<int32_t>(distance), vf);
            x[c] = fma(splat(a.slopes[query_head]), steps, x[c]);
        }
        if (low > c * W || high < (c + 1) * W) {
            const vi seen = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
            x[c] = seen ? x[c] : hidden;
        }
        top = max(x[c], top);
    }
    const float before = state[0];
    const float tops = max_of(top);
    const float now = tops > before ? tops : before;
    const float base = now == -INFINITY ? 0.0f : now;  // nothing seen yet
    vf sum = vf{};
    for (int c = 0; c < REGISTERS; ++c) {
        x[c] = exp_of(x[c] - splat(base));
        store(scores + c * W, x[c]);
        sum = sum + x[c];
    }
    const float scale = exp_of(splat(before - base))[0];
    state[0] = now;
    state[1] = state[1] * scale + sum_of(sum);
    return scale;
}

static void clear_states(float* states, int64_t rows, int64_t padded, int64_t state) {
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < padded; d += W) store(states + r * state + d, vf{});
        states[r * state + padded] = -INFINITY;
        states[r * state + padded + 1] = 0.0f;
    }
}

// The keys of `from` come after those of `into`.
static void join_state(float* into, const float* from, int64_t padded) {
    const float top = into[padded] > from[padded] ? into[padded] : from[padded];
    const float base = top == -INFINITY ? 0.0f : top;
    const float own = exp_of(splat(into[padded] - base))[0];
    const float other = exp_of(splat(from[padded] - base))[0];
    for (int64_t d = 0; d < padded; d += W)
        store(into + d, fma(load(into + d), splat(own), load(from + d) * splat(other)));
    into[padded] = top;
    into[padded + 1] = into[padded + 1] * own + from[padded + 1] * other;
}

static void write_row(const Attention& a, int64_t query_head, float* state, float* out) {
    const int64_t padded = a.padded();
    float own = 1.0f, total = state[padded + 1];
    if (a.sinks != nullptr) {
        const float sink = a.sinks[query_head];
        const float top = sink > state[padded] ? sink : state[padded];
        own = exp_of(splat(state[padded] - top))[0];
        total = total * own + exp_of(splat(sink - top))[0];
    }
    const float factor = own / total;
    for (int64_t d = 0; d < a.head_size; ++d) out[d] = state[d] * factor;
}

// ROWS rows that follow one another, of one key/value head, against one tile.
template <int ROWS>
static void take_tile(const Attention& a, const AttentionItem& item, int64_t head, int64_t row,
                      int64_t position, int64_t tile, int64_t first, int64_t stop, const float* q,
                      const float* keys, const float* const* values, float* scores,
                      float* states) {
    const int64_t group = a.group(), state = a.state(), padded = a.padded();
    int64_t lows[ROWS], highs[ROWS], low = tile_keys, high = 0;
    for (int r = 0; r < ROWS; ++r) {
        const int64_t at = position + item.query + (row + r) / group - tile;
        highs[r] = at + 1 < tile_keys ? at + 1 : tile_keys;
        lows[r] = a.window != 0 && at - a.window + 1 > 0 ? at - a.window + 1 : 0;
        low = lows[r] < low ? lows[r] : low;
        high = highs[r] > high ? highs[r] : high;
    }
    first = first > low ? first : low;
    stop = stop < high ? stop : high;
    if (first >= stop) return;
    score<ROWS>(q, a.head_size, keys, scores);
    float scales[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const int64_t at = position + item.query + (row + r) / group;
        scales[r] = soften(a, head * group + (row + r) % group, tile - at, lows[r], highs[r],
                           scores + r * tile_keys, states + r * state + padded);
    }
    add_values<ROWS>(values, first, stop, padded, scores, scales, states, state);
}

static void take_rows(int64_t num_rows, const Attention& a, const AttentionItem& item, int64_t head,
                      int64_t row, int64_t position, int64_t tile, int64_t first, int64_t stop,
                      const float* q, const float* keys, const float* const* values, float* scores,
                      float* states) {
    const auto run = num_rows == 1   ? take_tile<1>
                     : num_rows == 2 ? take_tile<2>
                     : num_rows == 3 ? take_tile<3>
                     : num_rows == 4 ? take_tile<4>
                     : num_rows == 5 ? take_tile<5>
                                     : take_tile<6>;
    run(a, item, head, row, position, tile, first, stop, q, keys, values, scores, states);
}

// One item, into its partial states or into `out`. `scratch` holds `scratch_floats`.
static void attend(const Attention& a, const AttentionItem& item, float* partials, float* scratch) {
    const int64_t group = a.group(), head_size = a.head_size, state = a.state();
    const int64_t padded = a.padded(), rows = item.rows(a);
    const int64_t num_queries = item.query_stop - item.query, head_rows = num_queries * group;
    const int64_t start = a.starts[item.request];
    const int64_t position = a.lengths[item.request] - (a.starts[item.request + 1] - start);
    const int64_t row_bytes = stored_row_bytes(a.stored_kind, head_size);
    const bool is_f32 = a.stored_kind == static_cast<int64_t>(StoredKind::f32);
    float* q = scratch;
    float* states = q + rows * head_size;
    float* all = states + rows * state;
    float* keys = all + rows * state;
    float* padded_values = keys + tile_keys * head_size;
    float* read_keys = padded_values + tile_keys * padded;
    float* scores = read_keys + tile_keys * head_size;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t head = item.head + r / head_rows;
        const int64_t token = start + item.query + r % head_rows / group;
        const float* from = a.q + token * a.q_stride + (head * group + r % group) * head_size;
        for (int64_t d = 0; d < head_size; ++d) q[r * head_size + d] = from[d] * a.scale;
    }
    const int64_t first_position = position + item.query, last = position + item.query_stop;
    int64_t first_key = 0;
    if (a.window != 0 && first_position - a.window + 1 > 0) first_key = first_position - a.window + 1;
    if (item.partial >= 0) all = partials + item.partial;
    clear_states(all, rows, padded, state);
    for (int64_t segment = item.segment; segment < item.segment_stop; ++segment) {
        clear_states(states, rows, padded, state);
        for (int64_t tile = segment * segment_keys; tile < (segment + 1) * segment_keys;
             tile += tile_keys) {
            const int64_t first = first_key > tile ? first_key - tile : 0;
            const int64_t stop = last - tile < tile_keys ? last - tile : tile_keys;
            if (first >= stop) continue;
            int64_t slots[tile_keys];
            const int32_t* blocks = a.table + item.request * a.table_width;
            for (int64_t j = first; j < stop; ++j) {
                const int64_t key = tile + j;
                slots[j] = blocks[key / a.block_size] * a.block_size + key % a.block_size;
            }
            for (int64_t head = item.head; head < item.head_stop; ++head) {
                const float* key_rows[tile_keys];
                const float* value_rows[tile_keys];
                for (int64_t j = 0; j < tile_keys; ++j) {  // others repeat a key: never uncounted
                    const int64_t own = j < first ? first : j < stop ? j : stop - 1;
                    const int64_t at = (slots[own] * a.num_kv_heads + head) * row_bytes;
                    if (is_f32) {
                        key_rows[j] = reinterpret_cast<const float*>(a.k + at);
                        value_rows[j] = reinterpret_cast<const float*>(a.v + at);
                        continue;
                    }
                    float* key = read_keys + own * head_size;
                    float* value = padded_values + own * padded;
                    if (j == own) {
                        read_row(a.stored_kind, a.k + at, head_size, key);
                        read_row(a.stored_kind, a.v + at, head_size, value);
                        for (int64_t d = head_size; d < padded; ++d) value[d] = 0.0f;
                    }
                    key_rows[j] = key;
                    value_rows[j] = value;
                }
                transpose(key_rows, first, stop, head_size, keys);
                if (is_f32 && padded != head_size) {
                    for (int64_t j = first; j < stop; ++j) {
                        float* to = padded_values + j * padded;
                        for (int64_t d = 0; d < padded; ++d)
                            to[d] = d < head_size ? value_rows[j][d] : 0.0f;
                        value_rows[j] = to;
                    }
                }
                const int64_t base = (head - item.head) * head_rows;
                for (int64_t row = 0; row < head_rows; row += most_rows_at_once) {
                    const int64_t left = head_rows - row;
                    take_rows(left < most_rows_at_once ? left : most_rows_at_once, a, item, head,
                              row, position, tile, first, stop, q + (base + row) * head_size, keys,
                              value_rows, scores, states + (base + row) * state);
                }
            }
        }
        for (int64_t r = 0; r < rows; ++r) join_state(all + r * state, states + r * state, padded);
    }
    if (item.partial >= 0) return;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t query_head = (item.head + r / head_rows) * group + r % group;
        const int64_t token = start + item.query + r % head_rows / group;
        write_row(a, query_head, all + r * state,
                  a.out + (token * a.num_query_heads + query_head) * head_size);
    }
}

// Joins the partial states of `num_segments` items in order and writes their rows.
static void join_items(const Attention& a, const AttentionItem* items, int64_t num_segments,
                       float* partials) {
    const AttentionItem& item = items[0];
    const int64_t rows = item.rows(a), state = a.state(), group = a.group();
    const int64_t head_rows = (item.query_stop - item.query) * group;
    for (int64_t r = 0; r < rows; ++r) {
        float* own = partials + item.partial + r * state;
        for (int64_t s = 1; s < num_segments; ++s)
            join_state(own, partials + items[s].partial + r * state, a.padded());
        const int64_t query_head = (item.head + r / head_rows) * group + r % group;
        const int64_t token = a.starts[item.request] + item.query + r % head_rows / group;
        write_row(a, query_head, own, a.out + (token * a.num_query_heads + query_head) * a.head_size);
    }
}
