// The softmax of attention, some rows at a time; see attention.h. Included by attention_body.h: no
// include guard.
//
// A row's scores against a tile become weights of its largest score there. A tile is taken in units
// of 16 keys.

constexpr int unit_keys = 16;
constexpr int unit_registers = unit_keys / W;

// Which keys of a tile a row sees: [low, high).
struct Sight {
    int64_t low, high;
};

EC_INLINE Sight sight_of(const AttentionRow& row, int64_t tile_start) {
    const int64_t low = row.first - tile_start, high = row.stop - tile_start;
    return {low > 0 ? low : 0, high < tile_keys ? high : tile_keys};
}

// The results of a block of rows against a tile, or what joins them to the rows' states.
struct Softened {
    alignas(64) float tops[most_block_rows + W];    // largest scores
    alignas(64) float totals[most_block_rows + W];  // sums of weights
    float largest[most_block_rows];  // weights, as the tile wants them; if it does
};

// One register of a row's scores, as they are after softcap, slopes, biases and sight.
EC_INLINE vf shown(const Attention& a, vf score, vi key, int64_t tile_start, int64_t query_head,
                   const AttentionRow& row) {
    if (a.softcap != 0.0f) {  // tanh(y) = 1 - 2 / (e^2y + 1)
        const vf power = exp_of(score * splat(2.0f / (a.softcap * log2_e)));
        score = splat(a.softcap * log2_e) * (splat(1.0f) - splat(2.0f) / (power + splat(1.0f)));
    }
    if (a.slopes != nullptr) {
        const auto distance = static_cast<int32_t>(tile_start - row.position);
        const vf steps = __builtin_convertvector(key + distance, vf);
        score = fma(splat(a.slopes[query_head] * log2_e), steps, score);
    }
    if (a.distance_biases != nullptr) {
        const float* own = a.distance_biases + query_head * (2 * a.reach + 1) + a.reach;
        const int64_t first = tile_start + key[0] - row.position;
        vf bias;
        if (first >= -a.reach && first + W - 1 <= a.reach) {
            bias = load(own + first);
        } else {
            for (int i = 0; i < W; ++i)
                bias[i] = own[std::clamp(first + i, -a.reach, a.reach)];
        }
        score = fma(bias, splat(log2_e), score);
    }
    if (a.buckets != nullptr) {
        const float* of_query = a.query_positions[query_head] +
                                (row.start + row.position) * a.num_buckets;
        const float* of_keys = a.key_positions[query_head] + row.start * a.num_buckets;
        const int64_t first = tile_start + key[0], left = row.stop - first;
        vf bias{};
        for (int i = 0; i < W && i < left; ++i) {
            const int64_t distance = std::clamp(first + i - row.position, -a.reach, a.reach);
            const int64_t bucket = a.buckets[distance + a.reach];
            bias[i] = of_query[bucket] + of_keys[(first + i) * a.num_buckets + bucket];
        }
        score = fma(bias, splat(log2_e), score);
    }
    const Sight sight = sight_of(row, tile_start);
    const vi seen = (key >= static_cast<int32_t>(sight.low)) &
                    (key < static_cast<int32_t>(sight.high));
    return seen ? score : splat(-INFINITY);
}

