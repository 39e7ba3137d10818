// Products of bytes on Arm's vectors. Included by linear_integer_tile.h: no include guard.
//
// Codes are multiplied as signed bytes, those to 255 less 128. `neon` adds four products to 16 bits and
// widens the sums; `neon_dot` has sdot, which takes a dword of a row's register by its number; `neon_i8mm`
// multiplies two rows by two outputs at once (smmla). All are exact, so a row has one result.

// Weights of inputs 4j... of a half, signed.
template <LinearKind KIND>
EC_INLINE int8x16_t signed_codes(const uint8_t* codes, int half, int j, const uint8_t* table) {
    const vi w = load_codes<KIND>(codes, half, j, table);
    return (int8x16_t)(record<KIND>.to_255 ? w ^ static_cast<int32_t>(0x80808080) : w);
}

#if EC_NEON == 1
// Codes to 31 leave 16 bits room for eight products, those to 63 for four: a half, or a group without scales
// of halves.
template <LinearKind KIND, int ROWS, int V>
EC_INLINE void add_halves(const uint8_t* codes, const uint8_t* table, const ActivationGroup* x,
                          int64_t stride, int half, int half_stop, vi (&acc)[ROWS][V]) {
    int16x8_t low[ROWS][V], high[ROWS][V];
    EC_UNROLL for (int r = 0; r < ROWS; ++r)
        EC_UNROLL for (int v = 0; v < V; ++v) low[r][v] = high[r][v] = vdupq_n_s16(0);
    for (; half < half_stop; ++half) {
        EC_UNROLL for (int j = 0; j < 4; ++j) {
            int8x16_t w[V];
            EC_UNROLL for (int v = 0; v < V; ++v)
                w[v] = signed_codes<KIND>(codes + v * W * 4, half, j, table);
            EC_UNROLL for (int r = 0; r < ROWS; ++r) {
                const auto four = (int8x16_t)broadcast_four(x[r * stride].codes + 16 * half + 4 * j);
                EC_UNROLL for (int v = 0; v < V; ++v) {
                    if constexpr (record<KIND>.to_255) {  // two fit
                        const int16x8_t first = vmull_s8(vget_low_s8(w[v]), vget_low_s8(four));
                        const int16x8_t pairs = vpaddq_s16(first, vmull_high_s8(w[v], four));
                        acc[r][v] = (vi)vpadalq_s16((int32x4_t)acc[r][v], pairs);
                    } else {
                        low[r][v] = vmlal_s8(low[r][v], vget_low_s8(w[v]), vget_low_s8(four));
                        high[r][v] = vmlal_high_s8(high[r][v], w[v], four);
                    }
                }
            }
        }
    }
    if constexpr (record<KIND>.to_255) return;
    EC_UNROLL for (int r = 0; r < ROWS; ++r)
        EC_UNROLL for (int v = 0; v < V; ++v)
            acc[r][v] += (vi)vpaddq_s32(vpaddlq_s16(low[r][v]), vpaddlq_s16(high[r][v]));
}
#else
template <LinearKind KIND, int ROWS, int V>
EC_INLINE void add_by_dots(const uint8_t* codes, const uint8_t* table, const ActivationGroup* x,
                           int64_t stride, int half, vi (&acc)[ROWS][V]) {
    int8x16_t own[ROWS];
    EC_UNROLL for (int r = 0; r < ROWS; ++r) own[r] = vld1q_s8(x[r * stride].codes + 16 * half);
    const auto step = [&](auto j) __attribute__((always_inline)) {
        EC_UNROLL for (int v = 0; v < V; ++v) {
            const int8x16_t w = signed_codes<KIND>(codes + v * W * 4, half, j, table);
            EC_UNROLL for (int r = 0; r < ROWS; ++r)
                acc[r][v] = (vi)vdotq_laneq_s32((int32x4_t)acc[r][v], w, own[r], decltype(j)::value);
        }
    };
    step(std::integral_constant<int, 0>{});
    step(std::integral_constant<int, 1>{});
    step(std::integral_constant<int, 2>{});
    step(std::integral_constant<int, 3>{});
}

#if EC_NEON == 3
// Sums of two rows by two outputs share a register: rows in its halves. A row without another is its own.
template <LinearKind KIND, int ROWS, int V>
EC_INLINE void add_by_pairs(const uint8_t* codes, const uint8_t* table, const ActivationGroup* x,
                            int64_t stride, int half, int half_stop, vi (&acc)[ROWS][V]) {
    constexpr int PAIRS = (ROWS + 1) / 2;
    int32x4_t sums[PAIRS][V][2];
    EC_UNROLL for (int p = 0; p < PAIRS; ++p)
        EC_UNROLL for (int v = 0; v < V; ++v) sums[p][v][0] = sums[p][v][1] = vdupq_n_s32(0);
    for (; half < half_stop; ++half) {
        EC_UNROLL for (int i = 0; i < 2; ++i) {
            int8x16_t both[PAIRS];  // eight inputs of each row
            EC_UNROLL for (int p = 0; p < PAIRS; ++p) {
                const int8_t* row = x[2 * p * stride].codes;
                const int8_t* other = x[std::min(2 * p + 1, ROWS - 1) * stride].codes;
                const int at = 16 * half + 8 * i;
                both[p] = vcombine_s8(vld1_s8(row + at), vld1_s8(other + at));
            }
            EC_UNROLL for (int v = 0; v < V; ++v) {
                const uint8_t* own = codes + v * W * 4;
                const auto a = (int32x4_t)signed_codes<KIND>(own, half, 2 * i, table);
                const auto b = (int32x4_t)signed_codes<KIND>(own, half, 2 * i + 1, table);
                const auto w0 = (int8x16_t)vzip1q_s32(a, b), w1 = (int8x16_t)vzip2q_s32(a, b);
                EC_UNROLL for (int p = 0; p < PAIRS; ++p) {
                    sums[p][v][0] = vmmlaq_s32(sums[p][v][0], both[p], w0);
                    sums[p][v][1] = vmmlaq_s32(sums[p][v][1], both[p], w1);
                }
            }
        }
    }
    EC_UNROLL for (int p = 0; p < PAIRS; ++p)
        EC_UNROLL for (int v = 0; v < V; ++v) {
            const auto a = (int64x2_t)sums[p][v][0], b = (int64x2_t)sums[p][v][1];
            acc[2 * p][v] += (vi)vzip1q_s64(a, b);
            if (2 * p + 1 < ROWS) acc[2 * p + 1][v] += (vi)vzip2q_s64(a, b);
        }
}
#endif

// acc += products of halves [half, half_stop) of a group.
template <LinearKind KIND, int ROWS, int V>
EC_INLINE void add_halves(const uint8_t* codes, const uint8_t* table, const ActivationGroup* x,
                          int64_t stride, int half, int half_stop, vi (&acc)[ROWS][V]) {
#if EC_NEON == 3
    if constexpr (ROWS > 1 && !record<KIND>.halves)  // sums of halves are too short for what zipping costs
        return add_by_pairs<KIND, ROWS, V>(codes, table, x, stride, half, half_stop, acc);
#endif
    for (; half < half_stop; ++half) add_by_dots<KIND, ROWS, V>(codes, table, x, stride, half, acc);
}
#endif
