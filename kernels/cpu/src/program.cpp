// Runs a recorded forward pass: one call from Python a step, whatever the number of layers.
//
// Each command is the exported operation that Python would have called, with the same checks and
// the same bits. Between two of them nothing happens, so that the pool's threads are still awake.
#include "program.h"

#include "dispatch.h"

namespace {

// The weight of the first product from command `i` on, or null.
const ec::LinearWeight* next_weight(const ec::Step& step, int64_t i) {
    for (; i < step.num_commands; ++i) {
        if (step.commands[i].kind == static_cast<int64_t>(ec::CommandKind::linear))
            return static_cast<const ec::LinearWeight*>(step.commands[i].operand);
    }
    return nullptr;
}

const char* run_command(const ec::Step& step, int64_t i) {
    const ec::Command& c = step.commands[i];
    const int64_t num_tokens = step.num_tokens;
    switch (static_cast<ec::CommandKind>(c.kind)) {
        case ec::CommandKind::embedding:
            return ec_embedding(step.token_ids, num_tokens, static_cast<const float*>(c.operand),
                                c.stride, c.size, c.out);
        case ec::CommandKind::embedding_packed:
            return ec_embedding_packed(static_cast<const ec::LinearWeight*>(c.operand),
                                       step.token_ids, num_tokens, c.out);
        case ec::CommandKind::rms_norm:
            return ec_rms_norm(c.subject, c.stride, static_cast<const float*>(c.operand), c.out,
                               num_tokens, c.size, c.number);
        case ec::CommandKind::add_rms_norm:
            return ec_add_rms_norm(c.subject, c.out, static_cast<const float*>(c.operand),
                                   num_tokens, c.size, c.number);
        case ec::CommandKind::linear: {
            const auto* weight = static_cast<const ec::LinearWeight*>(c.operand);
            return ec::linear(*weight, next_weight(step, i + 1), c.subject, num_tokens, c.stride,
                              weight->num_inputs, c.out, c.out_stride);
        }
        case ec::CommandKind::rotary: {
            ec::Rotary rotary = *static_cast<const ec::Rotary*>(c.operand);
            rotary.positions = step.positions;
            rotary.slots = c.geometry->slots;
            rotary.num_tokens = num_tokens;
            return ec_rotary_and_cache(&rotary);
        }
        case ec::CommandKind::attention: {
            const auto& call = *static_cast<const ec::AttentionCall*>(c.operand);
            AttentionGeometry geometry = *c.geometry;
            geometry.num_blocks = call.num_blocks;
            return ec_attention(&geometry, c.subject, c.stride, call.k, call.v, c.out, call.scale,
                                call.softcap, call.sinks, call.slopes);
        }
        case ec::CommandKind::silu:
            return ec_gated_activation(c.subject, c.out, num_tokens, c.size, 0);
        case ec::CommandKind::gelu_tanh:
            return ec_gated_activation(c.subject, c.out, num_tokens, c.size, 1);
        case ec::CommandKind::scale:
            for (int64_t i = 0; i < num_tokens * c.size; ++i) c.out[i] *= c.number;
            return nullptr;
    }
    return ec::refuse("command %lld is not known", static_cast<long long>(c.kind));
}

}  // namespace

EC_EXPORT const char* ec_run_program(const ec::Step* step) {
    if (step->num_tokens < 0 || step->num_tokens > step->capacity) {
        return ec::refuse("a step of %lld tokens, the program has memory for %lld",
                          static_cast<long long>(step->num_tokens),
                          static_cast<long long>(step->capacity));
    }
    for (int64_t i = 0; i < step->num_commands; ++i) {
        const ec::Command& command = step->commands[i];
        if (command.geometry != nullptr && command.geometry->num_tokens != step->num_tokens) {
            return ec::refuse("attention is planned for %lld tokens, the step has %lld",
                              static_cast<long long>(command.geometry->num_tokens),
                              static_cast<long long>(step->num_tokens));
        }
        if (const char* refusal = run_command(*step, i)) return refusal;
    }
    return nullptr;
}
