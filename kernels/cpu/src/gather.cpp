// Rows of a packed weight in float32: an embedding that is also the last product of a model.
//
// Each value is what gguf's reference dequantisation gives, operation by operation.
#include <algorithm>
#include <cstring>

#include "half.h"
#include "linear.h"
#include "pool.h"

namespace ec {
namespace {

constexpr int64_t line = panel_outputs * 4;  // bytes from four inputs of a panel to the next four

// Codes of a group whose bytes are at `from`, `lane` the output within its panel.
void read_codes(const Record& r, const uint8_t* from, int64_t lane, uint8_t (&group)[32]) {
    for (int i = 0; i < 32; ++i) {
        const int half = i / 16, j = i % 16 / 4;
        const auto byte = [&](int64_t dword) -> uint32_t {
            return from[dword * line + lane * 4 + i % 4];
        };
        const auto two = [&](int k) { return byte(3 * half + k) >> 6 << (2 * k); };
        uint32_t code = r.bits == 8   ? byte(i / 4)
                        : r.bits == 4 ? byte(j) >> (4 * half) & 15
                        : r.bits == 2 ? byte(half) >> (2 * j) & 3
                        : j < 3       ? byte(3 * half + j) & 63
                                      : two(0) | two(1) | two(2);
        if (r.plane) code |= (byte(r.bits) >> (2 * j + half) & 1) << r.bits;
        group[i] = static_cast<uint8_t>(code);
    }
}

// 32 values of the group at input 32 * g.
void read_group(const LinearWeight& w, const uint8_t* panel, int64_t lane, float row_scale,
                int64_t g, float (&values)[32]) {
    const auto kind = static_cast<LinearKind>(w.kind);
    const Record r = record_of(kind);
    const uint8_t* record = panel + g / r.groups * r.bytes;
    const int64_t group = g % r.groups;
    uint8_t codes[32];
    read_codes(r, record + r.codes_at + group * r.group_bytes, lane, codes);
    const uint8_t* tables[] = {nullptr, e2m1_codes, iq4_codes, record + r.table_at};
    if (const uint8_t* table = tables[static_cast<int>(r.table)])
        for (uint8_t& code : codes) code = table[code];
    float low = r.row_scale                ? row_scale
                : r.table == Table::e2m1   ? half_of_power(record[lane])
                                           : half_at(record + 2 * lane);
    if (r.table == Table::own) {
        float factor;
        std::memcpy(&factor, record + r.table_at + 16, 4);
        low *= factor;
    }
    float high = low;
    float low_minimum = r.minimum ? half_at(record + 2 * (panel_outputs + lane)) : 0;
    float high_minimum = low_minimum;
    const uint8_t* factors = record + r.bytes_at + group * panel_outputs + lane;
    const auto number = [](int byte) { return static_cast<float>(byte); };
    if (r.halves) {
        factors += group * panel_outputs;
        const uint8_t first = factors[0], second = factors[panel_outputs];
        low *= number(r.minimum ? first & 15 : static_cast<int8_t>(first));
        high *= number(r.minimum ? second & 15 : static_cast<int8_t>(second));
        low_minimum *= -number(first >> 4);
        high_minimum *= -number(second >> 4);
    } else if (r.superblock) {
        low = high = low * number(r.minimum ? factors[0] : static_cast<int8_t>(factors[0]));
        if (r.minimum) high_minimum = low_minimum *= -number(factors[r.groups * panel_outputs]);
    }
    for (int i = 0; i < 32; ++i) {
        values[i] = (i < 16 ? low : high) * static_cast<float>(codes[i] - r.zero);
        if (r.minimum) values[i] += i < 16 ? low_minimum : high_minimum;
    }
}

void read_row(const LinearWeight& w, int64_t row, float* out) {
    const int64_t lane = row % panel_outputs;
    const uint8_t* panel = w.blob + row / panel_outputs * (w.blob_bytes / num_panels(w));
    const auto kind = static_cast<LinearKind>(w.kind);
    if (kind == LinearKind::f32) {
        const auto* from = reinterpret_cast<const float*>(panel) + lane;
        for (int64_t i = 0; i < w.num_inputs; ++i) out[i] = from[i * panel_outputs];
        return;
    }
    if (kind == LinearKind::bf16) {
        const auto* from = reinterpret_cast<const uint16_t*>(panel) + 2 * lane;
        for (int64_t i = 0; i < w.num_inputs; ++i) {
            const uint32_t bits = uint32_t{from[i / 2 * 2 * panel_outputs + i % 2]} << 16;
            std::memcpy(out + i, &bits, 4);
        }
        return;
    }
    const float row_scale = kind == LinearKind::i8_row ? w.row_scales[row] : 1;
    for (int64_t g = 0; g < num_groups(w); ++g) {
        float values[32];
        read_group(w, panel, lane, row_scale, g, values);
        const int64_t first = g * group_inputs;
        std::copy_n(values, std::min(group_inputs, w.num_inputs - first), out + first);
    }
}

}  // namespace
}  // namespace ec

// out [num_ids, num_inputs] (contiguous) = rows of the weight, without its bias.
EC_EXPORT const char* ec_embedding_packed(const ec::LinearWeight* weight, const int64_t* ids,
                                          int64_t num_ids, float* out) {
    const ec::LinearWeight& w = *weight;
    if (const char* refusal = ec::check_weight(w)) return refusal;
    if (num_ids < 0) return ec::refuse("%ld ids: there cannot be fewer than 0", num_ids);
    if (num_ids == 0) return nullptr;
    if (ids == nullptr || out == nullptr) return ec::refuse("ids or out has no memory");
    for (int64_t i = 0; i < num_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= w.num_outputs) {
            return ec::refuse("id %ld at %ld is not in [0, %ld)", ids[i], i, w.num_outputs);
        }
    }
    constexpr int64_t ids_a_task = 16;  // each touches thousands of lines of memory
    ec::parallel((num_ids + ids_a_task - 1) / ids_a_task, [&](int64_t task, int) {
        const int64_t stop = std::min((task + 1) * ids_a_task, num_ids);
        for (int64_t i = task * ids_a_task; i < stop; ++i) {
            ec::read_row(w, ids[i], out + i * w.num_inputs);
        }
    });
    return nullptr;
}
