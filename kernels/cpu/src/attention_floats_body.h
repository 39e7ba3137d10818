// A tile of keys and values on the vector units: as floats, for any form of the cache, or as words of
// 16 bits; see attention.h. Included by attention_body.h: no include guard.
//
// Keys lie in panels [depth][16], in the cache or transposed once here, and serve all rows; a row's
// scores are then chains over the depth, and its values chains over the keys: the order is that of
// the indices for any number of rows at once.

constexpr int COLUMNS = num_registers == 32 ? 4 : 2;  // registers beside each other in a product
constexpr int64_t panel_values = 16;

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

// keys[j][d] -> out[j / 16][d][j % 16] for j in whole sixteens around [first, stop).
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
                _mm512_storeu_si512(out + j * head_size + (d + i) * unit_keys, x[i]);
        }
    }
}
#else
// The lower or the upper two of each four floats of both, in turn; and of each two pairs.
#if EC_LEVEL == 1
EC_INLINE vf low_floats(vf a, vf b) { return (vf)_mm256_unpacklo_ps((__m256)a, (__m256)b); }
EC_INLINE vf high_floats(vf a, vf b) { return (vf)_mm256_unpackhi_ps((__m256)a, (__m256)b); }
EC_INLINE vf low_pairs(vf a, vf b) { return (vf)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); }
EC_INLINE vf high_pairs(vf a, vf b) { return (vf)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); }
// Four floats of a key, and of the fourth behind it.
EC_INLINE vf load_fours(const float* const* keys, int64_t d) {
    return (vf)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(keys[0] + d)),
                                    _mm_loadu_ps(keys[4] + d), 1);
}
#else
EC_INLINE vf low_floats(vf a, vf b) { return EC_SHUFFLE_4(a, b, 0, 4, 1, 5); }
EC_INLINE vf high_floats(vf a, vf b) { return EC_SHUFFLE_4(a, b, 2, 6, 3, 7); }
EC_INLINE vf low_pairs(vf a, vf b) { return EC_SHUFFLE_4(a, b, 0, 1, 4, 5); }
EC_INLINE vf high_pairs(vf a, vf b) { return EC_SHUFFLE_4(a, b, 2, 3, 6, 7); }
EC_INLINE vf load_fours(const float* const* keys, int64_t d) { return load(keys[0] + d); }
#endif

// keys[j][d] -> out[j / 16][d][j % 16] for j in whole registers around [first, stop).
static void transpose(const float* const* keys, int64_t first, int64_t stop, int64_t head_size,
                      float* out, Ahead& ahead) {
    for (int64_t j = first / W * W; j < stop; j += W) {
        float* panel = out + j / unit_keys * unit_keys * head_size + j % unit_keys;
        int64_t d = 0;
        for (; d + 4 <= head_size; d += 4, panel += 4 * unit_keys) {
            if (d % 16 == 0) ahead.step();
            const vf a = load_fours(keys + j, d), b = load_fours(keys + j + 1, d);
            const vf c = load_fours(keys + j + 2, d), e = load_fours(keys + j + 3, d);
            const vf ab_low = low_floats(a, b), ab_high = high_floats(a, b);
            const vf ce_low = low_floats(c, e), ce_high = high_floats(c, e);
            store(panel, low_pairs(ab_low, ce_low));
            store(panel + unit_keys, high_pairs(ab_low, ce_low));
            store(panel + 2 * unit_keys, low_pairs(ab_high, ce_high));
            store(panel + 3 * unit_keys, high_pairs(ab_high, ce_high));
        }
        for (; d < head_size; ++d, panel += unit_keys)
            for (int64_t i = 0; i < W; ++i) std::memcpy(panel + i, keys[j + i] + d, 4);
    }
}
#endif

// sum + x * w.
EC_INLINE vf add_product(vf sum, vf x, vf w) { return fma(x, w, sum); }

#if EC_LEVEL == 1
// Of two words a lane, exact.
EC_INLINE vi add_product(vi sum, vf x, vf w) {
    // keys out of sight have any words, whose sums may wrap
    return (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)x, (__m256i)w));
}
#endif

