// Runs a captured forward pass: one call from Python a step, whatever the number of layers.
//
// Each operation is the function that Python would have called, with the same checks and the same
// bits, or two are run as one. What a product reads is made ready by the operation before it.
// Between two of them nothing happens, so that the pool's threads are still awake.
#include "graph.h"

#include <algorithm>
#include <utility>

#include "dispatch.h"
#include "row_chunks.h"
#include "tiles.h"

namespace {

// The weight of the first product from operation `i` on, or null.
const ec::LinearWeight* next_weight(const ec::GraphStep& step, int64_t i) {
    for (; i < step.num_ops; ++i) {
        if (step.ops[i].kind == static_cast<int64_t>(ec::GraphOpKind::linear))
            return static_cast<const ec::LinearWeight*>(step.ops[i].operand);
    }
    return nullptr;
}

// Of gated activations as `gated_rows` counts them; -1 for other operations.
int gated_kind(const ec::GraphOp& op) {
    switch (static_cast<ec::GraphOpKind>(op.kind)) {
        case ec::GraphOpKind::silu:
            return 0;
        case ec::GraphOpKind::gelu_tanh:
            return 1;
        case ec::GraphOpKind::gelu:
            return 2;
        default:
            return -1;
    }
}

ec::Norm norm_of(const ec::GraphOp& op) {
    const auto kind = static_cast<ec::GraphOpKind>(op.kind);
    const bool is_rms =
        kind == ec::GraphOpKind::rms_norm || kind == ec::GraphOpKind::add_rms_norm;
    return is_rms ? ec::Norm::rms : ec::Norm::layer;
}

// Rows that an operation makes ready for the product just behind it.
class ReadyRows {
public:
    // Of this operation's `subject`; or null. Asked once, before it makes rows of its own.
    const ec::InputRows* take() { return std::exchange(made_, nullptr); }

