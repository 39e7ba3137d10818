// Tiles of float32 and bfloat16 products. Included by every_isa.h: no include guard.
//
// A step is a dword of each output's weights and of a row's activations: one float32, or with PAIRS
// two bfloat16. Each output is one chain of multiply-adds over `chain_steps`, and the chains are
// added in order; so a row has the same bits in any tile, and with AVX2 as with AVX-512.

// The sums of a tile fill the registers: rows times vectors of outputs. With sixteen registers a tile
// has half of a panel, as each weight that is loaded should serve six rows.
constexpr int MAX_ROWS = EC_LEVEL >= 2 ? 14 : EC_NEON ? 8 : 6;
constexpr int vectors = panel_outputs / W;
constexpr int tile_vectors = 2;
// Few rows by 8 outputs are too few chains.
template <int ROWS>
constexpr int vectors_at_once = EC_NEON && ROWS <= 4 ? 2 * tile_vectors : tile_vectors;
// Of one row: enough chains to hide what a multiply-add waits for.
constexpr int one_row_vectors = 8;
// How far ahead a panel's first tile fetches weights; later ones find them in a cache.
constexpr int64_t ahead_floats = 24 * panel_outputs;
// The next panels' weights are fetched past the outer caches: what the program reads between two passes
// stays there. With AVX-512: not measured, and the nearest cache of an Intel server, which alone would
// hold them, has no room for a panel.
constexpr int soon_locality = EC_LEVEL == 1 ? 0 : 2;

// sum + x * w, of pairs the later input first, as vdpbf16ps adds them; a product of two bfloat16 is
// exact in float32.
template <bool PAIRS>
EC_INLINE vf add_step(vf sum, vf x, vf w) {
    if constexpr (!PAIRS) return fma(x, w, sum);
#if EC_LEVEL == 3
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    const vu later = vu{} + 0xFFFF0000u;
    sum = fma((vf)((vu)x & later), (vf)((vu)w & later), sum);
    return fma((vf)((vu)x << 16), (vf)((vu)w << 16), sum);
#endif
}

#if EC_NEON
// The same by the dword J of `x`. bfdot adds a pair's products first and rounds both sums to odd.
template <bool PAIRS, int J>
EC_INLINE vf add_step_by(vf sum, vf x, vf w) {
    if constexpr (!PAIRS) return (vf)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)w, (float32x4_t)x, J);
#if EC_NEON == 3
    return (vf)vbfdotq_laneq_f32((float32x4_t)sum, (bfloat16x8_t)w, (bfloat16x8_t)x, J);
#else
    return add_step<PAIRS>(sum, (vf)vdupq_laneq_f32((float32x4_t)x, J), w);
#endif
}
#endif

// After so many steps lines are fetched, several at once: a step of a tile is all multiply-adds. One
// row is as fast as memory, whose lines are better asked for one by one, or for a register of steps.
constexpr int64_t turn_steps(int64_t num_rows) { return num_rows > 1 ? 8 : EC_NEON ? 4 : 1; }

// Where a tile's vectors lie: VECTORS of them from `first` on, in panels that follow one another.
template <int VECTORS>
constexpr int panels_of = VECTORS > vectors ? VECTORS / vectors : 1;

