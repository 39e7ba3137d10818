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
//   q6_k, q3_k, q2_k, table_k have a scale for 16 inputs, a quarter of a tile: they stay with the vector
//              units.
#include "linear_tiles.h"

#include <algorithm>
#include <cstring>

#include "tiles.h"

#if EC_X86
#include <immintrin.h>

namespace ec {
namespace {

constexpr int64_t half_tile = 16;  // rows of a tile, and outputs
constexpr int64_t block_dwords = 16;  // of a row: what one product takes
// How far ahead a panel's first rows fetch weights.
constexpr int64_t ahead_bytes = 8192;
// What is read for all rows should lie in the first cache.
constexpr int64_t most_chunk_steps = 320;

EC_BEGIN_AVX512

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

EC_END_TARGET

}  // namespace

void linear_bf16_tiles(const LinearWeight& w, const PairedActivations& x, const Results& out,
                       const LinearTask& task) {
    with_tiles([&](auto tiles) { run_bf16<decltype(tiles)>(w, x, out, task); });
}

}  // namespace ec
#endif
