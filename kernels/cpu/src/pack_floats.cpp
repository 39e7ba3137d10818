// Rows of floats, or of GGUF's blocks, to the panels of a weight of floats (linear.h), on all threads.
//
// Blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Each value is what gguf's
// reference dequantisation gives, operation by operation.
#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "half.h"
#include "linear.h"
#include "pool.h"

namespace ec {
namespace {

using Decode = void (*)(const uint8_t* block, float* out);

void decode_f32(const uint8_t* from, float* out) { std::memcpy(out, from, 4); }

void decode_f16(const uint8_t* from, float* out) { *out = half_at(from); }

void decode_bf16(const uint8_t* from, float* out) {
    out[0] = 0;
    std::memcpy(reinterpret_cast<uint8_t*>(out) + 2, from, 2);
}

void decode_q4_0(const uint8_t* block, float* out) {
    const float scale = half_at(block);
    for (int i = 0; i < 16; ++i) {
        out[i] = scale * static_cast<float>((block[2 + i] & 15) - 8);
        out[16 + i] = scale * static_cast<float>((block[2 + i] >> 4) - 8);
    }
}

void decode_q4_1(const uint8_t* block, float* out) {
    const float scale = half_at(block), minimum = half_at(block + 2);
    for (int i = 0; i < 16; ++i) {
        out[i] = scale * static_cast<float>(block[4 + i] & 15) + minimum;
        out[16 + i] = scale * static_cast<float>(block[4 + i] >> 4) + minimum;
    }
}

void decode_q5_0(const uint8_t* block, float* out) {
    const float scale = half_at(block);
    uint32_t high;
    std::memcpy(&high, block + 2, 4);
    for (int i = 0; i < 16; ++i) {
        const int low = (block[6 + i] & 15) | (static_cast<int>(high >> i & 1) << 4);
        const int upper = (block[6 + i] >> 4) | (static_cast<int>(high >> (16 + i) & 1) << 4);
        out[i] = scale * static_cast<float>(low - 16);
        out[16 + i] = scale * static_cast<float>(upper - 16);
    }
}

void decode_q8_0(const uint8_t* block, float* out) {
    const float scale = half_at(block);
    for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
}

// Q4_K and Q5_K: 8 groups of 32, six bits each of scale and minimum; `fifth`: a plane of bits, or null.
void decode_k(const uint8_t* block, const uint8_t* fifth, const uint8_t* nibbles, float* out) {
    const float scale = half_at(block), minimum = half_at(block + 2);
    const uint8_t* packed = block + 4;
    for (int g = 0; g < 8; ++g) {
        const int i = g % 4;
        const int low = g < 4 ? packed[i] & 63 : (packed[8 + i] & 15) | (packed[i] >> 6 << 4);
        const int less = g < 4 ? packed[4 + i] & 63 : (packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4);
        const float factor = scale * static_cast<float>(low);
        const float offset = minimum * static_cast<float>(less);
        for (int j = 0; j < 32; ++j) {
            int code = nibbles[g / 2 * 32 + j] >> (g % 2 * 4) & 15;
            if (fifth != nullptr) code |= (fifth[j] >> g & 1) << 4;
            out[g * 32 + j] = factor * static_cast<float>(code) - offset;
        }
    }
}

void decode_q4_k(const uint8_t* block, float* out) { decode_k(block, nullptr, block + 16, out); }

void decode_q5_k(const uint8_t* block, float* out) { decode_k(block, block + 16, block + 48, out); }

void decode_q6_k(const uint8_t* block, float* out) {
    const float scale = half_at(block + 208);
    for (int g = 0; g < 8; ++g) {  // of each half: 64 bytes of low nibbles, 32 of pairs of high bits
        const uint8_t* low = block + g / 4 * 64 + g % 2 * 32;
        const uint8_t* high = block + 128 + g / 4 * 32;
        for (int j = 0; j < 32; ++j) {
            const int code = (low[j] >> (g % 4 / 2 * 4) & 15) | ((high[j] >> (g % 4 * 2) & 3) << 4);
            const auto factor = static_cast<int8_t>(block[192 + g * 2 + j / 16]);
            out[g * 32 + j] = scale * static_cast<float>(factor) * static_cast<float>(code - 32);
        }
    }
}

void decode_mxfp4(const uint8_t* block, float* out) {
    const float scale = half_of_power(block[0]);
    for (int i = 0; i < 16; ++i) {
        out[i] = scale * static_cast<float>(e2m1_codes[block[1 + i] & 15] - e2m1_zero);
        out[16 + i] = scale * static_cast<float>(e2m1_codes[block[1 + i] >> 4] - e2m1_zero);
    }
}

struct RowType {
    int64_t inputs, bytes;  // of a block
    Decode decode;
};

// By the numbers in kernels/cpu/weights.py.
constexpr RowType row_types[] = {
    {1, 4, decode_f32},     {1, 2, decode_f16},     {1, 2, decode_bf16},
    {32, 18, decode_q4_0},  {32, 20, decode_q4_1},  {32, 22, decode_q5_0},  {32, 34, decode_q8_0},
    {256, 144, decode_q4_k}, {256, 176, decode_q5_k}, {256, 210, decode_q6_k},
    {32, 17, decode_mxfp4},
};

constexpr int64_t chunk = superblock_inputs;
constexpr int64_t padded_chunk = chunk + 16;  // rows of a chunk do not meet in one set of the cache

template <int64_t type>
void decode_row(const uint8_t* from, int64_t num_inputs, float* out) {
    constexpr RowType t = row_types[type];
    for (int64_t i = 0; i < num_inputs; i += t.inputs, from += t.bytes) t.decode(from, out + i);
}

constexpr void (*decoders[])(const uint8_t*, int64_t, float*) = {
    decode_row<0>, decode_row<1>, decode_row<2>, decode_row<3>, decode_row<4>,
    decode_row<5>, decode_row<6>, decode_row<7>, decode_row<8>, decode_row<9>,
    decode_row<10>,
};

// Columns of a chunk become steps of a panel.
void turn(const float (&values)[panel_outputs][padded_chunk], int64_t lanes, int64_t count,
          uint32_t* steps) {
    for (int64_t j = 0; j < count; ++j)
        for (int64_t lane = 0; lane < lanes; ++lane)
            std::memcpy(steps + j * panel_outputs + lane, &values[lane][j], 4);
}

void turn_pairs(const float (&values)[panel_outputs][padded_chunk], int64_t lanes, int64_t count,
                uint32_t* steps) {
    uint32_t pairs[panel_outputs][padded_chunk / 2];
    for (int64_t lane = 0; lane < lanes; ++lane)
        for (int64_t j = 0; j < count; j += 2)
            pairs[lane][j / 2] =
                bfloat16_of(values[lane][j]) | bfloat16_of(values[lane][j + 1]) << 16;
    for (int64_t j = 0; j < count / 2; ++j)
        for (int64_t lane = 0; lane < lanes; ++lane)
            steps[j * panel_outputs + lane] = pairs[lane][j];
}

}  // namespace
}  // namespace ec

