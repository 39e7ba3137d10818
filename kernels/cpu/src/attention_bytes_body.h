// A tile of keys and values as the bytes that a cache of `KVCacheFormat::i8` holds; see attention.h.
// Included by attention_body.h for AVX-512 with VNNI: no include guard.
//
// Products are exact integers, of bytes on both sides. A row of q has one scale, and so have a row's
// weights in a tile, times the values' scales:
//
//   q = scale * signed code           key bytes + 128
//   w = scale * unsigned code         value bytes
//
// which is what the dot products of four bytes take. Rounding q costs what rounding the keys has.
// Keys and values lie in panels of 16 keys (kv_cache.h), in the cache or made here of its rows.

typedef int32_t dword_unaligned __attribute__((aligned(1), may_alias));

EC_INLINE __m512i bytes_at(const void* from, int64_t num_bytes) {
    const __mmask64 mask = num_bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << num_bytes) - 1;
    return _mm512_maskz_loadu_epi8(mask, from);
}

// Registers of keys: [c][16 n] dwords.
template <int WIDTH>
struct KeyColumns {
    const int32_t* units[WIDTH];

    const int32_t* at(int64_t n, int c) const { return units[c] + unit_keys * n; }
};

// Registers of values: of the n-th four, from a dimension on.
struct ValueColumns {
    const int32_t* const* units;
    int64_t padded, d;

    const int32_t* at(int64_t n, int c) const { return units[n >> 2] + (n & 3) * padded + d + 16 * c; }
};

// sums[r][c] = sum over n in [first, stop) of the bytes of x[r * x_stride + n] times those of
// vectors.at(n, c). Unsigned are the vectors' bytes if IS_KEYS, else those of x. `ahead`: stepped with
// each n, or null.
template <bool IS_KEYS, int ROWS, int WIDTH, class Columns>
EC_INLINE void dot_bytes(const Columns& vectors, const dword_unaligned* x, int64_t x_stride,
                         int64_t first, int64_t stop, Ahead* ahead, vi (&sums)[ROWS][WIDTH]) {
    EC_UNROLL for (int r = 0; r < ROWS; ++r)
        EC_UNROLL for (int c = 0; c < WIDTH; ++c) sums[r][c] = vi{};
    const auto turn = [&](int64_t n) __attribute__((always_inline)) {
        __m512i vector[WIDTH];
        EC_UNROLL for (int c = 0; c < WIDTH; ++c) vector[c] = _mm512_loadu_si512(vectors.at(n, c));
        EC_UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512i four = _mm512_set1_epi32(x[r * x_stride + n]);
            EC_UNROLL for (int c = 0; c < WIDTH; ++c) {
                const auto before = (__m512i)sums[r][c];
                sums[r][c] = IS_KEYS ? (vi)_mm512_dpbusd_epi32(before, vector[c], four)
                                     : (vi)_mm512_dpbusd_epi32(before, four, vector[c]);
            }
        }
    };
    // apart: in one loop the sums of six rows leave too few registers for the addresses
    if (ahead == nullptr) {
        for (int64_t n = first; n < stop; ++n) turn(n);
        return;
    }
    for (int64_t n = first; n < stop; ++n) {
        ahead->step();
        turn(n);
    }
}

class ByteTile {
public:
    static constexpr bool is_matrix = false;
    static constexpr bool reads_panels = true;
    static constexpr bool packs_weights = false;
    static constexpr int64_t block_rows = 24;
    static constexpr int most_rows = most_rows_at_once;
    static constexpr int64_t pass_keys = 4 * unit_keys;

    // Of `Ahead`, that reading [first, stop) takes, or products with what is in panels.
    static int64_t num_steps(const Attention& a, int64_t first, int64_t stop) {
        const int64_t units = (stop + unit_keys - 1) / unit_keys - first / unit_keys;
        const int64_t fours = (stop + 3) / 4 - first / 4, columns = (a.head_size + 63) / 64;
        return a.has_bytes() ? (units + 3) / 4 * dwords_of(a) + fours * columns
                             : (units + fours) * columns;
    }

    // Sums of D products of two bytes stay below 2^24, where floats are integers.
    static bool can_take(const Attention& a) { return a.head_size <= 512 && !a.is_latent(); }

    static int64_t query_floats(const Attention& a) { return dwords_of(a) + 2; }

