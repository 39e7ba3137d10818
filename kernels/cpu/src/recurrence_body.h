// Recurrent layers: some heads of values with one of keys, one request. Included by every_isa.h: no
// include guard.
//
// Each sum runs in one order, whatever the tokens of a step: over keys' elements from the first on,
// and over a block's rows from the first on.

EC_INLINE float dot(const float* a, const float* b, int64_t size) {
    vf sums[2] = {vf{}, vf{}};
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W)
        for (int c = 0; c < 2; ++c) sums[c] = fma(load(a + i + c * W), load(b + i + c * W), sums[c]);
    for (; i + W <= size; i += W) sums[0] = fma(load(a + i), load(b + i), sums[0]);
    float sum = sum_of(sums[0] + sums[1]);
    for (; i < size; ++i) sum += a[i] * b[i];
    return sum;
}

// Those of one vector with two others, each as above.
EC_INLINE void dots(const float* a, const float* b, const float* c, int64_t size, float& of_b,
                    float& of_c) {
    vf sums[2][2] = {{vf{}, vf{}}, {vf{}, vf{}}};
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W)
        for (int part = 0; part < 2; ++part) {
            const vf x = load(a + i + part * W);
            sums[0][part] = fma(x, load(b + i + part * W), sums[0][part]);
            sums[1][part] = fma(x, load(c + i + part * W), sums[1][part]);
        }
    for (; i + W <= size; i += W) {
        sums[0][0] = fma(load(a + i), load(b + i), sums[0][0]);
        sums[1][0] = fma(load(a + i), load(c + i), sums[1][0]);
    }
    of_b = sum_of(sums[0][0] + sums[0][1]), of_c = sum_of(sums[1][0] + sums[1][1]);
    for (; i < size; ++i) of_b += a[i] * b[i], of_c += a[i] * c[i];
}

// out[x][p] = sum over n of state[n][p] * rows[x][n], for `X` rows and `V` registers of p.
template <int X, int V>
EC_INLINE void multiply_tile(const float* state, int64_t value_size, const float* const* rows,
                             int64_t key_size, float* const* outs) {
    vf sums[X][V];
    EC_UNROLL
    for (int x = 0; x < X; ++x) EC_UNROLL for (int v = 0; v < V; ++v) sums[x][v] = vf{};
    for (int64_t n = 0; n < key_size; ++n) {
        vf s[V];
        EC_UNROLL
        for (int v = 0; v < V; ++v) s[v] = load(state + n * value_size + v * W);
        EC_UNROLL
        for (int x = 0; x < X; ++x) {
            const vf factor = splat(rows[x][n]);
            EC_UNROLL
            for (int v = 0; v < V; ++v) sums[x][v] = fma(s[v], factor, sums[x][v]);
        }
    }
    EC_UNROLL
    for (int x = 0; x < X; ++x) EC_UNROLL for (int v = 0; v < V; ++v) store(outs[x] + v * W, sums[x][v]);
}

template <int X>
static void multiply_rows(const float* state, int64_t value_size, const float* const* rows,
                          int64_t key_size, float* const* outs) {
    constexpr int V = num_registers == 32 ? (X == 2 ? 8 : 4) : (X == 2 ? 4 : 2);
    int64_t p = 0;
    float* at[X];
    const auto place = [&] { for (int x = 0; x < X; ++x) at[x] = outs[x] + p; };
    for (; p + V * W <= value_size; p += V * W) {
        place();
        multiply_tile<X, V>(state + p, value_size, rows, key_size, at);
    }
    for (; p + W <= value_size; p += W) {
        place();
        multiply_tile<X, 1>(state + p, value_size, rows, key_size, at);
    }
    for (; p < value_size; ++p)
        for (int x = 0; x < X; ++x) {
            float sum = 0.0f;
            for (int64_t n = 0; n < key_size; ++n) sum += state[n * value_size + p] * rows[x][n];
            outs[x][p] = sum;
        }
}