    // For operation `i`, if it is a product that reads `num_rows` rows [size] at `x` and nothing
    // but these; or null.
    const ec::InputRows* make(const ec::GraphStep& step, int64_t i, const float* x, int64_t size,
                              int64_t num_rows) {
        if (i >= step.num_ops || size % ec::group_inputs != 0) return nullptr;
        const ec::GraphOp& op = step.ops[i];
        if (op.kind != static_cast<int64_t>(ec::GraphOpKind::linear)) return nullptr;
        const auto& weight = *static_cast<const ec::LinearWeight*>(op.operand);
        if (op.subject != x || op.stride != size || weight.num_inputs != size) return nullptr;
        is_second_ = !is_second_;  // the other may be being read
        if (rows_[is_second_].begin(weight, num_rows)) made_ = &rows_[is_second_];
        return made_;
    }

private:
    ec::InputRows rows_[2];
    bool is_second_ = false;
    const ec::InputRows* made_ = nullptr;
};

thread_local ReadyRows ready_rows;

// Whether an operation from `i` on reads what lies in rows [size] at `x` now.
bool is_read(const ec::GraphStep& step, int64_t i, const float* x, int64_t size) {
    const auto is_in_a_row = [&](const float* at) { return at >= x && at < x + size; };
    for (; i < step.num_ops; ++i) {
        const ec::GraphOp& op = step.ops[i];
        if (is_in_a_row(op.subject)) return true;
        if (is_in_a_row(op.out)) return gated_kind(op) < 0;
    }
    return false;
}

const char* overwrite_given_rows(const ec::GraphStep& step, const ec::GraphOp& c) {
    if (step.num_given > 0 && step.given_size != c.size) {
        return ec::refuse("given rows have %ld columns, they replace rows of %ld", step.given_size,
                          c.size);
    }
    for (int64_t i = 0; i < step.num_given; ++i) {
        const int64_t place = step.given_places[i];
        if (place < 0 || place >= step.num_tokens) {
            return ec::refuse("row %ld is given, the step has %ld", place, step.num_tokens);
        }
        std::copy_n(step.given_rows + i * c.size, c.size, c.out + place * c.out_stride);
    }
    return nullptr;
}

// The rows move up within `out`; how many there are then is `num_rows`.
const char* take_rows(const ec::GraphStep& step, const ec::GraphOp& c, int64_t& num_rows) {
    if (step.output_rows == nullptr) return nullptr;
    for (int64_t i = 0, least = 0; i < step.num_output_rows; ++i) {
        const int64_t row = step.output_rows[i];
        if (row < least || row >= step.num_tokens) {
            return ec::refuse("output row %ld at %ld is not in [%ld, %ld)", row, i, least,
                              step.num_tokens);
        }
        least = row + 1;
        if (row != i) std::copy_n(c.out + row * c.out_stride, c.size, c.out + i * c.out_stride);
    }
    num_rows = step.num_output_rows;
    return nullptr;
}

// What attention or a rotation is planned by.
const AttentionGeometry* planned(const ec::GraphStep& step, const ec::GraphOp& c,
                                 int64_t num_rows) {
    return num_rows == step.num_tokens ? c.geometry : step.output_geometry;
}

// Whether operation `i` and the next are run as one, which never writes the product itself.
bool is_gated_product(const ec::GraphStep& step, int64_t num_rows, int64_t i) {
    constexpr int64_t least_rows = 48;  // below, rows of both halves stay in a cache anyway
    return num_rows >= least_rows && i + 1 < step.num_ops &&
           gated_kind(step.ops[i + 1]) >= 0 && step.ops[i + 1].number == 1.0f;
}

// Of a rotation as the step has it.
ec::Rotary rotary_of(const ec::GraphStep& step, int64_t num_rows, int64_t i) {
    ec::Rotary rotary = *static_cast<const ec::Rotary*>(step.ops[i].operand);
    rotary.positions = step.positions;
    rotary.slots = step.ops[i].geometry->slots;
    rotary.num_tokens = num_rows;
    return rotary;
}

// Whether the next operation rotates what this one multiplies, in heads of whole panels.
bool is_rotated_product(const ec::GraphStep& step, int64_t num_rows, int64_t i) {
    constexpr int64_t least_rows = 48;  // below, there are too few tasks
    const ec::GraphOp& c = step.ops[i];
    if (num_rows < least_rows || num_rows != step.num_tokens || i + 1 >= step.num_ops ||
        c.kind != static_cast<int64_t>(ec::GraphOpKind::linear) ||
        step.ops[i + 1].kind != static_cast<int64_t>(ec::GraphOpKind::rotary) ||
        step.ops[i + 1].geometry->num_tokens != num_rows)
        return false;
    const auto& rotary = *static_cast<const ec::Rotary*>(step.ops[i + 1].operand);
    return rotary.qkv == c.out && rotary.qkv_stride == c.out_stride &&
           rotary.head_size % ec::panel_outputs == 0 &&
           static_cast<const ec::LinearWeight*>(c.operand)->num_outputs ==
               rotary.num_heads() * rotary.head_size;
}

const char* run_rotated_product(const ec::GraphStep& step, int64_t num_rows, int64_t i) {
    const ec::GraphOp& c = step.ops[i];
    const auto& weight = *static_cast<const ec::LinearWeight*>(c.operand);
    const ec::Rotary rotary = rotary_of(step, num_rows, i + 1);
    if (const char* refusal = ec::check_rotary(&rotary)) return refusal;
    ec::Behind behind;
    behind.rotary = &rotary;
    return ec::linear(weight, next_weight(step, i + 2), c.subject, ready_rows.take(), num_rows,
                      c.stride, weight.num_inputs, c.out, c.out_stride, behind);
}

const char* run_gated_product(const ec::GraphStep& step, int64_t num_rows, int64_t i) {
    const ec::GraphOp &c = step.ops[i], &gate = step.ops[i + 1];
    const auto& weight = *static_cast<const ec::LinearWeight*>(c.operand);
    const ec::InputRows* ready = ready_rows.take();
    ec::Behind behind;
    behind.gate = ec::gated_rows(gated_kind(gate));
    behind.then = ready_rows.make(step, i + 2, gate.out, gate.size, num_rows);
    behind.skips_out = behind.then != nullptr && !is_read(step, i + 3, gate.out, gate.size);
    return ec::linear(weight, next_weight(step, i + 2), c.subject, ready, num_rows, c.stride,
                      weight.num_inputs, gate.out, gate.size, behind);
}

// `num_rows`: of the activations; fewer than the step's tokens behind `take_rows`.
const char* run_op(const ec::GraphStep& step, int64_t& num_rows, int64_t i) {
    const ec::GraphOp& c = step.ops[i];
    const ec::InputRows* ready = ready_rows.take();
    const auto then = [&](const float* rows, int64_t size) {
        return ready_rows.make(step, i + 1, rows, size, num_rows);
    };
    switch (static_cast<ec::GraphOpKind>(c.kind)) {
        case ec::GraphOpKind::embedding:
            return ec_embedding(step.token_ids, num_rows, static_cast<const float*>(c.operand),
                                c.stride, c.size, c.out);
        case ec::GraphOpKind::embedding_packed:
            return ec_embedding_packed(static_cast<const ec::LinearWeight*>(c.operand),
                                       step.token_ids, num_rows, c.out);
        case ec::GraphOpKind::embedding_at:
            return ec_embedding(step.positions, num_rows, static_cast<const float*>(c.operand),
                                c.stride, c.size, c.out);
        case ec::GraphOpKind::layer_norm:
        case ec::GraphOpKind::rms_norm:
            return ec::norm(norm_of(c), c.subject, c.stride, static_cast<const float*>(c.operand),
                            c.out, num_rows, c.size, c.number, then(c.out, c.size));
        case ec::GraphOpKind::add_layer_norm:
        case ec::GraphOpKind::add_rms_norm:
            return ec::add_norm(norm_of(c), c.subject, c.out, static_cast<const float*>(c.operand),
                                num_rows, c.size, c.number, then(c.subject, c.size));
        case ec::GraphOpKind::linear: {
            const auto* weight = static_cast<const ec::LinearWeight*>(c.operand);
            return ec::linear(*weight, next_weight(step, i + 1), c.subject, ready, num_rows,
                              c.stride, weight->num_inputs, c.out, c.out_stride, {});
        }
        case ec::GraphOpKind::rotary: {
            const ec::Rotary rotary = rotary_of(step, num_rows, i);
            return ec_rotary_and_cache(&rotary);
        }
        case ec::GraphOpKind::attention: {
            const auto& call = *static_cast<const ec::AttentionOperands*>(c.operand);
            return ec::attention_of_pass(planned(step, c, num_rows), c.subject, c.stride, call, c.out);
        }
        case ec::GraphOpKind::silu:
        case ec::GraphOpKind::gelu_tanh:
        case ec::GraphOpKind::gelu:
            return ec::gated_activation(c.subject, c.out, num_rows, c.size, gated_kind(c),
                                        then(c.out, c.size));
        case ec::GraphOpKind::activate:
            return ec_activation(c.out, num_rows, c.size, static_cast<int>(c.stride));
        case ec::GraphOpKind::scale:
            for (int64_t i = 0; i < num_rows * c.size; ++i) c.out[i] *= c.number;
            return nullptr;
        case ec::GraphOpKind::lora:
            return ec_lora(static_cast<const ec::LoraStack*>(c.operand), c.subject, c.stride,
                           num_rows, c.out, c.out_stride);
        case ec::GraphOpKind::experts:
            return ec_experts(static_cast<const ec::ExpertLayer*>(c.operand), c.subject, num_rows,
                              c.size, c.out);
        case ec::GraphOpKind::take_rows:
            return take_rows(step, c, num_rows);
        case ec::GraphOpKind::convolve:
        case ec::GraphOpKind::recur: {
            ec::RecurrentLayer layer = *static_cast<const ec::RecurrentLayer*>(c.operand);
            layer.qkv = c.subject, layer.stride = c.stride;
            const bool recurs = c.kind == static_cast<int64_t>(ec::GraphOpKind::recur);
            return recurs ? ec::recur(*c.geometry, layer, c.out)
                          : ec::convolve(*c.geometry, layer, c.out);
        }
        case ec::GraphOpKind::gated_norm:
            ec::gated_norm(*static_cast<const ec::GatedNorm*>(c.operand), c.subject, c.stride,
                           num_rows, c.size, c.out);
            return nullptr;
        case ec::GraphOpKind::gate:
        case ec::GraphOpKind::multiply:
            ec::gate(c.subject, c.stride, static_cast<const float*>(c.operand),
                     static_cast<int64_t>(c.number),
                     c.kind == static_cast<int64_t>(ec::GraphOpKind::gate), num_rows, c.size, c.out);
            return nullptr;
        case ec::GraphOpKind::add:
            ec::for_rows(num_rows, c.size, [&](int64_t row) {
                for (int64_t i = row * c.size; i < (row + 1) * c.size; ++i) c.out[i] += c.subject[i];
            });
            return nullptr;
        case ec::GraphOpKind::choose_keys:
            return ec_choose_keys(planned(step, c, num_rows), c.subject, c.stride,
                                  static_cast<const ec::KeyChoice*>(c.operand),
                                  reinterpret_cast<int32_t*>(c.out));
        case ec::GraphOpKind::given_rows:
            return overwrite_given_rows(step, c);
        case ec::GraphOpKind::copy:
            for (int64_t i = 0; i < num_rows; ++i)
                std::copy_n(c.subject + i * c.stride, c.size, c.out + i * c.out_stride);
            return nullptr;
        case ec::GraphOpKind::host:
            if (reinterpret_cast<ec::HostFunction>(c.operand)(num_rows) == 0) return nullptr;
            return ec::refuse("the host's part of operation %ld failed", i);
    }
    return ec::refuse("operation %ld is not known", c.kind);
}

}  // namespace

