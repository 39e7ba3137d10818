// A tile of keys and values as floats, for any form of the cache; see attention.h. Included by
// attention_body.h: no include guard.
//
// The keys are transposed once, [D][128], and serve all rows; a row's scores are then chains over D,
// and its values chains over the keys: the order is that of the indices for any number of rows at
// once.

constexpr int COLUMNS = EC_LEVEL == 2 ? 4 : 2;  // registers beside each other in a product

#if EC_LEVEL == 2
// Rows of 16 dwords to columns.
EC_INLINE void transpose_dwords(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    }
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

// keys[j][d] -> out[d][j] for j in whole sixteens around [first, stop).
static void transpose(const float* const* keys, int64_t first, int64_t stop, int64_t head_size,
                      float* out, Ahead& ahead) {
    for (int64_t j = first / unit_keys * unit_keys; j < stop; j += unit_keys) {
        for (int64_t d = 0; d < head_size; d += 16) {
            const int64_t count = head_size - d < 16 ? head_size - d : 16;
            const auto mask = static_cast<__mmask16>((1 << count) - 1);
            __m512i x[16];
            for (int i = 0; i < 16; ++i) x[i] = _mm512_maskz_loadu_epi32(mask, keys[j + i] + d);
            ahead.step();
            transpose_dwords(x);
            for (int64_t i = 0; i < count; ++i)
                _mm512_storeu_si512(out + (d + i) * tile_keys + j, x[i]);
        }
    }
}
#else
typedef float v4 __attribute__((vector_size(16)));
typedef float v4_unaligned __attribute__((vector_size(16), aligned(4), may_alias));

