// RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450), alone or after the residual addition,
// in float32.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "dispatch.h"
#include "graph.h"
#include "row_chunks.h"

#define EC_BODY "norm_body.h"
#include "every_isa.h"

// x and out [num_rows, size]; rows of x lie x_stride floats apart, those of out follow each other.
EC_EXPORT const char* ec_rms_norm(const float* x, int64_t x_stride, const float* weight, float* out,
                                  int64_t num_rows, int64_t size, float eps) {
    const auto norm_row = EC_CHOOSE(norm_row);
    ec::for_rows(num_rows, size, [&](int64_t row) {
        norm_row(x + row * x_stride, weight, size, eps, out + row * size);
    });
    return nullptr;
}

// Likewise; weight [2, size]: factors, then what is added.
EC_EXPORT const char* ec_layer_norm(const float* x, int64_t x_stride, const float* weight,
                                    float* out, int64_t num_rows, int64_t size, float eps) {
    const auto layer_norm_row = EC_CHOOSE(layer_norm_row);
    ec::for_rows(num_rows, size, [&](int64_t row) {
        layer_norm_row(x + row * x_stride, weight, size, eps, out + row * size);
    });
    return nullptr;
}

// Of rows [num_rows, size] that lie `stride` floats apart; out [size]. By the caller's thread.
EC_EXPORT const char* ec_mean_direction(const float* rows, int64_t num_rows, int64_t stride,
                                        int64_t size, float least, float* out) {
    EC_CHOOSE(mean_direction)(rows, num_rows, stride, size, least, out);
    return nullptr;
}

namespace {

using AddNormRow = void (*)(float*, float*, const float*, int64_t, float);

// residual += x; x = norm(residual). Both [num_rows, size], without gaps, apart from each other.
const char* add_norm(AddNormRow add_norm_row, float* x, float* residual, const float* weight,
                     int64_t num_rows, int64_t size, float eps) {
    if (x < residual + num_rows * size && residual < x + num_rows * size) {
        return ec::refuse("x and residual overlap; both are written, so give each its own memory");
    }
    ec::for_rows(num_rows, size, [&](int64_t row) {
        add_norm_row(x + row * size, residual + row * size, weight, size, eps);
    });
    return nullptr;
}

}  // namespace

EC_EXPORT const char* ec_add_rms_norm(float* x, float* residual, const float* weight,
                                      int64_t num_rows, int64_t size, float eps) {
    return add_norm(EC_CHOOSE(add_norm_row), x, residual, weight, num_rows, size, eps);
}

EC_EXPORT const char* ec_add_layer_norm(float* x, float* residual, const float* weight,
                                        int64_t num_rows, int64_t size, float eps) {
    return add_norm(EC_CHOOSE(add_layer_norm_row), x, residual, weight, num_rows, size, eps);
}