    // [codes], the scale, and what the keys' 128 must be made up for with.
    static void take_query(const Attention& a, const float* from, float* query) {
        const int64_t dwords = dwords_of(a), size = a.head_size;
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        __m512i most = _mm512_setzero_si512();  // of integers: NaN is above all numbers
        for (int64_t d = 0; d < size; d += 16) {
            const __m512i bits = _mm512_maskz_loadu_epi32(lanes(size - d), from + d);
            most = _mm512_max_epi32(most, _mm512_and_si512(bits, magnitude));
        }
        const int32_t bits = _mm512_reduce_max_epi32(most);
        float largest;
        std::memcpy(&largest, &bits, 4);
        const bool is_number = largest <= FLT_MAX;
        const __m512 inverse = _mm512_set1_ps(is_number && largest > 1e-30f ? 127.0f / largest : 0.0f);
        auto* codes = reinterpret_cast<int8_t*>(query);
        std::memset(codes, 0, static_cast<size_t>(4 * dwords));
        __m512i sum = _mm512_setzero_si512();
        for (int64_t d = 0; is_number && d < size; d += 16) {
            const __mmask16 mask = lanes(size - d);
            const __m512 x = _mm512_maskz_loadu_ps(mask, from + d);
            const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
            _mm512_mask_cvtepi32_storeu_epi8(codes + d, mask, code);
            sum = _mm512_add_epi32(sum, code);
        }
        query[dwords] = is_number ? largest * (a.scale * log2_e / 127.0f) : NAN;
        *reinterpret_cast<dword_unaligned*>(query + dwords + 1) = -128 * _mm512_reduce_add_epi32(sum);
    }

    ByteTile(const Attention& a, int64_t, float* scratch)
        : a_(a), has_panels_(a.has_bytes()), made_(reinterpret_cast<int32_t*>(scratch)) {}

    // A panel's first key and value that are seen stand for it.
    void read(const uint8_t* const* k, const uint8_t* const* v, int64_t first, int64_t stop,
              Ahead& ahead) {
        for (int64_t unit = 0; unit * unit_keys < stop; ++unit) {
            const int64_t seen = unit * unit_keys > first ? unit * unit_keys : first;
            keys_[unit] = has_panels_ ? reinterpret_cast<const int32_t*>(k[seen]) : made_keys(unit);
            values_[unit] =
                has_panels_ ? reinterpret_cast<const int32_t*>(v[seen]) : made_values(unit);
        }
        if (!has_panels_) make_panels(k, v, first, stop, ahead);
    }

    // From now on products fetch what `ahead` asks for, where nothing else of a tile is read.
    void fetch(Ahead& ahead, int64_t) { ahead_ = has_panels_ ? &ahead : nullptr; }
    void fetched() { ahead_ = nullptr; }

    void prepare(int64_t, Ahead&) {}

    // scores[r][j] = q[r] . keys[j], of keys [at, at + pass_keys), so far as they lie in the first
    // `units` units.
    template <int ROWS>
    void score(std::integral_constant<int, ROWS>, const float* queries, int64_t at, int64_t units, float* scores) const {
        const int64_t width = units - at / unit_keys;
        if (width >= 4) return score_columns<ROWS, 4>(queries, at, scores);
        if (width == 3) return score_columns<ROWS, 3>(queries, at, scores);
        if (width == 2) return score_columns<ROWS, 2>(queries, at, scores);
        score_columns<ROWS, 1>(queries, at, scores);
    }

    // A weight as `add` wants it, and the largest of those, which it wants too. A value that is
    // not a number shows in the rows that see it.
    vf weigh(vf weight, int64_t at, vf& largest) const {
        const vf x = weight != 0.0f ? weight * load(value_scales(at / unit_keys)) : vf{};
        largest = (vf)_mm512_max_epi32((__m512i)x, (__m512i)largest);  // NaN is above all numbers
        return x;
    }

    static float largest_of(vf x) {
        const int32_t bits = _mm512_reduce_max_epi32((__m512i)x);
        float largest;
        std::memcpy(&largest, &bits, 4);
        return largest;
    }

    // states[r] = own[r] * states[r] + other[r] * weights[r] . values, of keys [first, stop).
    template <int ROWS>
    void add(std::integral_constant<int, ROWS>, int64_t first, int64_t stop, const float* weights, const float* largest,
             const float* own, const float* other, float* states) const {
        alignas(64) uint8_t codes[ROWS][tile_keys];
        float scales[ROWS];
        take_codes(ROWS, stop, weights, largest, codes, scales);
        const int64_t padded = a_.padded();
        const int64_t four = first / 4, four_stop = (stop + 3) / 4;
        int64_t d = 0;
        for (; d + 64 <= padded; d += 64)
            add_columns<ROWS, 4>(four, four_stop, d, codes, scales, own, other, states);
        for (; d < padded; d += 16)
            add_columns<ROWS, 1>(four, four_stop, d, codes, scales, own, other, states);
    }

protected:
    // Of a unit, in own memory.
    int32_t* made_keys(int64_t unit) const { return made_ + unit * (dwords_of(a_) + 1) * unit_keys; }
    int32_t* made_values(int64_t unit) const {
        return made_keys(tile_keys / unit_keys) + unit * (4 * a_.padded() + unit_keys);
    }
    const float* key_scales(int64_t unit) const {
        return reinterpret_cast<const float*>(keys_[unit] + dwords_of(a_) * unit_keys);
    }
    const float* value_scales(int64_t unit) const {
        return reinterpret_cast<const float*>(values_[unit] + 4 * a_.padded());
    }

