// Runs a captured forward pass: one call from Python a step, whatever the number of layers.
//
// Each operation is the exported function that Python would have called, with the same checks and
// the same bits. Between two of them nothing happens, so that the pool's threads are still awake.
#include "graph.h"

#include <algorithm>

#include "dispatch.h"
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

// Of gated activations as `gated_row` counts them; -1 for other operations.
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

const char* run_gated_product(const ec::GraphStep& step, int64_t num_rows, int64_t i) {
    const ec::GraphOp &c = step.ops[i], &gate = step.ops[i + 1];
    const auto& weight = *static_cast<const ec::LinearWeight*>(c.operand);
    return ec::linear(weight, next_weight(step, i + 2), c.subject, num_rows, c.stride,
                      weight.num_inputs, gate.out, gate.size, ec::gated_row(gated_kind(gate)));
}

// `num_rows`: of the activations; fewer than the step's tokens behind `take_rows`.
const char* run_op(const ec::GraphStep& step, int64_t& num_rows, int64_t i) {
    const ec::GraphOp& c = step.ops[i];
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
            return ec_layer_norm(c.subject, c.stride, static_cast<const float*>(c.operand), c.out,
                                 num_rows, c.size, c.number);
        case ec::GraphOpKind::add_layer_norm:
            return ec_add_layer_norm(c.subject, c.out, static_cast<const float*>(c.operand),
                                     num_rows, c.size, c.number);
        case ec::GraphOpKind::rms_norm:
            return ec_rms_norm(c.subject, c.stride, static_cast<const float*>(c.operand), c.out,
                               num_rows, c.size, c.number);
        case ec::GraphOpKind::add_rms_norm:
            return ec_add_rms_norm(c.subject, c.out, static_cast<const float*>(c.operand),
                                   num_rows, c.size, c.number);
        case ec::GraphOpKind::linear: {
            const auto* weight = static_cast<const ec::LinearWeight*>(c.operand);
            return ec::linear(*weight, next_weight(step, i + 1), c.subject, num_rows, c.stride,
                              weight->num_inputs, c.out, c.out_stride, nullptr);
        }
        case ec::GraphOpKind::rotary: {
            ec::Rotary rotary = *static_cast<const ec::Rotary*>(c.operand);
            rotary.positions = step.positions;
            rotary.slots = c.geometry->slots;
            rotary.num_tokens = num_rows;
            return ec_rotary_and_cache(&rotary);
        }
        case ec::GraphOpKind::attention: {
            const auto& call = *static_cast<const ec::AttentionOperands*>(c.operand);
            AttentionGeometry geometry = *planned(step, c, num_rows);
            geometry.num_blocks = call.num_blocks;
            return ec_attention(&geometry, c.subject, c.stride, call.k, call.v, c.out, call.scale,
                                call.softcap, call.sinks, call.slopes);
        }
        case ec::GraphOpKind::silu:
        case ec::GraphOpKind::gelu_tanh:
        case ec::GraphOpKind::gelu:
            return ec_gated_activation(c.subject, c.out, num_rows, c.size, gated_kind(c));
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
    for (int64_t i = 0; i < step->num_ops; ++i) {
        const ec::GraphOp& op = step->ops[i];
        if (op.geometry != nullptr && planned(*step, op, num_rows)->num_tokens != num_rows) {
            return ec::refuse("attention is planned for %ld tokens, the step has %ld",
                              planned(*step, op, num_rows)->num_tokens, num_rows);
        }
        const bool is_pair = is_gated_product(*step, num_rows, i);
        if (const char* refusal =
                is_pair ? run_gated_product(*step, num_rows, i) : run_op(*step, num_rows, i))
            return refusal;
        i += is_pair;
    }
    ec::release_tiles();  // until the next step the caller's thread may do something else
    return nullptr;
}
