// Tiles of float32 products. Included by every_isa.h: no include guard.
//
// Each output is one chain of multiply-adds over `chain_inputs`, and the chains are added in order;
// so a row has the same bits in any tile, and with AVX2 as with AVX-512.

// The registers of a tile are rows * panels * 32 floats.
constexpr int MAX_ROWS = EC_LEVEL == 2 ? 12 : EC_LEVEL == 1 ? 3 : 1;
constexpr int MAX_PANELS = EC_LEVEL == 2 ? 4 : EC_LEVEL == 1 ? 2 : 1;
// How far ahead a panel's first tile fetches weights; later ones find them in a cache.
constexpr int64_t ahead_floats = 24 * panel_outputs;
constexpr int vectors = panel_outputs / W;

template <int ROWS, int PANELS>
inline __attribute__((always_inline)) void tile(const float* x, int64_t x_stride, const float* w,
                                                int64_t panel_floats, int64_t num_inputs,
                                                int64_t ahead, Upcoming soon, vf* sums) {
    vf acc[ROWS][PANELS][vectors];
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p)
            for (int v = 0; v < vectors; ++v) acc[r][p][v] = vf{};
#pragma GCC unroll 2  // twenty-four multiply-adds do not hide what a turn costs
    for (int64_t k = 0; k < num_inputs; ++k) {
        __builtin_prefetch(soon.at + k * soon.bytes, 0, 2);
        vf weights[PANELS][vectors];
        for (int p = 0; p < PANELS; ++p) {
            const float* at = w + p * panel_floats + k * panel_outputs;
            __builtin_prefetch(at + ahead);
            __builtin_prefetch(at + ahead + 16);
            for (int v = 0; v < vectors; ++v) weights[p][v] = load(at + v * W);
        }
        for (int r = 0; r < ROWS; ++r) {
            const vf value = splat(x[r * x_stride + k]);
            for (int p = 0; p < PANELS; ++p)
                for (int v = 0; v < vectors; ++v)
                    acc[r][p][v] = fma(value, weights[p][v], acc[r][p][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p)
            for (int v = 0; v < vectors; ++v) sums[(r * PANELS + p) * vectors + v] = acc[r][p][v];
}

// One tile's chain, added to what `out` holds, or to the bias if it is the first and starts anew.
template <int ROWS, int PANELS>
__attribute__((noinline)) void add_chain(const LinearWeight& weight, const float* x,
                                         int64_t x_stride, const Results& out, int64_t panel,
                                         int64_t k, int64_t k_stop, int64_t ahead,
                                         Upcoming soon) {
    const int64_t panel_floats = weight.num_inputs * panel_outputs;
    if (ROWS > 1 && !out.streams) prefetch_results(out.at + panel * panel_outputs, out.stride, ROWS);
    const float* w = reinterpret_cast<const float*>(weight.blob) + panel * panel_floats;
    vf sums[ROWS * PANELS * vectors];
    tile<ROWS, PANELS>(x + k, x_stride, w + k * panel_outputs, panel_floats, k_stop - k, ahead,
                       soon, sums);
    for (int p = 0; p < PANELS; ++p) {
        const int64_t n = (panel + p) * panel_outputs;
        const bool whole = n + panel_outputs <= weight.num_outputs;
        const int64_t num_valid = whole ? panel_outputs : weight.num_outputs - n;
        for (int r = 0; r < ROWS; ++r) {
            float* to = out.at + r * out.stride + n;
            alignas(64) float edge[panel_outputs];
            float* held = to;
            if (!whole) {
                held = edge;
                for (int64_t i = 0; i < panel_outputs; ++i) edge[i] = i < num_valid ? to[i] : 0;
            }
            for (int v = 0; v < vectors; ++v) {
                const vf sum = sums[(r * PANELS + p) * vectors + v];
                const int64_t at = v * W;
                vf total = sum;
                if (k != 0 || out.adds) {
                    total = load(held + at) + sum;
                } else if (weight.bias != nullptr) {
                    total = load(weight.bias + n + at) + sum;
                }
                if (out.streams && whole) {
                    stream(held + at, total);
                } else {
                    store(held + at, total);
                }
            }
            if (!whole) {
                for (int64_t i = 0; i < num_valid; ++i) to[i] = edge[i];
            }
        }
    }
}

template <int ROWS, int PANELS>
void some_rows(int64_t num_rows, const LinearWeight& weight, const float* x, int64_t x_stride,
               const Results& out, int64_t panel, int64_t k, int64_t k_stop, int64_t ahead,
               Upcoming soon) {
    if (num_rows == ROWS) {
        add_chain<ROWS, PANELS>(weight, x, x_stride, out, panel, k, k_stop, ahead, soon);
    } else if constexpr (ROWS > 1) {
        some_rows<ROWS - 1, PANELS>(num_rows, weight, x, x_stride, out, panel, k, k_stop, ahead,
                                    soon);
    }
}

// The chain from `k` on, or of the next panel, or of the next task.
inline Upcoming after_chain(const LinearWeight& weight, const LinearTask& task, int64_t panel,
                            int64_t k) {
    if (k == weight.num_inputs)
        return panel + 1 < task.panel_stop ? upcoming_panel(weight, panel + 1) : task.after;
    const int64_t floats = (panel * weight.num_inputs + k) * panel_outputs;
    return {weight.blob + 4 * floats,
            std::min(chain_inputs, weight.num_inputs - k) * panel_outputs * 4};
}

static void run_f32(const LinearWeight& weight, const float* x, int64_t x_stride,
                    const Results& out, const LinearTask& task) {
    const int64_t num_rows = task.row_stop - task.row;
    const float* first = x + task.row * x_stride;
    const Results to = out.from_row(task.row);
    int64_t panel = task.panel;
    if (num_rows == 1) {  // several panels at once: one row alone has too few chains
        for (; panel + MAX_PANELS <= task.panel_stop; panel += MAX_PANELS) {
            for (int64_t k = 0; k < weight.num_inputs; k += chain_inputs) {
                const int64_t stop = std::min(k + chain_inputs, weight.num_inputs);
                add_chain<1, MAX_PANELS>(weight, first, x_stride, to, panel, k, stop, ahead_floats,
                                         Upcoming{weight.blob, 0});
            }
        }
    }
    // tiles of nearly equal height: 13 rows are 7 and 6, not 12 and 1
    const int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (; panel < task.panel_stop; ++panel) {
        for (int64_t k = 0; k < weight.num_inputs; k += chain_inputs) {
            const int64_t stop = std::min(k + chain_inputs, weight.num_inputs);
            const Upcoming next = after_chain(weight, task, panel, stop);
            for (int64_t t = 0; t < num_tiles; ++t) {
                const int64_t row = num_rows * t / num_tiles;
                const int64_t row_stop = num_rows * (t + 1) / num_tiles;
                some_rows<MAX_ROWS, 1>(row_stop - row, weight, first + row * x_stride, x_stride,
                                       to.from_row(row), panel, k, stop,
                                       t == 0 ? ahead_floats : 0,
                                       next.part(t, num_tiles, stop - k));
            }
        }
    }
}
