// Included once an instruction set, inside its namespace, with these defined:
//
//   Ints, Floats   vectors of `width` lanes
//   dot            acc + four products of bytes a lane; weights unsigned and below 64, x signed
//   dot_wide       the same for codes to 255; DOT_WIDE_IS_SIGNED: of code - 128
//   dot_16, add_pairs   HAS_DOT_16: the same for codes below 16 with 16-bit sums, which hold those
//                  of a group, and acc + both of each pair of them
//   ROWS_GROUPED, ROWS_Q6   the heights of tiles
//
// A tile is some rows times two vectors of outputs.

constexpr int tile_vectors = 2;
constexpr int64_t tile_outputs = tile_vectors * width;
// How far ahead a panel's first tile fetches weights: the units wait for memory, not it for them.
constexpr int64_t ahead_bytes = 8192;
constexpr int64_t dwords = panel_outputs * 4;  // bytes from four inputs of a panel to the next four

template <LinearKind KIND>
struct Record {
    static constexpr bool superblock = KIND == LinearKind::q4_k || KIND == LinearKind::q6_k;
    static constexpr bool row_scale = KIND == LinearKind::i8_row;  // none in the record
    static constexpr bool to_255 = KIND == LinearKind::q8_group || row_scale;
    static constexpr bool bytes_of_codes = to_255 || KIND == LinearKind::q6_k;
    static constexpr bool minimum = KIND == LinearKind::q4_minimum || KIND == LinearKind::q4_k;
    static constexpr int groups = superblock ? superblock_inputs / group_inputs : 1;
    // f16 values, then the superblock's bytes: two of each output a group
    static constexpr int64_t bytes_at = 2 * panel_outputs * (row_scale ? 0 : minimum ? 2 : 1);
    static constexpr int64_t codes_at = bytes_at + (superblock ? groups * 2 * panel_outputs : 0);
    static constexpr int64_t group_bytes = (bytes_of_codes ? 8 : 4) * dwords;
    static constexpr int64_t bytes = codes_at + groups * group_bytes;
};

// acc += four dwords of inputs (16) times their weights, one byte a code.
template <LinearKind KIND, int ROWS>
inline __attribute__((always_inline)) void dot_half(const uint8_t* codes,
                                                    const ActivationGroup* x, int64_t stride,
                                                    int64_t input,
                                                    Ints (&acc)[ROWS][tile_vectors]) {
    for (int j = 0; j < 4; ++j) {
        Ints w[tile_vectors];
        for (int v = 0; v < tile_vectors; ++v) w[v] = load_ints(codes + j * dwords + v * width * 4);
        for (int r = 0; r < ROWS; ++r) {
            const Ints four = broadcast_four(x[r * stride].codes + input + 4 * j);
            for (int v = 0; v < tile_vectors; ++v) {
                acc[r][v] = Record<KIND>::to_255 ? dot_wide(acc[r][v], w[v], four)
                                                 : dot(acc[r][v], w[v], four);
            }
        }
    }
}

// acc = exact sums of weight code times activation code over one group.
template <LinearKind KIND, int ROWS>
inline __attribute__((always_inline)) void dot_group(const uint8_t* codes,
                                                     const ActivationGroup* x, int64_t stride,
                                                     Ints (&acc)[ROWS][tile_vectors]) {
    constexpr bool from_zero =
        Record<KIND>::minimum || (Record<KIND>::to_255 && DOT_WIDE_IS_SIGNED);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < tile_vectors; ++v)
            acc[r][v] = from_zero ? same_int(0) : same_int(x[r * stride].start);
    if constexpr (Record<KIND>::to_255) {
        dot_half<KIND, ROWS>(codes, x, stride, 0, acc);
        dot_half<KIND, ROWS>(codes + 4 * dwords, x, stride, 16, acc);
    } else {
        Ints part[ROWS][tile_vectors];
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < tile_vectors; ++v) part[r][v] = same_int(0);
        for (int j = 0; j < 4; ++j) {
            Ints low[tile_vectors];
            Ints high[tile_vectors];
            for (int v = 0; v < tile_vectors; ++v) {
                const Ints both = load_ints(codes + j * dwords + v * width * 4);
                low[v] = low_nibbles(both);
                high[v] = high_nibbles(both);
            }
            for (int r = 0; r < ROWS; ++r) {
                const Ints first = broadcast_four(x[r * stride].codes + 4 * j);
                const Ints second = broadcast_four(x[r * stride].codes + 16 + 4 * j);
                for (int v = 0; v < tile_vectors; ++v) {
                    if constexpr (HAS_DOT_16) {
                        part[r][v] = dot_16(part[r][v], low[v], first);
                        part[r][v] = dot_16(part[r][v], high[v], second);
                    } else {
                        acc[r][v] = dot(acc[r][v], low[v], first);
                        acc[r][v] = dot(acc[r][v], high[v], second);
                    }
                }
            }
        }
        if constexpr (HAS_DOT_16) {
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < tile_vectors; ++v) acc[r][v] = add_pairs(acc[r][v], part[r][v]);
        }
    }
}

