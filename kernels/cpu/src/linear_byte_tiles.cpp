// Products of bytes in groups on the matrix unit; linear_tiles.cpp says when.
#include <algorithm>

#include "half.h"
#include "linear_tiles.h"
#include "tiles.h"

#if EC_X86
#include <immintrin.h>

namespace ec {
namespace {

EC_BEGIN_AVX512

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
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(R.table == Table::iq4 ? iq4_codes : e2m1_codes)));
    const auto nibbles = [&](__m512i each) {
        each = _mm512_and_si512(each, low_half);
        return _mm512_sub_epi8(R.table != Table::none ? _mm512_shuffle_epi8(table, each) : each, zero);
    };
    for (int64_t i = 0; i < num_groups; ++i) {
        const uint8_t* record = records + i / R.groups * R.bytes;
        const int64_t g = i % R.groups;
        const uint8_t* from = record + R.codes_at + g * R.group_bytes;
        auto* to = reinterpret_cast<__m512i*>(chunk.codes[i]);
        constexpr int vectors = 2 * R.bits;
        for (int j = 0; j < vectors; ++j) {
            const __m512i both = _mm512_loadu_si512(from + 64 * j);
            if constexpr (R.plane) {
                const __m512i fifth = _mm512_set1_epi8(16);
                const __m512i plane = _mm512_srli_epi32(
                    _mm512_loadu_si512(from + 64 * (8 + j % 2)), static_cast<unsigned>(j / 2 * 2));
                to[j] = _mm512_or_si512(
                    nibbles(both), _mm512_and_si512(_mm512_slli_epi32(plane, 4), fifth));
                to[j + 8] =
                    _mm512_or_si512(nibbles(_mm512_srli_epi16(both, 4)),
                                    _mm512_and_si512(_mm512_slli_epi32(plane, 3), fifth));
            } else if constexpr (R.bits == 8) {
                to[j] = _mm512_sub_epi8(both, zero);
            } else {
                to[j] = nibbles(both);
                to[j + 8] = nibbles(_mm512_srli_epi16(both, 4));
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
            __m512 scale, minimum = _mm512_setzero_ps();
            if constexpr (R.table == Table::e2m1) {
                float powers[16];
                for (int i = 0; i < 16; ++i) powers[i] = half_of_power(record[n + i]);
                scale = _mm512_loadu_ps(powers);
            } else {
                scale = halves(record + 2 * n);
            }
            if constexpr (R.minimum) minimum = halves(record + 2 * (panel_outputs + n));
            if constexpr (R.superblock) {
                const uint8_t* at = record + R.bytes_at + g * panel_outputs + n;
                if constexpr (R.minimum) {
                    scale = _mm512_mul_ps(scale, bytes(at));
                    minimum = _mm512_mul_ps(minimum, bytes(at + R.groups * panel_outputs));
                } else {
                    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
                    scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)));
                }
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

// Whether the weight is of one of these kinds.
template <class T, LinearKind... KINDS>
bool run_kinds(const LinearWeight& w, const Activations& x, const Results& out,
               const LinearTask& task) {
    const auto own = static_cast<LinearKind>(w.kind);
    return ((own == KINDS && (run_groups<T, KINDS>(w, x, out, task), true)) || ...);
}

EC_END_TARGET

}  // namespace

int64_t linear_bytes_tiles(const LinearWeight& w, const Activations& x, const Results& out,
                           const LinearTask& task) {
    constexpr int64_t least_rows = 16;  // fewer do not pay for codes written out
    if (task.row_stop - task.row < least_rows) return task.row;
    LinearTask whole = task;
    whole.row_stop -= (task.row_stop - task.row) % group_rows;
    const bool is_done = with_tiles([&](auto tiles) {
        return run_kinds<decltype(tiles), LinearKind::i8_row, LinearKind::q8_group,
                         LinearKind::q4_group, LinearKind::q4_minimum, LinearKind::q4_k,
                         LinearKind::mxfp4, LinearKind::q5_k, LinearKind::q5_minimum,
                         LinearKind::iq4_group, LinearKind::iq4_k>(w, x, out, whole);
    });
    return is_done ? whole.row_stop : task.row;
}

}  // namespace ec
#endif
