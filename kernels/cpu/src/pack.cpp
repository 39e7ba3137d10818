// A weight of a checkpoint into panels; linear.h draws them.
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "pool.h"

namespace ec {
namespace {

// 32 inputs of 32 outputs, a line of the cache each, become 16 steps of a panel.
void turn_lines(const uint16_t* from, int64_t stride, int64_t num_outputs, int64_t num_inputs,
                uint32_t* steps) {
    uint32_t lines[panel_outputs][group_inputs / 2] = {};
    for (int64_t n = 0; n < num_outputs; ++n)
        std::memcpy(lines[n], from + n * stride, static_cast<size_t>(num_inputs) * 2);
    for (int64_t pair = 0; pair < group_inputs / 2; ++pair)
        for (int64_t n = 0; n < panel_outputs; ++n) steps[pair * panel_outputs + n] = lines[n][pair];
}

}  // namespace
}  // namespace ec

// weight [num_outputs, num_inputs] of bfloat16, contiguous -> blob, a whole `bf16` weight.
EC_EXPORT const char* ec_pack_bf16(const uint16_t* weight, int64_t num_outputs, int64_t num_inputs,
                                   uint8_t* blob, int64_t blob_bytes) {
    using namespace ec;
    const LinearWeight w{static_cast<int32_t>(LinearKind::bf16), 0, num_outputs, num_inputs, blob,
                         blob_bytes, nullptr, nullptr};
    if (const char* refusal = check_weight(w)) return refusal;
    if (weight == nullptr) return refuse("the weight has no memory");
    const int64_t groups = num_groups(w);
    parallel(num_panels(w), [&](int64_t panel, int) {
        const int64_t n = panel * panel_outputs;
        auto* steps = reinterpret_cast<uint32_t*>(blob) + panel * num_steps(w) * panel_outputs;
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t k = g * group_inputs;
            turn_lines(weight + n * num_inputs + k, num_inputs,
                       std::min(panel_outputs, num_outputs - n),
                       std::min(group_inputs, num_inputs - k),
                       steps + g * group_inputs / 2 * panel_outputs);
        }
    });
    return nullptr;
}
