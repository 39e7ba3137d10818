// Products on the matrix unit: of bfloat16 weights, and of bytes in groups. See tiles.h.
//
// A row has the same bits in every batch. Which form a row takes depends on the number of rows, so
// forms of one weight must agree to the bit:
//
//   bf16       tiles for any number of rows. The manual's order of the sums (32 inputs, even and odd
//              ones apart) is not that of vdpbf16ps. One row has rows of no meaning beside it: the unit
//              still multiplies 1 KiB of weights in 16 cycles, ten times what memory gives.
//   in groups  sums over a group are exact integers, and what follows is float32 in the order of
//              linear_integer_tile.h: here, and there for few rows, which wait for memory. Codes widened
//              to bf16 have twice the rate at most, but sums that one row could have only by widening
//              its weights, too, at half of memory's rate.
//   q6_k       has a scale for 16 inputs, a quarter of a tile: it stays with the vector units.
#include "linear_tiles.h"

#include <algorithm>
#include <cstring>

#include "tiles.h"

#if EC_X86
#include <immintrin.h>

namespace ec {
namespace {

constexpr int64_t half_tile = 16;  // rows of a tile, and outputs
constexpr int64_t block_rows = 2 * half_tile;
constexpr int64_t block_dwords = 16;  // of a row: what one product takes
constexpr int64_t step_bytes = panel_outputs * 4;
// How far ahead a panel's first rows fetch weights.
constexpr int64_t ahead_bytes = 8192;
// What is read again for every panel should lie in the second cache, what is read for all rows in the first.
constexpr int64_t most_cached_bytes = 512 << 10;
constexpr int64_t most_chunk_steps = 320;

int64_t rows_at_once(int64_t row_bytes) {
    return std::max<int64_t>(1, most_cached_bytes / row_bytes / block_rows) * block_rows;
}

EC_BEGIN_AVX512

void fetch(Upcoming& soon) {
    for (int64_t line = 0; line < soon.bytes; line += 64) __builtin_prefetch(soon.at + line, 0, 2);
    soon.at += soon.bytes;
}

// ---- bfloat16

// 16 rows and outputs of a block's sums, between their tile and `out`. What `out` has no place for
// lies in `edge`.
struct Corner {
    int64_t num_rows, num_outputs;  // that `out` has
    float* to;
    const Results& out;
    float* edge;
    bool is_whole;

    Corner(const LinearWeight& w, const Results& results, int64_t rows_left, int64_t row, int64_t n,
           float* scratch)
        : num_rows(std::clamp<int64_t>(rows_left - row, 0, half_tile)),
          num_outputs(std::clamp<int64_t>(w.num_outputs - n, 0, half_tile)),
          to(results.at + row * results.stride + n), out(results), edge(scratch),
          is_whole(num_rows == half_tile && num_outputs == half_tile && !results.streams) {}

    __mmask16 mask() const { return static_cast<__mmask16>((1 << num_outputs) - 1); }

    // From `bias` (or null), or from what `out` holds.
    template <class T, int TILE>
    __attribute__((noinline)) void start(bool adds, const float* bias) const {
        if (adds && is_whole) {
            T::template load<TILE>(to, out.stride * 4);
        } else if (adds) {
            for (int64_t r = 0; r < half_tile; ++r) {
                const __mmask16 held = r < num_rows ? mask() : 0;
                _mm512_store_ps(edge + r * half_tile, _mm512_maskz_loadu_ps(held, to + r * out.stride));
            }
            T::template load<TILE>(edge, 64);
        } else if (bias != nullptr) {
            T::template load<TILE>(bias, 0);
        } else {
            T::template zero<TILE>();
        }
    }

