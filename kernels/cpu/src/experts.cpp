// Tokens are gathered by expert, so that an expert's weights are read once a step, and the products of
// all experts are one list of pieces that the threads share. A (token, rank of its expert) is a pair.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "buffers.h"
#include "graph.h"
#include "pool.h"
#include "row_chunks.h"

namespace ec {
namespace {

constexpr int64_t rows_a_piece = 96;
constexpr int64_t products_a_piece = 1 << 17;  // less is not worth being taken by a thread

// Rows of activations as products with weights of a kind take them.
class Rows {
public:
    Rows(LinearKind kind, int64_t num_inputs, Buffer& buffer, int64_t num_rows)
        : kind_(kind), num_inputs_(num_inputs), stride_(bytes_of(kind, num_inputs)),
          at_(buffer.try_reserve<uint8_t>((num_rows + read_behind) * stride_)) {}

    bool has_memory() const { return at_ != nullptr; }

    void put(int64_t row, const float* x) const {
        uint8_t* to = at_ + row * stride_;
        if (kind_ == LinearKind::f32) {
            std::memcpy(to, x, static_cast<size_t>(num_inputs_) * 4);
        } else if (kind_ == LinearKind::bf16) {
            round_row(x, num_inputs_, reinterpret_cast<uint32_t*>(to));
        } else {
            auto* groups = reinterpret_cast<ActivationGroup*>(to);
            quantise_row(x, num_inputs_, record_of(kind_).sum_factor, groups);
        }
    }

    // The rows from `first` on, times `w`; `out` begins at the first of them.
    void multiply(const LinearWeight& w, int64_t first, const Results& out,
                  const LinearTask& task) const {
        const uint8_t* from = at_ + first * stride_;
        if (kind_ == LinearKind::f32) {
            linear_f32(w, reinterpret_cast<const float*>(from), stride_ / 4, out, task);
        } else if (kind_ == LinearKind::bf16) {
            linear_bf16(w, {reinterpret_cast<const uint32_t*>(from), stride_ / 4}, out, task);
        } else {
            constexpr auto size = static_cast<int64_t>(sizeof(ActivationGroup));
            linear_integer(w, {reinterpret_cast<const ActivationGroup*>(from), stride_ / size},
                           out, task);
        }
    }

private:
    static constexpr int64_t read_behind = 15;  // a tile's rows, of no meaning

    static int64_t bytes_of(LinearKind kind, int64_t num_inputs) {
        if (kind == LinearKind::f32) return num_inputs * 4;
        if (kind == LinearKind::bf16) return PairedActivations::stride_of(num_inputs) * 4;
        constexpr auto size = static_cast<int64_t>(sizeof(ActivationGroup));
        return (num_inputs + group_inputs - 1) / group_inputs * size;
    }

