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

// The mean of rows that lie `stride` apart, added in their order, over its length, or over `least` if
// it is shorter.
[[maybe_unused]] static void mean_direction(const float* rows, int64_t num_rows, int64_t stride, int64_t size,
                           float least, float* out) {
    const float count = static_cast<float>(num_rows);
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        vf sum = load(rows + i);
        for (int64_t row = 1; row < num_rows; ++row) sum = sum + load(rows + row * stride + i);
        store(out + i, sum / splat(count));
    }
    for (; i < size; ++i) {
        float sum = rows[i];
        for (int64_t row = 1; row < num_rows; ++row) sum += rows[row * stride + i];
        out[i] = sum / count;
    }
    const float squares = mean_of_squares(out, size) * static_cast<float>(size);
    const float length = std::max(std::sqrt(squares), least);
    for (i = 0; i + W <= size; i += W) store(out + i, load(out + i) / splat(length));
    for (; i < size; ++i) out[i] /= length;
}

// residual += x, then x = layer norm(residual).
[[maybe_unused]] static void add_layer_norm_row(float* x, float* residual, const float* weight, int64_t size, float eps) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(residual + i, load(residual + i) + load(x + i));
    for (; i < size; ++i) residual[i] += x[i];
    layer_norm_row(residual, weight, size, eps, x);
}
