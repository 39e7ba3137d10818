// Tiles of products of bytes. Included by every_isa.h: no include guard.

#ifdef EC_AVX_VNNI
#define EC_PAIRS 0
#else
#define EC_PAIRS (EC_LEVEL == 1)  // dot products of four bytes in two steps, by way of 16 bits
#endif

EC_INLINE vi same_int(int32_t a) { return vi{} + a; }

EC_INLINE vi load_ints(const uint8_t* from) {
    vi ints;
    std::memcpy(&ints, from, sizeof ints);
    return ints;
}

EC_INLINE vi broadcast_four(const void* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return same_int(four);
}

// One a lane.
template <bool SIGNED>
EC_INLINE vi load_bytes(const uint8_t* from) {
#if EC_LEVEL == 2
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (vi)(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif EC_LEVEL == 1
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (vi)(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#elif EC_NEON
    uint32_t four;
    std::memcpy(&four, from, 4);
    if (SIGNED) return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
    const vi bytes{from[0], from[1], from[2], from[3]};
    return SIGNED ? bytes << 24 >> 24 : bytes;
#endif
}

EC_INLINE vf load_halves(const uint8_t* from) {
#if EC_LEVEL == 2
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif EC_LEVEL == 1
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif EC_NEON
    return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#else
    return vf{half_at(from), half_at(from + 2), half_at(from + 4), half_at(from + 6)};
#endif
}

// 2^(e - 128) of bytes e: what a code, twice its value, is multiplied with.
EC_INLINE vf load_exponents(const uint8_t* from) {
    const vi e = load_bytes<false>(from);
    return (vf)(e > 1 ? (e - 1) << 23 : (e + 1) << 21);
}

EC_INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }
EC_INLINE vi low_nibbles(vi a) { return a & 0x0f0f0f0f; }
#if EC_NEON
EC_INLINE vi high_nibbles(vi a) { return (vi)vshrq_n_u8((uint8x16_t)a, 4); }
#else
EC_INLINE vi high_nibbles(vi a) { return low_nibbles(a >> 4); }
#endif

// The codes of a table at places below 16, a byte each.
EC_INLINE vi looked_up(vi places, const uint8_t* codes) {
#if EC_X86 && EC_LEVEL > 0
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
#endif
#if EC_LEVEL == 2
    return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)places);
#elif EC_LEVEL == 1
    return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)places);
#elif EC_NEON
    return (vi)vqtbl1q_u8(vld1q_u8(codes), (uint8x16_t)places);
#else
    uint8_t bytes[sizeof places];
    std::memcpy(bytes, &places, sizeof places);
    for (uint8_t& byte : bytes) byte = codes[byte];
    return load_ints(bytes);
#endif
}

// GCC would gather the terms of a long sum before it adds them, in more registers than there are.
EC_INLINE vi summed(vi a) {
#if EC_X86 && EC_LEVEL < 2
    asm("" : "+x"(a));
#endif
    return a;
}

#if EC_PAIRS
EC_INLINE vi add_pairs(vi acc, vi pairs) {
    return acc + (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}

// acc + products of codes below 16 with 16-bit sums: eight of two, 2 * 15 * 127 each, fit in them. Those of
// e2m1 may wrap, but end as those of 16 weights: 16 * 12 * 127 at most.
EC_INLINE vi dot_16(vi acc, vi w, vi x) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
    return summed((vi)_mm256_add_epi16((__m256i)acc, pairs));
}
#endif