    template <class T, int TILE>
    __attribute__((noinline)) void finish() const {
        if (is_whole) return T::template store<TILE>(to, out.stride * 4);
        T::template store<TILE>(edge, 64);
        for (int64_t r = 0; r < num_rows; ++r) {
            const __m512 sums = _mm512_load_ps(edge + r * half_tile);
            if (out.streams && num_outputs == half_tile) {
                _mm512_stream_ps(to + r * out.stride, sums);
            } else {
                _mm512_mask_storeu_ps(to + r * out.stride, mask(), sums);
            }
        }
    }
};

// One block's sums over steps [step, step_stop): ROWS * 16 rows by PANELS * 32 outputs.
template <class T, int ROWS, int PANELS>
void add_block(const LinearWeight& w, const PairedActivations& x, const Results& out,
               int64_t num_rows, int64_t panel, int64_t step, int64_t step_stop, int64_t ahead,
               Upcoming soon) {
    constexpr int columns = 2 * PANELS;
    const int64_t panel_bytes = num_steps(w) * step_bytes, x_stride = x.stride * 4;
    const uint8_t* at = w.blob + panel * panel_bytes + step * step_bytes;
    const auto* rows = reinterpret_cast<const uint8_t*>(x.pairs + step);
    alignas(64) float edges[4][half_tile * half_tile];
    const auto corner = [&](int64_t r, int64_t c) {
        return Corner(w, out, num_rows, r * half_tile, panel * panel_outputs + c * half_tile,
                      edges[r * columns + c]);
    };
    const bool adds = step != 0 || out.adds;
    const auto bias = [&](int64_t c) {
        return w.bias == nullptr ? nullptr : w.bias + panel * panel_outputs + c * half_tile;
    };
    if (!out.streams) prefetch_results(out.at + panel * panel_outputs, out.stride,
                                       std::min(num_rows, ROWS * half_tile));
    corner(0, 0).template start<T, 0>(adds, bias(0));
    corner(0, 1).template start<T, 1>(adds, bias(1));
    if constexpr (ROWS == 2) {
        corner(1, 0).template start<T, 2>(adds, bias(0));
        corner(1, 1).template start<T, 3>(adds, bias(1));
    } else if constexpr (PANELS == 2) {
        corner(0, 2).template start<T, 2>(adds, bias(2));
        corner(0, 3).template start<T, 3>(adds, bias(3));
    }
    constexpr int64_t tile_bytes = block_dwords * step_bytes, x_bytes = block_dwords * 4;
    for (; step < step_stop; step += block_dwords, at += tile_bytes, rows += x_bytes) {
        fetch(soon);
        for (int64_t line = 0; ahead != 0 && line < tile_bytes; line += 64) {
            for (int p = 0; p < PANELS; ++p) __builtin_prefetch(at + p * panel_bytes + ahead + line);
        }
        if constexpr (ROWS == 2) {  // few rows stay in the first cache
            for (int64_t r = 0; r < block_rows; ++r)
                __builtin_prefetch(rows + r * x_stride + 3 * x_bytes);
        }
        T::template load<4>(rows, x_stride);
        T::template load<6>(at, step_bytes);
        T::template dot_bf16<0, 4, 6>();
        T::template load<7>(at + 64, step_bytes);
        T::template dot_bf16<1, 4, 7>();
        if constexpr (ROWS == 2) {
            T::template load<5>(rows + half_tile * x_stride, x_stride);
            T::template dot_bf16<2, 5, 6>();
            T::template dot_bf16<3, 5, 7>();
        } else if constexpr (PANELS == 2) {
            T::template load<5>(at + panel_bytes, step_bytes);
            T::template dot_bf16<2, 4, 5>();
            T::template load<6>(at + panel_bytes + 64, step_bytes);
            T::template dot_bf16<3, 4, 6>();
        }
    }
    corner(0, 0).template finish<T, 0>();
    corner(0, 1).template finish<T, 1>();
    if constexpr (ROWS == 2) {
        corner(1, 0).template finish<T, 2>();
        corner(1, 1).template finish<T, 3>();
    } else if constexpr (PANELS == 2) {
        corner(0, 2).template finish<T, 2>();
        corner(0, 3).template finish<T, 3>();
    }
}

template <class T>
void run_bf16(const LinearWeight& w, const PairedActivations& x, const Results& out,
              const LinearTask& task) {
    T::configure(whole_tiles);
    const int64_t steps = num_steps(w), some_rows = rows_at_once(x.stride * 4);
    for (int64_t row = task.row; row < task.row_stop; row += some_rows) {
        const PairedActivations own{x.pairs + row * x.stride, x.stride};
        const Results to = out.from_row(row);
        const int64_t num_rows = std::min(some_rows, task.row_stop - row);
        const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
        const bool is_chunked = num_blocks > 1 && !out.streams;
        const int64_t num_chunks = is_chunked ? (steps + most_chunk_steps - 1) / most_chunk_steps : 1;
        int64_t panel = task.panel;
        for (; num_rows <= half_tile && panel + 2 <= task.panel_stop; panel += 2)
            add_block<T, 1, 2>(w, own, to, num_rows, panel, 0, steps, ahead_bytes, {w.blob, 0});
        for (; panel < task.panel_stop; ++panel) {
            const Upcoming next =
                panel + 1 < task.panel_stop ? upcoming_panel(w, panel + 1) : task.after;
            for (int64_t c = 0; c < num_chunks; ++c) {
                const int64_t groups = steps / block_dwords;
                const int64_t step = groups * c / num_chunks * block_dwords;
                const int64_t step_stop = groups * (c + 1) / num_chunks * block_dwords;
                for (int64_t b = 0; b < num_blocks; ++b) {
                    const int64_t first = b * block_rows;
                    const bool is_half = num_rows - first <= half_tile;
                    const auto add = is_half ? add_block<T, 1, 1> : add_block<T, 2, 1>;
                    add(w, {own.pairs + first * x.stride, x.stride}, to.from_row(first),
                        num_rows - first, panel, step, step_stop, b == 0 ? ahead_bytes : 0,
                        next.part(c * num_blocks + b, num_chunks * num_blocks, groups / num_chunks + 1));
                }
            }
        }
    }
}

// ---- bytes in groups

// A product takes the 32 inputs of one group: 8 rows of activations, whose float32 sums by 32 outputs
// stay in registers. Two sets of tiles take turns, so that one group is multiplied while the sums of
// the one before are scaled.
constexpr int group_rows = 8;
constexpr TileShapes group_tiles = {
    1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {8, 8, 8, 8, 8, 8, 8, 8}};
constexpr int64_t chunk_groups = 24;  // 30 KiB of a panel

// Some groups of a panel: signed codes as a product takes them, scales and minima as numbers.
struct Chunk {
    alignas(64) int8_t codes[chunk_groups][8][2][64];
    float scales[chunk_groups][panel_outputs];
    float minima[chunk_groups][panel_outputs];
};

template <LinearKind KIND>
void unpack(const uint8_t* records, int64_t num_groups, Chunk& chunk) {
    constexpr Record R = record_of(KIND);
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(R.zero));
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < num_groups; ++i) {
        const uint8_t* record = records + i / R.groups * R.bytes;
        const int64_t g = i % R.groups;
        const uint8_t* from = record + R.codes_at + g * R.group_bytes;
        auto* to = reinterpret_cast<__m512i*>(chunk.codes[i]);
        for (int j = 0; j < R.group_bytes / 64; ++j) {
            const __m512i both = _mm512_loadu_si512(from + 64 * j);
            if constexpr (R.bytes_of_codes) {
                to[j] = _mm512_sub_epi8(both, zero);
            } else {
                const __m512i high = _mm512_srli_epi16(both, 4);
                to[j] = _mm512_sub_epi8(_mm512_and_si512(both, low_half), zero);
                to[j + 8] = _mm512_sub_epi8(_mm512_and_si512(high, low_half), zero);
            }
        }
        if constexpr (R.row_scale) continue;
        for (int64_t n = 0; n < panel_outputs; n += 16) {
            const auto halves = [&](const uint8_t* at) {
                return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
            };
            const auto bytes = [&](const uint8_t* at) {
                const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
                return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(some));
            };
            __m512 scale = halves(record + 2 * n), minimum = _mm512_setzero_ps();
            if constexpr (R.minimum) minimum = halves(record + 2 * (panel_outputs + n));
            if constexpr (R.superblock) {
                const uint8_t* at = record + R.bytes_at + g * panel_outputs + n;
                scale = _mm512_mul_ps(scale, bytes(at));
                minimum = _mm512_mul_ps(minimum, bytes(at + R.groups * panel_outputs));
            }
            _mm512_storeu_ps(chunk.scales[i] + n, scale);
            if constexpr (R.minimum) _mm512_storeu_ps(chunk.minima[i] + n, minimum);
        }
    }
}

