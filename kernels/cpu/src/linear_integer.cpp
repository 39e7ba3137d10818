// Products of quantised weights and activations, for each instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "linear.h"

#define EC_BODY "linear_integer_tile.h"
#include "every_isa.h"

void ec::linear_integer(const LinearWeight& w, const Activations& x, const Results& out,
                        const LinearTask& task) {
    EC_CHOOSE(run_integer)(w, x, out, task);
}
