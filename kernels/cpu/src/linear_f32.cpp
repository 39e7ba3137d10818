// Float32 products, for each instruction set.
#include <algorithm>
#include <cmath>

#include "linear.h"

#define EC_BODY "linear_f32_tile.h"
#include "every_isa.h"

void ec::linear_f32(const LinearWeight& w, const float* x, int64_t x_stride, const Results& out,
                    const LinearTask& task) {
    EC_CHOOSE(run_f32)(w, x, x_stride, out, task);
}
