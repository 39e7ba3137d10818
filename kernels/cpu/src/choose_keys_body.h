// Scores of an indexer; see choose_keys.cpp. Included by every_isa.h: no include guard.
//
// Heads lie in lanes, so a key's score is one sum of lanes at its end; four keys share what is read
// of the query. A score's order of sums is its own, whatever is scored beside it.

constexpr int keys_at_once = 4;
constexpr int most_vectors = num_registers == 32 ? 4 : 2;  // whose sums stay in registers

// What heads in `vectors` lanes add to scores. `panel`: of each element of the query these heads.
static void add_heads(const float* panel, int64_t stride, const float* weights,
                      const float* const* keys, int64_t size, int vectors, vf* totals) {
    const auto add = [&](auto count) {
        constexpr int V = decltype(count)::value;
        vf sums[keys_at_once][V] = {};
        for (int64_t d = 0; d < size; ++d) {
            vf own[V];
            for (int v = 0; v < V; ++v) own[v] = load(panel + d * stride + v * W);
            for (int k = 0; k < keys_at_once; ++k) {
                const vf element = splat(keys[k][d]);
                for (int v = 0; v < V; ++v) sums[k][v] = fma(own[v], element, sums[k][v]);
            }
        }
        for (int v = 0; v < V; ++v) {
            const vf weight = load(weights + v * W);
            for (int k = 0; k < keys_at_once; ++k)
                totals[k] = fma(max(sums[k][v], vf{}), weight, totals[k]);
        }
    };
    if (vectors == most_vectors) return add(std::integral_constant<int, most_vectors>{});
    add(std::integral_constant<int, 1>{});
}

// Of keys [first, stop). `scratch` holds `choosing_floats`.
static void score_keys(const AttentionGeometry& g, const KeyChoice& c, const ChoosingToken& own,
                       int64_t first, int64_t stop, float* scratch) {
    const int64_t size = c.head_size, row_bytes = kv_row_bytes(g.kv_format, size);
    const int64_t padded = (c.num_heads + head_lanes - 1) / head_lanes * head_lanes;
    float *panel = scratch, *weights = panel + size * padded, *floats = weights + padded;
    std::memset(panel, 0, static_cast<size_t>((size + 1) * padded) * sizeof(float));
    for (int64_t h = 0; h < c.num_heads; ++h)
        for (int64_t d = 0; d < size; ++d) panel[d * padded + h] = own.q[h * size + d];
    std::memcpy(weights, own.weights, static_cast<size_t>(c.num_heads) * sizeof(float));
    for (int64_t key = first; key < stop; key += keys_at_once) {
        const float* keys[keys_at_once];
        for (int k = 0; k < keys_at_once; ++k) {
            const int64_t position = key + k < stop ? key + k : stop - 1;
            const int64_t block = position / g.block_size;
            const uint8_t* row = c.keys + own.blocks[block] * c.block_stride +
                                 (position - block * g.block_size) * row_bytes;
            float* to = floats + k * size;
            keys[k] = to;
            if (g.kv_format == static_cast<int64_t>(KVCacheFormat::f32)) {
                std::memcpy(to, row, static_cast<size_t>(row_bytes));
                continue;
            }
            for (int64_t d = 0; d < size; ++d) {
                uint16_t half;
                std::memcpy(&half, row + 2 * d, 2);
                const uint32_t bits = static_cast<uint32_t>(half) << 16;
                std::memcpy(to + d, &bits, 4);
            }
        }
        vf totals[keys_at_once] = {};
        for (int64_t h = 0; h < padded;) {
            const int vectors = h + most_vectors * W <= padded ? most_vectors : 1;
            add_heads(panel + h, padded, weights + h, keys, size, vectors, totals);
            h += vectors * W;
        }
        for (int k = 0; k < keys_at_once && key + k < stop; ++k) {
            const float score = sum_of(totals[k]);
            own.scores[key + k] = score == score ? score : -INFINITY;  // no order has NaN
        }
    }
}
