// Activations to signed bytes: code = round(x * 127 / max|x|), half to even, per group.
//
// A value that is not finite makes the scale NaN: the product then shows it, as float32 would.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear.h"

namespace ec {
namespace {

// Of up to 32 values; infinite or NaN if one is.
float largest_portable(const float* x, int64_t n) {
    float largest = 0;
    float poison = 0;
    for (int64_t i = 0; i < n; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        poison += x[i] * 0.0f;
    }
    return largest + poison;
}

void codes_portable(const float* x, int64_t n, float inverse, int8_t* codes, int32_t sums[2]) {
    for (int64_t i = 0; i < n; ++i) {
        const auto code = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
        codes[i] = static_cast<int8_t>(code);
        sums[i / 16] += code;
    }
}

#if EC_X86
EC_BEGIN_AVX2
float largest_avx2(const float* x) {
    // magnitudes order as integers do, NaN above all numbers
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) {
        const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        most = _mm256_max_epi32(most, _mm256_and_si256(value, magnitude));
    }
    __m128i half =
        _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

void codes_avx2(const float* x, float inverse, int8_t* codes, int32_t sums[2]) {
    const __m256 factor = _mm256_set1_ps(inverse);
    __m256i c[4];
    for (int i = 0; i < 4; ++i) {
        c[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
    }
    for (int h = 0; h < 2; ++h) {
        const __m256i both = _mm256_add_epi32(c[2 * h], c[2 * h + 1]);
        __m128i sum =
            _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
        sums[h] = _mm_cvtsi128_si32(sum);
    }
    // packs works in halves of 128 bits: the dwords come out as 0 2 4 6 1 3 5 7
    const __m256i words_low = _mm256_packs_epi32(c[0], c[1]);
    const __m256i words_high = _mm256_packs_epi32(c[2], c[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(
        _mm256_packs_epi16(words_low, words_high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
}
EC_END_TARGET
#endif

// A group below it counts as zeros: 127 / largest would not be finite.
constexpr float least = 1e-30f;

float largest(const float* x, int64_t n) {
#if EC_X86
    if (n == group_inputs && isa() != Isa::portable) return largest_avx2(x);
#endif
    return largest_portable(x, n);
}

// Codes of one group of `n` values, padded with zeros to 32; sums of its two halves.
void write_codes(const float* x, int64_t n, float inverse, int8_t* codes, int32_t sums[2]) {
    sums[0] = sums[1] = 0;
    if (inverse == 0) {  // zeros, or values that have no code
        std::memset(codes, 0, group_inputs);
        return;
    }
#if EC_X86
    if (n == group_inputs && isa() != Isa::portable) return codes_avx2(x, inverse, codes, sums);
#endif
    std::memset(codes, 0, group_inputs);
    codes_portable(x, n, inverse, codes, sums);
}

void write_group(float scale, int32_t low, int32_t high, int32_t zero, ActivationGroup* group) {
    group->scale = scale;
    group->scaled_sum = scale * static_cast<float>(low + high);
    group->start = -zero * (low + high);
    group->start_low = -zero * low;
    group->start_high = -zero * high;
}

}  // namespace

void quantise_row(const float* x, int64_t num_inputs, int32_t zero, int8_t* codes,
                  ActivationGroup* groups) {
    for (int64_t first = 0; first < num_inputs; first += group_inputs) {
        const int64_t n = std::min(group_inputs, num_inputs - first);
        const float most = largest(x + first, n);
        const bool is_finite = most < std::numeric_limits<float>::infinity();
        const float inverse = is_finite && most > least ? 127.0f / most : 0.0f;
        const float scale =
            is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
        int32_t sums[2];
        write_codes(x + first, n, inverse, codes + first, sums);
        write_group(scale, sums[0], sums[1], zero, groups + first / group_inputs);
    }
}

}  // namespace ec