// One tile's chain, added to what `out` holds, or to the bias if it is the first and starts anew.
// `first` counts vectors of outputs.
template <bool PAIRS, int ROWS, int VECTORS>
__attribute__((noinline)) void add_chain(const LinearWeight& weight, const float* x,
                                         int64_t x_stride, const Results& out, int64_t first,
                                         int64_t k, int64_t k_stop, int64_t ahead,
                                         Upcoming soon) {
    constexpr int PANELS = panels_of<VECTORS>, EACH = VECTORS / PANELS;
    constexpr int64_t width = EACH * W, turn = turn_steps(ROWS);
    const int64_t panel_floats = num_steps(weight) * panel_outputs;
    const int64_t panel = first / vectors, inside = first % vectors * W;
    if (ROWS > 1 && !out.streams && inside == 0)
        prefetch_results(out.at + panel * panel_outputs, out.stride, ROWS);
    const float* w = reinterpret_cast<const float*>(weight.blob) + panel * panel_floats + inside;
    vf sums[ROWS][VECTORS];
    EC_UNROLL for (int r = 0; r < ROWS; ++r)
        EC_UNROLL for (int v = 0; v < VECTORS; ++v) sums[r][v] = vf{};
    const auto step = [&](int64_t i) __attribute__((always_inline)) {
        vf weights[VECTORS];
        EC_UNROLL for (int v = 0; v < VECTORS; ++v)
            weights[v] = load(w + v / EACH * panel_floats + i * panel_outputs + v % EACH * W);
        EC_UNROLL for (int r = 0; r < ROWS; ++r) {
            const vf value = splat_bits(x + r * x_stride + i);
            EC_UNROLL for (int v = 0; v < VECTORS; ++v)
                sums[r][v] = add_step<PAIRS>(sums[r][v], value, weights[v]);
        }
    };
#if EC_NEON
    // A row's dwords of four steps are one register. Of pairs, with bfmmla: two rows' of two steps times
    // those of two outputs. It has the bits of two bfdot, and a chain of pairs whole turns.
    constexpr bool BY_PAIRS = EC_NEON == 3 && PAIRS && ROWS > 1;
    [[maybe_unused]] float32x4_t blocks[(ROWS + 1) / 2][VECTORS][2] = {};
    const auto weight_at = [&](int64_t at, int v) __attribute__((always_inline)) {
        return load(w + v / EACH * panel_floats + at * panel_outputs + v % EACH * W);
    };
    const auto four_steps = [&](int64_t at) __attribute__((always_inline)) {
        if constexpr (!BY_PAIRS) {
            vf own[ROWS];
            EC_UNROLL for (int r = 0; r < ROWS; ++r) own[r] = load(x + r * x_stride + at);
            const auto by = [&](auto j) __attribute__((always_inline)) {
                constexpr int J = decltype(j)::value;
                EC_UNROLL for (int v = 0; v < VECTORS; ++v) {
                    const vf weights = weight_at(at + J, v);
                    EC_UNROLL for (int r = 0; r < ROWS; ++r)
                        sums[r][v] = add_step_by<PAIRS, J>(sums[r][v], own[r], weights);
                }
            };
            by(std::integral_constant<int, 0>{});
            by(std::integral_constant<int, 1>{});
            by(std::integral_constant<int, 2>{});
            by(std::integral_constant<int, 3>{});
        }
#if EC_NEON == 3
        EC_UNROLL for (int half = 0; BY_PAIRS && half < 2; ++half) {
            bfloat16x8_t both[(ROWS + 1) / 2];
            EC_UNROLL for (int p = 0; p < ROWS; p += 2) {
                const float* row = x + p * x_stride + at + 2 * half;
                const float* other = x + std::min(p + 1, ROWS - 1) * x_stride + at + 2 * half;
                both[p / 2] = (bfloat16x8_t)vcombine_f32(vld1_f32(row), vld1_f32(other));
            }
            EC_UNROLL for (int v = 0; v < VECTORS; ++v) {
                const auto a = (float32x4_t)weight_at(at + 2 * half, v);
                const auto b = (float32x4_t)weight_at(at + 2 * half + 1, v);
                const auto w0 = (bfloat16x8_t)vzip1q_f32(a, b), w1 = (bfloat16x8_t)vzip2q_f32(a, b);
                EC_UNROLL for (int p = 0; p < (ROWS + 1) / 2; ++p) {
                    blocks[p][v][0] = vbfmmlaq_f32(blocks[p][v][0], both[p], w0);
                    blocks[p][v][1] = vbfmmlaq_f32(blocks[p][v][1], both[p], w1);
                }
            }
        }
#endif
    };
#endif
    int64_t i = k;
    for (; i + turn <= k_stop; i += turn) {
        fetch<soon_locality>(soon);
        if (ahead != 0) {
            for (int64_t at = 0; at < PANELS * turn; ++at) {
                const float* line = w + at / turn * panel_floats + (i + at % turn) * panel_outputs;
                for (int n = 0; n < width; n += 16) __builtin_prefetch(line + ahead + n);
            }
        }
#if EC_NEON
        for (int64_t j = 0; j < turn; j += 4) four_steps(i + j);
#else
#pragma GCC unroll 4
        for (int64_t j = 0; j < turn; ++j) step(i + j);
#endif
    }
#if EC_NEON == 3
    if constexpr (BY_PAIRS) {
        EC_UNROLL for (int p = 0; p < ROWS; p += 2) EC_UNROLL for (int v = 0; v < VECTORS; ++v) {
            const auto a = (float64x2_t)blocks[p / 2][v][0], b = (float64x2_t)blocks[p / 2][v][1];
            sums[p][v] = (vf)vzip1q_f64(a, b);
            if (p + 1 < ROWS) sums[p + 1][v] = (vf)vzip2q_f64(a, b);
        }
    }
#endif
    for (; !(EC_NEON && PAIRS) && i < k_stop; ++i) step(i);  // pairs fill whole turns

    const bool adds = k != 0 || out.adds;
    EC_UNROLL for (int p = 0; p < PANELS; ++p) {
        const int64_t n = (panel + p) * panel_outputs + inside;
        float* to = out.at + n;
        const float* start = adds ? to : weight.bias != nullptr ? weight.bias + n : nullptr;
        const int64_t start_stride = adds ? out.stride : 0;
        const int64_t num_valid = weight.num_outputs - n;
        if (num_valid < width) {
            alignas(64) float edge[ROWS * width];
            EC_UNROLL for (int r = 0; r < ROWS; ++r)
                EC_UNROLL for (int v = 0; v < EACH; ++v) store(edge + r * width + v * W, sums[r][p * EACH + v]);
            for (int r = 0; r < ROWS; ++r)
                for (int64_t j = 0; j < num_valid; ++j) {
                    const float sum = edge[r * width + j];
                    to[r * out.stride + j] =
                        start == nullptr ? sum : start[r * start_stride + j] + sum;
                }
            continue;
        }
        if (start != nullptr) {
            EC_UNROLL for (int r = 0; r < ROWS; ++r)
                EC_UNROLL for (int v = 0; v < EACH; ++v)
                    sums[r][p * EACH + v] =
                        load(start + r * start_stride + v * W) + sums[r][p * EACH + v];
        }
        const auto write = [&](auto put) __attribute__((always_inline)) {
            EC_UNROLL for (int r = 0; r < ROWS; ++r)
                EC_UNROLL for (int v = 0; v < EACH; ++v)
                    put(to + r * out.stride + v * W, sums[r][p * EACH + v]);
        };
        if (out.streams) {
            write(stream);
        } else {
            write(store);
        }
    }
}