    LinearKind kind_;
    int64_t num_inputs_, stride_;
    uint8_t* at_;
};

// Rows [start, stop) of the gathered ones are an expert's.
struct Segment {
    int64_t expert, start, stop;
};

struct Piece {
    const LinearWeight* weight;
    int64_t start;
    LinearTask task;
};

void multiply(const std::vector<Segment>& segments, const LinearWeight* weights, const Rows& rows,
              const Results& out) {
    thread_local std::vector<Piece> pieces;
    pieces.clear();
    for (const Segment& s : segments) {
        const LinearWeight& w = weights[s.expert];
        const int64_t panels = num_panels(w), num_rows = s.stop - s.start;
        const int64_t products = panel_outputs * w.num_inputs * std::min(num_rows, rows_a_piece);
        const int64_t step = std::max<int64_t>(1, products_a_piece / products);
        for (int64_t panel = 0; panel < panels; panel += step) {
            for (int64_t row = 0; row < num_rows; row += rows_a_piece) {
                const int64_t row_stop = std::min(row + rows_a_piece, num_rows);
                const int64_t panel_stop = std::min(panel + step, panels);
                pieces.push_back({&w, s.start, {panel, panel_stop, row, row_stop, {w.blob, 0}}});
            }
        }
    }
    const auto num_pieces = static_cast<int64_t>(pieces.size());
    const Piece* all = pieces.data();  // another thread's `pieces` is another
    parallel(num_pieces, [&](int64_t i, int) {
        const Piece& p = all[i];
        LinearTask task = p.task;
        if (const int64_t next = i + num_threads(); next < num_pieces)
            task.after = upcoming_panel(*all[next].weight, all[next].task.panel);
        rows.multiply(*p.weight, p.start, out.from_row(p.start), task);
    });
}

constexpr float never = -std::numeric_limits<float>::infinity();

// The largest of n numbers, or one that is none; the first in a tie.
int64_t best_of(const float* x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i)
        if (x[i] > x[best] || (std::isnan(x[i]) && !std::isnan(x[best]))) best = i;
    return best;
}

// Leaves a token the experts of its best groups. `ranks`: room for num_groups.
void mask_groups(const ExpertLayer& layer, float* choice, float* ranks) {
    const int64_t size = layer.num_experts / layer.num_groups;
    for (int64_t g = 0; g < layer.num_groups; ++g) {
        float* group = choice + g * size;
        const int64_t best = best_of(group, size);
        const float most = std::exchange(group[best], never);
        ranks[g] = most;
        if (layer.best_of_group > 1 && size > 1) ranks[g] += group[best_of(group, size)];
        group[best] = most;
    }
    for (int64_t taken = 0; taken < layer.top_groups; ++taken)
        ranks[best_of(ranks, layer.num_groups)] = never;
    for (int64_t g = 0; g < layer.num_groups; ++g)
        if (ranks[g] != never) std::fill_n(choice + g * size, size, never);
}

// The experts of one token, falling, and their weights. `p`: room for 3 * num_experts.
void choose(const ExpertLayer& layer, const float* logits, float* p, int64_t* ids, float* weights) {
    const int64_t n = layer.num_experts;
    if (layer.by_sigmoid != 0) {
        for (int64_t i = 0; i < n; ++i) p[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    } else {
        const float most = *std::max_element(logits, logits + n);
        float sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += p[i] = std::exp(logits[i] - most);
        for (int64_t i = 0; i < n; ++i) p[i] /= sum;
    }
    float* choice = p + n;
    for (int64_t i = 0; i < n; ++i)
        choice[i] = layer.bias == nullptr ? p[i] : p[i] + layer.bias[i];
    if (layer.num_groups > 1) mask_groups(layer, choice, choice + n);
    float chosen = layer.epsilon;
    for (int64_t rank = 0; rank < layer.top_k; ++rank) {
        const int64_t best = ids[rank] = best_of(choice, n);
        chosen += weights[rank] = p[best];
        choice[best] = never;
    }
    for (int64_t rank = 0; rank < layer.top_k; ++rank) {
        if (layer.renormalise != 0) weights[rank] /= chosen;
        weights[rank] *= layer.scale;
        if (layer.scales != nullptr) weights[rank] *= layer.scales[ids[rank]];
    }
}

const char* check_layer(const ExpertLayer& l, int64_t num_rows, int64_t num_inputs) {
    if (num_rows < 0) return refuse("%ld rows: there cannot be fewer than 0", num_rows);
    if (l.num_here < 1 || l.first_expert < 0 || l.num_experts > int64_t{1} << 28 ||
        l.first_expert + l.num_here > l.num_experts) {
        return refuse("experts %ld to %ld of %ld", l.first_expert, l.first_expert + l.num_here,
                      l.num_experts);
    }
    if (l.top_k < 1 || l.top_k > l.num_experts) {
        return refuse("%ld experts a token of %ld", l.top_k, l.num_experts);
    }
    const int64_t groups = l.num_groups;
    if (groups < 1 || l.num_experts % groups != 0 || l.top_groups < 1 || l.top_groups > groups ||
        l.top_k > l.num_experts / groups * l.top_groups) {
        return refuse("%ld of %ld groups of %ld experts, %ld a token", l.top_groups, groups,
                      l.num_experts, l.top_k);
    }
    if (l.activation < 0 || l.activation > 3) return refuse("activation %ld", l.activation);
    for (int64_t i = 0; i < l.num_here; ++i) {
        const LinearWeight &gate_up = l.gate_up[i], &down = l.down[i];
        for (const LinearWeight* w : {&gate_up, &down})
            if (const char* refusal = check_weight(*w)) return refusal;
        if (gate_up.num_inputs != num_inputs || down.num_outputs != num_inputs ||
            gate_up.num_outputs != l.halves() * down.num_inputs || gate_up.kind != l.gate_up[0].kind ||
            down.kind != l.down[0].kind || down.num_inputs != l.down[0].num_inputs) {
            return refuse("expert %ld takes %ld inputs to %ld, and %ld to %ld; x has %ld", i,
                          gate_up.num_inputs, gate_up.num_outputs, down.num_inputs,
                          down.num_outputs, num_inputs);
        }
    }
    return nullptr;
}

}  // namespace
}  // namespace ec

