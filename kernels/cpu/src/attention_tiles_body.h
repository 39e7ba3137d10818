// Tiles of keys and values on the matrix unit; see tiles.h and attention.h. Included by
// attention_body.h for AVX-512: no include guard.
//
// Of bytes the products are the exact integers of ByteTile: a chunk of a prompt has the bits that
// its tokens have one by one, which leave the unit alone. Of bfloat16 they have the unit's order of
// sums: so every token takes them, one alone too. The rows of no meaning beside it cost less than
// reading its keys.

// Rows are taken by 16, keys and columns of values by 64: tiles 0 ... 3 are their sums.
struct MatrixTile {
    static constexpr bool is_matrix = true;
    static constexpr bool reads_panels = false;
    static constexpr bool packs_weights = false;
    static constexpr int most_rows = 16;
    static constexpr int64_t block_rows = most_block_rows;
    static constexpr int64_t pass_keys = 4 * unit_keys;

    static int64_t width_of(int64_t columns) { return columns < 64 ? columns / 16 : 4; }

    // Columns that follow one another.
    static auto beside(const int32_t* w) {
        return [w](int c) { return w + 16 * c; };
    }

    // `to` [16][16 * width] = x times w, 16 dwords of a row at a time, of which each 16 columns lie at
    // `w(c)`. Strides are bytes.
    template <class Unit, class Multiply, class Columns>
    EC_INLINE void multiply(int64_t width, int64_t steps, const void* x, int64_t x_stride,
                            const Columns& w, int64_t w_stride, void* to, int64_t to_stride) {
        Unit::template zero<0>();
        Unit::template zero<1>();
        Unit::template zero<2>();
        Unit::template zero<3>();
        for (int64_t step = 0; step < steps; ++step) {
            const int64_t row = 4 * step * w_stride;
            Unit::template load<4>(static_cast<const uint8_t*>(x) + 64 * step, x_stride);
            Unit::template load<6>(w(0) + row, w_stride);
            Multiply::template run<0, 6>();
            if (width > 1) Unit::template load<7>(w(1) + row, w_stride);
            if (width > 1) Multiply::template run<1, 7>();
            if (width > 2) Unit::template load<6>(w(2) + row, w_stride);
            if (width > 2) Multiply::template run<2, 6>();
            if (width > 3) Unit::template load<7>(w(3) + row, w_stride);
            if (width > 3) Multiply::template run<3, 7>();
        }
        auto* at = static_cast<uint8_t*>(to);
        Unit::template store<0>(at, to_stride);
        if (width > 1) Unit::template store<1>(at + 64, to_stride);
        if (width > 2) Unit::template store<2>(at + 128, to_stride);
        if (width > 3) Unit::template store<3>(at + 192, to_stride);
    }
};

template <class Unit>
class PairTile : public PairPanels, public MatrixTile {
public:
    using PairPanels::packs_weights;
    using PairPanels::reads_panels;

    PairTile(const Attention& a, int64_t rows, float* scratch) : PairPanels(a, rows, scratch) {
        Unit::configure(whole_tiles);
    }

    // As of FloatTile, of 16 rows whatever their number: the next ones' are written later.
    void score(int64_t, const float* queries, int64_t at, int64_t units, float* scores) const {
        const int64_t size = a_.head_size;
        multiply<Unit, Products>(width_of(units * unit_keys - at), size / 32, queries, 2 * size,
                                 beside(keys_ + at), 4 * tile_keys, scores + at, 4 * tile_keys);
    }

    void add(int64_t count, int64_t first, int64_t stop, const float* weights, const float*,
             const float* own, const float* other, float* states) const {
        alignas(64) float sums[most_rows][64];
        const int64_t start = first / 32 * 32, steps = (stop - start + 31) / 32;
        const int64_t size = a_.value_size, state = a_.state();
        for (int64_t d = 0; d < size; d += 64) {
            const int64_t width = width_of(size - d);
            multiply<Unit, Products>(width, steps, weights + start / 2, 4 * tile_keys,
                                     beside(values_ + start / 2 * size + d), 4 * size, sums,
                                     sizeof sums[0]);
            for (int64_t r = 0; r < count; ++r) {
                for (int64_t c = 0; c < 16 * width; c += 16) {
                    float* to = states + r * state + d + c;
                    store(to, fma(load(to), splat(own[r]), load(sums[r] + c) * splat(other[r])));
                }
            }
        }
    }

private:
    struct Products {
        template <int SUM, int W>
        static void run() {
            Unit::template dot_bf16<SUM, 4, W>();
        }
    };
};