    void make_panels(const uint8_t* const* k, const uint8_t* const* v, int64_t first, int64_t stop,
                     Ahead& ahead) {
        const int64_t size = a_.head_size, dwords = dwords_of(a_), padded = a_.padded();
        for (int64_t unit = first / unit_keys * unit_keys; unit < stop; unit += unit_keys) {
            const int64_t at_unit = unit / unit_keys;
            const uint8_t* rows[unit_keys];  // keys out of sight repeat one that is seen
            for (int64_t j = 0; j < unit_keys; ++j) {
                const int64_t at = unit + j < first ? first : unit + j < stop ? unit + j : stop - 1;
                rows[j] = k[at];
                std::memcpy(made_keys(at_unit) + dwords * unit_keys + j, k[at] + size, 4);
                std::memcpy(made_values(at_unit) + 4 * padded + j, v[at] + size, 4);
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
                int32_t* to = made_keys(at_unit) + dword * unit_keys;
                for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(to + i * unit_keys, x[i]);
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
                int32_t* to = made_values(four / unit_keys) + four % unit_keys / 4 * padded + d;
                const __m512i made[4] = {
                    _mm512_unpacklo_epi16(a_low, b_low), _mm512_unpackhi_epi16(a_low, b_low),
                    _mm512_unpacklo_epi16(a_high, b_high), _mm512_unpackhi_epi16(a_high, b_high)};
                for (int i = 0; i < 4 && d + 16 * i < padded; ++i)
                    _mm512_storeu_si512(to + 16 * i, made[i]);
            }
        }
    }

    // Rows' weights as codes, and what those stand for.
    EC_INLINE void take_codes(int64_t rows, int64_t stop, const float* weights,
                              const float* largest, uint8_t (*codes)[tile_keys], float* scales) {
        for (int64_t r = 0; r < rows; ++r) {
            const bool has_codes = largest[r] > 1e-30f && largest[r] <= FLT_MAX;
            scales[r] = has_codes ? largest[r] / 255.0f : largest[r] <= 1e-30f ? 0.0f : NAN;
            const vf inverse = splat(has_codes ? 255.0f / largest[r] : 0.0f);
            for (int64_t at = 0; at < stop; at += unit_keys) {
                const vf x = load(weights + r * tile_keys + at) * inverse;
                _mm_store_si128(reinterpret_cast<__m128i*>(codes[r] + at),
                                _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x)));
            }
        }
    }

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
        vi sums[ROWS][WIDTH];
        KeyColumns<WIDTH> keys;
        for (int c = 0; c < WIDTH; ++c) keys.units[c] = keys_[at / unit_keys + c];
        dot_bytes<true, ROWS, WIDTH>(keys, dwords_at(queries), stride, 0, dwords, ahead_, sums);
        EC_UNROLL for (int r = 0; r < ROWS; ++r) {
            const vf scale = splat(queries[r * stride + dwords]);
            const int32_t start = *dwords_at(queries + r * stride + dwords + 1);
            EC_UNROLL for (int c = 0; c < WIDTH; ++c) {
                const vf scales = scale * load(key_scales(at / unit_keys + c));
                store(scores + r * tile_keys + at + c * unit_keys,
                      __builtin_convertvector(sums[r][c] + start, vf) * scales);
            }
        }
    }

    template <int ROWS, int WIDTH>
    void add_columns(int64_t four, int64_t four_stop, int64_t d, const uint8_t (*codes)[tile_keys],
                     const float* scales, const float* own, const float* other,
                     float* states) const {
        const int64_t padded = a_.padded(), state = a_.state();
        vi sums[ROWS][WIDTH];
        const ValueColumns values{values_, padded, d};
        dot_bytes<false, ROWS, WIDTH>(values, dwords_at(codes[0]), tile_keys / 4, four, four_stop,
                                      ahead_, sums);
        EC_UNROLL for (int r = 0; r < ROWS; ++r) {
            EC_UNROLL for (int c = 0; c < WIDTH; ++c) {
                float* to = states + r * state + d + 16 * c;
                // as a tile's own result would be: it is rounded before it is joined
                const vf sum = __builtin_convertvector(sums[r][c], vf) * splat(scales[r]);
                store(to, fma(load(to), splat(own[r]), sum * splat(other[r])));
            }
        }
    }

    const Attention& a_;
    const bool has_panels_;
    int32_t* made_;
    const int32_t* keys_[tile_keys / unit_keys];    // [ceil(D / 4)][16], [16] scales
    const int32_t* values_[tile_keys / unit_keys];  // [4][padded D], [16] scales
    Ahead* ahead_ = nullptr;
};
