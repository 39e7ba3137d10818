// The exported product: checks, the quantised copy of its input, and the split into tasks.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "buffers.h"
#include "pool.h"

namespace ec {
namespace {

// Bytes of a packed weight, or -1 for one that does not exist.
int64_t expected_bytes(int32_t kind, int64_t num_outputs, int64_t num_inputs) {
    constexpr int64_t most = int64_t{1} << 28;  // their product, in bytes, is an int64_t
    if (num_outputs < 1 || num_inputs < 1 || num_outputs > most || num_inputs > most) return -1;
    const int64_t panels = (num_outputs + panel_outputs - 1) / panel_outputs;
    if (kind < 0 || kind > static_cast<int32_t>(LinearKind::table_k)) return -1;
    const auto own = static_cast<LinearKind>(kind);
    if (own == LinearKind::f32) return panels * num_inputs * panel_outputs * 4;
    const int64_t groups = (num_inputs + group_inputs - 1) / group_inputs;
    if (own == LinearKind::bf16) return panels * groups * group_inputs * panel_outputs * 2;
    const Record record = record_of(own);
    return panels * (groups / record.groups) * record.bytes;
}

}  // namespace

const char* check_weight(const LinearWeight& w) {
    const int64_t bytes = expected_bytes(w.kind, w.num_outputs, w.num_inputs);
    if (bytes < 0) {
        return refuse("a weight of kind %d with %ld outputs and %ld inputs does not exist", w.kind,
                      w.num_outputs, w.num_inputs);
    }
    const auto kind = static_cast<LinearKind>(w.kind);
    if (record_of(kind).superblock && w.num_inputs % superblock_inputs != 0) {
        return refuse("a weight of kind %d has %ld inputs, a multiple of %ld is needed", w.kind,
                      w.num_inputs, superblock_inputs);
    }
    if (w.blob == nullptr || reinterpret_cast<uintptr_t>(w.blob) % 64 != 0) {
        return refuse("the packed weight at %p is not aligned to 64 bytes",
                      static_cast<const void*>(w.blob));
    }
    if (w.blob_bytes != bytes) {
        return refuse("the packed weight has %ld bytes, kind %d with %ld outputs and %ld inputs "
                      "needs %ld", w.blob_bytes, w.kind, w.num_outputs, w.num_inputs, bytes);
    }
    if (kind == LinearKind::i8_row && w.row_scales == nullptr) {
        return refuse("a weight of kind %d needs a scale for each output", w.kind);
    }
    return nullptr;
}

namespace {

// Panels and rows of a task such that there are about twelve tasks a thread: enough to even out
// threads that are late, few enough that taking one costs nothing. `unit` panels stay together.
struct Split {
    int64_t panels_a_task, panel_tasks, row_tasks, num_rows;
    int64_t row_step = isa() >= Isa::amx ? 32 : 1;  // whole tiles

    Split(int64_t panels, int64_t rows, int64_t unit = 1) : num_rows(rows) {
        const int64_t least_rows = std::max(int64_t{24}, row_step);
        const int64_t wanted = int64_t{12} * num_threads();
        panels_a_task = unit * std::max<int64_t>(1, panels / unit / wanted);
        panel_tasks = (panels + panels_a_task - 1) / panels_a_task;
        row_tasks = panel_tasks >= wanted
                        ? 1
                        : std::max<int64_t>(1, std::min(num_rows / least_rows,
                                                        (wanted + panel_tasks - 1) / panel_tasks));
    }

