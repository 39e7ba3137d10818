// Codes of 16 bits, for products with the bytes that a cache of `KVCacheFormat::i8` holds; see
// attention.h. Included by attention_body.h for AVX2: no include guard.
//
//   q = scale * code       a row of q has one scale,
//   w = scale * code       and so have a row's weights in a tile, times the values' scales
//
// Two products a lane are added at once; their sums are exact integers. The keys' bytes are widened
// in pairs of dimensions, the values' in pairs of keys.

struct Words {
    static constexpr bool are_words = true;

    // As integers, where NaN is above all numbers.
    EC_INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_epi32((__m256i)a, (__m256i)b); }

    EC_INLINE float largest_bits(vf x) {
        int32_t lanes[W], largest = 0;
        std::memcpy(lanes, &x, sizeof lanes);
        for (int32_t lane : lanes) largest = lane > largest ? lane : largest;
        float result;
        std::memcpy(&result, &largest, 4);
        return result;
    }

    // `count` floats, and zeros.
    EC_INLINE vf load_some(const float* from, int64_t count) {
        if (count >= W) return load(from);
        float lanes[W] = {};
        std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(float));
        return load(lanes);
    }

    static float largest_magnitude(const float* x, int64_t count) {
        vf largest{};
        for (int64_t i = 0; i < count; i += W)
            largest = larger(largest, (vf)((vi)load_some(x + i, count - i) & 0x7fffffff));
        return largest_bits(largest);
    }

    // Codes of numbers up to `largest`, and zeros up to whole sixteens. Returns what 1 stands for: NaN
    // where one of them is not finite.
    static float write_codes(const float* x, int64_t count, float largest, float* codes) {
        const bool has_codes = largest > 1e-30f && largest <= FLT_MAX;
        const vf inverse = splat(has_codes ? 32767.0f / largest : 0.0f);
        const auto code = [&](int64_t i) {
            const vf some = i < count ? load_some(x + i, count - i) : vf{};
            return _mm256_cvtps_epi32((__m256)(some * inverse));
        };
        for (int64_t i = 0; i < count; i += 16) {
            const __m256i both = _mm256_packs_epi32(code(i), code(i + 8));  // in halves of registers
            store(codes + i / 2, (vf)_mm256_permute4x64_epi64(both, 0xd8));
        }
        return has_codes ? largest / 32767.0f : largest <= 1e-30f ? 0.0f : NAN;
    }

    // `count` bytes at most, and zeros.
    EC_INLINE __m128i load_bytes(const uint8_t* from, int64_t count) {
        if (count >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        uint8_t bytes[16] = {};
        std::memcpy(bytes, from, static_cast<size_t>(count));
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    }

    // Bytes to words, two a dword.
    static void widen(const uint8_t* from, int64_t count, float* to) {
        for (int64_t i = 0; i < count; i += 16)
            store(to + i / 2, (vf)_mm256_cvtepi8_epi16(load_bytes(from + i, count - i)));
    }

    // Sixteen fours of bytes to words: of the first two each, and of the others. `ARE_OFFSET`: by 128.
    template <bool ARE_OFFSET>
    EC_INLINE void widen_fours(const uint8_t* from, float* first, float* others) {
        for (int64_t half = 0; half < 2; ++half, from += 32, first += W, others += W) {
            const __m256i flip = _mm256_set1_epi8(ARE_OFFSET ? -128 : 0);
            const __m256i x =
                _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), flip);
            const auto low = (__m256)_mm256_cvtepi8_epi16(_mm256_castsi256_si128(x));
            const auto high = (__m256)_mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1));
            const auto in_order = [](__m256 y) { return (vf)_mm256_permute4x64_epi64((__m256i)y, 0xd8); };
            store(first, in_order(_mm256_shuffle_ps(low, high, 0x88)));
            store(others, in_order(_mm256_shuffle_ps(low, high, 0xdd)));
        }
    }

    // Sixteen dwords of a byte of `even` and one of `odd` each.
    EC_INLINE void widen_pairs(const uint8_t* even, const uint8_t* odd, int64_t count, float* to) {
        const __m128i a = load_bytes(even, count), b = load_bytes(odd, count);
        store(to, (vf)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)));
        store(to + W, (vf)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)));
    }
};
