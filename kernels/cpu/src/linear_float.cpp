// Products of float32 and bfloat16 weights, for each instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "linear.h"
#include "linear_tiles.h"

#define EC_BODY "linear_float_tile.h"
#define EC_WITH_BF16
#include "every_isa.h"

void ec::linear_f32(const LinearWeight& w, const float* x, int64_t x_stride, const Results& out,
                    const LinearTask& task) {
    EC_CHOOSE(run_float<false>)(w, x, x_stride, out, task);
}

void ec::linear_bf16(const LinearWeight& w, const PairedActivations& x, const Results& out,
                     const LinearTask& task) {
#if EC_X86
    if (isa() >= Isa::amx) return linear_bf16_tiles(w, x, out, task);
#endif
    const auto* pairs = reinterpret_cast<const float*>(x.pairs);
    EC_CHOOSE_BF16(run_float<true>)(w, pairs, x.stride, out, task);
}

void ec::round_row(const float* x, int64_t num_inputs, uint32_t* pairs) {
    EC_CHOOSE_BF16(round_row)(x, num_inputs, pairs);
}