    // Where part `part` of the rows begins.
    int64_t row(int64_t part) const {
        return part == row_tasks ? num_rows : num_rows * part / row_tasks / row_step * row_step;
    }
};

// What the thread that has task `task` of `w` takes when all threads are equally fast.
Upcoming after_task(const LinearWeight& w, const Split& split, int64_t task,
                    const LinearWeight* next, int64_t num_rows) {
    int node;
    const Share share = share_of(split.panel_tasks * split.row_tasks, task, &node);
    const int64_t ahead = task + share.threads, panel_task = ahead / split.row_tasks;
    if (ahead < share.stop) {
        const bool is_same = panel_task == task / split.row_tasks;
        if (is_same) return {w.blob, 0};
        return upcoming_panel(w, panel_task * split.panels_a_task);
    }
    if (next == nullptr) return {w.blob, 0};
    const Split other(num_panels(*next), num_rows);
    const int64_t num_others = other.panel_tasks * other.row_tasks;
    const int64_t first = share_at(num_others, node).first / other.row_tasks +
                          (ahead - share.stop) / split.row_tasks;
    return upcoming_panel(*next, std::min(first, other.panel_tasks - 1) * other.panels_a_task);
}

// Makes streamed results visible to the thread that waits for the task.
void finish_stream(const Results& results) {
#if EC_X86
    if (results.streams) __builtin_ia32_sfence();
#endif
}

// Calls `multiply(weight, row, results, task)` for all of `w`; rows count from `row` on.
template <typename Multiply>
void run_split(const LinearWeight& w, const LinearWeight* next, int64_t num_rows,
               const Results& results, Multiply&& multiply) {
    const int64_t panels = num_panels(w);
    const Split split(panels, num_rows);
    parallel(split.panel_tasks * split.row_tasks, [&](int64_t task, int) {
        const int64_t panel = task / split.row_tasks * split.panels_a_task;
        const int64_t part = task % split.row_tasks;
        multiply(w, 0, results,
                 LinearTask{panel, std::min(panel + split.panels_a_task, panels), split.row(part),
                            split.row(part + 1), after_task(w, split, task, next, num_rows)});
        finish_stream(results);
    });
}

// One panel as a weight of its own.
LinearWeight panel_of(const LinearWeight& w, int64_t panel) {
    LinearWeight one = w;
    one.num_outputs = panel_outputs;
    one.blob_bytes = w.blob_bytes / num_panels(w);
    one.blob += panel * one.blob_bytes;
    if (w.row_scales != nullptr) one.row_scales += panel * panel_outputs;
    if (w.bias != nullptr) one.bias += panel * panel_outputs;
    return one;
}

// The same for panels of the left half and those of the right half, whose results `gate` joins.
template <typename Multiply>
void run_gated(const LinearWeight& w, const LinearWeight* next, int64_t num_rows,
               const Results& out, const Behind& behind, Multiply&& multiply) {
    constexpr int64_t block_rows = 128, width = 2 * panel_outputs;
    const int64_t pairs = num_panels(w) / 2;
    const Split split(pairs, num_rows);
    parallel(split.panel_tasks * split.row_tasks, [&](int64_t task, int) {
        alignas(64) float both[block_rows * width];
        const int64_t first = task / split.row_tasks * split.panels_a_task;
        const int64_t stop = std::min(first + split.panels_a_task, pairs);
        const int64_t start = split.row(task % split.row_tasks);
        const int64_t row_stop = split.row(task % split.row_tasks + 1);
        for (int64_t pair = first; pair < stop; ++pair) {
            const LinearWeight left = panel_of(w, pair), right = panel_of(w, pairs + pair);
            for (int64_t row = start; row < row_stop; row += block_rows) {
                const int64_t count = std::min(block_rows, row_stop - row);
                const bool is_last = row + count == row_stop;
                const Upcoming later = !is_last          ? Upcoming{w.blob, 0}
                                       : pair + 1 < stop ? upcoming_panel(w, pair + 1)
                                       : after_task(w, split, task, next, num_rows);
                if (behind.then != nullptr)
                    behind.then->fetch(row, row + count, pair * panel_outputs);
                multiply(left, row, Results{both, width},
                         LinearTask{0, 1, 0, count, upcoming_panel(right, 0)});
                multiply(right, row, Results{both + panel_outputs, width},
                         LinearTask{0, 1, 0, count, later});
                float* to =
                    behind.skips_out ? both : out.at + row * out.stride + pair * panel_outputs;
                const int64_t stride = behind.skips_out ? width : out.stride;
                behind.gate(both, both + panel_outputs, width, count, panel_outputs, to, stride);
                if (behind.then != nullptr)
                    behind.then->write_columns(row, count, pair * panel_outputs, to, stride);
            }
        }
    });
}

// The same for heads of q, k and v, each rotated and kept where its rows are multiplied.
template <typename Multiply>
void run_rotated(const LinearWeight& w, const LinearWeight* next, int64_t num_rows,
                 const Results& out, const Rotary& rotary, Multiply&& multiply) {
    constexpr int64_t block_floats = 8192, row_step = 32;
    const int64_t width = rotary.head_size / panel_outputs;
    const int64_t block_rows =
        std::max(row_step, block_floats / rotary.head_size / row_step * row_step);
    const Split split(num_panels(w), num_rows, width);
    parallel(split.panel_tasks * split.row_tasks, [&](int64_t task, int) {
        const int64_t first = task / split.row_tasks * split.panels_a_task;
        const int64_t stop = std::min(first + split.panels_a_task, num_panels(w));
        const int64_t start = split.row(task % split.row_tasks);
        const int64_t row_stop = split.row(task % split.row_tasks + 1);
        for (int64_t panel = first; panel < stop; panel += width) {
            for (int64_t row = start; row < row_stop; row += block_rows) {
                const int64_t count = std::min(block_rows, row_stop - row);
                const bool is_last = row + count == row_stop;
                const Upcoming later = !is_last               ? Upcoming{w.blob, 0}
                                       : panel + width < stop ? upcoming_panel(w, panel + width)
                                       : after_task(w, split, task, next, num_rows);
                fetch_slots(rotary, panel / width, row, row + count);
                multiply(w, row, out.from_row(row),
                         LinearTask{panel, panel + width, 0, count, later});
                rotate(rotary, panel / width, row, row + count);
            }
        }
    });
}

// A task has some `values_a_task`: fewer are not worth a thread's wake-up.
template <typename Fn>
void each_row(int64_t num_rows, int64_t num_inputs, int64_t values_a_task, Fn&& run) {
    const int64_t rows_a_task = std::max<int64_t>(1, values_a_task / num_inputs);
    parallel((num_rows + rows_a_task - 1) / rows_a_task, [&](int64_t task, int) {
        const int64_t stop = std::min((task + 1) * rows_a_task, num_rows);
        for (int64_t row = task * rows_a_task; row < stop; ++row) run(row);
    });
}

// Whether results are more than a second cache holds, and lines are written once and whole.
bool can_stream(const LinearWeight& w, const float* out, int64_t num_rows, int64_t out_stride) {
    constexpr int64_t least_bytes = 4 << 20, line_floats = 16;
    const bool is_once = !is_float(w) || num_steps(w) <= chain_steps;
    return is_once && num_rows * w.num_outputs * 4 >= least_bytes &&
           out_stride % line_floats == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

// Rows that lie a multiple of 4 KiB apart share the few places of a line in the nearest cache, and those
// of a tile drive each other out: a twentieth of the time with AVX2. Many outputs pay for a copy.
bool should_spread(const LinearWeight& w, int64_t num_rows, int64_t x_stride) {
    constexpr int64_t page_floats = 1024, least_rows = 24, least_outputs = 1024;
    constexpr int64_t most_floats = int64_t{1} << 24;  // of the buffer, which stays
    return x_stride % page_floats == 0 && num_rows >= least_rows && w.num_outputs >= least_outputs &&
           num_rows * w.num_inputs <= most_floats;
}

}  // namespace

const char* linear(const LinearWeight& w, const LinearWeight* next, const float* x,
                   const InputRows* ready, int64_t num_rows, int64_t x_stride, int64_t num_inputs,
                   float* out, int64_t out_stride, const Behind& behind) {
    if (const char* refusal = check_weight(w)) return refusal;
    if (num_inputs != w.num_inputs || x_stride < num_inputs || num_rows < 0) {
        return refuse("x is [%ld, %ld] with %ld from row to row, the weight has %ld inputs",
                      num_rows, num_inputs, x_stride, w.num_inputs);
    }
    const int64_t width = behind.gate == nullptr ? w.num_outputs : w.num_outputs / 2;
    if (out_stride < width) {
        return refuse("out has %ld from row to row, it takes %ld", out_stride, width);
    }
    if (behind.gate != nullptr && w.num_outputs % (2 * panel_outputs) != 0) {
        return refuse("a gated product has %ld outputs, they must be a multiple of %ld",
                      w.num_outputs, 2 * panel_outputs);
    }
    if (num_rows == 0) return nullptr;
    if (x == nullptr || out == nullptr) return refuse("x or out has no memory");
    const auto kind = static_cast<LinearKind>(w.kind);
    const auto share = [&](const auto& multiply) {
        const Results whole{out, out_stride};
        if (behind.gate != nullptr) return run_gated(w, next, num_rows, whole, behind, multiply);
        if (behind.rotary != nullptr)
            return run_rotated(w, next, num_rows, whole, *behind.rotary, multiply);
        const bool streams = can_stream(w, out, num_rows, out_stride);
        run_split(w, next, num_rows, {out, out_stride, streams}, multiply);
    };
    if (kind == LinearKind::f32) {
        thread_local Buffer buffer;
        const int64_t stride = spread_stride(num_inputs);
        float* rows = should_spread(w, num_rows, x_stride) ? buffer.try_reserve<float>(num_rows * stride)
                                                           : nullptr;
        if (rows != nullptr) {
            each_row(num_rows, num_inputs, 65536, [&](int64_t row) {
                std::memcpy(rows + row * stride, x + row * x_stride,
                            static_cast<size_t>(num_inputs) * sizeof(float));
            });
            x = rows;
            x_stride = stride;
        }
        share([&](const LinearWeight& part, int64_t row, const Results& results,
                  const LinearTask& task) {
            linear_f32(part, x + row * x_stride, x_stride, results, task);
        });
        return nullptr;
    }
    thread_local InputRows own;
    if (ready == nullptr) {
        if (!own.begin(w, num_rows)) return refuse("no memory for %ld rows of inputs", num_rows);
        const InputRows& rows = own;
        each_row(num_rows, num_inputs, kind == LinearKind::bf16 ? 65536 : 16384, [&](int64_t row) {
            rows.write_row(row, x + row * x_stride, num_inputs);
        });
        ready = &rows;
    }
    share([&](const LinearWeight& part, int64_t row, const Results& results,
              const LinearTask& task) {
        if (kind == LinearKind::bf16) return linear_bf16(part, ready->pairs(row), results, task);
        linear_integer(part, ready->groups(row), results, task);
    });
    return nullptr;
}

bool InputRows::begin(const LinearWeight& w, int64_t num_rows) {
    groups_ = nullptr;
    pairs_ = nullptr;
    const auto kind = static_cast<LinearKind>(w.kind);
    if (kind == LinearKind::f32) return false;
    if (kind == LinearKind::bf16) {
        constexpr int64_t tile_rows = 16;  // what follows the last row has no meaning, but memory
        stride_ = PairedActivations::stride_of(w.num_inputs);
        pairs_ = buffer_.try_reserve<uint32_t>((num_rows + tile_rows - 1) * stride_);
        return pairs_ != nullptr;
    }
    stride_ = num_groups(w) | 1;  // rows of a tile do not drive each other out
    zero_ = record_of(kind).sum_factor;
    groups_ = buffer_.try_reserve<ActivationGroup>(num_rows * stride_);
    return groups_ != nullptr;
}

void InputRows::write_row(int64_t row, const float* values, int64_t num_inputs) const {
    if (pairs_ != nullptr) return round_row(values, num_inputs, pairs_ + row * stride_);
    quantise_row(values, num_inputs, zero_, groups_ + row * stride_);
}

void InputRows::write_columns(int64_t row, int64_t num_rows, int64_t column, const float* values,
                              int64_t values_stride) const {
    if (pairs_ == nullptr) {
        ActivationGroup* first = groups_ + row * stride_ + column / group_inputs;
        return quantise_columns(values, values_stride, num_rows, zero_, first, stride_);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        round_row(values + r * values_stride, group_inputs,
                  pairs_ + (row + r) * stride_ + column / 2);
    }
}

}  // namespace ec

using ec::LinearKind;
using ec::LinearWeight;
using ec::refuse;

EC_EXPORT const char* ec_linear_bytes(int64_t kind, int64_t num_outputs, int64_t num_inputs,
                                      int64_t* bytes) {
    *bytes = ec::expected_bytes(static_cast<int32_t>(kind), num_outputs, num_inputs);
    if (*bytes >= 0) return nullptr;
    return refuse("a weight of kind %ld with %ld outputs and %ld inputs does not exist", kind,
                  num_outputs, num_inputs);
}

EC_EXPORT const char* ec_linear_check(const LinearWeight* weight) {
    return ec::check_weight(*weight);
}

// out [num_rows, num_outputs] = x [num_rows, num_inputs] times weight, plus bias. Strides: floats
// from a row to the next.
EC_EXPORT const char* ec_linear(const LinearWeight* weight, const float* x, int64_t num_rows,
                                int64_t x_stride, int64_t num_inputs, float* out,
                                int64_t out_stride) {
    return ec::linear(*weight, nullptr, x, nullptr, num_rows, x_stride, num_inputs, out, out_stride,
                      {});
}

// For tests: the codes [num_rows, padded to 32] and scales [num_rows, groups] of activations.
EC_EXPORT const char* ec_quantise_activations(const float* x, int64_t num_rows,
                                              int64_t num_inputs, int8_t* codes, float* scales) {
    if (num_rows < 0 || num_inputs < 1) return refuse("x has no inputs");
    const int64_t num_groups = (num_inputs + ec::group_inputs - 1) / ec::group_inputs;
    const std::unique_ptr<ec::ActivationGroup[]> groups(
        new ec::ActivationGroup[static_cast<size_t>(num_groups)]);
    for (int64_t row = 0; row < num_rows; ++row) {
        ec::quantise_row(x + row * num_inputs, num_inputs, 0, groups.get());
        for (int64_t g = 0; g < num_groups; ++g) {
            const ec::ActivationGroup& group = groups[static_cast<size_t>(g)];
            scales[row * num_groups + g] = group.scale;
            std::memcpy(codes + (row * num_groups + g) * ec::group_inputs, group.codes,
                        sizeof group.codes);
        }
    }
    return nullptr;
}
