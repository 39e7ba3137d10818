// Products of quantised weights and activations, for each instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "linear.h"
#include "linear_tiles.h"

#define EC_WITH_BYTES
#define EC_BODY "linear_integer_tile.h"
#include "every_isa.h"

void ec::linear_integer(const LinearWeight& w, const Activations& x, const Results& out,
                        const LinearTask& task) {
    LinearTask rest = task;
#if EC_X86
    if (isa() >= Isa::amx) rest.row = linear_bytes_tiles(w, x, out, task);
#endif
    if (rest.row < rest.row_stop) EC_CHOOSE_BYTES(run_integer)(w, x, out, rest);
}
