// Gated activations of one row. Included by every_isa.h: no include guard.

EC_INLINE vf silu(vf g) { return g / (splat(1.0f) + exp_of(-g)); }

// g/2 (1 + tanh(y)) = g / (1 + e^-2y), y = sqrt(2 / pi) (g + 0.044715 g^3)
EC_INLINE vf gelu_tanh(vf g) {
    const vf y = fma(g * g * g, splat(0.044715f), g) * splat(0.7978845608028654f);
    return g / (splat(1.0f) + exp_of(splat(-2.0f) * y));
}

#define EC_GATED_ROW(name, activation)                                                  \
    static void name(const float* gate, const float* up, int64_t size, float* out) {    \
        int64_t i = 0;                                                                  \
        for (; i + W <= size; i += W)                                                   \
            store(out + i, activation(load(gate + i)) * load(up + i));                  \
        for (; i < size; ++i) out[i] = activation(splat(gate[i]))[0] * up[i];           \
    }

EC_GATED_ROW(silu_row, silu)
EC_GATED_ROW(gelu_tanh_row, gelu_tanh)
#undef EC_GATED_ROW