// out += factor * x
EC_INLINE void add_scaled(float* out, const float* x, float factor, int64_t size) {
    int64_t p = 0;
    for (; p + W <= size; p += W) store(out + p, fma(load(x + p), splat(factor), load(out + p)));
    for (; p < size; ++p) out[p] += x[p] * factor;
}

// out += weights[j] * x[j], from the first of `count` rows on.
EC_INLINE void add_rows(float* out, const float* x, const float* weights, int64_t count,
                        int64_t size) {
    int64_t p = 0;
    const auto run = [&](auto width) {
        constexpr int V = decltype(width)::value;
        vf sums[V];
        EC_UNROLL
        for (int v = 0; v < V; ++v) sums[v] = load(out + p + v * W);
        for (int64_t j = 0; j < count; ++j) {
            const vf weight = splat(weights[j]);
            EC_UNROLL
            for (int v = 0; v < V; ++v) sums[v] = fma(load(x + j * size + p + v * W), weight, sums[v]);
        }
        EC_UNROLL
        for (int v = 0; v < V; ++v) store(out + p + v * W, sums[v]);
        p += V * W;
    };
    while (p + 8 * W <= size) run(std::integral_constant<int, 8>{});
    while (p + W <= size) run(std::integral_constant<int, 1>{});
    for (; p < size; ++p)
        for (int64_t j = 0; j < count; ++j) out[p] += x[j * size + p] * weights[j];
}

// e^x of `size` numbers.
EC_INLINE void exps_of(const float* x, int64_t size, float* out) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(out + i, exp_of(load(x + i)));
    if (i < size) {
        float last[W] = {};
        std::memcpy(last, x + i, static_cast<size_t>(size - i) * 4);
        store(last, exp_of(load(last)));
        std::memcpy(out + i, last, static_cast<size_t>(size - i) * 4);
    }
}

EC_INLINE float exp_one(float x) { return exp_of(splat(x))[0]; }
EC_INLINE float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// A block's rows of one head: keys [S, N], updates [S, P], sums of log decays [S, D].
struct HeadRows {
    const float *keys, *updates, *sums;
};

// next = e^(last sum) * state + sum over rows j of (e^(last sum - sum j) * key j) update j^T.
// `state`: null for zeros; may be `next`. `shares`: [S].
static void close_block(const float* state, float* next, const HeadRows& rows, int64_t num_rows,
                        int64_t key_size, int64_t value_size, int64_t decay_size, float* shares) {
    constexpr int V = num_registers == 32 ? 8 : 4;
    const float* last = rows.sums + (num_rows - 1) * decay_size;
    const int64_t stride = decay_size > 1 ? decay_size : 1;
    float of_rows[most_state_rows], decay = 0.0f;
    const auto weigh = [&](int64_t d) {
        float differences[most_state_rows];
        for (int64_t j = 0; j < num_rows; ++j) differences[j] = last[d] - rows.sums[j * stride + d];
        exps_of(differences, num_rows, of_rows);
        decay = exp_one(last[d]);
    };
    if (decay_size == 1) weigh(0);
    for (int64_t n = 0; n < key_size; ++n) {
        if (decay_size > 1) weigh(n);
        for (int64_t j = 0; j < num_rows; ++j) shares[j] = of_rows[j] * rows.keys[j * key_size + n];
        const float* from = state == nullptr ? nullptr : state + n * value_size;
        float* to = next + n * value_size;
        int64_t p = 0;
        const auto run = [&](auto width) {
            constexpr int v_count = decltype(width)::value;
            vf sums[v_count];
            EC_UNROLL
            for (int v = 0; v < v_count; ++v)
                sums[v] = from == nullptr ? vf{} : load(from + p + v * W) * splat(decay);
            for (int64_t j = 0; j < num_rows; ++j) {
                const vf share = splat(shares[j]);
                EC_UNROLL
                for (int v = 0; v < v_count; ++v)
                    sums[v] = fma(load(rows.updates + j * value_size + p + v * W), share, sums[v]);
            }
            EC_UNROLL
            for (int v = 0; v < v_count; ++v) store(to + p + v * W, sums[v]);
            p += v_count * W;
        };
        while (p + V * W <= value_size) run(std::integral_constant<int, V>{});
        while (p + W <= value_size) run(std::integral_constant<int, 1>{});
        for (; p < value_size; ++p) {
            float sum = from == nullptr ? 0.0f : from[p] * decay;
            for (int64_t j = 0; j < num_rows; ++j) sum += rows.updates[j * value_size + p] * shares[j];
            to[p] = sum;
        }
    }
}