// sums[r][c] = sum over n in [first, stop) of x[r * x_stride + n] times the register at `at(n, c)`.
// `fetch(n)` is called beside it.
template <class Sum, int ROWS, int WIDTH, class At, class Fetch>
EC_INLINE void dot(const At& at, int64_t first, int64_t stop, const float* x, int64_t x_stride,
                   Sum (&sums)[ROWS][WIDTH], const Fetch& fetch) {
    constexpr bool WORDS = std::is_same_v<Sum, vi>;
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < WIDTH; ++c) sums[r][c] = Sum{};
    const auto value = [&](int r, int64_t n) {
        return WORDS ? splat_bits(x + r * x_stride + n) : splat(x[r * x_stride + n]);
    };
    if constexpr (EC_LEVEL < 2 && WIDTH > ROWS) {
        for (int64_t n = first; n < stop; ++n) {
            fetch(n);
            vf values[ROWS];
            for (int r = 0; r < ROWS; ++r) values[r] = value(r, n);
            for (int c = 0; c < WIDTH; ++c) {
                const vf vector = load(at(n, c));
                for (int r = 0; r < ROWS; ++r)
                    sums[r][c] = add_product(sums[r][c], values[r], vector);
            }
        }
        return;
    }
    const auto turn = [&](int64_t n) __attribute__((always_inline)) {
        fetch(n);
        vf vectors[WIDTH];
        for (int c = 0; c < WIDTH; ++c) vectors[c] = load(at(n, c));
        for (int r = 0; r < ROWS; ++r) {
            const vf own = value(r, n);
            for (int c = 0; c < WIDTH; ++c)
                sums[r][c] = add_product(sums[r][c], own, vectors[c]);
        }
    };
    if constexpr (WORDS) {  // of two turns GCC would gather the products
        for (int64_t n = first; n < stop; ++n) turn(n);
    } else {
#pragma GCC unroll 2
        for (int64_t n = first; n < stop; ++n) turn(n);
    }
}

struct Floats {
    static constexpr bool are_words = false;
    static float largest_bits(vf) { return 0.0f; }
};

template <class Codes>
class VectorTile {
public:
    static constexpr bool is_matrix = false;
    static constexpr bool reads_panels = !Codes::are_words;
    static constexpr bool packs_weights = false;
    static constexpr int64_t block_rows = 24;
    static constexpr int most_rows = most_rows_at_once;
    static constexpr bool WORDS = Codes::are_words;
    // Few rows have too few chains of multiply-adds to keep the units busy: twice the columns.
    static constexpr int columns_of(int rows) {
        return EC_LEVEL < 2 && !WORDS && rows <= 3 ? 2 * COLUMNS : COLUMNS;
    }
    static constexpr int64_t pass_keys = columns_of(1) * W;
    static int64_t num_steps(const Attention&, int64_t, int64_t) {
        return tile_keys / W * (WORDS ? 2 : 4);
    }

    // Of words: codes, then their scale.
    static int64_t query_floats(const Attention& a) {
        return WORDS ? a.padded() / 2 + 1 : a.head_size;
    }

    static void take_query(const Attention& a, const float* from, float* query) {
        if constexpr (WORDS) {
            const float largest = Codes::largest_magnitude(from, a.head_size);
            const float scale = Codes::write_codes(from, a.head_size, largest, query);
            query[a.padded() / 2] = scale * (a.scale * log2_e);
        } else {
            const float scale = a.scale * log2_e;
            int64_t d = 0;
            for (; d + W <= a.head_size; d += W) store(query + d, load(from + d) * splat(scale));
            for (; d < a.head_size; ++d) query[d] = from[d] * scale;
        }
    }

    // For so many rows of a head. Values that serve many are copied to panels [128][panel_values].
    VectorTile(const Attention& a, int64_t rows, float* scratch)
        : a_(a), packs_(WORDS || (EC_LEVEL < 2 && rows > 4 * block_rows)),
          has_panels_(a.has_floats()), has_bytes_(a.has_bytes()),
          depth_(WORDS ? (a.head_size + 1) / 2 : a.head_size), keys_(scratch),
          read_keys_(keys_ + tile_keys * depth_),
          values_(read_keys_ + tile_keys * (WORDS ? a.padded() / 2 : a.head_size)) {}

