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
    float nan_sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        nan_sum += x[i] * 0.0f;
    }
    return largest + nan_sum;
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

void write_group(float scale, int32_t low, int32_t high, int32_t zero, ActivationGroup* group) {
    group->scale = scale;
    group->scaled_sum = scale * static_cast<float>(low + high);
    group->start = -zero * (low + high);
    group->start_low = -zero * low;
    group->start_high = -zero * high;
}

#if EC_X86
EC_BEGIN_AVX512
// Whole groups, with the bits that the functions above give.
void quantise_groups_avx512(const float* x, int64_t num_groups, int32_t zero,
                            ActivationGroup* groups) {
    for (int64_t g = 0; g < num_groups; ++g) {
        const __m512 a = _mm512_loadu_ps(x + g * group_inputs);
        const __m512 b = _mm512_loadu_ps(x + g * group_inputs + 16);
        const __m512i magnitudes = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)),
                                                    _mm512_castps_si512(_mm512_abs_ps(b)));
        const int32_t bits = _mm512_reduce_max_epi32(magnitudes);
        float most;
        std::memcpy(&most, &bits, 4);
        const bool is_finite = most < std::numeric_limits<float>::infinity();
        const bool has_codes = is_finite && most > least;
        const __m512 factor = _mm512_set1_ps(has_codes ? 127.0f / most : 0.0f);
        const __mmask16 mask = has_codes ? 0xffff : 0;
        const __m128i low =
            _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(mask, _mm512_mul_ps(a, factor)));
        const __m128i high =
            _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(mask, _mm512_mul_ps(b, factor)));
        const __m256i codes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(groups[g].codes), codes);
        // sums of eight codes + 128 each
        const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)),
                                             _mm256_setzero_si256());
        const auto sum_low =
            static_cast<int32_t>(_mm256_extract_epi64(sums, 0) + _mm256_extract_epi64(sums, 1));
        const auto sum_high =
            static_cast<int32_t>(_mm256_extract_epi64(sums, 2) + _mm256_extract_epi64(sums, 3));
        const float scale = is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
        constexpr int32_t sixteen = 16 * 128;
        write_group(scale, sum_low - sixteen, sum_high - sixteen, zero, groups + g);
    }
}
EC_END_TARGET
#endif

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

}  // namespace

void quantise_row(const float* x, int64_t num_inputs, int32_t zero,
                  ActivationGroup* groups) {
    int64_t first = 0;
#if EC_X86
    if (isa() == Isa::avx512) {
        quantise_groups_avx512(x, num_inputs / group_inputs, zero, groups);
        first = num_inputs / group_inputs * group_inputs;
    }
#endif
    for (; first < num_inputs; first += group_inputs) {
        const int64_t n = std::min(group_inputs, num_inputs - first);
        const float most = largest(x + first, n);
        const bool is_finite = most < std::numeric_limits<float>::infinity();
        const float inverse = is_finite && most > least ? 127.0f / most : 0.0f;
        const float scale =
            is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
        int32_t sums[2];
        ActivationGroup* group = groups + first / group_inputs;
        write_codes(x + first, n, inverse, group->codes, sums);
        write_group(scale, sums[0], sums[1], zero, group);
    }
}

}  // namespace ec
