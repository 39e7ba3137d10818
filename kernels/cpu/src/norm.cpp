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

namespace ec {

const char* norm(Norm kind, const float* x, int64_t x_stride, const float* weight, float* out,
                 int64_t num_rows, int64_t size, float eps, const InputRows* then) {
    const auto run = kind == Norm::rms ? EC_CHOOSE(norm_row) : EC_CHOOSE(layer_norm_row);
    for_rows(num_rows, size, [&](int64_t row) {
        run(x + row * x_stride, weight, size, eps, out + row * size);
        if (then != nullptr) then->write_row(row, out + row * size, size);
    });
    return nullptr;
}

const char* add_norm(Norm kind, float* x, float* residual, const float* weight, int64_t num_rows,
                     int64_t size, float eps, const InputRows* then) {
    if (x < residual + num_rows * size && residual < x + num_rows * size) {
        return refuse("x and residual overlap; both are written, so give each its own memory");
    }
    const auto run = kind == Norm::rms ? EC_CHOOSE(add_norm_row) : EC_CHOOSE(add_layer_norm_row);
    for_rows(num_rows, size, [&](int64_t row) {
        run(x + row * size, residual + row * size, weight, size, eps);
        if (then != nullptr) then->write_row(row, x + row * size, size);
    });
    return nullptr;
}

}  // namespace ec

// As `ec::norm` and `ec::add_norm`.
EC_EXPORT const char* ec_rms_norm(const float* x, int64_t x_stride, const float* weight, float* out,
                                  int64_t num_rows, int64_t size, float eps) {
    return ec::norm(ec::Norm::rms, x, x_stride, weight, out, num_rows, size, eps, nullptr);
}

EC_EXPORT const char* ec_layer_norm(const float* x, int64_t x_stride, const float* weight,
                                    float* out, int64_t num_rows, int64_t size, float eps) {
    return ec::norm(ec::Norm::layer, x, x_stride, weight, out, num_rows, size, eps, nullptr);
}

EC_EXPORT const char* ec_add_rms_norm(float* x, float* residual, const float* weight,
                                      int64_t num_rows, int64_t size, float eps) {
    return ec::add_norm(ec::Norm::rms, x, residual, weight, num_rows, size, eps, nullptr);
}

EC_EXPORT const char* ec_add_layer_norm(float* x, float* residual, const float* weight,
                                        int64_t num_rows, int64_t size, float eps) {
    return ec::add_norm(ec::Norm::layer, x, residual, weight, num_rows, size, eps, nullptr);
}

// Of rows [num_rows, size] that lie `stride` floats apart; out [size]. By the caller's thread.
EC_EXPORT const char* ec_mean_direction(const float* rows, int64_t num_rows, int64_t stride,
                                        int64_t size, float least, float* out) {
    EC_CHOOSE(mean_direction)(rows, num_rows, stride, size, least, out);
    return nullptr;
}