// acc + four products of bytes a lane; weights unsigned and below 64, x signed.
EC_INLINE vi dot(vi acc, vi w, vi x) {
#if EC_LEVEL == 2
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif EC_LEVEL == 1 && !EC_PAIRS
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#elif EC_PAIRS  // sums of two products stay below 2^15 for codes below 129
    return summed(add_pairs(acc, (vi)_mm256_maddubs_epi16((__m256i)w, (__m256i)x)));
#elif EC_X86  // SSE2, which all of them have: even and odd bytes in 16 bits
    const auto weights = (__m128i)w, values = (__m128i)x;
    const __m128i even = _mm_madd_epi16(_mm_and_si128(weights, _mm_set1_epi16(255)),
                                        _mm_srai_epi16(_mm_slli_epi16(values, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(weights, 8), _mm_srai_epi16(values, 8));
    return summed(acc + ((vi)even + (vi)odd));
#else
    for (int b = 0; b < 32; b += 8) acc += ((w >> b) & 255) * ((x << (24 - b)) >> 24);
    return acc;
#endif
}

// The same for codes to 255; DOT_WIDE_IS_SIGNED: of code - 128.
constexpr bool DOT_WIDE_IS_SIGNED = EC_PAIRS || EC_NEON;
EC_INLINE vi dot_wide(vi acc, vi w, vi x) {
#if EC_PAIRS  // a code to 255 would overflow them: |code - 128| times x with its sign
    const __m256i weight = _mm256_xor_si256((__m256i)w, _mm256_set1_epi8(-128));
    return dot(acc, (vi)_mm256_abs_epi8(weight), (vi)_mm256_sign_epi8((__m256i)x, weight));
#else
    return dot(acc, w, x);
#endif
}

// A tile is some rows, at most these, times a panel. Sums of a group are in registers for so many
// vectors of outputs at once; sums over groups are in memory where there are only 16 registers.
// Every Arm processor has neon: there `portable` is what tests compare with.
constexpr int ROWS_GROUPED = EC_ARM && !EC_NEON ? 1 : EC_NEON == 3 ? 8 : EC_LEVEL == 2 ? 6 : 4;
constexpr int ROWS_HALVES = EC_LEVEL == 2 || EC_PAIRS || EC_NEON >= 2 ? 4 : EC_ARM ? 1 : 2;
// Rows of the next lower tile: of Arm's sets, which have pairs of rows, there are tiles of 8, 4, 2 and 1.
constexpr int lower_tile(int rows) { return EC_NEON ? rows / 2 : rows - 1; }
constexpr int panel_vectors = panel_outputs / W;
template <int ROWS>
constexpr int vectors_at_once = EC_LEVEL == 1 && ROWS <= 2 ? 4 : 2;
// How far ahead a panel's first tile fetches weights: the units wait for memory, not it for them.
constexpr int64_t ahead_bytes = 8192;
constexpr int64_t dwords = panel_outputs * 4;  // bytes from four inputs of a panel to the next four

template <LinearKind KIND>
constexpr Record record = record_of(KIND);

template <LinearKind KIND>
EC_INLINE const uint8_t* table_of(const uint8_t* records) {
    constexpr Record R = record_of(KIND);
    return R.table == Table::own ? records + R.table_at
                                 : R.table == Table::iq4 ? iq4_codes : e2m1_codes;
}

// Codes of inputs 4j... of a half of a group, from the outputs at `codes` on.
template <LinearKind KIND>
EC_INLINE vi load_codes(const uint8_t* codes, int half, int j, const uint8_t* table) {
    constexpr Record R = record_of(KIND);
    if constexpr (R.bits == 8) return load_ints(codes + (4 * half + j) * dwords);
    if constexpr (R.bits == 6) {
        const auto three = [&](int i) { return load_ints(codes + (3 * half + i) * dwords); };
        if (j < 3) return three(j) & 0x3f3f3f3f;
        const vi high = (three(0) >> 6 & 0x03030303) | (three(1) >> 4 & 0x0c0c0c0c);
        return high | (three(2) >> 2 & 0x30303030);
    }
    vi code = load_ints(codes + (R.bits == 2 ? half : j) * dwords);
    if constexpr (R.bits == 2) {
        code = code >> (2 * j) & 0x03030303;
    } else {
        code = half == 0 ? low_nibbles(code) : high_nibbles(code);
    }
    if constexpr (R.table != Table::none) code = looked_up(code, table);
    if constexpr (R.plane) {
        const vi plane = load_ints(codes + R.plane_at) >> (2 * j);
        code |= plane << (R.bits - half) & (0x01010101 << R.bits);
    }
    return code;
}

#if EC_NEON
#include "linear_integer_neon.h"
#endif

// acc += four dwords of inputs (16) times their weights.
template <LinearKind KIND, int ROWS, int V>
EC_INLINE void dot_half(const uint8_t* codes, const uint8_t* table, const ActivationGroup* x,
                        int64_t stride, int half, vi (&acc)[ROWS][V]) {
#if EC_NEON
    return add_halves<KIND, ROWS, V>(codes, table, x, stride, half, half + 1, acc);
#endif
#if EC_PAIRS
#pragma GCC unroll 4
#endif
    for (int j = 0; j < 4; ++j) {
        vi w[V];
        for (int v = 0; v < V; ++v) w[v] = load_codes<KIND>(codes + v * W * 4, half, j, table);
        for (int r = 0; r < ROWS; ++r) {
            const vi four = broadcast_four(x[r * stride].codes + 16 * half + 4 * j);
            for (int v = 0; v < V; ++v) {
                acc[r][v] = record<KIND>.to_255 ? dot_wide(acc[r][v], w[v], four)
                                                 : dot(acc[r][v], w[v], four);
            }
        }
    }
}

// acc = exact sums of weight code times activation code over one group.
template <LinearKind KIND, int ROWS, int V>
EC_INLINE void dot_group(const uint8_t* codes, const uint8_t* table, const ActivationGroup* x,
                         int64_t stride, vi (&acc)[ROWS][V]) {
    constexpr bool from_zero =
        record<KIND>.minimum || (record<KIND>.to_255 && DOT_WIDE_IS_SIGNED);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < V; ++v)
            acc[r][v] = from_zero || (EC_PAIRS && record<KIND>.table == Table::e2m1)
                            ? same_int(0)
                            : same_int(x[r * stride].start);
#if EC_NEON
    return add_halves<KIND, ROWS, V>(codes, table, x, stride, 0, 2, acc);
#endif
    if constexpr (record<KIND>.to_255) {
        dot_half<KIND, ROWS, V>(codes, table, x, stride, 0, acc);
        dot_half<KIND, ROWS, V>(codes, table, x, stride, 1, acc);
    } else {
#if EC_PAIRS
        vi part[ROWS][V];
        for (int r = 0; r < ROWS; ++r) {
            const auto& halves = x[r * stride].start_pairs;
            const vi start = (vi)_mm256_add_epi16((__m256i)broadcast_four(halves[0]),
                                                  (__m256i)broadcast_four(halves[1]));
            for (int v = 0; v < V; ++v) part[r][v] = record<KIND>.table == Table::e2m1 ? start : same_int(0);
        }
#pragma GCC unroll 4  // what is added to zero costs nothing
#endif
        for (int j = 0; j < 4; ++j) {
            vi low[V];
            vi high[V];
#if EC_PAIRS
            if (record<KIND>.plane && j == 2)  // 16 bits hold so many codes below 32
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < V; ++v) {
                        acc[r][v] = add_pairs(acc[r][v], part[r][v]);
                        part[r][v] = same_int(0);
                    }
#endif
            for (int v = 0; v < V; ++v) {
                low[v] = load_codes<KIND>(codes + v * W * 4, 0, j, table);
                high[v] = load_codes<KIND>(codes + v * W * 4, 1, j, table);
            }
            for (int r = 0; r < ROWS; ++r) {
                const vi first = broadcast_four(x[r * stride].codes + 4 * j);
                const vi second = broadcast_four(x[r * stride].codes + 16 + 4 * j);
                for (int v = 0; v < V; ++v) {
#if EC_PAIRS
                    part[r][v] = dot_16(part[r][v], low[v], first);
                    part[r][v] = dot_16(part[r][v], high[v], second);
#else
                    acc[r][v] = dot(acc[r][v], low[v], first);
                    acc[r][v] = dot(acc[r][v], high[v], second);
#endif
                }
            }
        }
#if EC_PAIRS
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < V; ++v) acc[r][v] = add_pairs(acc[r][v], part[r][v]);
#endif
    }
}

