// Rows of GGUF's blocks to the panels of a weight in groups (linear.h): the same codes and scales.
#include <cstring>

#include "dispatch.h"
#include "pack_rows.h"

namespace ec {
namespace {

// What one output has of a record, in its order: f16 values, bytes, dwords of codes.
using Fields = void (*)(const uint8_t* block, uint8_t* fields);

template <size_t bytes>
void copy(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, bytes);
}

void q8_0(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, 2);
    for (int i = 2; i < 34; ++i) fields[i] = block[i] ^ 0x80;
}

// scale * (code - 16) as scale * code; bit i of four bytes is the fifth of input i.
void q5_0(const uint8_t* block, uint8_t* fields) {
    uint32_t fifths;
    std::memcpy(&fifths, block + 2, 4);
    std::memcpy(fields, block, 2);
    for (int i = 0; i < 16; ++i) {
        const uint32_t low = fifths >> i & 1, high = fifths >> (16 + i) & 1;
        fields[2 + i] = static_cast<uint8_t>((block[6 + i] & 15) + (low << 4) + 112);
        fields[18 + i] = static_cast<uint8_t>((block[6 + i] >> 4) + (high << 4) + 112);
    }
}

// Of Q4_K and Q5_K: f16 d and dmin, then 6 bits each of 8 scales and 8 minima.
void superblock_scales(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, 4);
    const uint8_t* packed = block + 4;
    for (int i = 0; i < 4; ++i) {
        fields[4 + i] = packed[i] & 63;
        fields[8 + i] = static_cast<uint8_t>((packed[8 + i] & 15) | (packed[i] >> 6 << 4));
        fields[12 + i] = packed[4 + i] & 63;
        fields[16 + i] = static_cast<uint8_t>((packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4));
    }
}

// 32 bytes hold group 2i in their low halves and group 2i + 1 in their high ones; groups of fields lie
// `stride` apart.
void nibbles_of_pairs(const uint8_t* pairs, uint8_t* groups, int64_t stride) {
    for (int pair = 0; pair < 4; ++pair, pairs += 32, groups += 2 * stride) {
        for (int i = 0; i < 16; ++i) {
            groups[i] = static_cast<uint8_t>((pairs[i] & 15) | (pairs[16 + i] << 4));
            groups[stride + i] = static_cast<uint8_t>((pairs[i] >> 4) | (pairs[16 + i] & 0xF0));
        }
    }
}

void q4_k(const uint8_t* block, uint8_t* fields) {
    superblock_scales(block, fields);
    nibbles_of_pairs(block + 16, fields + 20, 16);
}

// Bit g of byte i is the fifth of input i of group g.
void q5_k(const uint8_t* block, uint8_t* fields) {
    superblock_scales(block, fields);
    nibbles_of_pairs(block + 48, fields + 20, 20);
    const uint8_t* fifths = block + 16;
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 4; ++i) {
            int plane = 0;
            for (int j = 0; j < 4; ++j) {
                plane |= (fifths[4 * j + i] >> g & 1) << (2 * j);
                plane |= (fifths[16 + 4 * j + i] >> g & 1) << (2 * j + 1);
            }
            fields[20 + 20 * g + 16 + i] = static_cast<uint8_t>(plane);
        }
    }
}

// Of each half: 64 bytes of low nibbles, 32 of pairs of high bits.
void q6_k(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block + 208, 2);
    std::memcpy(fields + 2, block + 192, 16);
    for (int g = 0; g < 8; ++g) {
        const uint8_t* low = block + g / 4 * 64 + g % 2 * 32;
        const uint8_t* high = block + 128 + g / 4 * 32;
        const int low_shift = g % 4 / 2 * 4, high_shift = g % 4 * 2;
        for (int i = 0; i < 32; ++i) {
            fields[18 + 32 * g + i] = static_cast<uint8_t>((low[i] >> low_shift & 15) |
                                                           (high[i] >> high_shift & 3) << 4);
        }
    }
}

struct BlockType {
    LinearKind kind;
    Fields fields;
};

// By the numbers of `row_types`; rows of floats have none.
constexpr BlockType block_types[] = {
    {}, {}, {},
    {LinearKind::q4_group, copy<18>},    // Q4_0
    {LinearKind::q4_minimum, copy<20>},  // Q4_1
    {LinearKind::q8_group, q5_0},
    {LinearKind::q8_group, q8_0},
    {LinearKind::q4_k, q4_k},
    {LinearKind::q5_k, q5_k},
    {LinearKind::q6_k, q6_k},
    {LinearKind::mxfp4, copy<17>},
    {LinearKind::i8_row, copy<32>},
};

