// Activations to signed bytes: code = round(x * 127 / max|x|), half to even, per group.
//
// A value that is not finite makes the scale NaN: the product then shows it, as float32 would.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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
float largest(const float* x, int64_t n) {
    float largest = 0;
    float nan_sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        nan_sum += x[i] * 0.0f;
    }
    return largest + nan_sum;
}

void write_codes(const float* x, int64_t n, float inverse, int8_t* codes, int32_t sums[2]) {
    for (int64_t i = 0; i < n; ++i) {
        const auto code = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
        codes[i] = static_cast<int8_t>(code);
        sums[i / 16] += code;
    }
}

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
EC_BEGIN_AVX2
// Whole groups, with the bits that the functions above give. They lie `x_stride` floats apart, and
// `stride` groups.
void quantise_groups_avx2(const float* x, int64_t x_stride, int64_t num_groups, int32_t zero,
                          ActivationGroup* groups, int64_t stride) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), one = _mm256_set1_epi16(1);
    for (int64_t g = 0; g < num_groups; ++g, x += x_stride, groups += stride) {
        // magnitudes order as integers do, NaN above all numbers
        __m256 value[4];
        __m256i most_of[4], code[4];
        for (int i = 0; i < 4; ++i) {
            value[i] = _mm256_loadu_ps(x + 8 * i);
            most_of[i] = _mm256_and_si256(_mm256_castps_si256(value[i]), magnitude);
        }
        const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(most_of[0], most_of[1]),
                                               _mm256_max_epi32(most_of[2], most_of[3]));
        __m128i four =
            _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
        const float most = _mm_cvtss_f32(_mm_castsi128_ps(four));
        const bool is_finite = most < std::numeric_limits<float>::infinity();
        const bool has_codes = is_finite && most > least;
        const __m256 factor = _mm256_set1_ps(has_codes ? 127.0f / most : 0.0f);
        for (int i = 0; i < 4; ++i) code[i] = _mm256_cvtps_epi32(_mm256_mul_ps(value[i], factor));
        // packs works in halves of 128 bits: the dwords come out as 0 2 4 6 1 3 5 7
        const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]),
                                                  _mm256_packs_epi32(code[2], code[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i codes = _mm256_and_si256(_mm256_permutevar8x32_epi32(packed, order),
                                               _mm256_set1_epi32(has_codes ? -1 : 0));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(groups->codes), codes);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
        pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
        pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0xb1));
        const __m256i sums = _mm256_madd_epi16(pairs, one);
        const float scale = is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
        write_group(scale, _mm256_extract_epi32(sums, 0), _mm256_extract_epi32(sums, 4), zero,
                    groups);
        pairs = _mm256_mullo_epi16(pairs, _mm256_set1_epi16(static_cast<int16_t>(-zero)));
        const int32_t starts[2] = {_mm256_extract_epi32(pairs, 0), _mm256_extract_epi32(pairs, 4)};
        std::memcpy(groups->start_pairs, starts, sizeof starts);
    }
}
EC_END_TARGET

EC_BEGIN_AVX512
// The same.
void quantise_groups_avx512(const float* x, int64_t x_stride, int64_t num_groups, int32_t zero,
                            ActivationGroup* groups, int64_t stride) {
    for (int64_t g = 0; g < num_groups; ++g, x += x_stride, groups += stride) {
        const __m512 a = _mm512_loadu_ps(x);
        const __m512 b = _mm512_loadu_ps(x + 16);
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
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(groups->codes), codes);
        // sums of eight codes + 128 each
        const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)),
                                             _mm256_setzero_si256());
        const auto sum_low =
            static_cast<int32_t>(_mm256_extract_epi64(sums, 0) + _mm256_extract_epi64(sums, 1));
        const auto sum_high =
            static_cast<int32_t>(_mm256_extract_epi64(sums, 2) + _mm256_extract_epi64(sums, 3));
        const float scale = is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
        constexpr int32_t sixteen = 16 * 128;
        write_group(scale, sum_low - sixteen, sum_high - sixteen, zero, groups);
    }
}
EC_END_TARGET