    // Keys and values [first, stop), where they lie in panels the first one of each; others repeat
    // one of them: they are never counted.
    void read(const uint8_t* const* k, const uint8_t* const* v, int64_t first, int64_t stop,
              [[maybe_unused]] Ahead& ahead) {
        first_ = first;
        stop_ = stop;
        if constexpr (WORDS) {
            has_bytes_ ? read_panels(k, v, ahead) : read_words(k, v);
        } else {
            read_floats(k, v);
        }
        constexpr int64_t whole = unit_keys;
        for (int64_t unit = 0; unit * whole < stop; ++unit) {
            const int64_t seen = unit * whole > first ? unit * whole : first;
            panels_[unit] = has_panels_ ? reinterpret_cast<const float*>(k[seen])
                                        : keys_ + unit * whole * depth_;
        }
        if (has_panels_ || (WORDS && has_bytes_)) return;
        for (int64_t j = first / whole * whole; j < first; ++j) key_rows_[j] = key_rows_[first];
        for (int64_t j = stop; j % whole != 0; ++j) key_rows_[j] = key_rows_[stop - 1];
    }

    // From now on products fetch the next tile's panels and values of a head of it.
    void fetch(const Ahead& ahead, int64_t head) {
        next_ = has_panels_ && ahead.find(head, places_) ? &places_ : nullptr;
    }
    // A tile that is longer than this one has keys left, for which there was no step.
    void fetched() {
        if (next_ == nullptr) return;
        const int64_t units = (stop_ + unit_keys - 1) / unit_keys;
        for (int64_t j = stop_; j < next_->num_keys; ++j)
            for (int64_t d = 0; d < a_.head_size; d += 16)
                __builtin_prefetch(next_->values[j] + d, 0, 2);
        for (int64_t unit = units; unit * unit_keys < next_->num_keys; ++unit)
            for (int64_t d = 0; d < a_.head_size; ++d)
                __builtin_prefetch(next_->panels[unit] + d * unit_keys, 0, 2);
        next_ = nullptr;
    }

    // Before the first `score` from `at` on: a pass that is scored at once is in the nearest cache.
    void prepare(int64_t at, Ahead& ahead) {
        if (has_panels_ || (WORDS && has_bytes_)) return;
        const int64_t stop = at + pass_keys < stop_ ? at + pass_keys : stop_;
        transpose(key_rows_, at > first_ ? at : first_, stop, depth_, keys_, ahead);
    }

    // scores[r][j] = q[r] . keys[j], of keys [at, at + pass_keys), so far as they lie in the first
    // `units` units.
    template <int ROWS>
    void score(std::integral_constant<int, ROWS>, const float* q, int64_t at, int64_t units,
               float* scores) const {
        constexpr int most = columns_of(ROWS);
        const int64_t pass_stop = at + pass_keys, seen_stop = units * unit_keys;
        const int64_t stop = pass_stop < seen_stop ? pass_stop : seen_stop;
        for (; at + most * W <= stop; at += most * W) score_columns<ROWS, most>(q, at, scores);
        if (at >= stop) return;
        if constexpr (W == unit_keys) {
            const int64_t registers = (stop - at) / W;
            if (registers == 3) return score_columns<ROWS, 3>(q, at, scores);
            if (registers == 1) return score_columns<ROWS, 1>(q, at, scores);
        }
        score_columns<ROWS, W == unit_keys ? 2 : unit_registers>(q, at, scores);
    }

    // A weight as `add` wants it, and the largest of those, if it wants that. A value that is not a
    // number shows in the rows that see it.
    vf weigh(vf weight, [[maybe_unused]] int64_t at, [[maybe_unused]] vf& largest) const {
        if constexpr (WORDS) {
            weight = weight != 0.0f ? weight * load(value_scales_ + at) : vf{};
            largest = Codes::larger(weight, largest);
        }
        return weight;
    }

    static float largest_of(vf x) { return Codes::largest_bits(x); }

    // states[r] = own[r] * states[r] + other[r] * weights[r] . values, of keys [first, stop).
    template <int ROWS>
    void add(std::integral_constant<int, ROWS> rows, int64_t first, int64_t stop,
             const float* weights, const float* largest, const float* own, const float* other,
             float* states) const {
        if constexpr (WORDS) {
            alignas(64) float codes[ROWS][tile_keys / 2];
            float scales[ROWS];
            for (int r = 0; r < ROWS; ++r)
                scales[r] = Codes::write_codes(weights + r * tile_keys, stop, largest[r], codes[r]);
            add_rows(rows, first / 2, (stop + 1) / 2, codes[0], scales, own, other, states);
        } else {
            add_rows(rows, first, stop, weights, nullptr, own, other, states);
        }
    }

private:
    using Sum = std::conditional_t<WORDS, vi, vf>;
    static constexpr int64_t weight_floats = WORDS ? tile_keys / 2 : tile_keys;