// The same where halves of a group have scales of their own: sums of code times scale.
template <LinearKind KIND, int ROWS, int V>
EC_INLINE void dot_halves(const uint8_t* codes, const uint8_t* table, const uint8_t* scales,
                          const ActivationGroup* x, int64_t stride, vi (&acc)[ROWS][V]) {
    constexpr Record R = record_of(KIND);
    constexpr bool in_pairs = EC_PAIRS && !R.to_255;
    for (int half = 0; half < 2; ++half, scales += panel_outputs) {
        vi part[ROWS][V];
        for (int r = 0; r < ROWS; ++r) {
            const ActivationGroup& own = x[r * stride];
            for (int v = 0; v < V; ++v) {
                if (R.minimum || (R.to_255 && DOT_WIDE_IS_SIGNED)) {
                    part[r][v] = same_int(0);
                } else if (in_pairs) {
                    part[r][v] = broadcast_four(own.start_pairs[half]);
                } else {
                    part[r][v] = same_int(half == 0 ? own.start_low : own.start_high);
                }
            }
        }
        if constexpr (in_pairs) {
#if EC_PAIRS  // 16-bit sums may wrap, but end as those of eight weights: 8 * 32 * 127 at most
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                vi w[V];
                for (int v = 0; v < V; ++v) w[v] = load_codes<KIND>(codes + v * W * 4, half, j, table);
                for (int r = 0; r < ROWS; ++r) {
                    const vi four = broadcast_four(x[r * stride].codes + 16 * half + 4 * j);
                    for (int v = 0; v < V; ++v) part[r][v] = dot_16(part[r][v], w[v], four);
                }
            }
#endif
        } else {
            dot_half<KIND, ROWS, V>(codes, table, x, stride, half, part);
        }
        for (int v = 0; v < V; ++v) {
            const vi scale = R.minimum ? load_bytes<false>(scales + v * W) & 15
                                       : load_bytes<true>(scales + v * W);
            for (int r = 0; r < ROWS; ++r) {
                vi scaled = part[r][v];
#if EC_PAIRS
                if constexpr (in_pairs) {
                    const __m256i both =
                        _mm256_blend_epi16((__m256i)scale, (__m256i)(scale << 16), 0xaa);
                    scaled = (vi)_mm256_madd_epi16((__m256i)scaled, both);
                } else
#endif
                    scaled *= scale;
                acc[r][v] = half == 0 ? scaled : acc[r][v] + scaled;
            }
        }
    }
}

