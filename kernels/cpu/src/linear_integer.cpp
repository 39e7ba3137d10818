// Products of quantised weights and activations, for each instruction set.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "linear.h"

namespace ec {

namespace integer_portable {
constexpr int64_t width = 4;
struct Ints {
    int32_t lanes[width];
};
struct Floats {
    float lanes[width];
};
template <typename To, typename Fn>
inline To lanes(Fn&& fn) {
    To made;
    for (int i = 0; i < width; ++i) made.lanes[i] = fn(i);
    return made;
}
inline Ints same_int(int32_t a) { return lanes<Ints>([&](int) { return a; }); }
inline Floats same_float(float a) { return lanes<Floats>([&](int) { return a; }); }
inline Ints load_ints(const uint8_t* from) {
    Ints made;
    std::memcpy(made.lanes, from, sizeof made.lanes);
    return made;
}
inline Ints broadcast_four(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return same_int(four);
}
inline Ints load_bytes(const uint8_t* from) {
    return lanes<Ints>([&](int i) { return static_cast<int32_t>(from[i]); });
}
inline Ints load_signed_bytes(const uint8_t* from) {
    return lanes<Ints>([&](int i) { return static_cast<int32_t>(static_cast<int8_t>(from[i])); });
}
inline Floats load_floats(const float* from) {
    return lanes<Floats>([&](int i) { return from[i]; });
}
inline void store_floats(float* to, Floats a) { std::memcpy(to, a.lanes, sizeof a.lanes); }
inline void stream_floats(float* to, Floats a) { store_floats(to, a); }
inline Floats load_halves(const uint8_t* from) {
    return lanes<Floats>([&](int i) { return half_at(from + 2 * i); });
}
inline Ints low_nibbles(Ints a) {
    return lanes<Ints>([&](int i) { return a.lanes[i] & 0x0f0f0f0f; });
}
inline Ints high_nibbles(Ints a) {
    return lanes<Ints>([&](int i) { return (a.lanes[i] >> 4) & 0x0f0f0f0f; });
}
inline Ints dot(Ints acc, Ints w, Ints x) {
#if EC_X86  // SSE2, which all of them have: even and odd bytes in 16 bits
    __m128i sum, weights, values;
    std::memcpy(&sum, acc.lanes, 16);
    std::memcpy(&weights, w.lanes, 16);
    std::memcpy(&values, x.lanes, 16);
    const __m128i even = _mm_madd_epi16(_mm_and_si128(weights, _mm_set1_epi16(255)),
                                        _mm_srai_epi16(_mm_slli_epi16(values, 8), 8));
    const __m128i odd =
        _mm_madd_epi16(_mm_srli_epi16(weights, 8), _mm_srai_epi16(values, 8));
    sum = _mm_add_epi32(sum, _mm_add_epi32(even, odd));
    asm("" : "+x"(sum));  // see `summed` below
    std::memcpy(acc.lanes, &sum, 16);
    return acc;
#else
    return lanes<Ints>([&](int i) {
        int32_t sum = acc.lanes[i];
        for (int b = 0; b < 32; b += 8) {
            const auto code = static_cast<int32_t>(static_cast<uint32_t>(w.lanes[i]) >> b & 255);
            sum += code * static_cast<int8_t>(static_cast<uint32_t>(x.lanes[i]) >> b & 255);
        }
        return sum;
    });
#endif
}
inline Ints dot_wide(Ints acc, Ints w, Ints x) { return dot(acc, w, x); }
inline Ints dot_16(Ints acc, Ints, Ints) { return acc; }
inline Ints add_pairs(Ints acc, Ints) { return acc; }
inline Ints add_ints(Ints a, Ints b) {
    return lanes<Ints>([&](int i) { return a.lanes[i] + b.lanes[i]; });
}
inline Ints multiply_ints(Ints a, Ints b) {
    return lanes<Ints>([&](int i) { return a.lanes[i] * b.lanes[i]; });
}
inline Floats to_float(Ints a) {
    return lanes<Floats>([&](int i) { return static_cast<float>(a.lanes[i]); });
}
inline Floats add(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.lanes[i] + b.lanes[i]; });
}
inline Floats multiply(Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return a.lanes[i] * b.lanes[i]; });
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return lanes<Floats>([&](int i) { return a.lanes[i] * b.lanes[i] + c.lanes[i]; });
}
constexpr bool DOT_WIDE_IS_SIGNED = false;
constexpr bool HAS_DOT_16 = false;
constexpr int ROWS_GROUPED = 4;
constexpr int ROWS_Q6 = 2;
#include "linear_integer_tile.h"
}  // namespace integer_portable

