// Gated linear units (arXiv:2002.05202): an activation of the left half times the right half.
#include <cmath>

#include "dispatch.h"
#include "graph.h"
#include "row_chunks.h"

#define EC_BODY "activation_body.h"
#include "every_isa.h"

// gate_up [num_rows, 2 * size], out [num_rows, size]; kind 0: SiLU, 1: GELU's tanh approximation.
EC_EXPORT const char* ec_gated_activation(const float* gate_up, float* out, int64_t num_rows,
                                          int64_t size, int kind) {
    if (kind != 0 && kind != 1) {
        return ec::refuse("activation %d is not 0 (SiLU) or 1 (GELU, tanh)", kind);
    }
    const auto run = kind == 0 ? EC_CHOOSE(silu_row) : EC_CHOOSE(gelu_tanh_row);
    ec::for_rows(num_rows, 4 * size, [&](int64_t row) {  // an exponential costs as four others
        run(gate_up + row * 2 * size, gate_up + row * 2 * size + size, size, out + row * size);
    });
    return nullptr;
}
