// The online softmax of attention, a row at a time; see attention.h. Included by attention_body.h:
// no include guard.
//
// A row's scores against a tile become weights of the largest score so far, which the sum of values
// so far is scaled to. A tile is taken in units of 16 keys.

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

// Scores of some rows to weights, in place; a row's state ends with (largest score, sum of weights).
// scales[r]: what the sum of values so far must be multiplied with. What a row does not see is
// hidden, it sees the first UNITS units at most, and nothing behind those is touched. Rows take
// each step together: one alone would wait for its own results.
template <int ROWS, int UNITS>
EC_INLINE void soften(const Attention& a, int64_t tile_start, int64_t query_head,
                      const AttentionRow* sees, float* scores, float* states, float* scales) {
    constexpr int registers = UNITS * unit_registers;
    const int64_t state = a.state(), padded = a.padded(), group = a.group();
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const vf hidden = splat(-INFINITY);
    vf x[ROWS][registers], top[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const Sight sight = sight_of(sees[r], tile_start);
        top[r] = hidden;
        for (int c = 0; c < registers; ++c) {
            vf score = load(scores + r * tile_keys + c * W);
            if (a.softcap != 0.0f) {  // tanh(y) = 1 - 2 / (e^2y + 1)
                const vf power = exp_of(score * splat(2.0f / a.softcap));
                score = splat(a.softcap) * (splat(1.0f) - splat(2.0f) / (power + splat(1.0f)));
            }
            const vi key = lane + c * W;
            if (a.slopes != nullptr) {
                const auto distance = static_cast<int32_t>(tile_start - sees[r].position);
                const vf steps = __builtin_convertvector(key + distance, vf);
                const int64_t own = query_head / group * group + (query_head + r) % group;
                score = fma(splat(a.slopes[own]), steps, score);
            }
            if (sight.low > c * W || sight.high < (c + 1) * W) {
                const vi seen = (key >= static_cast<int32_t>(sight.low)) &
                                (key < static_cast<int32_t>(sight.high));
                score = seen ? score : hidden;
            }
            x[r][c] = score;
            top[r] = max(score, top[r]);
        }
    }
    float bases[ROWS], befores[W] = {};
    for (int r = 0; r < ROWS; ++r) {
        float* own = states + r * state + padded;
        const float tops = max_of(top[r]);
        const float now = tops > own[0] ? tops : own[0];
        bases[r] = now == -INFINITY ? 0.0f : now;  // nothing seen yet
        befores[r] = own[0] - bases[r];
        own[0] = now;
    }
    vf sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = vf{};
    for (int c = 0; c < registers; ++c) {
        for (int r = 0; r < ROWS; ++r) {
            x[r][c] = exp_to_one(x[r][c] - splat(bases[r]));
            store(scores + r * tile_keys + c * W, x[r][c]);
            sums[r] = sums[r] + x[r][c];
        }
    }
    static_assert(ROWS <= W);
    const vf before_scales = exp_to_one(load(befores));
    for (int r = 0; r < ROWS; ++r) {
        float* own = states + r * state + padded;
        scales[r] = before_scales[r];
        own[1] = own[1] * scales[r] + sum_of(sums[r]);
    }
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
    const float own = exp_to_one(splat(into[padded] - base))[0];
    const float other = exp_to_one(splat(from[padded] - base))[0];
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