// is_first: no tile before has read these outputs' weights, so they are fetched ahead.
template <LinearKind KIND, int ROWS>
__attribute__((noinline)) void grouped_tile(const uint8_t* records, int64_t num_groups,
                                            const ActivationGroup* groups, int64_t stride,
                                            bool is_first, Upcoming soon,
                                            vf (&sums)[ROWS][panel_vectors]) {
    constexpr Record R = record_of(KIND);
    constexpr int V = vectors_at_once<ROWS>;
    vf acc[ROWS][panel_vectors];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < panel_vectors; ++v) acc[r][v] = vf{};
    for (int64_t first = 0; first < num_groups; first += R.groups, records += R.bytes) {
        fetch(soon);
        vf d[panel_vectors];
        vf minimum[panel_vectors];
        for (int v = 0; v < panel_vectors; ++v) {
            const uint8_t* halves = records + 2 * v * W;
            if (R.table == Table::e2m1) {
                d[v] = load_exponents(records + v * W);
            } else if (!R.row_scale) {
                d[v] = load_halves(halves);
            }
            if (R.minimum) minimum[v] = load_halves(halves + 2 * panel_outputs);
            if (R.table == Table::own) {
                float factor;
                std::memcpy(&factor, records + R.table_at + 16, 4);
                d[v] = d[v] * splat(factor);
            }
        }
        const uint8_t* table = table_of<KIND>(records);
        for (int g = 0; g < R.groups; ++g) {
            const uint8_t* codes = records + R.codes_at + g * R.group_bytes;
            if (is_first) {
                const uint8_t* ahead = records + ahead_bytes;
                const int64_t start = g == 0 ? 0 : R.codes_at + g * R.group_bytes;
                const int64_t stop = R.codes_at + (g + 1) * R.group_bytes;
                for (int64_t line = start; line < stop; line += 64)
                    __builtin_prefetch(ahead + line);
            }
            const ActivationGroup* group = groups + first + g;
            const uint8_t* bytes = records + R.bytes_at;
            for (int at = 0; at < panel_vectors; at += V) {
                vi dots[ROWS][V];
                if constexpr (R.halves) {
                    dot_halves<KIND, ROWS, V>(codes + at * W * 4, table,
                                              bytes + 2 * g * panel_outputs + at * W, group, stride,
                                              dots);
                } else {
                    dot_group<KIND, ROWS, V>(codes + at * W * 4, table, group, stride, dots);
                }
                for (int v = at; v < at + V; ++v) {
                    vf scale = d[v];
                    vf least = minimum[v];
                    const uint8_t* own = bytes + g * panel_outputs + v * W;
                    if constexpr (R.superblock && !R.halves)
                        scale = scale * to_float(load_bytes<!R.minimum>(own));
                    vi low, high;
                    if constexpr (R.halves && R.minimum) {
                        own += g * panel_outputs;
                        low = load_bytes<false>(own) >> 4;
                        high = load_bytes<false>(own + panel_outputs) >> 4;
                    } else if constexpr (R.superblock && R.minimum) {
                        least = least * to_float(load_bytes<false>(own + R.groups * panel_outputs));
                    }
                    for (int r = 0; r < ROWS; ++r) {
                        const ActivationGroup& own = group[r * stride];
                        const vf factor = splat(own.scale);
                        acc[r][v] = fma(to_float(dots[r][v - at]),
                                        R.row_scale ? factor : scale * factor, acc[r][v]);
                        if constexpr (R.halves && R.minimum) {
                            const vi all = low * same_int(own.start_low) + high * same_int(own.start_high);
                            acc[r][v] = fma(to_float(all), least * factor, acc[r][v]);
                        } else if (R.minimum) {
                            // that of a superblock is subtracted
                            const float sum = R.superblock ? -own.scaled_sum : own.scaled_sum;
                            acc[r][v] = fma(least, splat(sum), acc[r][v]);
                        }
                    }
                }
#if EC_NEON || (EC_X86 && EC_LEVEL < 2)
                asm volatile("" : "+m"(acc) : : "memory");  // stays there, and x is read again
#endif
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < panel_vectors; ++v) sums[r][v] = acc[r][v];
}

template <LinearKind KIND, int ROWS>
void some_rows(int64_t num_rows, const LinearWeight& weight, const uint8_t* records,
               const Activations& x, const Results& out, int64_t panel, int64_t row, bool is_first,
               Upcoming soon) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS)
            return some_rows<KIND, lower_tile(ROWS)>(num_rows, weight, records, x, out, panel, row,
                                             is_first, soon);
    }
    const ActivationGroup* groups = x.groups + row * x.stride;
    const int64_t n = panel * panel_outputs;
    if (!out.streams) prefetch_results(out.at + row * out.stride + n, out.stride, ROWS);
    vf sums[ROWS][panel_vectors];
    grouped_tile<KIND, ROWS>(records, num_groups(weight), groups, x.stride, is_first, soon, sums);
    const int64_t num_valid = std::min(panel_outputs, weight.num_outputs - n);
    for (int r = 0; r < ROWS; ++r) {
        float* to = out.at + (row + r) * out.stride + n;
        alignas(64) float edge[panel_outputs];
        float* held = num_valid == panel_outputs ? to : edge;
        for (int v = 0; v < panel_vectors; ++v) {
            vf total = sums[r][v];
            if (record<KIND>.row_scale) total = total * load(weight.row_scales + n + v * W);
            if (weight.bias != nullptr) total = total + load(weight.bias + n + v * W);
            if (out.streams && held == to) {
                stream(held + v * W, total);
            } else {
                store(held + v * W, total);
            }
        }
        if (held == edge) std::memcpy(to, edge, static_cast<size_t>(num_valid) * 4);
    }
}