template <class T, int SET>
EC_INLINE void multiply(const int8_t (&codes)[8][2][64], const ActivationGroup* x, int64_t stride,
                        int32_t (&dots)[group_rows][2][16]) {
    T::template zero<2 * SET>();
    T::template zero<2 * SET + 1>();
    T::template load<4 + SET>(x->codes, stride * static_cast<int64_t>(sizeof *x));
    T::template load<6>(codes[0][0], step_bytes);
    T::template dot_signed<2 * SET, 4 + SET, 6>();
    T::template load<7>(codes[0][1], step_bytes);
    T::template dot_signed<2 * SET + 1, 4 + SET, 7>();
    T::template store<2 * SET>(dots[0][0], 2 * 64);
    T::template store<2 * SET + 1>(dots[0][1], 2 * 64);
}

// acc += a group's exact sums, as linear_integer_tile.h adds them.
template <LinearKind KIND>
EC_INLINE void scale_group(const Chunk& chunk, int64_t g, const ActivationGroup* x, int64_t stride,
                           const int32_t (&dots)[group_rows][2][16], __m512 (&acc)[group_rows][2]) {
    constexpr Record R = record_of(KIND);
    __m512 scales[2], minima[2];
    for (int v = 0; v < 2 && !R.row_scale; ++v) {
        scales[v] = _mm512_loadu_ps(chunk.scales[g] + 16 * v);
        if (R.minimum) minima[v] = _mm512_loadu_ps(chunk.minima[g] + 16 * v);
    }
#pragma GCC unroll 8
    for (int r = 0; r < group_rows; ++r) {
        const __m512 factor = _mm512_set1_ps(x[r * stride].scale);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[r][v]));
            const __m512 scale = R.row_scale ? factor : _mm512_mul_ps(scales[v], factor);
            acc[r][v] = _mm512_fmadd_ps(dot, scale, acc[r][v]);
            if constexpr (R.minimum) {
                const float sum = x[r * stride].scaled_sum;
                acc[r][v] = _mm512_fmadd_ps(minima[v], _mm512_set1_ps(R.superblock ? -sum : sum),
                                            acc[r][v]);
            }
        }
    }
}