template <class Unit>
class FourTile : public ByteTile, public MatrixTile {
public:
    using MatrixTile::block_rows;
    using MatrixTile::is_matrix;
    using MatrixTile::most_rows;
    using MatrixTile::packs_weights;
    using MatrixTile::pass_keys;
    using MatrixTile::reads_panels;

    // Of panels, that copying their values takes.
    static int64_t num_steps(const Attention& a, int64_t first, int64_t stop) {
        const int64_t units = (stop + unit_keys - 1) / unit_keys - first / unit_keys;
        return a.has_bytes() ? units : ByteTile::num_steps(a, first, stop);
    }

    static bool can_take(const Attention& a, const AttentionPlan& plan, int64_t index) {
        const AttentionItem& item = plan.items[static_cast<size_t>(index)];
        return a.kv_format == static_cast<int64_t>(KVCacheFormat::i8) && ByteTile::can_take(a) &&
               a.head_size % 64 == 0 && item.num_queries * a.group() >= most_rows;
    }

    FourTile(const Attention& a, int64_t rows, float* scratch)
        : ByteTile(a, rows, scratch), fours_(made_values(tile_keys / unit_keys)) {
        Unit::configure(whole_tiles);
    }

    // A tile of values is of sixteen fours, those of four panels.
    void read(const uint8_t* const* k, const uint8_t* const* v, int64_t first, int64_t stop,
              Ahead& ahead) {
        ByteTile::read(k, v, first, stop, ahead);
        const int64_t four_floats = 4 * a_.head_size;
        for (int64_t unit = first / unit_keys; unit * unit_keys < stop; ++unit) {
            if (has_panels_) ahead.step();
            std::memcpy(fours_ + unit * four_floats, values_[unit],
                        static_cast<size_t>(four_floats) * sizeof(int32_t));
        }
    }

    void score(int64_t count, const float* queries, int64_t at, int64_t units,
               float* scores) const {
        alignas(64) int32_t sums[most_rows][64];
        const int64_t stride = query_floats(a_), width = width_of(units * unit_keys - at);
        const auto keys = [&](int c) { return keys_[at / unit_keys + c]; };
        multiply<Unit, Scores>(width, a_.head_size / 64, queries, 4 * stride, keys, 4 * unit_keys,
                               sums, sizeof sums[0]);
        for (int64_t r = 0; r < count; ++r) {
            const float* end = queries + r * stride + dwords_of(a_);
            const int32_t start = *dwords_at(end + 1);
            for (int64_t c = 0; c < 16 * width; c += 16) {
                const auto sum = (vi)_mm512_load_si512(sums[r] + c) + start;
                const vf scales = splat(*end) * load(key_scales((at + c) / unit_keys));
                store(scores + r * tile_keys + at + c, __builtin_convertvector(sum, vf) * scales);
            }
        }
    }

    void add(int64_t count, int64_t first, int64_t stop, const float* weights,
             const float* largest, const float* own, const float* other, float* states) const {
        alignas(64) uint8_t codes[most_rows][tile_keys] = {};
        alignas(64) int32_t sums[most_rows][64];
        float scales[most_rows];
        take_codes(count, stop, weights, largest, codes, scales);
        const int64_t start = first / 64 * 64, steps = (stop - start + 63) / 64;
        const int64_t size = a_.head_size, state = a_.state();
        for (int64_t d = 0; d < size; d += 64) {
            multiply<Unit, Values>(4, steps, codes[0] + start, sizeof codes[0],
                                   beside(fours_ + start / 4 * size + d), 4 * size, sums,
                                   sizeof sums[0]);
            for (int64_t r = 0; r < count; ++r) {
                for (int64_t c = 0; c < 64; c += 16) {
                    float* to = states + r * state + d + c;
                    const auto sum = (vi)_mm512_load_si512(sums[r] + c);
                    store(to, fma(load(to), splat(own[r]),
                                  __builtin_convertvector(sum, vf) * splat(scales[r]) *
                                      splat(other[r])));
                }
            }
        }
    }

private:
    struct Scores {
        template <int SUM, int W>
        static void run() {
            Unit::template dot_signed_unsigned<SUM, 4, W>();
        }
    };
    struct Values {
        template <int SUM, int W>
        static void run() {
            Unit::template dot_unsigned_signed<SUM, 4, W>();
        }
    };

    int32_t* fours_;  // of values, [32][D]
};