// Heads [first, first + count) of values, which share key head `key_head`, of request r. `memory`:
// `recurrent_floats` of them.
static void recur_heads(const AttentionGeometry& g, const RecurrentLayer& layer, float* outs,
                        int64_t r, int64_t key_head, int64_t first, int64_t count, bool writes_keys,
                        float* memory) {
    const int64_t S = g.block_size, N = layer.key_size, P = layer.value_size, D = layer.decay_size;
    const int64_t K = layer.num_key_heads, H = layer.num_heads;
    const int64_t num_tokens = g.starts[r + 1] - g.starts[r];
    const int64_t begin = g.lengths[r] - num_tokens, end = g.lengths[r];
    const int32_t* table = g.table + r * g.table_width;
    const bool has_delta = layer.rule == static_cast<int64_t>(Rule::delta);
    const auto part = [&](uint8_t* base, int64_t block) {
        return reinterpret_cast<float*>(base + table[block] * layer.block_stride);
    };
    float* keys = memory;                       // [S, N]
    float* queries = keys + S * N;              // [S, N]
    float* from_keys = queries + S * N;         // [S, P]
    float* from_queries = from_keys + S * P;    // [S, P]
    float* updates = from_queries + S * P;      // [count, S, P]
    float* scratch = updates + count * S * P;   // [count, N, P]
    float* sums = scratch + count * N * P;      // [count, S, D]
    float* decayed = sums + count * S * D;      // [2, N] a row: key and query by a vector's decays
    float* factors = decayed + S * 2 * N;       // [N]
    float* shares = factors + N;                // [S]
    float of_keys[most_state_rows][most_state_rows], of_queries[most_state_rows][most_state_rows];
    const float* states[most_state_heads];  // at the block's start; null: zeros
    const auto read_rows = [&](int64_t block, int64_t stop) {
        for (int64_t i = 0; i < stop; ++i) {
            std::memcpy(keys + i * N, part(layer.keys, block) + (i * K + key_head) * N,
                        static_cast<size_t>(N) * 4);
            for (int64_t s = 0; s < count; ++s) {
                std::memcpy(updates + (s * S + i) * P,
                            part(layer.updates, block) + (i * H + first + s) * P,
                            static_cast<size_t>(P) * 4);
                std::memcpy(sums + (s * S + i) * D,
                            part(layer.decays, block) + (i * H + first + s) * D,
                            static_cast<size_t>(D) * 4);
            }
        }
    };
    const auto state_at = [&](int64_t block, int64_t s) {
        return part(layer.states, block) + (first + s) * N * P;
    };
    // Before a block's first token: its states, from those and the rows of the block before it.
    const auto enter = [&](int64_t block) {
        for (int64_t s = 0; s < count; ++s) {
            float* next = table[block] != 0 ? state_at(block, s) : scratch + s * N * P;
            const HeadRows rows{keys, updates + s * S * P, sums + s * S * D};
            close_block(states[s], next, rows, S, N, P, D, shares);
            states[s] = next;
        }
    };
    const int64_t begun = begin / S, low_of_first = begin % S;
    for (int64_t s = 0; s < count; ++s) states[s] = nullptr;
    if (low_of_first > 0) {
        read_rows(begun, low_of_first);
        for (int64_t s = 0; s < count; ++s) states[s] = state_at(begun, s);
    } else if (begun > 0) {
        read_rows(begun - 1, S);
        for (int64_t s = 0; s < count; ++s) states[s] = state_at(begun - 1, s);
    }
    for (int64_t at = begin; at < end;) {
        const int64_t block = at / S, low = at % S, high = std::min(S, low + end - at);
        const bool is_kept = table[block] != 0;
        if (low == 0 && block > 0) enter(block);
        if (low == 0 && block == 0 && is_kept)
            for (int64_t s = 0; s < count; ++s)
                std::memset(state_at(0, s), 0, static_cast<size_t>(N * P) * 4);
        for (int64_t i = low; i < high; ++i) {
            const float* row = layer.qkv + (g.starts[r] + at - begin + i - low) * layer.stride;
            const float *q = row + layer.q_start + key_head * N, *k = row + layer.k_start + key_head * N;
            const float q_factor =
                layer.normed ? layer.q_scale / std::sqrt(dot(q, q, N) + 1e-6f) : layer.q_scale;
            const float k_factor = layer.normed ? 1.0f / std::sqrt(dot(k, k, N) + 1e-6f) : 1.0f;
            for (int64_t n = 0; n < N; ++n) queries[i * N + n] = q[n] * q_factor;
            for (int64_t n = 0; n < N; ++n) keys[i * N + n] = k[n] * k_factor;
            if (is_kept && writes_keys)
                std::memcpy(part(layer.keys, block) + (i * K + key_head) * N, keys + i * N,
                            static_cast<size_t>(N) * 4);
            if (D > 1) continue;
            for (int64_t j = 0; j <= i; ++j) {
                const float *key = keys + j * N, *query = queries + i * N;
                if (has_delta) dots(key, keys + i * N, query, N, of_keys[i][j], of_queries[i][j]);
                else of_queries[i][j] = dot(key, query, N);
            }
        }
        for (int64_t s = 0; s < count; ++s) {
            const int64_t head = first + s;
            float *u = updates + s * S * P, *c = sums + s * S * D;
            const float* state = states[s];
            float steps[most_state_rows];
            for (int64_t i = low; i < high; ++i) {
                const int64_t token = g.starts[r] + at - begin + i - low;
                for (int64_t d = 0; d < D; ++d) {
                    steps[i] = layer.rate_biases == nullptr
                                   ? 1.0f
                                   : softplus(layer.a[token * layer.a_stride + head * D + d] +
                                              layer.rate_biases[head * D + d]);
                    c[i * D + d] = (i > 0 ? c[(i - 1) * D + d] : 0.0f) - layer.rates[head] * steps[i];
                }
                if (D == 1) continue;
                exps_of(c + i * D, N, factors);
                for (int64_t n = 0; n < N; ++n) {
                    decayed[i * 2 * N + n] = keys[i * N + n] * factors[n];
                    decayed[i * 2 * N + N + n] = queries[i * N + n] * factors[n];
                }
                for (int64_t j = 0; j <= i; ++j) {
                    for (int64_t n = 0; n < N; ++n) factors[n] = c[i * D + n] - c[j * D + n];
                    exps_of(factors, N, factors);
                    for (int64_t n = 0; n < N; ++n) factors[n] *= keys[j * N + n];
                    dots(factors, keys + i * N, queries + i * N, N, of_keys[i][j], of_queries[i][j]);
                }
            }
            if (state != nullptr) {
                const float* vectors[4];
                float* to[4];
                int64_t i = low;
                const auto of_row = [&](int64_t row, int x) {
                    vectors[x] = D > 1 ? decayed + row * 2 * N : keys + row * N;
                    vectors[x + 1] = D > 1 ? decayed + row * 2 * N + N : queries + row * N;
                    to[x] = from_keys + row * P, to[x + 1] = from_queries + row * P;
                };
                for (; i + 2 <= high; i += 2) {
                    of_row(i, 0), of_row(i + 1, 2);
                    multiply_rows<4>(state, P, vectors, N, to);
                }
                if (i < high) {
                    of_row(i, 0);
                    multiply_rows<2>(state, P, vectors, N, to);
                }
            }
            for (int64_t i = low; i < high; ++i) {
                const int64_t token = g.starts[r] + at - begin + i - low;
                const float* v = layer.qkv + token * layer.stride + layer.v_start + head * P;
                float of_rows[most_state_rows], differences[most_state_rows];
                if (D == 1) {
                    for (int64_t j = 0; j <= i; ++j) differences[j] = c[i] - c[j];
                    exps_of(differences, i + 1, of_rows);
                } else {
                    std::fill_n(of_rows, i + 1, 1.0f);  // decays are in the products
                }
                const float decay = D == 1 ? exp_one(c[i]) : 1.0f;
                std::memcpy(u + i * P, v, static_cast<size_t>(P) * 4);
                float share = layer.rule == static_cast<int64_t>(Rule::discretised) ? steps[i] : 1.0f;
                if (has_delta) {
                    if (state != nullptr) add_scaled(u + i * P, from_keys + i * P, -decay, P);
                    for (int64_t j = 0; j < i; ++j) differences[j] = -(of_rows[j] * of_keys[i][j]);
                    add_rows(u + i * P, u, differences, i, P);
                    share = 1.0f / (1.0f + std::exp(-layer.b[token * layer.b_stride + head]));
                }
                for (int64_t p = 0; p < P; ++p) u[i * P + p] *= share;
                float* out = outs + (token * H + head) * P;
                const float skip = layer.skips == nullptr ? 0.0f : layer.skips[head];
                for (int64_t p = 0; p < P; ++p) out[p] = layer.skips == nullptr ? 0.0f : skip * v[p];
                if (state != nullptr) add_scaled(out, from_queries + i * P, decay, P);
                for (int64_t j = 0; j <= i; ++j) differences[j] = of_rows[j] * of_queries[i][j];
                add_rows(out, u, differences, i + 1, P);
                if (!is_kept) continue;
                std::memcpy(part(layer.updates, block) + (i * H + head) * P, u + i * P,
                            static_cast<size_t>(P) * 4);
                std::memcpy(part(layer.decays, block) + (i * H + head) * D, c + i * D,
                            static_cast<size_t>(D) * 4);
            }
        }
        at += high - low;
    }
}

