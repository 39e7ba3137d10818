// One register of floats, and the functions of it that kernels share.
//
// Included by every_isa.h once an instruction set, inside its namespace, with EC_LEVEL and EC_NEON
// defined: no include guard.
//
// `vf` is what one register holds: 4, 8 or 16 floats. Multiply-adds are written by name, so that
// the same source gives the same bits wherever it is inlined.

constexpr int W = EC_LEVEL >= 2 ? 16 : EC_LEVEL == 1 ? 8 : 4;
constexpr int num_registers = EC_LEVEL >= 2 || EC_NEON ? 32 : 16;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));  // bits of any float: may wrap
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));

EC_INLINE vf load(const float* at) { return *reinterpret_cast<const vf_unaligned*>(at); }
EC_INLINE void store(float* at, vf x) { *reinterpret_cast<vf_unaligned*>(at) = x; }
EC_INLINE vf splat(float x) { return x - vf{}; }  // plus zero would not be x for -0

// One dword in every lane, whatever it means as a float.
EC_INLINE vf splat_bits(const float* at) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    return (vf)(vu{} + bits);
}

// Past the caches, to whole lines.
EC_INLINE void stream(float* at, vf x) {
#if EC_LEVEL >= 2
    _mm512_stream_ps(at, (__m512)x);
#elif EC_LEVEL == 1
    _mm256_stream_ps(at, (__m256)x);
#else
    store(at, x);
#endif
}

// a * b + c
EC_INLINE vf fma(vf a, vf b, vf c) {
#if EC_LEVEL >= 2
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif EC_LEVEL == 1
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif EC_NEON
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

EC_INLINE vf max(vf a, vf b) { return a > b ? a : b; }

// In halves: the same order for every number of lanes in use.
EC_INLINE float sum_of(vf x) {
#if EC_LEVEL >= 2
    return _mm512_reduce_add_ps((__m512)x);
#elif EC_NEON
    const auto all = (float32x4_t)x;
    return vpadds_f32(vadd_f32(vget_low_f32(all), vget_high_f32(all)));
#else
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

EC_INLINE float max_of(vf x) {
#if EC_LEVEL >= 2
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
#endif
}

// Bit i: x[i] >= limit[i]. False for NaN.
EC_INLINE uint32_t at_least(vf x, vf limit) {
#if EC_LEVEL >= 2
    return _mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_GE_OQ);
#elif EC_LEVEL == 1
    return static_cast<uint32_t>(
        _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)limit, _CMP_GE_OQ)));
#elif EC_NEON
    return vaddvq_u32((uint32x4_t)((vu)(x >= limit) & vu{1, 2, 4, 8}));
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= static_cast<uint32_t>(x[i] >= limit[i]) << i;
    return bits;
#endif
}

// e^x within 1 unit of the last place, 0 below -87, for x of 88.3 at most. Cephes' polynomial (S. Moshier).
EC_INLINE vf exp_to_one(vf x) {
    const vf to_integer = splat(12582912.0f);  // 1.5 * 2^23: the last bits of the sum are an integer
    const vf shifted = fma(x, splat(1.44269504088896341f), to_integer);
    const vf n = shifted - to_integer;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    const vf y = fma(p, r * r, r) + splat(1.0f);
    const vu exponent = ((vu)shifted - 0x4B400000u + 127u) << 23;
    return x < splat(-87.0f) ? vf{} : y * (vf)exponent;
}

// 2^x within 2 units of the last place, exactly 1 for 0, 0 below -125, for x of 127 at most.
EC_INLINE vf exp2_to_one(vf x) {
    const vf to_integer = splat(12582912.0f);  // as above: what it adds is shifted out below
    const vf shifted = x + to_integer;
    const vf r = x - (shifted - to_integer);
    vf p = splat(1.3264727247e-3f);
    p = fma(p, r, splat(9.6715126881e-3f));
    p = fma(p, r, splat(5.5507337436e-2f));
    p = fma(p, r, splat(2.4022242085e-1f));
    p = fma(p, r, splat(6.9314697760e-1f));
    p = fma(p, r, splat(1.0f));
    const vf y = (vf)((vu)p + ((vu)shifted << 23));
    return x < splat(-125.0f) ? vf{} : y;
}

// The same for any x: infinite above 88.3.
EC_INLINE vf exp_of(vf x) {
    const vf above = splat(88.3f);
    return x > above ? splat(INFINITY) : exp_to_one(x);
}

// Natural logarithm of normal numbers above 0, within 1 unit of the last place (Cephes).
EC_INLINE vf log_of(vf x) {
    const vu bits = (vu)x;
    const vi e = (vi)(bits - 0x3F3504F3u) >> 23;  // the mantissa lies in [sqrt(1/2), sqrt(2))
    const vf f = (vf)(bits - ((vu)e << 23)) - splat(1.0f);
    const vf exponent = __builtin_convertvector(e, vf);
    const vf z = f * f;
    vf p = splat(7.0376836292e-2f);
    p = fma(p, f, splat(-1.1514610310e-1f));
    p = fma(p, f, splat(1.1676998740e-1f));
    p = fma(p, f, splat(-1.2420140846e-1f));
    p = fma(p, f, splat(1.4249322787e-1f));
    p = fma(p, f, splat(-1.6668057665e-1f));
    p = fma(p, f, splat(2.0000714765e-1f));
    p = fma(p, f, splat(-2.4999993993e-1f));
    p = fma(p, f, splat(3.3333331174e-1f));
    vf y = p * f * z;
    y = fma(exponent, splat(-2.12194440e-4f), y);
    y = fma(z, splat(-0.5f), y);
    return fma(exponent, splat(0.693359375f), f + y);
}
