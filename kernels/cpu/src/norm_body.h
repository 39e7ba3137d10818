// RMSNorm and LayerNorm of one row. Included by every_isa.h: no include guard.

// Sum of squares of `x - center` in four chains of registers, then the rest one by one.
EC_INLINE float mean_of_squares(const float* x, int64_t size, float center = 0.0f) {
    vf sums[4] = {vf{}, vf{}, vf{}, vf{}};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int c = 0; c < 4; ++c) {
            const vf v = load(x + i + c * W) - splat(center);
            sums[c] = fma(v, v, sums[c]);
        }
    for (; i + W <= size; i += W) {
        const vf v = load(x + i) - splat(center);
        sums[0] = fma(v, v, sums[0]);
    }
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; ++i) sum += (x[i] - center) * (x[i] - center);
    return sum / static_cast<float>(size);
}

EC_INLINE float mean_of(const float* x, int64_t size) {
    vf sums[4] = {vf{}, vf{}, vf{}, vf{}};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int c = 0; c < 4; ++c) sums[c] = sums[c] + load(x + i + c * W);
    for (; i + W <= size; i += W) sums[0] = sums[0] + load(x + i);
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; ++i) sum += x[i];
    return sum / static_cast<float>(size);
}

// out = x / sqrt(mean(x^2) + eps) * weight; `out` may be `x`.
static void norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
    const float factor = 1.0f / std::sqrt(mean_of_squares(x, size) + eps);
    int64_t i = 0;
    for (; i + W <= size; i += W) store(out + i, load(x + i) * splat(factor) * load(weight + i));
    for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

// residual += x, then x = norm(residual).
[[maybe_unused]] static void add_norm_row(float* x, float* residual, const float* weight, int64_t size, float eps) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(residual + i, load(residual + i) + load(x + i));
    for (; i < size; ++i) residual[i] += x[i];
    norm_row(residual, weight, size, eps, x);
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight[0] + weight[1]; `out` may be `x`.
[[maybe_unused]] static void layer_norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
    const float mean = mean_of(x, size);
    const float factor = 1.0f / std::sqrt(mean_of_squares(x, size, mean) + eps);
    const float* bias = weight + size;
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const vf scaled = (load(x + i) - splat(mean)) * splat(factor);
        store(out + i, fma(scaled, load(weight + i), load(bias + i)));
    }
    for (; i < size; ++i) out[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

// residual += x, then x = layer norm(residual).
[[maybe_unused]] static void add_layer_norm_row(float* x, float* residual, const float* weight, int64_t size, float eps) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(residual + i, load(residual + i) + load(x + i));
    for (; i < size; ++i) residual[i] += x[i];
    layer_norm_row(residual, weight, size, eps, x);
}
