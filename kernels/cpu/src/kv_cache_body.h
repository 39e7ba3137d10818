// Writing and reading one row of the KV cache; see kv_cache.h. Included by the bodies that need
// it: no include guard. Rows need not be aligned.

static void store_bf16(const float* x, int64_t size, uint8_t* out) {
    for (int64_t i = 0; i < size; ++i) {
        const auto half = static_cast<uint16_t>(bfloat16_of(x[i]));
        std::memcpy(out + 2 * i, &half, 2);
    }
}

constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to even

// What a code of 1 stands for. A row with a value that is not finite reads as NaN.
static float scale_of(const float* x, int64_t size) {
    vf magnitudes{}, zeros{};  // a value that is not finite times zero is NaN
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const vf own = load(x + i);
        magnitudes = max(max(own, -own), magnitudes);
        zeros = zeros + own * vf{};
    }
    float most = max_of(magnitudes), zero = sum_of(zeros);
    for (; i < size; ++i) {
        const float magnitude = std::fabs(x[i]);
        most = magnitude > most ? magnitude : most;
        zero += x[i] * 0.0f;
    }
    return zero == 0.0f ? most / 127.0f : NAN;
}

static void store_i8(const float* x, int64_t size, uint8_t* out) {
    const float scale = scale_of(x, size);
    const bool is_finite = scale <= FLT_MAX;
    const float divisor = scale > 0.0f ? scale : 1.0f;
    for (int64_t i = 0; i < size; ++i) {
        const float code = is_finite ? x[i] / divisor + to_integer - to_integer : 1.0f;
        const float bounded = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        out[i] = static_cast<uint8_t>(static_cast<int8_t>(bounded));
    }
    std::memcpy(out + size, &scale, 4);
}

// Token `lane` of a panel of keys or of values.
template <bool ARE_KEYS>
[[maybe_unused]] static void store_lane(const float* x, int64_t size, int64_t lane, uint8_t* panel) {
    const float scale = scale_of(x, size);
    std::memcpy(panel + size * panel_tokens + 4 * lane, &scale, 4);
    const vf divisor = splat(scale > 0.0f ? scale : 1.0f), most = splat(127.0f);
    uint8_t* values = panel + lane / 4 * size * 4;
    const int64_t byte = lane % 4;
    for (int64_t d = 0; d < size; d += 16) {
        alignas(64) int32_t codes[16];
        for (int64_t i = 0; i < 16; i += W) {
            vf code = load(x + d + i) / divisor + splat(to_integer) - splat(to_integer);
            code = scale <= FLT_MAX ? max(-max(-code, -most), -most) : splat(1.0f);
            const vi whole = __builtin_convertvector(code, vi);
            std::memcpy(codes + i, &whole, sizeof whole);
        }
#if EC_LEVEL == 2
        const __m512i dwords = _mm512_load_si512(codes);
        if constexpr (ARE_KEYS) {
            alignas(16) uint32_t fours[4];
            const __m128i bytes = _mm512_cvtepi32_epi8(dwords);
            _mm_store_si128(reinterpret_cast<__m128i*>(fours),
                            _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
            for (int64_t i = 0; i < 4; ++i)
                std::memcpy(panel + ((d / 4 + i) * panel_tokens + lane) * 4, fours + i, 4);
        } else {
            const __m512i shifted = _mm512_sll_epi32(dwords, _mm_cvtsi64_si128(8 * byte));
            _mm512_mask_storeu_epi8(values + 4 * d, __mmask64{0x1111111111111111} << byte, shifted);
        }
#else
        for (int64_t i = 0; i < 16; ++i) {
            const auto code = static_cast<uint8_t>(codes[i]);
            if constexpr (ARE_KEYS) {
                panel[((d + i) / 4 * panel_tokens + lane) * 4 + i % 4] = code ^ 0x80;
            } else {
                values[4 * (d + i) + byte] = code;
            }
        }
#endif
    }
}

[[maybe_unused]] static void read_key(const uint8_t* panel, int64_t lane, int64_t size, float* out) {
    float scale;
    std::memcpy(&scale, panel + size * panel_tokens + 4 * lane, 4);
    for (int64_t i = 0; i < size; ++i) {
        const uint8_t code = panel[(i / 4 * panel_tokens + lane) * 4 + i % 4] ^ 0x80;
        out[i] = static_cast<float>(static_cast<int8_t>(code)) * scale;
    }
}

[[maybe_unused]] static void read_value(const uint8_t* panel, int64_t lane, int64_t size,
                                        float* out) {
    float scale;
    std::memcpy(&scale, panel + size * panel_tokens + 4 * lane, 4);
    const uint8_t* from = panel + lane / 4 * size * 4 + lane % 4;
    for (int64_t i = 0; i < size; ++i)
        out[i] = static_cast<float>(static_cast<int8_t>(from[4 * i])) * scale;
}

[[maybe_unused]] static void store_row(int64_t kind, const float* x, int64_t size, uint8_t* out) {
    switch (static_cast<KVCacheFormat>(kind)) {
        case KVCacheFormat::f32:
            std::memcpy(out, x, static_cast<size_t>(size) * 4);
            return;
        case KVCacheFormat::bf16:
            return store_bf16(x, size, out);
        case KVCacheFormat::i8:
            return store_i8(x, size, out);
    }
}

static void read_bf16(const uint8_t* row, int64_t size, float* out) {
    int64_t i = 0;
#if EC_LEVEL == 2
    for (; i + 16 <= size; i += 16) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i));
        store(out + i, (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
#elif EC_LEVEL == 1
    for (; i + 8 <= size; i += 8) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
        store(out + i, (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
#endif
    for (; i < size; ++i) {
        uint16_t half;
        std::memcpy(&half, row + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        std::memcpy(out + i, &bits, 4);
    }
}

static void read_i8(const uint8_t* row, int64_t size, float* out) {
    float scale;
    std::memcpy(&scale, row + size, 4);
    int64_t i = 0;
#if EC_LEVEL == 2
    for (; i + 16 <= size; i += 16) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i));
        store(out + i, (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)) * splat(scale));
    }
#elif EC_LEVEL == 1
    for (; i + 8 <= size; i += 8) {
        const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i));
        store(out + i, (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)) * splat(scale));
    }
#endif
    for (; i < size; ++i) {
        out[i] = static_cast<float>(static_cast<int8_t>(row[i])) * scale;
    }
}

// Not for f32, which is read where it lies.
[[maybe_unused]] static void read_row(int64_t kind, const uint8_t* row, int64_t size, float* out) {
    if (kind == static_cast<int64_t>(KVCacheFormat::bf16)) return read_bf16(row, size, out);
    read_i8(row, size, out);
}
