// Rows of a packed weight in float32: an embedding that is also the last product of a model.
//
// Each value is what gguf's reference dequantisation gives, operation by operation.
#include <algorithm>
#include <cinttypes>

#include "half.h"
#include "linear.h"
#include "pool.h"

namespace ec {
namespace {

constexpr int64_t line = panel_outputs * 4;  // bytes from four inputs of a panel to the next four
constexpr int64_t halves = panel_outputs * 2;
constexpr int64_t in_superblock = superblock_inputs / group_inputs;

// Codes of 16 inputs a half, `lane` the output within its panel.
void read_bytes(const uint8_t* codes, int64_t lane, uint8_t (&group)[32]) {
    for (int64_t i = 0; i < 32; ++i) group[i] = codes[i / 4 * line + lane * 4 + i % 4];
}

void read_nibbles(const uint8_t* codes, int64_t lane, uint8_t (&group)[32]) {
    for (int64_t i = 0; i < 16; ++i) {
        const uint8_t both = codes[i / 4 * line + lane * 4 + i % 4];
        group[i] = both & 15;
        group[16 + i] = both >> 4;
    }
}

// 32 values of the group at input 32 * g.
void read_group(const LinearWeight& w, const uint8_t* panel, int64_t lane, float row_scale,
                int64_t g, float (&values)[32]) {
    uint8_t codes[32];
    switch (static_cast<LinearKind>(w.kind)) {
        case LinearKind::i8_row: {
            read_bytes(panel + g * 8 * line, lane, codes);
            for (int i = 0; i < 32; ++i)
                values[i] = row_scale * static_cast<float>(codes[i] - 128);
            return;
        }
        case LinearKind::q8_group: {
            const uint8_t* record = panel + g * (halves + 8 * line);
            const float scale = half_at(record + 2 * lane);
            read_bytes(record + halves, lane, codes);
            for (int i = 0; i < 32; ++i) values[i] = scale * static_cast<float>(codes[i] - 128);
            return;
        }
        case LinearKind::q4_group: {
            const uint8_t* record = panel + g * (halves + 4 * line);
            const float scale = half_at(record + 2 * lane);
            read_nibbles(record + halves, lane, codes);
            for (int i = 0; i < 32; ++i) values[i] = scale * static_cast<float>(codes[i] - 8);
            return;
        }
        case LinearKind::q4_minimum: {
            const uint8_t* record = panel + g * (2 * halves + 4 * line);
            const float scale = half_at(record + 2 * lane);
            const float minimum = half_at(record + halves + 2 * lane);
            read_nibbles(record + 2 * halves, lane, codes);
            for (int i = 0; i < 32; ++i)
                values[i] = scale * static_cast<float>(codes[i]) + minimum;
            return;
        }
        case LinearKind::q4_k: {
            constexpr int64_t bytes_at = 2 * halves;
            constexpr int64_t codes_at = bytes_at + 2 * in_superblock * panel_outputs;
            const uint8_t* record =
                panel + g / in_superblock * (codes_at + in_superblock * 4 * line);
            const uint8_t* factors = record + bytes_at + g % in_superblock * panel_outputs + lane;
            const float scale = half_at(record + 2 * lane) * static_cast<float>(factors[0]);
            const float minimum = half_at(record + halves + 2 * lane) *
                                  static_cast<float>(factors[in_superblock * panel_outputs]);
            read_nibbles(record + codes_at + g % in_superblock * 4 * line, lane, codes);
            for (int i = 0; i < 32; ++i)
                values[i] = scale * static_cast<float>(codes[i]) - minimum;
            return;
        }
        case LinearKind::q6_k: {
            constexpr int64_t bytes_at = halves;
            constexpr int64_t codes_at = bytes_at + 2 * in_superblock * panel_outputs;
            const uint8_t* record =
                panel + g / in_superblock * (codes_at + in_superblock * 8 * line);
            const uint8_t* factors =
                record + bytes_at + g % in_superblock * 2 * panel_outputs + lane;
            const float d = half_at(record + 2 * lane);
            const float low = d * static_cast<float>(static_cast<int8_t>(factors[0]));
            const float high =
                d * static_cast<float>(static_cast<int8_t>(factors[panel_outputs]));
            read_bytes(record + codes_at + g % in_superblock * 8 * line, lane, codes);
            for (int i = 0; i < 32; ++i)
                values[i] = (i < 16 ? low : high) * static_cast<float>(codes[i] - 32);
            return;
        }
        case LinearKind::f32:
            return;  // not in groups
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
    if (num_ids < 0) return ec::refuse("%" PRId64 " ids: there cannot be fewer than 0", num_ids);
    if (num_ids == 0) return nullptr;
    if (ids == nullptr || out == nullptr) return ec::refuse("ids or out has no memory");
    for (int64_t i = 0; i < num_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= w.num_outputs) {
            return ec::refuse("id %" PRId64 " at %" PRId64 " is not in [0, %" PRId64 ")", ids[i],
                              i, w.num_outputs);
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
