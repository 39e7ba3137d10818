// Float32 products, for each instruction set.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>

#include "linear.h"

namespace ec {

namespace f32_portable {
struct Vec {
    typedef float Lanes __attribute__((vector_size(16), aligned(4)));
    static constexpr int width = 4;
    Lanes lanes;
    static Vec zero() { return {Lanes{0, 0, 0, 0}}; }
    static Vec load(const float* from) { return {*reinterpret_cast<const Lanes*>(from)}; }
    static Vec broadcast(float value) { return {Lanes{value, value, value, value}}; }
    static Vec add(Vec a, Vec b) { return {a.lanes + b.lanes}; }
    static Vec multiply_add(Vec a, Vec b, Vec c) { return {a.lanes * b.lanes + c.lanes}; }
    static void store(float* to, Vec a) { *reinterpret_cast<Lanes*>(to) = a.lanes; }
    static void stream(float* to, Vec a) { store(to, a); }
};
constexpr int MAX_ROWS = 1;
constexpr int MAX_PANELS = 1;
#include "linear_f32_tile.h"
}  // namespace f32_portable

#if EC_X86
EC_BEGIN_AVX2
namespace f32_avx2 {
struct Vec {
    static constexpr int width = 8;
    __m256 lanes;
    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec load(const float* from) { return {_mm256_loadu_ps(from)}; }
    static Vec broadcast(float value) { return {_mm256_set1_ps(value)}; }
    static Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lanes, b.lanes)}; }
    static Vec multiply_add(Vec a, Vec b, Vec c) {
        return {_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)};
    }
    static void store(float* to, Vec a) { _mm256_storeu_ps(to, a.lanes); }
    static void stream(float* to, Vec a) { _mm256_stream_ps(to, a.lanes); }
};
constexpr int MAX_ROWS = 3;
constexpr int MAX_PANELS = 2;
#include "linear_f32_tile.h"
}  // namespace f32_avx2
EC_END_TARGET

EC_BEGIN_AVX512
namespace f32_avx512 {
struct Vec {
    static constexpr int width = 16;
    __m512 lanes;
    static Vec zero() { return {_mm512_setzero_ps()}; }
    static Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
    static Vec broadcast(float value) { return {_mm512_set1_ps(value)}; }
    static Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }
    static Vec multiply_add(Vec a, Vec b, Vec c) {
        return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)};
    }
    static void store(float* to, Vec a) { _mm512_storeu_ps(to, a.lanes); }
    static void stream(float* to, Vec a) { _mm512_stream_ps(to, a.lanes); }
};
constexpr int MAX_ROWS = 12;
constexpr int MAX_PANELS = 4;
#include "linear_f32_tile.h"
}  // namespace f32_avx512
EC_END_TARGET
#endif

void linear_f32(const LinearWeight& w, const float* x, int64_t x_stride, const Results& out,
                const LinearTask& task) {
    switch (isa()) {
#if EC_X86
        case Isa::avx512:
            return f32_avx512::run(w, x, x_stride, out, task);
        case Isa::avx2:
            return f32_avx2::run(w, x, x_stride, out, task);
#endif
        default:
            return f32_portable::run(w, x, x_stride, out, task);
    }
}

}  // namespace ec
