// Activations of rows, alone and gated. Included by every_isa.h: no include guard.

EC_INLINE vf silu(vf g) { return g / (splat(1.0f) + exp_of(-g)); }

// g/2 (1 + tanh(y)) = g / (1 + e^-2y), y = sqrt(2 / pi) (g + 0.044715 g^3)
EC_INLINE vf gelu_tanh(vf g) {
    const vf y = fma(g * g * g, splat(0.044715f), g) * splat(0.7978845608028654f);
    return g / (splat(1.0f) + exp_of(splat(-2.0f) * y));
}

// g Phi(g) = g/2 (1 + erf(g / sqrt(2))), the latter as x p(x^2) / q(x^2) of g within +-5.515: the best such
// quotient, by least squares weighted again and again (Lawson), is within 1.5e-8. Below it is 0.
EC_INLINE vf gelu(vf g) {
    const vf last = splat(5.515433f);
    const vf x = g > last ? last : g < -last ? -last : g, square = x * x;
    vf p = splat(4.5307505e-08f), q = splat(1.1947044e-06f);
    p = fma(p, square, splat(1.2703799e-05f));
    q = fma(q, square, splat(7.3857038e-05f));
    p = fma(p, square, splat(3.3912808e-04f));
    q = fma(q, square, splat(1.8886307e-03f));
    p = fma(p, square, splat(9.3632722e-03f));
    q = fma(q, square, splat(2.8689370e-02f));
    p = fma(p, square, splat(6.7860797e-02f));
    q = fma(q, square, splat(2.5171679e-01f));
    p = fma(p, square, splat(7.9788446e-01f));
    q = fma(q, square, splat(1.0f));
    const vf half = g * splat(0.5f);
    const vf result = fma(half, max(x * p / q, splat(-1.0f)), half);
    return g < -last ? vf{} : result;
}

EC_INLINE vf relu(vf g) { return g < vf{} ? vf{} : g; }

EC_INLINE vf relu2(vf g) { return relu(g) * relu(g); }

EC_INLINE vf swiglu_oai(vf g, vf u) {
    const vf limit = splat(7.0f), least = -limit;
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < least ? least : u;
    return (u + splat(1.0f)) * (g / (splat(1.0f) + exp_of(splat(-1.702f) * g)));
}

// Of a register of gates `g` and one of ups `u`.
#define EC_GATED(name, both)                                                                     \
    [[maybe_unused]] static void name(const float* gate, const float* up, int64_t stride,        \
                                      int64_t num_rows, int64_t size, float* out,                \
                                      int64_t out_stride) {                                      \
        const int64_t whole = size / W * W;                                                      \
        for (int64_t r = 0; r < num_rows; ++r) {                                                 \
            for (int64_t i = 0; i < whole; i += W) {                                             \
                const vf g = load(gate + r * stride + i), u = load(up + r * stride + i);         \
                store(out + r * out_stride + i, both);                                           \
            }                                                                                    \
        }                                                                                        \
        for (int64_t r = 0; whole < size && r < num_rows; ++r) {                                 \
            for (int64_t i = whole; i < size; ++i) {                                             \
                const vf g = splat(gate[r * stride + i]), u = splat(up[r * stride + i]);         \
                out[r * out_stride + i] = (both)[0];                                             \
            }                                                                                    \
        }                                                                                        \
    }

EC_GATED(swiglu_oai_gated, swiglu_oai(g, u))

#define EC_ROWS(activation)                                                                      \
    EC_GATED(activation##_gated, activation(g) * u)                                              \
    static void activation##_row(float* x, int64_t size) {                                       \
        int64_t i = 0;                                                                           \
        for (; i + W <= size; i += W) store(x + i, activation(load(x + i)));                     \
        for (; i < size; ++i) x[i] = activation(splat(x[i]))[0];                                 \
    }

EC_ROWS(silu)
EC_ROWS(gelu_tanh)
EC_ROWS(gelu)
EC_ROWS(relu)
EC_ROWS(relu2)
#undef EC_ROWS
#undef EC_GATED