// A panel of q6_k as q6_k_bytes; null: there is no memory.
inline const uint8_t* widened(const uint8_t* records, int64_t num_records) {
    constexpr Record packed = record_of(LinearKind::q6_k), wide = record_of(LinearKind::q6_k_bytes);
    thread_local Buffer buffer;
    auto* to = buffer.try_reserve<uint8_t>(num_records * wide.bytes);
    const uint8_t* made = to;
    for (int64_t i = 0; made != nullptr && i < num_records; ++i, records += packed.bytes) {
        for (int64_t line = 0; line < packed.bytes; line += 64)
            __builtin_prefetch(records + ahead_bytes + line);
        std::memcpy(to, records, packed.codes_at);
        to += wide.codes_at;
        for (int64_t g = 0; g < packed.groups; ++g) {
            const uint8_t* codes = records + packed.codes_at + g * packed.group_bytes;
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j)
                for (int v = 0; v < panel_vectors; ++v, to += sizeof(vi)) {
                    const vi four =
                        load_codes<LinearKind::q6_k>(codes + v * W * 4, j / 4, j % 4, nullptr);
                    std::memcpy(to, &four, sizeof four);
                }
        }
    }
    return made;
}

template <LinearKind KIND>
void run_kind(const LinearWeight& weight, const Activations& x, const Results& out,
              const LinearTask& task) {
    constexpr int ROWS = record<KIND>.halves ? ROWS_HALVES : ROWS_GROUPED;
    constexpr int64_t least_wide_rows = 16;  // so many pay for q6_k's codes written out
    const int64_t num_rows = task.row_stop - task.row;
    int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    if (EC_NEON) num_tiles = num_rows / ROWS + __builtin_popcountll(num_rows % ROWS);
    const int64_t num_records = num_groups(weight) / record<KIND>.groups;
    for (int64_t panel = task.panel; panel < task.panel_stop; ++panel) {
        Upcoming next =
            panel + 1 < task.panel_stop ? upcoming_panel(weight, panel + 1) : task.after;
        // the only tile of a panel fetches all that it reads itself
        if (EC_LEVEL == 1 && num_tiles == 1) next.bytes = 0;
        const uint8_t* records = weight.blob + panel * (weight.blob_bytes / num_panels(weight));
        const uint8_t* bytes = nullptr;
        if (KIND == LinearKind::q6_k && EC_LEVEL < 2 && num_rows >= least_wide_rows)
            bytes = widened(records, num_records);
        for (int64_t t = 0, row = task.row, row_stop = 0; t < num_tiles; ++t, row = row_stop) {
            row_stop = task.row + num_rows * (t + 1) / num_tiles;
            if (EC_NEON) {
                const int64_t left = task.row_stop - row;
                row_stop = row + (left < ROWS ? int64_t{1} << (63 - __builtin_clzll(left)) : ROWS);
            }
            const Upcoming soon = next.part(t, num_tiles, num_records);
            if constexpr (KIND == LinearKind::q6_k && EC_LEVEL < 2) {
                if (bytes != nullptr) {
                    some_rows<LinearKind::q6_k_bytes, ROWS>(row_stop - row, weight, bytes, x, out,
                                                            panel, row, false, soon);
                    continue;
                }
            }
            some_rows<KIND, ROWS>(row_stop - row, weight, records, x, out, panel, row, t == 0, soon);
        }
    }
}