// Whole groups.
void quantise_groups(const float* x, int64_t x_stride, int64_t num_groups, int32_t zero,
                     ActivationGroup* groups, int64_t stride) {
    const auto run = isa() >= Isa::avx512 ? quantise_groups_avx512 : quantise_groups_avx2;
    run(x, x_stride, num_groups, zero, groups, stride);
}
#elif EC_ARM
// Whole groups, as for AVX2; what is not a number has code 0.
void quantise_groups(const float* x, int64_t x_stride, int64_t num_groups, int32_t zero,
                     ActivationGroup* groups, int64_t stride) {
    for (int64_t g = 0; g < num_groups; ++g, x += x_stride, groups += stride) {
        float32x4_t value[8];
        uint32x4_t magnitudes = vdupq_n_u32(0);
        for (int i = 0; i < 8; ++i) {
            value[i] = vld1q_f32(x + 4 * i);
            magnitudes = vmaxq_u32(magnitudes, vreinterpretq_u32_f32(vabsq_f32(value[i])));
        }
        const uint32_t bits = vmaxvq_u32(magnitudes);
        float most;
        std::memcpy(&most, &bits, 4);
        const bool is_finite = most < std::numeric_limits<float>::infinity();
        const float factor = is_finite && most > least ? 127.0f / most : 0.0f;
        int32_t sums[2];
        for (int half = 0; half < 2; ++half) {
            int16x4_t four[4];
            for (int i = 0; i < 4; ++i)
                four[i] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(value[4 * half + i], factor)));
            const int8x16_t codes =
                vcombine_s8(vmovn_s16(vcombine_s16(four[0], four[1])), vmovn_s16(vcombine_s16(four[2], four[3])));
            vst1q_s8(groups->codes + 16 * half, codes);
            sums[half] = vaddlvq_s8(codes);
        }
        const float scale = is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
        write_group(scale, sums[0], sums[1], zero, groups);
    }
}
#endif

}  // namespace

void quantise_columns(const float* x, int64_t x_stride, int64_t num_rows, int32_t zero,
                      ActivationGroup* groups, int64_t stride) {
#if EC_X86 || EC_ARM
    if (isa() != Isa::portable)
        return quantise_groups(x, x_stride, num_rows, zero, groups, stride);
#endif
    for (int64_t r = 0; r < num_rows; ++r)
        quantise_row(x + r * x_stride, group_inputs, zero, groups + r * stride);
}

void quantise_row(const float* x, int64_t num_inputs, int32_t zero,
                  ActivationGroup* groups) {
#if EC_X86 || EC_ARM
    if (isa() != Isa::portable) {
        const int64_t whole = num_inputs / group_inputs, rest = num_inputs % group_inputs;
        quantise_groups(x, group_inputs, whole, zero, groups, 1);
        if (rest == 0) return;
        float padded[group_inputs] = {};
        std::memcpy(padded, x + whole * group_inputs, static_cast<size_t>(rest) * 4);
        return quantise_groups(padded, 0, 1, zero, groups + whole, 0);
    }
#endif
    for (int64_t first = 0; first < num_inputs; first += group_inputs) {
        const int64_t n = std::min(group_inputs, num_inputs - first);
        const float most = largest(x + first, n);
        const bool is_finite = most < std::numeric_limits<float>::infinity();
        const float scale =
            is_finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
        int32_t sums[2] = {0, 0};
        ActivationGroup* group = groups + first / group_inputs;
        std::memset(group->codes, 0, group_inputs);  // they stay where values have no code
        if (is_finite && most > least) write_codes(x + first, n, 127.0f / most, group->codes, sums);
        write_group(scale, sums[0], sums[1], zero, group);
    }
}

}  // namespace ec