    // Where the values from dimension `d` on lie behind a key's first ones.
    int64_t value_at(int64_t d) const {
        return packs_ ? d / panel_values * (panel_values * weight_floats) + d % panel_values : d;
    }

    void read_floats(const uint8_t* const* k, const uint8_t* const* v) {
        const int64_t head_size = a_.head_size, value_size = a_.value_size, padded = a_.padded();
        const bool is_float = a_.kv_format == static_cast<int64_t>(KVCacheFormat::f32);
        const bool copies = packs_ || padded != value_size;
        if (has_panels_ && !copies) {
            const auto count = static_cast<size_t>(stop_ - first_);
            std::memcpy(value_rows_ + first_, v + first_, count * sizeof v[0]);
            return;
        }
        for (int64_t j = first_; j < stop_; ++j) {
            const auto* key = reinterpret_cast<const float*>(k[has_panels_ || has_bytes_ ? first_ : j]);
            const auto* value = reinterpret_cast<const float*>(v[has_bytes_ ? first_ : j]);
            float* to = values_ + j * (packs_ ? panel_values : padded);
            if (!is_float) {
                float *own_key = read_keys_ + j * head_size, *own = packs_ ? keys_ : to;
                if (has_bytes_) {
                    const int64_t lane = j % panel_tokens, seen = j - lane > first_ ? j - lane : first_;
                    read_key(k[seen], lane, head_size, own_key);
                    read_value(v[seen], lane, head_size, own);
                } else {
                    read_row(a_.kv_format, k[j], head_size, own_key);
                    if (!a_.is_latent())  // into `keys_`: they come later
                        read_row(a_.kv_format, v[j], head_size, own);
                }
                key = own_key;
                value = a_.is_latent() ? own_key + head_size - value_size : own;
            }
            key_rows_[j] = key;
            value_rows_[j] = copies ? to : value;
            for (int64_t d = 0; copies && d < padded; d += panel_values) {
                const auto count = static_cast<size_t>(value_size - d);
                float part[panel_values] = {};
                if (count >= panel_values) {
                    std::memcpy(part, value + d, sizeof part);
                } else {
                    std::memcpy(part, value + d, count * sizeof(float));
                }
                std::memcpy(to + value_at(d), part, sizeof part);
            }
        }
    }

    void read_words(const uint8_t* const* k, const uint8_t* const* v) {
        const int64_t size = a_.head_size;
        for (int64_t j = first_; j < stop_; ++j) {
            float* key = read_keys_ + j * a_.padded() / 2;
            Codes::widen(k[j], size, key);
            key_rows_[j] = key;
            std::memcpy(key_scales_ + j, k[j] + size, 4);
            std::memcpy(value_scales_ + j, v[j] + size, 4);
        }
        for (int64_t n = first_ / 2; 2 * n < stop_; ++n) {
            const uint8_t* even = v[2 * n < first_ ? first_ : 2 * n];
            const uint8_t* odd = v[2 * n + 1 < stop_ ? 2 * n + 1 : stop_ - 1];
            float* to = values_ + n * panel_values;
            for (int64_t d = 0; d < size; d += panel_values)
                Codes::widen_pairs(even + d, odd + d, size - d, to + value_at(d));
            value_rows_[n] = to;
        }
    }

    void read_panels(const uint8_t* const* k, const uint8_t* const* v, Ahead& ahead) {
        const int64_t size = a_.head_size, codes = size * panel_tokens;
        for (int64_t at = first_ / unit_keys * unit_keys; at < stop_; at += unit_keys) {
            const int64_t seen = at > first_ ? at : first_;
            std::memcpy(key_scales_ + at, k[seen] + codes, 4 * panel_tokens);
            std::memcpy(value_scales_ + at, v[seen] + codes, 4 * panel_tokens);
            float* keys = keys_ + at * depth_;
            for (int64_t n = 0; n < size / 4; ++n, keys += 2 * unit_keys)
                Codes::template widen_fours<true>(k[seen] + 64 * n, keys, keys + unit_keys);
            for (int64_t four = 0; four < 4; ++four) {
                const int64_t pair = at / 2 + 2 * four;
                float* to = values_ + pair * panel_values;
                ahead.step();
                for (int64_t d = 0; d < size; d += panel_values) {
                    Codes::template widen_fours<false>(v[seen] + (four * size + d) * 4,
                                                       to + value_at(d),
                                                       to + panel_values + value_at(d));
                }
                value_rows_[pair] = to;
                value_rows_[pair + 1] = to + panel_values;
            }
        }
    }

