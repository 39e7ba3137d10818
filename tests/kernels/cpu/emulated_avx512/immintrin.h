// AVX-512 on a machine with AVX2: SIMDe writes the instructions out, and this file those that it
// lacks (0.7.4), or that our kernels want to the bit: by the Intel 64 manual, volume 2.
#pragma once
#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define EMULATED static inline __attribute__((always_inline, unused))

namespace emulated {

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t dwords __attribute__((vector_size(64)));

template <class To, class From>
EMULATED To bits_of(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// In halves, as g++'s own.
template <class Lane, class Vector, class Fold>
EMULATED Lane reduce(Vector x, Fold fold) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x[i] = fold(x[i], x[i + half]);
    return x[0];
}

template <class Vector>
EMULATED Vector load_some(unsigned mask, const void* from) {
    Vector x{};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(reinterpret_cast<char*>(&x) + 4 * i, static_cast<const char*>(from) + 4 * i, 4);
    return x;
}

EMULATED void store_some(void* to, unsigned mask, floats x) {
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + 4 * i, reinterpret_cast<char*>(&x) + 4 * i, 4);
}

EMULATED __m512i load_some_bytes(uint64_t mask, const void* from) {
    uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = mask >> i & 1 ? static_cast<const uint8_t*>(from)[i] : 0;
    return bits_of<__m512i>(bytes);
}

EMULATED void store_masked_bytes(void* to, uint64_t mask, __m512i x) {
    const auto* from = reinterpret_cast<const uint8_t*>(&x);
    for (int i = 0; i < 64; ++i)
        if (mask >> i & 1) static_cast<uint8_t*>(to)[i] = from[i];
}

EMULATED void store_some_bytes(void* to, unsigned mask, ints x) {
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) static_cast<int8_t*>(to)[i] = static_cast<int8_t>(x[i]);
}

EMULATED __m128i low_bytes(ints x) {
    int8_t bytes[16];
    store_some_bytes(bytes, 0xffff, x);
    return bits_of<__m128i>(bytes);
}

template <class Lane, class From>
EMULATED ints widened(From from) {
    Lane lanes[16];
    static_assert(sizeof lanes == sizeof from);
    std::memcpy(lanes, &from, sizeof lanes);
    ints x;
    for (int i = 0; i < 16; ++i) x[i] = lanes[i];
    return x;
}

EMULATED ints rounded(unsigned mask, floats x) {
    ints to{};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) to[i] = _mm_cvtss_si32(_mm_set_ss(x[i]));
    return to;
}

EMULATED floats from_halves(__m256i x) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    floats both;
    std::memcpy(&both, &low, 32);
    std::memcpy(reinterpret_cast<char*>(&both) + 32, &high, 32);
    return both;
}

// VCVTNE2PS2BF16: to even, denormals to zero, NaN made quiet.
EMULATED uint16_t bfloat16_of(float x) {
    const auto bits = bits_of<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    if ((bits & 0x7f800000u) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

EMULATED dwords bfloat16_pairs(floats high, floats low) {
    uint16_t values[32];
    for (int i = 0; i < 16; ++i) {
        values[i] = bfloat16_of(low[i]);
        values[16 + i] = bfloat16_of(high[i]);
    }
    return bits_of<dwords>(values);
}

// VDPBF16PS: the odd product first, each one fused with its sum.
EMULATED floats add_products(floats sum, dwords x, dwords w) {
    for (int i = 0; i < 16; ++i) {
        const auto odd = [](uint32_t pair) { return bits_of<float>(pair & 0xffff0000u); };
        const auto even = [](uint32_t pair) { return bits_of<float>(pair << 16); };
        const float first = __builtin_fmaf(odd(x[i]), odd(w[i]), sum[i]);
        sum[i] = __builtin_fmaf(even(x[i]), even(w[i]), first);
    }
    return sum;
}

template <class T>
EMULATED T larger(T a, T b) {
    return a > b ? a : b;
}
template <class T>
EMULATED T added(T a, T b) {
    return a + b;
}

}  // namespace emulated

#undef EMULATED
#undef _mm512_cvtne2ps_pbh
#undef _mm512_dpbf16_ps
#define __m512bh emulated::dwords
#define _mm512_stream_ps(to, x) emulated::store_some(to, 0xffffu, (emulated::floats)(x))
#define _mm512_reduce_add_ps(x) emulated::reduce<float>((emulated::floats)(x), emulated::added<float>)
#define _mm512_reduce_max_ps(x) emulated::reduce<float>((emulated::floats)(x), emulated::larger<float>)
#define _mm512_reduce_add_epi32(x) emulated::reduce<int32_t>((emulated::ints)(x), emulated::added<int32_t>)
#define _mm512_reduce_max_epi32(x) emulated::reduce<int32_t>((emulated::ints)(x), emulated::larger<int32_t>)
#define _mm512_maskz_loadu_ps(mask, from) ((__m512)emulated::load_some<emulated::floats>(mask, from))
#define _mm512_maskz_loadu_epi32(mask, from) ((__m512i)emulated::load_some<emulated::ints>(mask, from))
#define _mm512_maskz_loadu_epi8(mask, from) emulated::load_some_bytes(mask, from)
#define _mm512_mask_storeu_ps(to, mask, x) emulated::store_some(to, mask, (emulated::floats)(x))
#define _mm512_mask_storeu_epi8(to, mask, x) emulated::store_masked_bytes(to, mask, x)
#define _mm512_mask_cvtepi32_storeu_epi8(to, mask, x) emulated::store_some_bytes(to, mask, (emulated::ints)(x))
#define _mm512_cvtepi32_epi8(x) emulated::low_bytes((emulated::ints)(x))
#define _mm512_cvtepi32_ps(x) ((__m512)__builtin_convertvector((emulated::ints)(x), emulated::floats))
#define _mm512_cvtps_epi32(x) ((__m512i)emulated::rounded(0xffffu, (emulated::floats)(x)))
#define _mm512_maskz_cvtps_epi32(mask, x) ((__m512i)emulated::rounded(mask, (emulated::floats)(x)))
#define _mm512_cvtph_ps(x) ((__m512)emulated::from_halves(x))
#define _mm512_cvtepu8_epi32(x) ((__m512i)emulated::widened<uint8_t>(x))
#define _mm512_cvtepi8_epi32(x) ((__m512i)emulated::widened<int8_t>(x))
#define _mm512_cvtepu16_epi32(x) ((__m512i)emulated::widened<uint16_t>(x))
#define _mm512_cvtne2ps_pbh(high, low) emulated::bfloat16_pairs((emulated::floats)(high), (emulated::floats)(low))
#define _mm512_dpbf16_ps(sum, x, w) \
    ((__m512)emulated::add_products((emulated::floats)(sum), (emulated::dwords)(x), (emulated::dwords)(w)))
