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

// Eight bytes, or four, at a time: of each all bits, of which `mask` keeps its own.
template <typename T = uint64_t>
T word(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <typename T>
void store(T value, uint8_t* to) {
    std::memcpy(to, &value, sizeof value);
}
template <typename T = uint64_t>
constexpr T each_byte(uint8_t mask) {
    return static_cast<T>(0x0101010101010101) * mask;
}

void q8_0(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, 2);
    for (int i = 2; i < 34; i += 8) store(word(block + i) ^ each_byte(0x80), fields + i);
}

// scale * (code - 16) as scale * code; bit i of four bytes is the fifth of input i.
void q5_0(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, 2);
    for (int i = 0; i < 4; ++i) {
        const uint64_t bits = block[2 + i];
        const uint64_t fifths = ((bits & 127) * 0x0002040810204081 & each_byte(1)) | bits >> 7 << 56;
        const uint64_t nibbles = word(block + 6 + i % 2 * 8) >> (i / 2 * 4) & each_byte(15);
        store((nibbles | fifths << 4) + each_byte(112), fields + 2 + 8 * i);
    }
}

// Of Q4_K and Q5_K: f16 d and dmin, then 6 bits each of 8 scales and 8 minima.
void superblock_scales(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, 4);
    constexpr auto low = each_byte<uint32_t>(15), high = each_byte<uint32_t>(48);
    const auto scales = word<uint32_t>(block + 4), minima = word<uint32_t>(block + 8);
    const auto both = word<uint32_t>(block + 12);
    store(scales & (low | high), fields + 4);
    store((both & low) | (scales >> 2 & high), fields + 8);
    store(minima & (low | high), fields + 12);
    store((both >> 4 & low) | (minima >> 2 & high), fields + 16);
}

// 32 bytes hold group 2i in their low halves and group 2i + 1 in their high ones; groups of fields lie
// `stride` apart.
void nibbles_of_pairs(const uint8_t* pairs, uint8_t* groups, int64_t stride) {
    constexpr uint64_t low = each_byte(15), high = ~low;
    for (int pair = 0; pair < 4; ++pair, pairs += 32, groups += 2 * stride) {
        for (int i = 0; i < 16; i += 8) {
            const uint64_t first = word(pairs + i), second = word(pairs + 16 + i);
            store((first & low) | (second & low) << 4, groups + i);
            store((first & high) >> 4 | (second & high), groups + stride + i);
        }
    }
}

void q4_k(const uint8_t* block, uint8_t* fields) {
    superblock_scales(block, fields);
    nibbles_of_pairs(block + 16, fields + 20, 16);
}

// Of group g: bit g of byte i is that of input i.
uint32_t plane_of(const uint8_t* bytes, int g) {
    uint32_t plane = 0;
    for (int i = 0; i < 8; ++i) {  // the halves of a group take turns
        const auto bits = word<uint32_t>(bytes + i % 2 * 16 + i / 2 * 4);
        plane |= (bits >> g & each_byte<uint32_t>(1)) << i;
    }
    return plane;
}

void q5_k(const uint8_t* block, uint8_t* fields) {
    superblock_scales(block, fields);
    nibbles_of_pairs(block + 48, fields + 20, 20);
    for (int g = 0; g < 8; ++g) {
        store(plane_of(block + 16, g), fields + 36 + 20 * g);
    }
}

// Of each half: 64 bytes of low nibbles, 32 of pairs of high bits.
void q6_k(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block + 208, 2);
    std::memcpy(fields + 2, block + 192, 16);
    fields += 18;
    for (int g = 0; g < 8; ++g) {
        const uint8_t* low = block + g / 4 * 64 + g % 2 * 32;
        const uint8_t* high = block + 128 + g / 4 * 32;
        const auto codes = [&](int i) {
            const uint64_t nibbles = word(low + i) >> (g % 4 / 2 * 4) & each_byte(15);
            return nibbles | (word(high + i) >> (g % 4 * 2) & each_byte(3)) << 4;
        };
        for (int i = 0; i < 32; i += 16, fields += 12) {
            const uint64_t first = codes(i), last = codes(i + 8);
            const uint64_t fourth = last >> 32, pair = each_byte<uint32_t>(3);
            const uint64_t pairs = (fourth & pair) | (fourth >> 2 & pair) << 32;
            store(first | pairs << 6, fields);
            store(static_cast<uint32_t>(last | (fourth >> 4 & pair) << 6), fields + 8);
        }
    }
}

// Codes of 2 bits and, unless null, a plane of third ones: groups g of `low` lie two bits apart in 32
// bytes for four, bits of `high` as Q5_K's fifth ones.
void two_bits(const uint8_t* low, const uint8_t* high, uint8_t* fields) {
    for (int g = 0; g < 8; ++g) {
        for (int half = 0; half < 2; ++half, fields += 4) {
            uint32_t pairs = 0;
            for (int j = 0; j < 4; ++j) {
                const auto four = word<uint32_t>(low + g / 4 * 32 + 16 * half + 4 * j);
                pairs |= (four >> (g % 4 * 2) & each_byte<uint32_t>(3)) << (2 * j);
            }
            store(pairs, fields);
        }
        if (high == nullptr) continue;
        store(plane_of(high, g), fields);
        fields += 4;
    }
}

// 16 scales of 6 bits: low and high halves of 8 bytes, then pairs of bits, four apart.
void q3_k(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block + 108, 2);
    for (int i = 0; i < 16; ++i) {
        const int low = block[96 + i % 8] >> (i / 8 * 4) & 15;
        const int high = block[104 + i % 4] >> (i / 4 * 2) & 3;
        fields[2 + i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    two_bits(block + 32, block, fields + 18);
}

void q2_k(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block + 80, 4);
    std::memcpy(fields + 4, block, 16);
    two_bits(block + 16, nullptr, fields + 20);
}