    // Of the WIDTH registers of keys from `at` on.
    template <int ROWS, int WIDTH>
    void score_columns(const float* q, int64_t at, float* scores) const {
        const int64_t stride = query_floats(a_);
        const float* keys[WIDTH];
        for (int c = 0; c < WIDTH; ++c)
            keys[c] = panels_[(at + c * W) / unit_keys] + (at + c * W) % unit_keys;
        Sum sums[ROWS][WIDTH];
        const auto key_at = [&](int64_t d, int c) { return keys[c] + d * unit_keys; };
        const Places* next = next_;
        const auto fetch = [&](int64_t d) __attribute__((always_inline)) {
            if (WORDS || next == nullptr) return;
            for (int c = 0; c < WIDTH; c += unit_registers)
                __builtin_prefetch(next->panels[at / unit_keys + c / unit_registers] + d * unit_keys, 0, 2);
        };
        dot(key_at, 0, depth_, q, stride, sums, fetch);
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < WIDTH; ++c) {
                float* to = scores + r * tile_keys + at + c * W;
                if constexpr (WORDS) {
                    const vf scale = splat(q[r * stride + stride - 1]);
                    const vf sum = __builtin_convertvector(sums[r][c], vf);
                    store(to, sum * (scale * load(key_scales_ + at + c * W)));
                } else {
                    store(to, sums[r][c]);
                }
            }
        }
    }

    template <int ROWS>
    void add_rows(std::integral_constant<int, ROWS>, int64_t first, int64_t stop, const float* x,
                  const float* scales, const float* own, const float* other, float* states) const {
        constexpr int most = columns_of(ROWS);
        const int64_t padded = a_.padded();
        int64_t d = 0;
        for (; d + most * W <= padded && (most == COLUMNS || !packs_); d += most * W)
            add_columns<ROWS, most>(first, stop, d, x, scales, own, other, states);
        for (; d + COLUMNS * W <= padded; d += COLUMNS * W)
            add_columns<ROWS, COLUMNS>(first, stop, d, x, scales, own, other, states);
        for (; d < padded; d += W)
            add_columns<ROWS, 1>(first, stop, d, x, scales, own, other, states);
    }

    template <int ROWS, int WIDTH>
    void add_columns(int64_t first, int64_t stop, int64_t d, const float* x, const float* scales,
                     const float* own, const float* other, float* states) const {
        const int64_t state = a_.state(), offset = value_at(d);
        Sum sums[ROWS][WIDTH];
        const auto value_at_key = [&](int64_t n, int c) { return value_rows_[n] + offset + c * W; };
        const Places* next = next_;
        const auto fetch = [&](int64_t n) __attribute__((always_inline)) {
            if (WORDS || next == nullptr) return;
            for (int c = 0; c < WIDTH; c += unit_registers)
                __builtin_prefetch(next->values[n] + d + c * W, 0, 2);
        };
        dot(value_at_key, first, stop, x, weight_floats, sums, fetch);
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < WIDTH; ++c) {
                vf sum = __builtin_convertvector(sums[r][c], vf);
                // as a tile's own result would be: it is rounded before it is joined
                if constexpr (WORDS) sum = sum * splat(scales[r]);
                float* to = states + r * state + d + c * W;
                store(to, fma(load(to), splat(own[r]), sum * splat(other[r])));
            }
        }
    }

    const Attention& a_;
    const bool packs_, has_panels_, has_bytes_;  // of floats in panels, or bytes
    const int64_t depth_;  // dwords of a key
    float* keys_;          // [8][depth][16]
    float* read_keys_;
    float* values_;
    const float* key_rows_[tile_keys];
    const float* panels_[tile_keys / unit_keys];  // of keys
    const float* value_rows_[tile_keys];
    float key_scales_[WORDS ? tile_keys : 1];
    float value_scales_[WORDS ? tile_keys : 1];
    int64_t first_ = 0, stop_ = 0;
    Places places_;
    const Places* next_ = nullptr;  // what products fetch beside them
};

using FloatTile = VectorTile<Floats>;