EC_EXPORT const char* ec_run_graph(const ec::GraphStep* step) {
    if (step->num_tokens < 0 || step->num_tokens > step->capacity) {
        return ec::refuse("a step of %ld tokens, the graph has memory for %ld", step->num_tokens,
                          step->capacity);
    }
    int64_t num_rows = step->num_tokens;
    ready_rows.take();  // of a pass that was refused
    ec::begin_pass();
    for (int64_t i = 0; i < step->num_ops; ++i) {
        const ec::GraphOp& op = step->ops[i];
        if (op.geometry != nullptr && planned(*step, op, num_rows)->num_tokens != num_rows) {
            return ec::refuse("attention is planned for %ld tokens, the step has %ld",
                              planned(*step, op, num_rows)->num_tokens, num_rows);
        }
        const bool is_gated = is_gated_product(*step, num_rows, i);
        const bool is_rotated = is_rotated_product(*step, num_rows, i);
        if (const char* refusal = is_gated     ? run_gated_product(*step, num_rows, i)
                                  : is_rotated ? run_rotated_product(*step, num_rows, i)
                                               : run_op(*step, num_rows, i))
            return refusal;
        i += is_gated || is_rotated;
    }
    ec::release_tiles();  // until the next step the caller's thread may do something else
    return nullptr;
}
