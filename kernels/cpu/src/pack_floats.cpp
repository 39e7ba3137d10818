// Rows of floats, or of GGUF's blocks, to the panels of a weight of floats (linear.h). Each value is what
// gguf's reference dequantisation gives, operation by operation.
#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "half.h"
#include "pack_rows.h"

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

// By the numbers of `row_types`; codes have no value without their scale.
constexpr Decode decode_block[] = {
    decode_f32,  decode_f16,  decode_bf16, decode_q4_0, decode_q4_1,  decode_q5_0,
    decode_q8_0, decode_q4_k, decode_q5_k, decode_q6_k, decode_mxfp4, nullptr,
};

constexpr int64_t chunk = superblock_inputs;
constexpr int64_t padded_chunk = chunk + 16;  // rows of a chunk do not meet in one set of the cache

template <int64_t type>
void decode_row(const uint8_t* from, int64_t num_inputs, float* out) {
    constexpr RowType t = row_types[type];
    for (int64_t i = 0; i < num_inputs; i += t.inputs, from += t.bytes)
        decode_block[type](from, out + i);
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

const char* pack_floats(const Rows& rows, const LinearWeight& w, int64_t first, uint8_t* panels) {
    constexpr int64_t num_decoders = sizeof decoders / sizeof *decoders;
    if (rows.type >= num_decoders) {
        return refuse("rows of type %ld do not become a weight of kind %d", rows.type, w.kind);
    }
    const auto decode = decoders[rows.type];
    const bool in_pairs = static_cast<LinearKind>(w.kind) == LinearKind::bf16;
    const int64_t padded_inputs = in_pairs ? num_groups(w) * group_inputs : w.num_inputs;
    each_panel(first, rows.num_rows, [&](int64_t panel, int64_t lane, int64_t i, int64_t lanes) {
        alignas(64) float values[panel_outputs][padded_chunk] = {};
        auto* steps = reinterpret_cast<uint32_t*>(panels) +
                      panel * panel_outputs * num_steps(w) + lane;
        for (int64_t input = 0; input < w.num_inputs; input += chunk) {
            const int64_t count = std::min(chunk, w.num_inputs - input);
            const int64_t padded = std::min(chunk, padded_inputs - input);
            for (int64_t l = 0; l < lanes; ++l) {
                decode(rows.block(i + l, input), count, values[l]);
                std::fill(values[l] + count, values[l] + padded, 0.0f);
            }
            if (in_pairs) {
                turn_pairs(values, lanes, padded, steps + input / 2 * panel_outputs);
            } else {
                turn(values, lanes, count, steps + input * panel_outputs);
            }
        }
    });
    return nullptr;
}

}  // namespace ec