// Channels [first, stop) of one request's tokens, and what is kept of their inputs.
static void convolve_channels(const AttentionGeometry& g, const RecurrentLayer& layer, float* outs,
                              int64_t r, int64_t first, int64_t stop) {
    const int64_t S = g.block_size, C = layer.num_channels, before = layer.width - 1;
    const int64_t num_tokens = g.starts[r + 1] - g.starts[r];
    const int64_t begin = g.lengths[r] - num_tokens, end = g.lengths[r];
    const int32_t* table = g.table + r * g.table_width;
    const size_t bytes = static_cast<size_t>(stop - first) * 4;
    const auto part = [&](uint8_t* base, int64_t block) {
        return reinterpret_cast<float*>(base + table[block] * layer.block_stride);
    };
    const int64_t begun = begin % S > 0 ? begin / S : begin / S - 1;  // has inputs of earlier steps
    // The inputs of a position, from channel 0 on; null: before the first.
    const auto input_at = [&](int64_t position) -> const float* {
        if (position >= begin) return layer.qkv + (g.starts[r] + position - begin) * layer.stride;
        if (position < 0) return nullptr;
        if (position >= begun * S) return part(layer.inputs, begun) + position % S * C;
        return part(layer.tails, begun) + (before - (begun * S - position)) * C;
    };
    for (int64_t position = begin; position < end; ++position) {
        const float* taps[most_taps];
        for (int64_t w = 0; w <= before; ++w) taps[w] = input_at(position - before + w);
        float* to = outs + (g.starts[r] + position - begin) * C;
        int64_t c = first;
        for (; c + W <= stop; c += W) {
            vf sum = layer.bias == nullptr ? vf{} : load(layer.bias + c);
            for (int64_t w = 0; w <= before; ++w)
                if (taps[w] != nullptr)
                    sum = fma(load(taps[w] + c), load(layer.weight + w * C + c), sum);
            store(to + c, layer.silu ? sum / (splat(1.0f) + exp_of(-sum)) : sum);
        }
        for (; c < stop; ++c) {
            float sum = layer.bias == nullptr ? 0.0f : layer.bias[c];
            for (int64_t w = 0; w <= before; ++w)
                if (taps[w] != nullptr) sum += taps[w][c] * layer.weight[w * C + c];
            to[c] = layer.silu ? sum / (1.0f + std::exp(-sum)) : sum;
        }
    }
    for (int64_t block = begin / S; block * S < end; ++block) {
        if (table[block] == 0) continue;
        if (block * S >= begin)  // it begins in this step
            for (int64_t w = 0; w < before; ++w) {
                const float* from = input_at(block * S - before + w);
                float* to = part(layer.tails, block) + w * C + first;
                if (from == nullptr) std::memset(to, 0, bytes);
                else std::memcpy(to, from + first, bytes);
            }
        const int64_t high = std::min(end, (block + 1) * S);
        for (int64_t position = std::max(begin, block * S); position < high; ++position)
            std::memcpy(part(layer.inputs, block) + position % S * C + first,
                        input_at(position) + first, bytes);
    }
}

