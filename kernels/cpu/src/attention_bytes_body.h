// A tile of keys and values as the bytes that a cache of `KVCacheFormat::i8` holds; see attention.h.
// Included by attention_body.h for AVX-512 with VNNI: no include guard.
//
// Products are exact integers. A row of q, and a row's weights times the values' scales, are taken
// in 16 bits with one scale: their rounding is a hundredth of the cache's. Two digits of 8 bits,
//
//   q = scale * (256 high + low), both signed       key bytes + 128
//   w = scale * (256 high + low), both unsigned     value bytes
//
// are what the dot products of four bytes take. Keys are transposed by dwords,
// [ceil(D / 4)][128], values by fours of keys, [32][D] dwords.

typedef int32_t dword_unaligned __attribute__((aligned(1), may_alias));

EC_INLINE __m512i bytes_at(const void* from, int64_t num_bytes) {
    const __mmask64 mask = num_bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << num_bytes) - 1;
    return _mm512_maskz_loadu_epi8(mask, from);
}

// What 256 * high + low stands for, exactly.
EC_INLINE vf of_digits(vi high, vi low) {
    return fma(__builtin_convertvector(high, vf), splat(256.0f), __builtin_convertvector(low, vf));
}

// sums[i][c] = sum over n < count of the bytes of x[i][n] times those of vectors[n][c]. Vectors lie
// `stride` dwords apart, row i begins at x[i / 2 * pair_stride + i % 2 * digit_stride]. Unsigned are
// the vectors' bytes if IS_KEYS, else those of x.
template <bool IS_KEYS, int ROWS, int WIDTH>
__attribute__((noinline)) void dot_bytes(const int32_t* vectors, int64_t stride,
                                         const dword_unaligned* x, int64_t pair_stride,
                                         int64_t digit_stride, int64_t count, vi* sums) {
    vi acc[ROWS][WIDTH];
    for (int i = 0; i < ROWS; ++i)
        for (int c = 0; c < WIDTH; ++c) acc[i][c] = vi{};
    for (int64_t n = 0; n < count; ++n) {
        __m512i vector[WIDTH];
        for (int c = 0; c < WIDTH; ++c) vector[c] = _mm512_loadu_si512(vectors + n * stride + 16 * c);
        for (int i = 0; i < ROWS; ++i) {
            const __m512i four = _mm512_set1_epi32(x[i / 2 * pair_stride + i % 2 * digit_stride + n]);
            for (int c = 0; c < WIDTH; ++c) {
                const auto before = (__m512i)acc[i][c];
                acc[i][c] = IS_KEYS ? (vi)_mm512_dpbusd_epi32(before, vector[c], four)
                                    : (vi)_mm512_dpbusd_epi32(before, four, vector[c]);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int c = 0; c < WIDTH; ++c) sums[i * WIDTH + c] = acc[i][c];
}

class ByteTile {
public:
    static constexpr int most_rows = 3;  // two sums each
    static constexpr int64_t pass_keys = 4 * unit_keys;
    static constexpr int fetches = 12;

    // Sums of D products of a byte and a digit stay below 2^24, where floats are integers.
    static bool can_take(const Attention& a) { return a.head_size <= 512; }

    static int64_t query_floats(const Attention& a) { return 2 * dwords_of(a) + 3; }

    // [high digits][low digits], the scale, and the sums that a key's 128 adds.
    static void take_query(const Attention& a, const float* from, float* query) {
        const int64_t dwords = dwords_of(a), size = a.head_size;
        const __m512 factor = _mm512_set1_ps(a.scale * log2_e);
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        __m512i most = _mm512_setzero_si512();  // of integers: NaN is above all numbers
        for (int64_t d = 0; d < size; d += 16) {
            const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes(size - d), from + d), factor);
            most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x), magnitude));
        }
        const int32_t bits = _mm512_reduce_max_epi32(most);
        float largest;
        std::memcpy(&largest, &bits, 4);
        const bool is_number = largest <= FLT_MAX;
        const __m512 inverse =
            _mm512_set1_ps(is_number && largest > 1e-30f ? most_code / largest : 0.0f);
        auto* high = reinterpret_cast<int8_t*>(query);
        int8_t* low = high + 4 * dwords;
        std::memset(high, 0, static_cast<size_t>(8 * dwords));
        __m512i sum_high = _mm512_setzero_si512(), sum_low = sum_high;
        for (int64_t d = 0; is_number && d < size; d += 16) {
            const __mmask16 mask = lanes(size - d);
            const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, from + d), factor);
            const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
            const __m512i lower = _mm512_sub_epi32(code, _mm512_slli_epi32(upper, 8));
            _mm512_mask_cvtepi32_storeu_epi8(high + d, mask, upper);
            _mm512_mask_cvtepi32_storeu_epi8(low + d, mask, lower);
            sum_high = _mm512_add_epi32(sum_high, upper);
            sum_low = _mm512_add_epi32(sum_low, lower);
        }
        query[2 * dwords] = is_number ? largest / most_code : NAN;
        auto* starts = reinterpret_cast<dword_unaligned*>(query + 2 * dwords + 1);
        starts[0] = -128 * _mm512_reduce_add_epi32(sum_high);
        starts[1] = -128 * _mm512_reduce_add_epi32(sum_low);
    }

    ByteTile(const Attention& a, float* scratch)
        : a_(a), keys_(reinterpret_cast<int32_t*>(scratch)),
          values_(keys_ + dwords_of(a) * tile_keys) {}

    void read(const uint8_t* const* k, const uint8_t* const* v, int64_t first, int64_t stop,
              Ahead& ahead) {
        const int64_t size = a_.head_size, dwords = dwords_of(a_), padded = a_.padded();
        for (int64_t unit = first / unit_keys * unit_keys; unit < stop; unit += unit_keys) {
            const uint8_t* rows[unit_keys];  // keys out of sight repeat one that is seen
            for (int64_t j = 0; j < unit_keys; ++j) {
                const int64_t at = unit + j < first ? first : unit + j < stop ? unit + j : stop - 1;
                rows[j] = k[at];
                std::memcpy(key_scales_ + unit + j, k[at] + size, 4);
                std::memcpy(value_scales_ + unit + j, v[at] + size, 4);
            }
            for (int64_t dword = 0; dword < dwords; dword += 16) {
                __m512i x[16];
                for (int j = 0; j < 16; ++j) {
                    x[j] = _mm512_xor_si512(bytes_at(rows[j] + 4 * dword, size - 4 * dword),
                                            _mm512_set1_epi8(-128));
                }
                ahead.step();
                transpose_dwords(x);
                const int64_t count = dwords - dword < 16 ? dwords - dword : 16;
                int32_t* to = keys_ + dword * tile_keys + unit;
                for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(to + i * tile_keys, x[i]);
            }
        }
        // unpacking works in quarters: dwords 4i + n of a quarter come from its n-th
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int64_t four = first / 4 * 4; four < stop; four += 4) {
            const uint8_t* rows[4];
            for (int64_t j = 0; j < 4; ++j)
                rows[j] = v[four + j < first ? first : four + j < stop ? four + j : stop - 1];
            for (int64_t d = 0; d < size; d += 64) {
                __m512i x[4];
                for (int j = 0; j < 4; ++j)
                    x[j] = _mm512_permutexvar_epi32(order, bytes_at(rows[j] + d, size - d));
                ahead.step();
                const __m512i a_low = _mm512_unpacklo_epi8(x[0], x[1]);
                const __m512i a_high = _mm512_unpackhi_epi8(x[0], x[1]);
                const __m512i b_low = _mm512_unpacklo_epi8(x[2], x[3]);
                const __m512i b_high = _mm512_unpackhi_epi8(x[2], x[3]);
                int32_t* to = values_ + four / 4 * padded + d;
                const __m512i made[4] = {
                    _mm512_unpacklo_epi16(a_low, b_low), _mm512_unpackhi_epi16(a_low, b_low),
                    _mm512_unpacklo_epi16(a_high, b_high), _mm512_unpackhi_epi16(a_high, b_high)};
                for (int i = 0; i < 4 && d + 16 * i < padded; ++i)
                    _mm512_storeu_si512(to + 16 * i, made[i]);
            }
        }
    }

    // scores[r][j] = q[r] . keys[j], of keys [at, at + pass_keys), so far as they lie in the first
    // `units` units.
    template <int ROWS>
    void score(const float* queries, int64_t at, int64_t units, float* scores) const {
        const int64_t width = units - at / unit_keys;
        if (width >= 4) return score_columns<ROWS, 4>(queries, at, scores);
        if (width == 3) return score_columns<ROWS, 3>(queries, at, scores);
        if (width == 2) return score_columns<ROWS, 2>(queries, at, scores);
        score_columns<ROWS, 1>(queries, at, scores);
    }

    // states[r] = own[r] * states[r] + other[r] * weights[r] . values, of keys [first, stop).
    // Overwrites the weights.
    template <int ROWS>
    void add(int64_t first, int64_t stop, float* weights, const float* own, const float* other,
             float* states) const {
        alignas(64) uint8_t digits[2 * ROWS][tile_keys];
        float scales[ROWS];
        take_weights<ROWS>((stop + unit_keys - 1) / unit_keys, weights, digits, scales);
        for (int r = 0; r < ROWS; ++r) scales[r] *= other[r];
        const int64_t padded = a_.padded();
        const int64_t four = first / 4, four_stop = (stop + 3) / 4;
        int64_t d = 0;
        for (; d + 64 <= padded; d += 64)
            add_columns<ROWS, 4>(four, four_stop, d, digits, scales, own, states);
        for (; d < padded; d += 16)
            add_columns<ROWS, 1>(four, four_stop, d, digits, scales, own, states);
    }

