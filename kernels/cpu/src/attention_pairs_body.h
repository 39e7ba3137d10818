// A tile of bfloat16 keys and values as products of pairs take them, and those products on the vector
// units; see attention.h. Included by attention_body.h for AVX-512: no include guard.
//
// Keys are transposed by dwords, of two dimensions each; values lie in pairs of keys. Queries (times the
// scale) and weights are rounded to bfloat16, and all else is float32, of every token, so that one alone
// has the bits that it has in a prompt.

EC_INLINE __m512i bf16_pairs(vf low, vf high) {
    __m512i both;  // written out: the code around it is compiled for any AVX-512
#ifdef EC_EMULATED_AVX512
    both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high), "v"(low));
#endif
    return both;
}

// sum + x * w of pairs, the later one first.
EC_INLINE vf add_pairs(vf sum, vf x, vf w) {
#ifdef EC_EMULATED_AVX512
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
#endif
}

class PairPanels {
public:
    static constexpr bool reads_panels = false;
    static constexpr bool packs_weights = true;

    static int64_t num_steps(const Attention& a, int64_t first, int64_t stop) {
        const int64_t units = (stop + unit_keys - 1) / unit_keys - first / unit_keys;
        return units * (a.head_size / 32) + ((stop + 31) / 32 - first / 32) * 16;
    }

    static bool can_take(const Attention& a) {
        return a.rounds && a.kv_format == static_cast<int64_t>(KVCacheFormat::bf16) &&
               a.head_size % 32 == 0 && a.value_size % 32 == 0;
    }

    static int64_t query_floats(const Attention& a) { return a.head_size / 2; }

    static void take_query(const Attention& a, const float* from, float* query) {
        const vf scale = splat(a.scale * log2_e);
        for (int64_t d = 0; d < a.head_size; d += 32) {
            const vf low = load(from + d) * scale, high = load(from + d + 16) * scale;
            _mm512_storeu_si512(query + d / 2, bf16_pairs(low, high));
        }
    }

    PairPanels(const Attention& a, int64_t, float* scratch)
        : a_(a), keys_(reinterpret_cast<int32_t*>(scratch)),
          values_(keys_ + a.head_size / 2 * tile_keys) {}

    // Keys out of sight repeat one that is seen: they weigh nothing, and are numbers if it is.
    void read(const uint8_t* const* k, const uint8_t* const* v, int64_t first, int64_t stop,
              Ahead& ahead) {
        const int64_t size = a_.head_size, value_size = a_.value_size;
        const auto seen = [&](int64_t j) { return j < first ? first : j < stop ? j : stop - 1; };
        for (int64_t unit = first / unit_keys * unit_keys; unit < stop; unit += unit_keys) {
            for (int64_t dword = 0; dword < size / 2; dword += 16) {
                __m512i x[16];
                for (int j = 0; j < 16; ++j)
                    x[j] = _mm512_loadu_si512(k[seen(unit + j)] + 4 * dword);
                ahead.step();
                transpose_dwords(x);
                int32_t* to = keys_ + dword * tile_keys + unit;
                for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * tile_keys, x[i]);
            }
        }
        // unpacking works in quarters, of which it takes the first or the second half
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        for (int64_t j = first / 32 * 32; j < (stop + 31) / 32 * 32; j += 2) {
            const uint8_t *even = v[seen(j)], *odd = v[seen(j + 1)];
            int32_t* to = values_ + j / 2 * value_size;
            for (int64_t d = 0; d < value_size; d += 32) {
                const __m512i a = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(even + 2 * d));
                const __m512i b = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(odd + 2 * d));
                _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(to + d + 16, _mm512_unpackhi_epi16(a, b));
            }
            ahead.step();
        }
    }

    void prepare(int64_t, Ahead&) {}

    static void pack(vf low, vf high, float* to) { _mm512_storeu_si512(to, bf16_pairs(low, high)); }

    static float largest_of(vf) { return 0.0f; }

protected:
    const Attention& a_;
    int32_t* keys_;    // [D / 2][128]
    int32_t* values_;  // [64][value size]
};

class PairVectorTile : public PairPanels {
public:
    static constexpr bool is_matrix = false;
    static constexpr int64_t block_rows = 24;
    static constexpr int most_rows = most_rows_at_once;
    static constexpr int64_t pass_keys = COLUMNS * unit_keys;

    using PairPanels::PairPanels;

    template <int ROWS>
    void score(std::integral_constant<int, ROWS>, const float* q, int64_t at, int64_t units,
               float* scores) const {
        const int64_t left = units - at / unit_keys, pairs = a_.head_size / 2;
        with_count<COLUMNS>(left, [&](auto columns) {
            constexpr int WIDTH = columns.value;
            vf sums[ROWS][WIDTH];
            dot_pairs(keys_ + at, tile_keys, q, pairs, 0, pairs, sums);
            EC_UNROLL for (int r = 0; r < ROWS; ++r)
                EC_UNROLL for (int c = 0; c < WIDTH; ++c)
                    store(scores + r * tile_keys + at + 16 * c, sums[r][c]);
        });
    }

    template <int ROWS>
    void add(std::integral_constant<int, ROWS>, int64_t first, int64_t stop, const float* weights,
             const float*, const float* own, const float* other, float* states) const {
        const int64_t size = a_.value_size, state = a_.state();
        for (int64_t d = 0; d < size; d += 16 * COLUMNS) {
            const int64_t left = (size - d) / 16;
            with_count<COLUMNS>(left, [&](auto columns) {
                constexpr int WIDTH = columns.value;
                vf sums[ROWS][WIDTH];
                dot_pairs(values_ + d, size, weights, tile_keys, first / 2, (stop + 1) / 2, sums);
                EC_UNROLL for (int r = 0; r < ROWS; ++r) {
                    EC_UNROLL for (int c = 0; c < WIDTH; ++c) {
                        float* to = states + r * state + d + 16 * c;
                        store(to, fma(load(to), splat(own[r]), sums[r][c] * splat(other[r])));
                    }
                }
            });
        }
    }

private:
    // sums[r][c] = sum over n in [first, stop) of the pairs x[r][n] times those of the c-th register
    // of w[n].
    template <int ROWS, int WIDTH>
    EC_INLINE void dot_pairs(const int32_t* w, int64_t w_stride, const float* x, int64_t x_stride,
                                    int64_t first, int64_t stop, vf (&sums)[ROWS][WIDTH]) {
        EC_UNROLL for (int r = 0; r < ROWS; ++r)
            EC_UNROLL for (int c = 0; c < WIDTH; ++c) sums[r][c] = vf{};
        for (int64_t n = first; n < stop; ++n) {
            vf vectors[WIDTH];
            EC_UNROLL for (int c = 0; c < WIDTH; ++c)
                vectors[c] = (vf)_mm512_loadu_si512(w + n * w_stride + 16 * c);
            EC_UNROLL for (int r = 0; r < ROWS; ++r) {
                const vf pair = splat_bits(x + r * x_stride + n);
                EC_UNROLL for (int c = 0; c < WIDTH; ++c)
                    sums[r][c] = add_pairs(sums[r][c], pair, vectors[c]);
            }
        }
    }
};