EC_EXPORT const char* ec_experts(const ec::ExpertLayer* layer, const float* x, int64_t num_rows,
                                 int64_t num_inputs, float* out) {
    using namespace ec;
    const ExpertLayer& l = *layer;
    if (const char* refusal = check_layer(l, num_rows, num_inputs)) return refusal;
    if (num_rows == 0) return nullptr;
    if (x == nullptr || out == nullptr || l.logits == nullptr)
        return refuse("x, logits or out has no memory");
    const int64_t width = num_inputs, features = l.down[0].num_inputs;
    const int64_t num_pairs = num_rows * l.top_k, both_size = l.halves() * features;

    thread_local std::vector<int64_t> ids, place, pair_at, counts;
    thread_local std::vector<float> weights;
    for (auto* each : {&ids, &place, &pair_at}) each->resize(static_cast<size_t>(num_pairs));
    weights.resize(static_cast<size_t>(num_pairs));
    counts.assign(static_cast<size_t>(l.num_here), 0);
    int64_t *id = ids.data(), *at = place.data(), *pair_of = pair_at.data(), *count = counts.data();
    float* weight = weights.data();
    for_rows(num_rows, (16 + l.top_k) * l.num_experts, [&](int64_t t) {
        thread_local std::vector<float> p;
        p.resize(static_cast<size_t>(3 * l.num_experts));
        const float* logits = l.logits + t * l.num_experts;
        choose(l, logits, p.data(), id + t * l.top_k, weight + t * l.top_k);
    });

    // pairs by expert: place of each among the gathered rows; -1: its expert is elsewhere
    for (int64_t i = 0; i < num_pairs; ++i) {
        id[i] -= l.first_expert;
        if (id[i] >= 0 && id[i] < l.num_here) ++count[id[i]];
    }
    thread_local std::vector<Segment> segments;
    segments.clear();
    int64_t num_gathered = 0;
    for (int64_t e = 0; e < l.num_here; ++e) {
        if (count[e] != 0) segments.push_back({e, num_gathered, num_gathered + count[e]});
        num_gathered += count[e];
        count[e] = num_gathered - count[e];  // from here on: the next free place
    }
    for (int64_t i = 0; i < num_pairs; ++i) {
        const bool is_here = id[i] >= 0 && id[i] < l.num_here;
        at[i] = is_here ? count[id[i]]++ : -1;
        if (is_here) pair_of[at[i]] = i;
    }

    thread_local Buffer inputs_memory, both_memory, hidden_memory, outputs_memory;
    const auto kind = static_cast<LinearKind>(l.gate_up[0].kind);
    const Rows inputs(kind, width, inputs_memory, num_gathered);
    const auto down_kind = static_cast<LinearKind>(l.down[0].kind);
    const Rows hidden(down_kind, features, hidden_memory, num_gathered);
    auto* both = both_memory.try_reserve<float>(num_gathered * both_size);
    auto* outputs = outputs_memory.try_reserve<float>(num_gathered * width);
    const bool has_memory = inputs.has_memory() && hidden.has_memory() && both && outputs;
    if (!has_memory && num_gathered != 0)
        return refuse("no memory for %ld rows of experts", num_pairs);
    for_rows(num_gathered, width, [&](int64_t row) {
        inputs.put(row, x + pair_of[row] / l.top_k * width);
    });
    multiply(segments, l.gate_up, inputs, {both, both_size});
    for_rows(num_gathered, 4 * features, [&](int64_t row) {
        float* gate_up = both + row * both_size;  // the result takes the place of gate
        if (l.activation == 0 || l.activation == 3) {
            gated_activation(gate_up, gate_up, 1, features, l.activation == 3, nullptr);
        } else if (l.activation == 2) {
            swiglu_oai(gate_up, gate_up + features, 0, 1, features, gate_up, 0);
        } else {
            constexpr int relu2 = 4;
            ec_activation(gate_up, 1, features, relu2);
        }
        hidden.put(row, gate_up);
    });
    multiply(segments, l.down, hidden, {outputs, width});
    for_rows(num_rows, width * l.top_k, [&](int64_t t) {
        float* sum = out + t * width;
        std::fill_n(sum, width, 0.0f);
        for (int64_t i = t * l.top_k; i < (t + 1) * l.top_k; ++i) {
            if (at[i] < 0) continue;
            const float* y = outputs + at[i] * width;
            for (int64_t e = 0; e < width; ++e) sum[e] += weight[i] * y[e];
        }
    });
    return nullptr;
}