// Scores of ROWS rows to weights, in place, in the first `units` units: nothing behind those is
// touched. The first is `row` rows behind one of `query_head`. What a row does not see weighs
// nothing. Rows take each step together: one alone would wait for its own results. A tile may have
// two registers of weights packed into one, from the start of the row on.
template <int ROWS, class Tile>
EC_INLINE void soften(const Attention& a, const Tile& tile, int64_t tile_start, int64_t query_head,
                      int64_t row, const AttentionRow* sees, int64_t units, float* scores, float* tops,
                      float* totals, float* largest) {
    const int64_t stop = units * unit_keys, group = a.group();
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    vf top[ROWS], sums[ROWS], bases[ROWS], most[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const Sight sight = sight_of(sees[r], tile_start);
        float* own = scores + r * tile_keys;
        const bool changes = a.changes_scores();
        if (sight.low > 0 || sight.high < stop || changes) {
            const int64_t head = query_head / group * group + (query_head + row + r) % group;
            for (int64_t at = 0; at < stop; at += W) {
                if (!changes && sight.low <= at && at + W <= sight.high) continue;
                const vi key = lane + static_cast<int32_t>(at);
                store(own + at, shown(a, load(own + at), key, tile_start, head, sees[r]));
            }
        }
        top[r] = load(own);
    }
    for (int64_t at = W; at < stop; at += W)
        for (int r = 0; r < ROWS; ++r) top[r] = max(load(scores + r * tile_keys + at), top[r]);
    for (int r = 0; r < ROWS; ++r) {
        tops[r] = max_of(top[r]);
        bases[r] = splat(tops[r] == -INFINITY ? 0.0f : tops[r]);  // nothing seen
        sums[r] = most[r] = vf{};
    }
    constexpr int64_t step = Tile::packs_weights ? 2 * W : W;
    for (int64_t at = 0; at < stop; at += step) {
        for (int r = 0; r < ROWS; ++r) {
            float* own = scores + r * tile_keys;
            const vf weight = exp2_to_one(load(own + at) - bases[r]);
            sums[r] = sums[r] + weight;
            if constexpr (Tile::packs_weights) {
                vf other{};
                if (at + W < stop) other = exp2_to_one(load(own + at + W) - bases[r]);
                sums[r] = sums[r] + other;
                Tile::pack(weight, other, own + at / 2);
            } else {
                store(own + at, tile.weigh(weight, at, most[r]));
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        totals[r] = sum_of(sums[r]);
        largest[r] = Tile::largest_of(most[r]);
    }
}

static void clear_states(float* states, int64_t rows, int64_t padded, int64_t state) {
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < padded; d += W) store(states + r * state + d, vf{});
        states[r * state + padded] = -INFINITY;
        states[r * state + padded + 1] = 0.0f;
    }
}

// What two sums of values are multiplied with where one joins the other. Their keys follow one
// another; `tops` and `totals` become those of both.
EC_INLINE void join_scales(vf& tops, vf& totals, vf other_tops, vf other_totals, vf& own,
                           vf& other) {
    const vf joined = tops > other_tops ? tops : other_tops;
    const vf base = joined == splat(-INFINITY) ? vf{} : joined;
    own = exp2_to_one(tops - base);
    other = exp2_to_one(other_tops - base);
    totals = totals * own + other_totals * other;
    tops = joined;
}

// Joins largest scores and sums of weights to those of the rows' states; in their place come the
// scales: of the states' own sums of values in `tops`, of the tile's in `totals`.
static void join_tile(int64_t num_rows, int64_t padded, int64_t state, float* states,
                      Softened& tile) {
    for (int64_t row = 0; row < num_rows; row += W) {
        const int64_t count = num_rows - row < W ? num_rows - row : W;
        vf tops{}, totals{}, own, other;
        for (int64_t i = 0; i < count; ++i) {
            tops[i] = states[(row + i) * state + padded];
            totals[i] = states[(row + i) * state + padded + 1];
        }
        join_scales(tops, totals, load(tile.tops + row), load(tile.totals + row), own, other);
        store(tile.tops + row, own);
        store(tile.totals + row, other);
        for (int64_t i = 0; i < count; ++i) {
            states[(row + i) * state + padded] = tops[i];
            states[(row + i) * state + padded + 1] = totals[i];
        }
    }
}

// The keys of `from` come after those of `into`.
static void join_state(float* into, const float* from, int64_t padded) {
    vf tops = splat(into[padded]), totals = splat(into[padded + 1]), own, other;
    join_scales(tops, totals, splat(from[padded]), splat(from[padded + 1]), own, other);
    for (int64_t d = 0; d < padded; d += W)
        store(into + d, fma(load(into + d), own, load(from + d) * other));
    into[padded] = tops[0];
    into[padded + 1] = totals[0];
}

static void write_row(const Attention& a, int64_t query_head, float* state, float* out) {
    const int64_t padded = a.padded();
    float own = 1.0f, total = state[padded + 1];
    if (a.sinks != nullptr) {
        const float sink = a.sinks[query_head] * log2_e;
        const float top = sink > state[padded] ? sink : state[padded];
        own = exp2_to_one(splat(state[padded] - top))[0];
        total = total * own + exp2_to_one(splat(sink - top))[0];
    }
    const float factor = own / total;
    for (int64_t d = 0; d < a.value_size; ++d) out[d] = state[d] * factor;
}