// is_first: no tile before has read these outputs' weights, so they are fetched ahead.
template <LinearKind KIND, int ROWS>
__attribute__((noinline)) void grouped_tile(const uint8_t* records, int64_t num_groups,
                                            int64_t output, const ActivationGroup* groups,
                                            int64_t stride,
                                            bool is_first, Upcoming soon,
                                            Floats (&sums)[ROWS][tile_vectors]) {
    using R = Record<KIND>;
    Floats acc[ROWS][tile_vectors];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < tile_vectors; ++v) acc[r][v] = same_float(0);
    for (int64_t first = 0; first < num_groups; first += R::groups, records += R::bytes) {
        for (int64_t line = 0; line < soon.bytes; line += 64)
            __builtin_prefetch(soon.at + line, 0, 2);
        soon.at += soon.bytes;
        Floats d[tile_vectors];
        Floats minimum[tile_vectors];
        for (int v = 0; v < tile_vectors; ++v) {
            const uint8_t* halves = records + 2 * (output + v * width);
            if (!R::row_scale) d[v] = load_halves(halves);
            if (R::minimum) minimum[v] = load_halves(halves + 2 * panel_outputs);
        }
        for (int g = 0; g < R::groups; ++g) {
            const uint8_t* codes = records + R::codes_at + g * R::group_bytes + output * 4;
            if (is_first) {
                const uint8_t* ahead = records + ahead_bytes;
                const int64_t start = g == 0 ? 0 : R::codes_at + g * R::group_bytes;
                const int64_t stop = R::codes_at + (g + 1) * R::group_bytes;
                for (int64_t line = start; line < stop; line += 64)
                    __builtin_prefetch(ahead + line);
            }
            const ActivationGroup* group = groups + first + g;
            const uint8_t* bytes = records + R::bytes_at + output;
            Ints dots[ROWS][tile_vectors];
            if constexpr (KIND == LinearKind::q6_k) {
                for (int half = 0; half < 2; ++half) {
                    Ints part[ROWS][tile_vectors];
                    for (int r = 0; r < ROWS; ++r) {
                        const ActivationGroup& own = group[r * stride];
                        for (int v = 0; v < tile_vectors; ++v)
                            part[r][v] = same_int(half == 0 ? own.start_low : own.start_high);
                    }
                    dot_half<KIND, ROWS>(codes + half * 4 * dwords, group, stride, 16 * half, part);
                    for (int v = 0; v < tile_vectors; ++v) {
                        const Ints scale = load_signed_bytes(
                            bytes + (2 * g + half) * panel_outputs + v * width);
                        for (int r = 0; r < ROWS; ++r) {
                            const Ints scaled = multiply_ints(part[r][v], scale);
                            dots[r][v] = half == 0 ? scaled : add_ints(dots[r][v], scaled);
                        }
                    }
                }
            } else {
                dot_group<KIND, ROWS>(codes, group, stride, dots);
            }
            for (int v = 0; v < tile_vectors; ++v) {
                Floats scale = d[v];
                Floats least = minimum[v];
                if constexpr (KIND == LinearKind::q4_k) {
                    const uint8_t* at = bytes + g * panel_outputs + v * width;
                    scale = multiply(scale, to_float(load_bytes(at)));
                    least = multiply(least, to_float(load_bytes(at + R::groups * panel_outputs)));
                }
                for (int r = 0; r < ROWS; ++r) {
                    const ActivationGroup& own = group[r * stride];
                    const Floats factor = same_float(own.scale);
                    acc[r][v] = multiply_add(to_float(dots[r][v]),
                                             R::row_scale ? factor : multiply(scale, factor),
                                             acc[r][v]);
                    if (R::minimum) {
                        // the minimum of q4_k is subtracted
                        const float sum =
                            KIND == LinearKind::q4_k ? -own.scaled_sum : own.scaled_sum;
                        acc[r][v] = multiply_add(least, same_float(sum), acc[r][v]);
                    }
                }
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < tile_vectors; ++v) sums[r][v] = acc[r][v];
}

template <LinearKind KIND, int ROWS>
void some_rows(int64_t num_rows, const LinearWeight& weight, const Activations& x,
               const Results& out, int64_t panel, int64_t row, bool is_first,
               Upcoming soon) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS)
            return some_rows<KIND, ROWS - 1>(num_rows, weight, x, out, panel, row, is_first, soon);
    }
    const int64_t panel_bytes = weight.blob_bytes / num_panels(weight);
    const uint8_t* blob = weight.blob + panel * panel_bytes;
    const ActivationGroup* groups = x.groups + row * x.stride;
    for (int64_t output = 0; output < panel_outputs; output += tile_outputs) {
        const int64_t n = panel * panel_outputs + output;
        if (n >= weight.num_outputs) return;
        if (!out.streams) prefetch_results(out.at + row * out.stride + n, out.stride, ROWS);
        Floats sums[ROWS][tile_vectors];
        grouped_tile<KIND, ROWS>(blob, num_groups(weight), output, groups, x.stride,
                                 is_first && output == 0,
                                 output == 0 ? soon : Upcoming{soon.at, 0}, sums);
        const int64_t num_valid = std::min(tile_outputs, weight.num_outputs - n);
        for (int r = 0; r < ROWS; ++r) {
            float* to = out.at + (row + r) * out.stride + n;
            alignas(64) float edge[tile_outputs];
            float* held = num_valid == tile_outputs ? to : edge;
            for (int v = 0; v < tile_vectors; ++v) {
                Floats total = sums[r][v];
                if (Record<KIND>::row_scale)
                    total = multiply(total, load_floats(weight.row_scales + n + v * width));
                if (weight.bias != nullptr)
                    total = add(total, load_floats(weight.bias + n + v * width));
                if (out.streams && held == to) {
                    stream_floats(held + v * width, total);
                } else {
                    store_floats(held + v * width, total);
                }
            }
            if (held == edge) std::memcpy(to, edge, static_cast<size_t>(num_valid) * 4);
        }
    }
}