// Fields of `lanes` outputs, `stride` bytes apart, side by side: `count` of them. Moves both on.
template <typename T>
void turn(const uint8_t*& fields, int64_t stride, int64_t lane, int64_t lanes, int64_t count,
          uint8_t*& record) {
    for (int64_t i = 0; i < count; ++i, fields += sizeof(T), record += panel_outputs * sizeof(T)) {
        T values[panel_outputs];
        for (int64_t l = 0; l < lanes; ++l) std::memcpy(values + l, fields + l * stride, sizeof(T));
        std::memcpy(record + lane * static_cast<int64_t>(sizeof(T)), values,
                    static_cast<size_t>(lanes) * sizeof(T));
    }
}

}  // namespace

const char* pack_blocks(const Rows& rows, const LinearWeight& w, int64_t first, uint8_t* panels) {
    const BlockType& t = block_types[rows.type];
    const auto kind = static_cast<LinearKind>(w.kind);
    if (t.fields == nullptr || t.kind != kind) {
        return refuse("rows of type %ld do not become a weight of kind %d", rows.type, w.kind);
    }
    const Record r = record_of(kind);
    const int64_t num_halves = r.looks_up ? 0 : r.bytes_at / (2 * panel_outputs);
    const int64_t num_bytes = r.codes_at / panel_outputs - 2 * num_halves;
    const int64_t num_dwords = (r.bytes - r.codes_at) / (4 * panel_outputs);
    const int64_t block_inputs = row_types[rows.type].inputs;
    const int64_t panel_bytes = w.blob_bytes / num_panels(w);
    each_panel(first, rows.num_rows, [&](int64_t panel, int64_t lane, int64_t i, int64_t lanes) {
        constexpr int64_t stride = 288;  // the largest is Q6_K's, 274
        uint8_t fields[panel_outputs * stride];
        uint8_t* record = panels + panel * panel_bytes;
        for (int64_t input = 0; input < w.num_inputs; input += block_inputs) {
            for (int64_t l = 0; l < lanes; ++l) {
                t.fields(rows.block(i + l, input), fields + l * stride);
            }
            const uint8_t* from = fields;
            turn<uint16_t>(from, stride, lane, lanes, num_halves, record);
            turn<uint8_t>(from, stride, lane, lanes, num_bytes, record);
            turn<uint32_t>(from, stride, lane, lanes, num_dwords, record);
        }
    });
    return nullptr;
}

}  // namespace ec

// Fills outputs [first_output, first_output + num_rows) of a weight, whose other bytes stay: of floats
// with the values of the rows, of groups with their blocks, which must be of that kind.
// rows [num_stored, row_bytes], contiguous; output first_output + i is row order[i] (null: i).
EC_EXPORT const char* ec_pack_rows(const uint8_t* rows, int64_t type, int64_t num_stored,
                                   int64_t row_bytes, const int64_t* order, int64_t num_rows,
                                   int64_t first_output, const ec::LinearWeight* weight) {
    const ec::LinearWeight& w = *weight;
    if (const char* refusal = ec::check_weight(w)) return refusal;
    constexpr int64_t num_types = sizeof ec::row_types / sizeof *ec::row_types;
    if (type < 0 || type >= num_types) {
        return ec::refuse("row type %ld is not in [0, %ld)", type, num_types);
    }
    const ec::RowType& t = ec::row_types[type];
    // groups are whole: what we quantise ourselves ends in zeros
    const int64_t num_inputs =
        ec::is_float(w) ? w.num_inputs : ec::num_groups(w) * ec::group_inputs;
    if (num_inputs % t.inputs != 0 || row_bytes != num_inputs / t.inputs * t.bytes) {
        return ec::refuse("rows of %ld inputs in %ld bytes; a block holds %ld in %ld", num_inputs,
                          row_bytes, t.inputs, t.bytes);
    }
    if (num_rows < 0 || first_output < 0 || first_output + num_rows > w.num_outputs) {
        return ec::refuse("outputs %ld to %ld of %ld", first_output, first_output + num_rows,
                          w.num_outputs);
    }
    if (num_rows == 0) return nullptr;
    if (rows == nullptr) return ec::refuse("rows have no memory");
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t row = order == nullptr ? i : order[i];
        if (row < 0 || row >= num_stored) {
            return ec::refuse("row %ld at %ld is not in [0, %ld)", row, i, num_stored);
        }
    }
    const ec::Rows from{rows, type, row_bytes, order, num_rows};
    auto* panels = const_cast<uint8_t*>(w.blob);
    const auto pack = ec::is_float(w) ? ec::pack_floats : ec::pack_blocks;
    return pack(from, w, first_output, panels);
}