EC_INLINE vf activated(vf x, bool sigmoid) {
    const vf share = splat(1.0f) / (splat(1.0f) + exp_of(-x));
    return sigmoid ? share : x * share;
}

EC_INLINE float activated_one(float x, bool sigmoid) {
    const float share = 1.0f / (1.0f + std::exp(-x));
    return sigmoid ? share : x * share;
}

static void gated_norm_row(const GatedNorm& call, const float* x, const float* by,
                           int64_t num_columns, float* out) {
    const bool sigmoid = call.sigmoid != 0;
    const int64_t across = call.transposed, along = num_columns / (call.size * across);
    for (int64_t start = 0; start < num_columns; start += call.size) {
        const float *from = x + start, *gate = by + start;
        const float* weight = call.weight + start % call.weight_size;
        const int64_t group = start / call.size;
        float* to = out + (group % across * along + group / across) * call.size;
        const float* normed = from;
        if (call.gate_first) {
            int64_t i = 0;
            for (; i + W <= call.size; i += W)
                store(to + i, load(from + i) * activated(load(gate + i), sigmoid));
            for (; i < call.size; ++i) to[i] = from[i] * activated_one(gate[i], sigmoid);
            normed = to;
        }
        const float size = static_cast<float>(call.size);
        const float scale = 1.0f / std::sqrt(dot(normed, normed, call.size) / size + call.eps);
        int64_t i = 0;
        for (; i + W <= call.size; i += W) {
            const vf y = load(normed + i) * splat(scale) * load(weight + i);
            store(to + i, call.gate_first ? y : y * activated(load(gate + i), sigmoid));
        }
        for (; i < call.size; ++i) {
            const float y = normed[i] * scale * weight[i];
            to[i] = call.gate_first ? y : y * activated_one(gate[i], sigmoid);
        }
    }
}

static void gate_row(const float* x, const float* by, bool sigmoid, int64_t num_columns, float* out) {
    int64_t i = 0;
    for (; i + W <= num_columns; i += W) {
        const vf factor = load(by + i);
        store(out + i, load(x + i) * (sigmoid ? activated(factor, true) : factor));
    }
    for (; i < num_columns; ++i) out[i] = x[i] * (sigmoid ? activated_one(by[i], true) : by[i]);
}