#if EC_X86
EC_BEGIN_AVX2
namespace integer_avx2 {
constexpr int64_t width = 8;
using Ints = __m256i;
using Floats = __m256;
inline Ints same_int(int32_t a) { return _mm256_set1_epi32(a); }
inline Floats same_float(float a) { return _mm256_set1_ps(a); }
inline Ints load_ints(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Ints broadcast_four(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm256_set1_epi32(four);
}
inline __m128i load_eight(const uint8_t* from) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
}
inline Ints load_bytes(const uint8_t* from) { return _mm256_cvtepu8_epi32(load_eight(from)); }
inline Ints load_signed_bytes(const uint8_t* from) {
    return _mm256_cvtepi8_epi32(load_eight(from));
}
inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
inline void store_floats(float* to, Floats a) { _mm256_storeu_ps(to, a); }
inline void stream_floats(float* to, Floats a) { _mm256_stream_ps(to, a); }
inline Floats load_halves(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Ints low_nibbles(Ints a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
// GCC would gather the terms of a long sum before it adds them, in more registers than there are.
inline Ints summed(Ints a) {
    asm("" : "+x"(a));
    return a;
}
// sums of two products stay below 2^15 for codes below 129
inline Ints dot(Ints acc, Ints w, Ints x) {
    const __m256i pairs = _mm256_maddubs_epi16(w, x);
    return summed(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
// a code to 255 would overflow them: |code - 128| times x with its sign
inline Ints dot_wide(Ints acc, Ints w, Ints x) {
    const __m256i weight = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return dot(acc, _mm256_abs_epi8(weight), _mm256_sign_epi8(x, weight));
}
// eight sums of two products, 2 * 15 * 127 each, stay below 2^15
inline Ints dot_16(Ints acc, Ints w, Ints x) {
    return summed(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x)));
}
inline Ints add_pairs(Ints acc, Ints pairs) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints multiply_ints(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Floats to_float(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
constexpr bool DOT_WIDE_IS_SIGNED = true;
constexpr bool HAS_DOT_16 = true;
constexpr int ROWS_GROUPED = 3;
constexpr int ROWS_Q6 = 2;
#include "linear_integer_tile.h"
}  // namespace integer_avx2
EC_END_TARGET

EC_BEGIN_AVX512
namespace integer_avx512 {
constexpr int64_t width = 16;
// not __m512i, which may be an alias of anything: GCC would keep sums in memory as well
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
inline Ints ints(__m512i a) { return (Ints)a; }
inline __m512i raw(Ints a) { return (__m512i)a; }
inline Ints same_int(int32_t a) { return ints(_mm512_set1_epi32(a)); }
inline Floats same_float(float a) { return (Floats)_mm512_set1_ps(a); }
inline Ints load_ints(const uint8_t* from) { return ints(_mm512_loadu_si512(from)); }
inline Ints broadcast_four(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return same_int(four);
}
inline __m128i load_sixteen(const uint8_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
inline Ints load_bytes(const uint8_t* from) {
    return ints(_mm512_cvtepu8_epi32(load_sixteen(from)));
}
inline Ints load_signed_bytes(const uint8_t* from) {
    return ints(_mm512_cvtepi8_epi32(load_sixteen(from)));
}
inline Floats load_floats(const float* from) { return (Floats)_mm512_loadu_ps(from); }
inline void store_floats(float* to, Floats a) { _mm512_storeu_ps(to, (__m512)a); }
inline void stream_floats(float* to, Floats a) { _mm512_stream_ps(to, (__m512)a); }
inline Floats load_halves(const uint8_t* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Floats)_mm512_cvtph_ps(halves);
}
inline Ints low_nibbles(Ints a) {
    return ints(_mm512_and_si512(raw(a), _mm512_set1_epi8(15)));
}
inline Ints high_nibbles(Ints a) { return low_nibbles(ints(_mm512_srli_epi16(raw(a), 4))); }
inline Ints dot(Ints acc, Ints w, Ints x) {
    return ints(_mm512_dpbusd_epi32(raw(acc), raw(w), raw(x)));
}
inline Ints dot_wide(Ints acc, Ints w, Ints x) { return dot(acc, w, x); }
inline Ints dot_16(Ints acc, Ints, Ints) { return acc; }
inline Ints add_pairs(Ints acc, Ints) { return acc; }
inline Ints add_ints(Ints a, Ints b) { return ints(_mm512_add_epi32(raw(a), raw(b))); }
inline Ints multiply_ints(Ints a, Ints b) { return ints(_mm512_mullo_epi32(raw(a), raw(b))); }
inline Floats to_float(Ints a) { return (Floats)_mm512_cvtepi32_ps(raw(a)); }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
constexpr bool DOT_WIDE_IS_SIGNED = false;
constexpr bool HAS_DOT_16 = false;
constexpr int ROWS_GROUPED = 6;
constexpr int ROWS_Q6 = 4;
#include "linear_integer_tile.h"
}  // namespace integer_avx512
EC_END_TARGET
#endif

void linear_integer(const LinearWeight& w, const Activations& x, const Results& out,
                    const LinearTask& task) {
    switch (isa()) {
#if EC_X86
        case Isa::avx512:
            return integer_avx512::run(w, x, out, task);
        case Isa::avx2:
            return integer_avx2::run(w, x, out, task);
#endif
        default:
            return integer_portable::run(w, x, out, task);
    }
}

}  // namespace ec