// keys[j][d] -> out[d][j] for j in whole fours around [first, stop).
static void transpose(const float* const* keys, int64_t first, int64_t stop, int64_t head_size,
                      float* out, Ahead& ahead) {
    for (int64_t j = first / 4 * 4; j < stop; j += 4) {
        const float *a = keys[j], *b = keys[j + 1], *c = keys[j + 2], *e = keys[j + 3];
        int64_t d = 0;
        ahead.step();
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
#endif

// states[r][d...] = own[r] * states[r][d...] + other[r] * sum over j of weights[r][j] * values[j][d...].
template <int ROWS, int WIDTH>
EC_INLINE void add_columns(const float* const* values, int64_t first, int64_t stop, int64_t d,
                           const float* weights, const float* own, const float* other,
                           float* states, int64_t state) {
    vf sums[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < WIDTH; ++c) sums[r][c] = vf{};
#pragma GCC unroll 2
    for (int64_t j = first; j < stop; ++j) {
        vf value[WIDTH];
        for (int c = 0; c < WIDTH; ++c) value[c] = load(values[j] + d + c * W);
        for (int r = 0; r < ROWS; ++r) {
            const vf weight = splat(weights[r * tile_keys + j]);
            for (int c = 0; c < WIDTH; ++c) sums[r][c] = fma(weight, value[c], sums[r][c]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < WIDTH; ++c) {
            float* to = states + r * state + d + c * W;
            store(to, fma(load(to), splat(own[r]), sums[r][c] * splat(other[r])));
        }
    }
}

class FloatTile {
public:
    static constexpr bool is_matrix = false;
    static constexpr int64_t block_rows = 24;
    static constexpr int most_rows = most_rows_at_once;
    static constexpr int64_t pass_keys = COLUMNS * W;
    static constexpr int fetches = tile_keys / 4;  // steps that reading a tile takes, about

    static int64_t query_floats(const Attention& a) { return a.head_size; }

    static void take_query(const Attention& a, const float* from, float* query) {
        for (int64_t d = 0; d < a.head_size; ++d) query[d] = from[d] * (a.scale * log2_e);
    }

    FloatTile(const Attention& a, float* scratch)
        : a_(a), keys_(scratch), read_keys_(keys_ + tile_keys * a.head_size),
          padded_values_(read_keys_ + tile_keys * a.head_size) {}

    // Keys and values [first, stop); others repeat one of them: they are never counted.
    void read(const uint8_t* const* k, const uint8_t* const* v, int64_t first, int64_t stop, Ahead&) {
        const int64_t head_size = a_.head_size, padded = a_.padded();
        first_ = first;
        stop_ = stop;
        if (a_.kv_format == static_cast<int64_t>(KVCacheFormat::f32)) {
            for (int64_t j = first; j < stop; ++j) {
                key_rows_[j] = reinterpret_cast<const float*>(k[j]);
                value_rows_[j] = reinterpret_cast<const float*>(v[j]);
                if (padded == head_size) continue;
                float* to = padded_values_ + j * padded;
                for (int64_t d = 0; d < padded; ++d) to[d] = d < head_size ? value_rows_[j][d] : 0.0f;
                value_rows_[j] = to;
            }
        } else {
            for (int64_t j = first; j < stop; ++j) {
                float* key = read_keys_ + j * head_size;
                float* value = padded_values_ + j * padded;
                read_row(a_.kv_format, k[j], head_size, key);
                read_row(a_.kv_format, v[j], head_size, value);
                for (int64_t d = head_size; d < padded; ++d) value[d] = 0.0f;
                key_rows_[j] = key;
                value_rows_[j] = value;
            }
        }
        constexpr int64_t whole = unit_keys;
        for (int64_t j = first / whole * whole; j < first; ++j) key_rows_[j] = key_rows_[first];
        for (int64_t j = stop; j % whole != 0; ++j) key_rows_[j] = key_rows_[stop - 1];
    }

    // Before the first `score` from `at` on: a pass that is scored at once is in the nearest cache.
    void prepare(int64_t at, Ahead& ahead) {
        const int64_t stop = at + pass_keys < stop_ ? at + pass_keys : stop_;
        transpose(key_rows_, at > first_ ? at : first_, stop, a_.head_size, keys_, ahead);
    }

    // scores[r][j] = q[r] . keys[:, j], of the WIDTH registers of keys from `at` on.
    template <int ROWS, int WIDTH>
    void score_columns(const float* q, int64_t at, float* scores) const {
        const int64_t head_size = a_.head_size;
        vf sums[ROWS][WIDTH];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < WIDTH; ++c) sums[r][c] = vf{};
#pragma GCC unroll 2
        for (int64_t d = 0; d < head_size; ++d) {
            vf key[WIDTH];
            for (int c = 0; c < WIDTH; ++c) key[c] = load(keys_ + d * tile_keys + at + c * W);
            for (int r = 0; r < ROWS; ++r) {
                const vf value = splat(q[r * head_size + d]);
                for (int c = 0; c < WIDTH; ++c) sums[r][c] = fma(value, key[c], sums[r][c]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < WIDTH; ++c) store(scores + r * tile_keys + at + c * W, sums[r][c]);
    }

    // Of keys [at, at + pass_keys), so far as they lie in the first `units` units.
    template <int ROWS>
    void score(std::integral_constant<int, ROWS>, const float* q, int64_t at, int64_t units, float* scores) const {
        const int64_t registers = (units * unit_keys - at) / W;
        if (registers >= COLUMNS) return score_columns<ROWS, COLUMNS>(q, at, scores);
        if constexpr (COLUMNS == 4) {
            if (registers == 3) return score_columns<ROWS, 3>(q, at, scores);
            if (registers == 2) return score_columns<ROWS, 2>(q, at, scores);
            score_columns<ROWS, 1>(q, at, scores);
        }
    }

    // A weight as `add` wants it, and the largest of those, if it wants that.
    vf weigh(vf weight, int64_t, vf&) const { return weight; }

    static float largest_of(vf) { return 0.0f; }

    // states[r] = own[r] * states[r] + other[r] * weights[r] . values, of keys [first, stop).
    template <int ROWS>
    void add(std::integral_constant<int, ROWS>, int64_t first, int64_t stop, const float* weights, const float*, const float* own,
             const float* other, float* states) const {
        const int64_t padded = a_.padded(), state = a_.state();
        int64_t d = 0;
        for (; d + COLUMNS * W <= padded; d += COLUMNS * W) {
            add_columns<ROWS, COLUMNS>(value_rows_, first, stop, d, weights, own, other, states,
                                       state);
        }
        for (; d < padded; d += W)
            add_columns<ROWS, 1>(value_rows_, first, stop, d, weights, own, other, states, state);
    }

private:
    const Attention& a_;
    float* keys_;  // [D][128]
    float* read_keys_;
    float* padded_values_;
    const float* key_rows_[tile_keys];
    const float* value_rows_[tile_keys];
    int64_t first_ = 0, stop_ = 0;
};
