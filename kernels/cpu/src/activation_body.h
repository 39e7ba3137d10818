// Activations of one row, alone and gated. Included by every_isa.h: no include guard.

EC_INLINE vf silu(vf g) { return g / (splat(1.0f) + exp_of(-g)); }

// g/2 (1 + tanh(y)) = g / (1 + e^-2y), y = sqrt(2 / pi) (g + 0.044715 g^3)
EC_INLINE vf gelu_tanh(vf g) {
    const vf y = fma(g * g * g, splat(0.044715f), g) * splat(0.7978845608028654f);
    return g / (splat(1.0f) + exp_of(splat(-2.0f) * y));
}

// g Phi(g), with 1 - Phi(|g|) = p(t) e^-z^2 / 2 of z = |g| / sqrt(2), t = 1 / (1 + 0.3275911 z): within
// 1.5e-7 (Abramowitz and Stegun 7.1.26).
EC_INLINE vf gelu(vf g) {
    const vf zero = vf{};
    const vf z = (g < zero ? -g : g) * splat(0.7071067811865476f);
    const vf t = splat(1.0f) / fma(splat(0.3275911f), z, splat(1.0f));
    vf p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const vf tail = g * (p * t * exp_to_one(-z * z) * splat(0.5f));
    return g < zero ? tail : g - tail;
}

EC_INLINE vf relu(vf g) { return g < vf{} ? vf{} : g; }

#define EC_ROWS(activation)                                                                      \
    [[maybe_unused]] static void activation##_gated(const float* gate, const float* up,          \
                                                    int64_t size, float* out) {                  \
        int64_t i = 0;                                                                           \
        for (; i + W <= size; i += W) store(out + i, activation(load(gate + i)) * load(up + i)); \
        for (; i < size; ++i) out[i] = activation(splat(gate[i]))[0] * up[i];                    \
    }                                                                                            \
    static void activation##_row(float* x, int64_t size) {                                       \
        int64_t i = 0;                                                                           \
        for (; i + W <= size; i += W) store(x + i, activation(load(x + i)));                     \
        for (; i < size; ++i) x[i] = activation(splat(x[i]))[0];                                 \
    }

EC_ROWS(silu)
EC_ROWS(gelu_tanh)
EC_ROWS(gelu)
EC_ROWS(relu)
#undef EC_ROWS