void iq4_xs(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, 2);
    for (int g = 0; g < 8; ++g) {
        const int low = block[4 + g / 2] >> (g % 2 * 4) & 15, high = block[2 + g / 4] >> (g % 4 * 2) & 3;
        fields[2 + g] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    std::memcpy(fields + 10, block + 8, 128);
}

// Bit i of four bytes is the fifth of input i.
void q5_1(const uint8_t* block, uint8_t* fields) {
    std::memcpy(fields, block, 4);
    std::memcpy(fields + 4, block + 8, 16);
    const auto fifths = word<uint32_t>(block + 4);
    uint32_t plane = 0;
    for (int i = 0; i < 32; ++i) plane |= (fifths >> i & 1) << (i % 4 * 8 + i % 16 / 4 * 2 + i / 16);
    store(plane, fields + 20);
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
    {LinearKind::q5_minimum, q5_1},
    {LinearKind::iq4_group, copy<18>},
    {LinearKind::iq4_k, iq4_xs},
    {LinearKind::q3_k, q3_k},
    {LinearKind::q2_k, q2_k},
    {LinearKind::table_k, copy<146>},  // behind it: 20 bytes of the record's line, the same in all blocks
};

// Values of `lanes` outputs, which lie `stride` bytes apart, side by side from `lane` on: `count` of
// them. Moves both on.
template <typename T>
void turn(const uint8_t*& fields, int64_t stride, int64_t lane, int64_t lanes, int64_t count,
          uint8_t*& record) {
    constexpr int64_t size = sizeof(T);
    for (int64_t i = 0; i < count; ++i, fields += size, record += panel_outputs * size)
        for (int64_t l = 0; l < lanes; ++l)
            std::memcpy(record + (lane + l) * size, fields + l * stride, sizeof(T));
}

typedef uint32_t Four __attribute__((vector_size(16)));

// The same of a whole panel, four by four.
void turn_dwords(const uint8_t* fields, int64_t stride, int64_t count, uint8_t* record) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        for (int64_t l = 0; l < panel_outputs; l += 4) {
            Four a[4];
            for (int k = 0; k < 4; ++k) std::memcpy(a + k, fields + (l + k) * stride + 4 * i, 16);
            const Four low01 = EC_SHUFFLE_4(a[0], a[1], 0, 4, 1, 5);
            const Four low23 = EC_SHUFFLE_4(a[2], a[3], 0, 4, 1, 5);
            const Four high01 = EC_SHUFFLE_4(a[0], a[1], 2, 6, 3, 7);
            const Four high23 = EC_SHUFFLE_4(a[2], a[3], 2, 6, 3, 7);
            const Four out[4] = {
                EC_SHUFFLE_4(low01, low23, 0, 1, 4, 5), EC_SHUFFLE_4(low01, low23, 2, 3, 6, 7),
                EC_SHUFFLE_4(high01, high23, 0, 1, 4, 5), EC_SHUFFLE_4(high01, high23, 2, 3, 6, 7)};
            for (int k = 0; k < 4; ++k)
                std::memcpy(record + ((i + k) * panel_outputs + l) * 4, out + k, 16);
        }
    }
    fields += 4 * i;
    record += i * panel_outputs * 4;
    turn<uint32_t>(fields, stride, 0, panel_outputs, count - i, record);
}

}  // namespace

const char* pack_blocks(const Rows& rows, const LinearWeight& w, int64_t first, uint8_t* panels) {
    const BlockType& t = block_types[rows.type];
    const auto kind = static_cast<LinearKind>(w.kind);
    if (t.fields == nullptr || t.kind != kind) {
        return refuse("rows of type %ld do not become a weight of kind %d", rows.type, w.kind);
    }
    const Record r = record_of(kind);
    const int64_t num_halves = r.table == Table::e2m1 ? 0 : r.table_at / (2 * panel_outputs);
    const int64_t line_bytes = r.bytes_at - r.table_at;
    const int64_t num_bytes = (r.codes_at - line_bytes) / panel_outputs - 2 * num_halves;
    const int64_t num_dwords = (r.bytes - r.codes_at) / (4 * panel_outputs);
    const RowType row_type = row_types[rows.type];
    const int64_t panel_bytes = w.blob_bytes / num_panels(w);
    each_panel(first, rows.num_rows, [&](int64_t panel, int64_t lane, int64_t i, int64_t lanes) {
        constexpr int64_t stride = 288;  // the largest is Q6_K's, 210
        uint8_t fields[panel_outputs * stride];
        uint8_t* record = panels + panel * panel_bytes;
        for (int64_t input = 0; input < w.num_inputs; input += row_type.inputs) {
            for (int64_t l = 0; l < lanes; ++l) {
                const uint8_t* block = rows.block(i + l, input);
                // more rows than the processor fetches ahead of by itself
                for (int64_t at = 0; at < row_type.bytes; at += 64)
                    __builtin_prefetch(block + row_type.bytes + at);
                t.fields(block, fields + l * stride);
            }
            const uint8_t* from = fields;
            turn<uint16_t>(from, stride, lane, lanes, num_halves, record);
            if (line_bytes != 0) {
                std::memset(record, 0, static_cast<size_t>(line_bytes));
                std::memcpy(record, rows.block(i, input) + 146, 20);
                record += line_bytes;
            }
            turn<uint8_t>(from, stride, lane, lanes, num_bytes, record);
            if (lanes == panel_outputs) {
                turn_dwords(from, stride, num_dwords, record);
                record += num_dwords * panel_outputs * 4;
            } else {
                turn<uint32_t>(from, stride, lane, lanes, num_dwords, record);
            }
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