// Fills outputs [first_output, first_output + num_rows) of panels, see linear.h. `in_pairs`: of
// bf16, else of f32.
// rows [num_stored, row_bytes], contiguous; output first_output + i is row order[i] (null: i).
EC_EXPORT const char* ec_pack_floats(const uint8_t* rows, int64_t type, int64_t num_stored,
                                     int64_t row_bytes, const int64_t* order, int64_t num_rows,
                                     int64_t num_inputs, uint32_t* panels, int64_t num_outputs,
                                     int64_t first_output, int64_t in_pairs) {
    constexpr int64_t num_types = sizeof ec::row_types / sizeof *ec::row_types;
    if (type < 0 || type >= num_types) {
        return ec::refuse("row type %ld is not in [0, %ld)", type, num_types);
    }
    const ec::RowType& t = ec::row_types[type];
    if (num_inputs < 1 || num_inputs % t.inputs != 0 ||
        row_bytes != num_inputs / t.inputs * t.bytes) {
        return ec::refuse("rows of %ld inputs in %ld bytes; a block holds %ld in %ld", num_inputs,
                          row_bytes, t.inputs, t.bytes);
    }
    if (num_rows < 0 || first_output < 0 || first_output + num_rows > num_outputs) {
        return ec::refuse("outputs %ld to %ld of %ld", first_output, first_output + num_rows,
                          num_outputs);
    }
    if (num_rows == 0) return nullptr;
    if (rows == nullptr || panels == nullptr) return ec::refuse("rows or panels has no memory");
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t row = order == nullptr ? i : order[i];
        if (row < 0 || row >= num_stored) {
            return ec::refuse("row %ld at %ld is not in [0, %ld)", row, i, num_stored);
        }
    }
    constexpr int64_t size = ec::panel_outputs;
    constexpr int64_t group = ec::group_inputs;
    const int64_t padded_inputs =
        in_pairs != 0 ? (num_inputs + group - 1) / group * group : num_inputs;
    const int64_t panel_steps = in_pairs != 0 ? padded_inputs / 2 : num_inputs;
    const int64_t first_panel = first_output / size;
    const int64_t end = first_output + num_rows;
    ec::parallel((end + size - 1) / size - first_panel, [&](int64_t task, int) {
        alignas(64) float values[size][ec::padded_chunk] = {};
        const int64_t start = std::max((first_panel + task) * size, first_output);
        const int64_t stop = std::min((first_panel + task + 1) * size, end);
        uint32_t* panel = panels + (first_panel + task) * size * panel_steps + start % size;
        for (int64_t i = 0; i < num_inputs; i += ec::chunk) {
            const int64_t count = std::min(ec::chunk, num_inputs - i);
            const int64_t padded = std::min(ec::chunk, padded_inputs - i);
            for (int64_t output = start; output < stop; ++output) {
                const int64_t i_row = output - first_output;
                const int64_t row = order == nullptr ? i_row : order[i_row];
                const uint8_t* from = rows + row * row_bytes + i / t.inputs * t.bytes;
                float* to = values[output - start];
                ec::decoders[type](from, count, to);
                std::fill(to + count, to + padded, 0.0f);
            }
            if (in_pairs != 0) {
                ec::turn_pairs(values, stop - start, padded, panel + i / 2 * size);
            } else {
                ec::turn(values, stop - start, count, panel + i * size);
            }
        }
    });
    return nullptr;
}