// 8 rows from `x` on, over the groups of a chunk; `out` carries their sums from chunk to chunk.
template <class T, LinearKind KIND>
__attribute__((noinline)) void add_groups(const LinearWeight& w, const Chunk& chunk,
                                          const ActivationGroup* x, int64_t stride,
                                          int64_t num_groups, const Results& out, int64_t n,
                                          bool is_first, bool is_last, Upcoming soon) {
    constexpr Record R = record_of(KIND);
    alignas(64) int32_t even[group_rows][2][16], odd[group_rows][2][16];
    const int64_t valid = std::min(panel_outputs, w.num_outputs - n);
    const auto all = static_cast<uint32_t>((uint64_t{1} << valid) - 1);
    const __mmask16 masks[2] = {static_cast<__mmask16>(all), static_cast<__mmask16>(all >> 16)};
    float* to = out.at + n;
    alignas(64) float sums[group_rows][2][16];  // apart from acc: that stays in registers
    for (int r = 0; r < group_rows; ++r) {
        for (int v = 0; v < 2; ++v) {
            const __mmask16 held = is_first ? 0 : masks[v];
            _mm512_store_ps(sums[r][v], _mm512_maskz_loadu_ps(held, to + r * out.stride + 16 * v));
        }
    }
    __m512 acc[group_rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < group_rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) acc[r][v] = _mm512_load_ps(sums[r][v]);
    multiply<T, 0>(chunk.codes[0], x, stride, even);
    for (int64_t g = 0; g < num_groups; g += 2) {
        fetch(soon);
        if (g + 1 < num_groups) multiply<T, 1>(chunk.codes[g + 1], x + g + 1, stride, odd);
        scale_group<KIND>(chunk, g, x + g, stride, even, acc);
        if (g + 1 == num_groups) break;
        if (g + 2 < num_groups) multiply<T, 0>(chunk.codes[g + 2], x + g + 2, stride, even);
        scale_group<KIND>(chunk, g + 1, x + g + 1, stride, odd, acc);
    }
#pragma GCC unroll 8
    for (int r = 0; r < group_rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) _mm512_store_ps(sums[r][v], acc[r][v]);
    for (int r = 0; r < group_rows; ++r) {
        for (int v = 0; v < 2; ++v) {
            __m512 sum = _mm512_load_ps(sums[r][v]);
            const int64_t own = n + 16 * v;
            if (is_last && R.row_scale) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(w.row_scales + own));
            if (is_last && w.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_loadu_ps(w.bias + own));
            float* at = to + r * out.stride + 16 * v;
            if (is_last && out.streams && valid == panel_outputs) {
                _mm512_stream_ps(at, sum);
            } else {
                _mm512_mask_storeu_ps(at, masks[v], sum);
            }
        }
    }
}

