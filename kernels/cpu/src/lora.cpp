// Shrink (A x) and expand (B h) of all adapters of a step: one call of the thread pool each.
#include "lora.h"

#include <algorithm>
#include <vector>

#include "buffers.h"
#include "pool.h"

namespace ec {
namespace {

constexpr int64_t rows_a_task = 48;
constexpr int64_t products_a_task = 1 << 16;  // less is not worth a thread's wake-up

// A piece of a product: `weight` times rows of `x`, added to or written into `out`.
struct Piece {
    const LinearWeight* weight;
    const float* x;
    int64_t x_stride;
    Results out;
    LinearTask task;
};

void cut(std::vector<Piece>& pieces, const LinearWeight& w, const float* x, int64_t x_stride,
         const Results& out, int64_t num_rows) {
    const int64_t panels = num_panels(w), rows = std::min(num_rows, rows_a_task);
    const int64_t panel_products = panel_outputs * w.num_inputs * rows;
    const int64_t step = std::max<int64_t>(1, products_a_task / panel_products);
    for (int64_t row = 0; row < num_rows; row += rows_a_task) {
        const int64_t row_stop = std::min(row + rows_a_task, num_rows);
        for (int64_t panel = 0; panel < panels; panel += step) {
            pieces.push_back({&w, x, x_stride, out,
                              {panel, std::min(panel + step, panels), row, row_stop, {w.blob, 0}}});
        }
    }
}

void run(const std::vector<Piece>& pieces) {
    parallel(static_cast<int64_t>(pieces.size()), [&](int64_t i, int) {
        const Piece& p = pieces[static_cast<size_t>(i)];
        linear_f32(*p.weight, p.x, p.x_stride, p.out, p.task);
    });
}

}  // namespace
}  // namespace ec

EC_EXPORT const char* ec_lora(const ec::LoraStack* stack, const float* x, int64_t x_stride,
                              int64_t num_rows, float* out, int64_t out_stride) {
    const ec::LoraStep& step = *stack->step;
    if (step.num_segments == 0) return nullptr;
    int64_t width = 0;
    for (int64_t i = 0; i < step.num_segments; ++i) {
        const ec::LoraSegment& s = step.segments[i];
        if (s.slot < 0 || s.slot >= stack->num_slots || s.start < 0 || s.stop > num_rows) {
            return ec::refuse("rows [%ld, %ld) of %ld have adapter slot %ld of %ld", s.start, s.stop,
                              num_rows, s.slot, stack->num_slots);
        }
        const ec::LinearWeight* a = stack->slots[s.slot].a;
        if (a != nullptr) width = std::max(width, a->num_outputs);
    }
    if (width == 0) return nullptr;
    thread_local ec::Buffer buffer;
    auto* hidden = buffer.try_reserve<float>(num_rows * width);
    if (hidden == nullptr) return ec::refuse("no memory for %ld rows of adapters", num_rows);
    thread_local std::vector<ec::Piece> shrink, expand;
    shrink.clear();
    expand.clear();
    for (int64_t i = 0; i < step.num_segments; ++i) {
        const ec::LoraSegment& s = step.segments[i];
        const ec::LoraSlot& slot = stack->slots[s.slot];
        if (slot.a == nullptr) continue;
        const int64_t rows = s.stop - s.start;
        float* h = hidden + s.start * width;
        ec::cut(shrink, *slot.a, x + s.start * x_stride, x_stride, {h, width}, rows);
        for (int64_t p = 0; p < slot.num_parts; ++p) {
            const ec::LinearWeight& b = slot.b[p];
            float* to = out + s.start * out_stride + slot.columns[p];
            ec::cut(expand, b, h, width, {to, out_stride, false, true}, rows);
            h += b.num_inputs;
        }
    }
    ec::run(shrink);
    ec::run(expand);
    return nullptr;
}