private:
    static constexpr float most_code = 32639.0f;  // 127 * 256 + 127

    static int64_t dwords_of(const Attention& a) { return (a.head_size + 3) / 4; }

    static const dword_unaligned* dwords_at(const void* from) {
        return static_cast<const dword_unaligned*>(from);
    }

    static __mmask16 lanes(int64_t count) {
        return static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1);
    }

    template <int ROWS, int WIDTH>
    void score_columns(const float* queries, int64_t at, float* scores) const {
        const int64_t dwords = dwords_of(a_), stride = query_floats(a_);
        vi sums[2 * ROWS][WIDTH];
        dot_bytes<true, 2 * ROWS, WIDTH>(keys_ + at, tile_keys, dwords_at(queries), stride, dwords,
                                         dwords, sums[0]);
        for (int r = 0; r < ROWS; ++r) {
            const vf scale = splat(queries[r * stride + 2 * dwords]);
            const dword_unaligned* starts = dwords_at(queries + r * stride + 2 * dwords + 1);
            for (int c = 0; c < WIDTH; ++c) {
                const vi high = sums[2 * r][c] + starts[0], low = sums[2 * r + 1][c] + starts[1];
                const vf scales = scale * load(key_scales_ + at + c * unit_keys);
                store(scores + r * tile_keys + at + c * unit_keys, of_digits(high, low) * scales);
            }
        }
    }

    // Digits of rows' weights times the values' scales, and what their codes stand for. A value that
    // is not a number shows in the rows that see it.
    template <int ROWS>
    __attribute__((always_inline)) void take_weights(int64_t units, float* weights,
                                                     uint8_t (*digits)[tile_keys],
                                                     float* scales) const {
        vi most[ROWS];  // of integers: NaN is above all numbers
        for (int r = 0; r < ROWS; ++r) most[r] = vi{};
        for (int64_t at = 0; at < units * unit_keys; at += unit_keys) {
            const vf value_scales = load(value_scales_ + at);
            for (int r = 0; r < ROWS; ++r) {
                const vf weight = load(weights + r * tile_keys + at);
                const vf x = weight != 0.0f ? weight * value_scales : vf{};
                store(weights + r * tile_keys + at, x);
                most[r] = (vi)x > most[r] ? (vi)x : most[r];
            }
        }
        vf inverses[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            const int32_t bits = _mm512_reduce_max_epi32((__m512i)most[r]);
            float largest;
            std::memcpy(&largest, &bits, 4);
            const bool has_codes = largest > 1e-30f && largest <= FLT_MAX;
            scales[r] = has_codes ? largest / 65535.0f : largest <= 1e-30f ? 0.0f : NAN;
            inverses[r] = splat(has_codes ? 65535.0f / largest : 0.0f);
        }
        for (int64_t at = 0; at < units * unit_keys; at += unit_keys) {
            for (int r = 0; r < ROWS; ++r) {
                const vf x = load(weights + r * tile_keys + at);
                const __m512i code = _mm512_cvtps_epi32((__m512)(x * inverses[r]));
                auto* high = reinterpret_cast<__m128i*>(digits[2 * r] + at);
                auto* low = reinterpret_cast<__m128i*>(digits[2 * r + 1] + at);
                _mm_store_si128(high, _mm512_cvtepi32_epi8(_mm512_srli_epi32(code, 8)));
                _mm_store_si128(low, _mm512_cvtepi32_epi8(code));
            }
        }
    }

    template <int ROWS, int WIDTH>
    __attribute__((always_inline)) void add_columns(int64_t four, int64_t four_stop, int64_t d,
                                      const uint8_t (*digits)[tile_keys],
                                      const float* scales, const float* own, float* states) const {
        const int64_t padded = a_.padded(), state = a_.state();
        constexpr int64_t row_dwords = tile_keys / 4;
        vi sums[2 * ROWS][WIDTH];
        dot_bytes<false, 2 * ROWS, WIDTH>(values_ + four * padded + d, padded,
                                          dwords_at(digits[0]) + four, 2 * row_dwords, row_dwords,
                                          four_stop - four, sums[0]);
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < WIDTH; ++c) {
                float* to = states + r * state + d + 16 * c;
                const vf sum = of_digits(sums[2 * r][c], sums[2 * r + 1][c]);
                store(to, fma(load(to), splat(own[r]), sum * splat(scales[r])));
            }
        }
    }

    const Attention& a_;
    int32_t* keys_;    // [ceil(D / 4)][128]
    int32_t* values_;  // [32][padded D]
    float key_scales_[tile_keys];
    float value_scales_[tile_keys];
};