template <class T, LinearKind KIND>
void run_groups(const LinearWeight& w, const Activations& x, const Results& out,
                const LinearTask& task) {
    T::configure(group_tiles);
    Chunk chunk;
    constexpr Record R = record_of(KIND);
    const int64_t groups = num_groups(w), panel_bytes = w.blob_bytes / num_panels(w);
    const int64_t some_rows = rows_at_once(x.stride * static_cast<int64_t>(sizeof(ActivationGroup)));
    for (int64_t row = task.row; row < task.row_stop; row += some_rows) {
        const int64_t num_blocks = (std::min(some_rows, task.row_stop - row)) / group_rows;
        for (int64_t panel = task.panel; panel < task.panel_stop; ++panel) {
            const Upcoming next =
                panel + 1 < task.panel_stop ? upcoming_panel(w, panel + 1) : task.after;
            const uint8_t* records = w.blob + panel * panel_bytes;
            for (int64_t group = 0; group < groups; group += chunk_groups) {
                const int64_t count = std::min(chunk_groups, groups - group);
                unpack<KIND>(records + group / R.groups * R.bytes, count, chunk);
                for (int64_t b = 0; b < num_blocks; ++b) {
                    const int64_t first = row + b * group_rows;
                    const Upcoming soon = group == 0 ? next.part(b, num_blocks, (count + 1) / 2)
                                                     : Upcoming{next.at, 0};
                    add_groups<T, KIND>(w, chunk, x.groups + first * x.stride + group, x.stride,
                                        count, out.from_row(first), panel * panel_outputs,
                                        group == 0, group + count == groups, soon);
                }
            }
        }
    }
}

template <class T>
bool run_bytes(const LinearWeight& w, const Activations& x, const Results& out,
               const LinearTask& task) {
    switch (static_cast<LinearKind>(w.kind)) {
        case LinearKind::i8_row:
            run_groups<T, LinearKind::i8_row>(w, x, out, task);
            return true;
        case LinearKind::q8_group:
            run_groups<T, LinearKind::q8_group>(w, x, out, task);
            return true;
        case LinearKind::q4_group:
            run_groups<T, LinearKind::q4_group>(w, x, out, task);
            return true;
        case LinearKind::q4_minimum:
            run_groups<T, LinearKind::q4_minimum>(w, x, out, task);
            return true;
        case LinearKind::q4_k:
            run_groups<T, LinearKind::q4_k>(w, x, out, task);
            return true;
        default:
            return false;
    }
}

EC_END_TARGET

}  // namespace

void linear_bf16_tiles(const LinearWeight& w, const PairedActivations& x, const Results& out,
                       const LinearTask& task) {
    with_tiles([&](auto tiles) { run_bf16<decltype(tiles)>(w, x, out, task); });
}

int64_t linear_bytes_tiles(const LinearWeight& w, const Activations& x, const Results& out,
                           const LinearTask& task) {
    constexpr int64_t least_rows = 16;  // fewer do not pay for codes written out
    if (task.row_stop - task.row < least_rows) return task.row;
    LinearTask whole = task;
    whole.row_stop -= (task.row_stop - task.row) % group_rows;
    const bool is_done =
        with_tiles([&](auto tiles) { return run_bytes<decltype(tiles)>(w, x, out, whole); });
    return is_done ? whole.row_stop : task.row;
}

}  // namespace ec
#endif