template <bool PAIRS, int ROWS>
void some_rows(int64_t num_rows, const LinearWeight& weight, const float* x, int64_t x_stride,
               const Results& out, int64_t first, int64_t k, int64_t k_stop, int64_t ahead,
               Upcoming soon) {
    if (num_rows == ROWS) {
        constexpr int own = vectors_at_once<ROWS>;
        if (first % own == 0)  // else the tile before has had these outputs
            add_chain<PAIRS, ROWS, own>(weight, x, x_stride, out, first, k, k_stop, ahead, soon);
    } else if constexpr (ROWS > 1) {
        some_rows<PAIRS, ROWS - 1>(num_rows, weight, x, x_stride, out, first, k, k_stop, ahead, soon);
    }
}

// The chain from `k` on, or of the next panel, or of the next task.
inline Upcoming after_chain(const LinearWeight& weight, const LinearTask& task, int64_t panel,
                            int64_t k) {
    if (k == num_steps(weight))
        return panel + 1 < task.panel_stop ? upcoming_panel(weight, panel + 1) : task.after;
    const int64_t floats = (panel * num_steps(weight) + k) * panel_outputs;
    return {weight.blob + 4 * floats,
            std::min(chain_steps, num_steps(weight) - k) * panel_outputs * 4};
}

template <bool PAIRS>
void run_float(const LinearWeight& weight, const float* x, int64_t x_stride,
                    const Results& out, const LinearTask& task) {
    const int64_t num_rows = task.row_stop - task.row;
    const float* rows = x + task.row * x_stride;
    const Results to = out.from_row(task.row);
    int64_t panel = task.panel;
    if (num_rows == 1) {
        // one row alone has too few chains for a float32 panel; two of pairs outrun memory, and one
        // panel at a time is read in order
        constexpr int at_once = PAIRS ? vectors : std::max(one_row_vectors, vectors);
        constexpr int num_panels = at_once / vectors;
        for (; panel + num_panels <= task.panel_stop; panel += num_panels) {
            for (int64_t k = 0; k < num_steps(weight); k += chain_steps) {
                const int64_t stop = std::min(k + chain_steps, num_steps(weight));
                add_chain<PAIRS, 1, at_once>(weight, rows, x_stride, to, panel * vectors, k, stop,
                                             ahead_floats, Upcoming{weight.blob, 0});
            }
        }
    }
    // tiles of nearly equal height: 15 rows are 8 and 7, not 14 and 1
    constexpr int64_t parts = vectors / tile_vectors;
    const int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (; panel < task.panel_stop; ++panel) {
        for (int64_t k = 0; k < num_steps(weight); k += chain_steps) {
            const int64_t stop = std::min(k + chain_steps, num_steps(weight));
            const Upcoming next = after_chain(weight, task, panel, stop);
            const int64_t turns = std::max<int64_t>(1, (stop - k) / turn_steps(num_rows));
            for (int64_t t = 0; t < num_tiles * parts; ++t) {
                const int64_t row = num_rows * (t / parts) / num_tiles;
                const int64_t row_stop = num_rows * (t / parts + 1) / num_tiles;
                some_rows<PAIRS, MAX_ROWS>(row_stop - row, weight, rows + row * x_stride, x_stride,
                                           to.from_row(row), panel * vectors + t % parts * tile_vectors,
                                           k, stop, t < parts ? ahead_floats : 0,
                                           next.part(t, num_tiles * parts, turns));
            }
        }
    }
}

static void round_row(const float* x, int64_t num_inputs, uint32_t* pairs) {
    const int64_t padded = (num_inputs + group_inputs - 1) / group_inputs * group_inputs;
    auto* out = reinterpret_cast<uint16_t*>(pairs);
    int64_t i = 0;
#if EC_LEVEL == 3
    for (; i + group_inputs <= num_inputs; i += group_inputs) {
        const __m512bh both =
            _mm512_cvtne2ps_pbh((__m512)load(x + i + 16), (__m512)load(x + i));
        _mm512_storeu_si512(out + i, (__m512i)both);
    }
#elif EC_NEON == 3
    for (; i + 8 <= num_inputs; i += 8) {
        const auto low = vcvtq_low_bf16_f32((float32x4_t)load(x + i));
        vst1q_bf16(reinterpret_cast<bfloat16_t*>(out + i),
                   vcvtq_high_bf16_f32(low, (float32x4_t)load(x + i + 4)));
    }
#endif
    for (; i < num_inputs; ++i) out[i] = static_cast<uint16_t>(bfloat16_of(x[i]));
    for (; i < padded; ++i) out[i] = 0;
}
