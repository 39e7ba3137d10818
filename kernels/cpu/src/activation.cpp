// Activations, alone or gated (arXiv:2002.05202): of the left half, times the right half.
#include <cmath>
#include <cstring>

#include "activation.h"
#include "dispatch.h"
#include "graph.h"
#include "row_chunks.h"

#define EC_BODY "activation_body.h"
#include "every_isa.h"

ec::GatedRows* ec::gated_rows(int64_t kind) {
    return kind == 0   ? EC_CHOOSE(silu_gated)
           : kind == 1 ? EC_CHOOSE(gelu_tanh_gated)
           : kind == 2 ? EC_CHOOSE(gelu_gated)
                       : nullptr;
}

void ec::swiglu_oai(const float* gate, const float* up, int64_t stride, int64_t num_rows, int64_t size,
                    float* out, int64_t out_stride) {
    EC_CHOOSE(swiglu_oai_gated)(gate, up, stride, num_rows, size, out, out_stride);
}

const char* ec::gated_activation(const float* gate_up, float* out, int64_t num_rows, int64_t size,
                                 int kind, const InputRows* then) {
    const auto run = gated_rows(kind);
    if (run == nullptr) {
        return refuse("activation %d is not 0 (SiLU), 1 (GELU, tanh) or 2 (GELU)", kind);
    }
    for_rows(num_rows, 4 * size, [&](int64_t row) {  // an exponential costs as four others
        const float* gate = gate_up + row * 2 * size;
        run(gate, gate + size, 2 * size, 1, size, out + row * size, size);
        if (then != nullptr) then->write_row(row, out + row * size, size);
    });
    return nullptr;
}

EC_EXPORT const char* ec_gated_activation(const float* gate_up, float* out, int64_t num_rows,
                                          int64_t size, int kind) {
    return ec::gated_activation(gate_up, out, num_rows, size, kind, nullptr);
}

// x [num_rows, size], in place; kinds as above, 3: ReLU, and 4: its square.
EC_EXPORT const char* ec_activation(float* x, int64_t num_rows, int64_t size, int kind) {
    if (kind < 0 || kind > 4) return ec::refuse("activation %d is not in [0, 4]", kind);
    const auto run = kind == 0   ? EC_CHOOSE(silu_row)
                     : kind == 1 ? EC_CHOOSE(gelu_tanh_row)
                     : kind == 2 ? EC_CHOOSE(gelu_row)
                     : kind == 3 ? EC_CHOOSE(relu_row)
                                 : EC_CHOOSE(relu2_row);
    ec::for_rows(num_rows, 4 * size, [&](int64_t row) { run(x + row * size, size); });
    return nullptr;
}