template <LinearKind KIND, int ROWS>
void run_kind(const LinearWeight& weight, const Activations& x, const Results& out,
              const LinearTask& task) {
    const int64_t num_rows = task.row_stop - task.row;
    const int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    const int64_t num_records = num_groups(weight) / Record<KIND>::groups;
    for (int64_t panel = task.panel; panel < task.panel_stop; ++panel) {
        const Upcoming next =
            panel + 1 < task.panel_stop ? upcoming_panel(weight, panel + 1) : task.after;
        for (int64_t t = 0; t < num_tiles; ++t) {
            const int64_t row = task.row + num_rows * t / num_tiles;
            const int64_t row_stop = task.row + num_rows * (t + 1) / num_tiles;
            some_rows<KIND, ROWS>(row_stop - row, weight, x, out, panel, row, t == 0,
                                  next.part(t, num_tiles, num_records));
        }
    }
}

void run(const LinearWeight& weight, const Activations& x, const Results& out,
         const LinearTask& task) {
    switch (static_cast<LinearKind>(weight.kind)) {
        case LinearKind::i8_row:
            return run_kind<LinearKind::i8_row, ROWS_GROUPED>(weight, x, out, task);
        case LinearKind::q8_group:
            return run_kind<LinearKind::q8_group, ROWS_GROUPED>(weight, x, out, task);
        case LinearKind::q4_group:
            return run_kind<LinearKind::q4_group, ROWS_GROUPED>(weight, x, out, task);
        case LinearKind::q4_minimum:
            return run_kind<LinearKind::q4_minimum, ROWS_GROUPED>(weight, x, out, task);
        case LinearKind::q4_k:
            return run_kind<LinearKind::q4_k, ROWS_GROUPED>(weight, x, out, task);
        case LinearKind::q6_k:
            return run_kind<LinearKind::q6_k, ROWS_Q6>(weight, x, out, task);
        case LinearKind::f32:
            return;  // not an integer product
    }
}
