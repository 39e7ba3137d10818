// Products on the matrix unit (instruction sets from `Isa::amx` on). See linear_tiles.cpp.
#pragma once

#include "linear.h"

namespace ec {

// x has memory for whole tiles of 16 rows.
void linear_bf16_tiles(const LinearWeight& w, const PairedActivations& x, const Results& out,
                       const LinearTask& task);

// The first row that is left to the vector units.
int64_t linear_bytes_tiles(const LinearWeight& w, const Activations& x, const Results& out,
                           const LinearTask& task);

}  // namespace ec