static void run_integer(const LinearWeight& weight, const Activations& x, const Results& out,
                        const LinearTask& task) {
    switch (static_cast<LinearKind>(weight.kind)) {
        case LinearKind::i8_row:
            return run_kind<LinearKind::i8_row>(weight, x, out, task);
        case LinearKind::q8_group:
            return run_kind<LinearKind::q8_group>(weight, x, out, task);
        case LinearKind::q4_group:
            return run_kind<LinearKind::q4_group>(weight, x, out, task);
        case LinearKind::q4_minimum:
            return run_kind<LinearKind::q4_minimum>(weight, x, out, task);
        case LinearKind::q4_k:
            return run_kind<LinearKind::q4_k>(weight, x, out, task);
        case LinearKind::q6_k:
            return run_kind<LinearKind::q6_k>(weight, x, out, task);
        case LinearKind::q5_k:
            return run_kind<LinearKind::q5_k>(weight, x, out, task);
        case LinearKind::mxfp4:
            return run_kind<LinearKind::mxfp4>(weight, x, out, task);
        case LinearKind::q5_minimum:
            return run_kind<LinearKind::q5_minimum>(weight, x, out, task);
        case LinearKind::iq4_group:
            return run_kind<LinearKind::iq4_group>(weight, x, out, task);
        case LinearKind::iq4_k:
            return run_kind<LinearKind::iq4_k>(weight, x, out, task);
        case LinearKind::q3_k:
            return run_kind<LinearKind::q3_k>(weight, x, out, task);
        case LinearKind::q2_k:
            return run_kind<LinearKind::q2_k>(weight, x, out, task);
        case LinearKind::table_k:
            return run_kind<LinearKind::table_k>(weight, x, out, task);
        case LinearKind::f32:
        case LinearKind::bf16:
        case LinearKind::q6_k_bytes:
            return;  // not an integer product
    }
}
#undef EC_PAIRS
