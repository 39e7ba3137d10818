// The arithmetic of paged attention; see attention.h. Included by every_isa.h: no include guard.

#include "kv_cache_body.h"

#include "attention_ahead_body.h"

#include "attention_softmax_body.h"

// Calls `run` with a count, or MOST if it is more, as a constant.
template <int MOST, class Run>
EC_INLINE void with_count(int64_t count, const Run& run) {
    if constexpr (MOST > 1) {
        if (count < MOST) return with_count<MOST - 1>(count, run);
    }
    run(std::integral_constant<int, MOST>{});
}

#if EC_LEVEL == 1
#include "attention_words_body.h"
#endif

#include "attention_floats_body.h"

#if EC_LEVEL == 2
#include "attention_bytes_body.h"

#include "attention_pairs_body.h"

#include "attention_tiles_body.h"
#endif

// The matrix unit takes any number of rows at once.
template <class Tile, class Run>
EC_INLINE void with_rows_of(int64_t count, const Run& run) {
    if constexpr (Tile::is_matrix) {
        run(count);
    } else {
        with_count<Tile::most_rows>(count, run);
    }
}

// `num_rows` rows that follow one another, of one key/value head, against one tile: products
// and softmax each of all rows, so that what they read stays in the nearest cache.
// `ahead`: for the first block of a tile, else null.
template <class Tile>
static void take_block(const Attention& a, Tile& tile, Ahead* ahead, int64_t tile_start,
                       int64_t query_head, int64_t num_rows, int64_t first, int64_t stop,
                       const AttentionRow* sees, const float* queries, float* scores,
                       float* states) {
    constexpr int most = Tile::most_rows;
    constexpr int64_t most_takes = Tile::block_rows / most;
    const int64_t num_takes = (num_rows + most - 1) / most;
    const int64_t query_floats = Tile::query_floats(a), state = a.state();
    struct Take {
        int64_t row, count, low, high, units;
    } takes[most_takes];
    Softened softened;
    for (int64_t t = 0; t < num_takes; ++t) {
        Take& take = takes[t];
        take.row = num_rows * t / num_takes;
        take.count = num_rows * (t + 1) / num_takes - take.row;
        int64_t low = tile_keys, high = 0;  // keys that any of the rows sees
        for (int64_t r = take.row; r < take.row + take.count; ++r) {
            const Sight sight = sight_of(sees[r], tile_start);
            low = sight.low < low ? sight.low : low;
            high = sight.high > high ? sight.high : high;
        }
        take.low = first > low ? first : low;
        take.high = stop < high ? stop : high;
        take.units = take.low < take.high ? (take.high + unit_keys - 1) / unit_keys : 0;
    }
    for (int64_t at = 0; at < stop; at += Tile::pass_keys) {
        if (ahead != nullptr) tile.prepare(at, *ahead);
        for (int64_t t = 0; t < num_takes; ++t) {
            const Take& take = takes[t];
            if (take.units * unit_keys <= at) continue;
            with_rows_of<Tile>(take.count, [&](auto rows) {
                tile.score(rows, queries + take.row * query_floats, at, take.units,
                           scores + take.row * tile_keys);
            });
        }
    }
    for (int64_t t = 0; t < num_takes; ++t) {
        const Take& take = takes[t];
        for (int64_t row = take.row; row < take.row + take.count; row += 3) {
            const int64_t left = take.row + take.count - row;
            if (take.units == 0) {
                for (int64_t r = row; r < row + left; ++r) {
                    softened.tops[r] = -INFINITY;
                    softened.totals[r] = 0.0f;
                }
                break;
            }
            with_count<3>(left, [&](auto rows) {
                soften<rows.value>(a, tile, tile_start, query_head, row, sees + row, take.units,
                                   scores + row * tile_keys, softened.tops + row,
                                   softened.totals + row, softened.largest + row);
            });
        }
    }
    join_tile(num_rows, a.padded(), state, states, softened);
    for (int64_t t = 0; t < num_takes; ++t) {
        const Take& take = takes[t];
        if (take.units == 0) continue;
        with_rows_of<Tile>(take.count, [&](auto rows) {
            tile.add(rows, take.low, take.high, scores + take.row * tile_keys,
                     softened.largest + take.row, softened.tops + take.row,
                     softened.totals + take.row, states + take.row * state);
        });
    }
}

// Item `index`, into its members' partial states or into `out`. `scratch` holds `scratch_floats`.
template <class Tile>
static void attend_with(const Attention& a, const AttentionPlan& plan, int64_t index,
                        float* partials, float* scratch) {
    const AttentionItem& item = plan.items[static_cast<size_t>(index)];
    const AttentionMember* members = plan.members_of(item);
    const int64_t group = a.group(), head_size = a.head_size, state = a.state();
    const int64_t padded = a.padded(), rows = item.rows(a);
    const int64_t head_rows = item.num_queries * group, query_floats = Tile::query_floats(a);
    const int64_t row_bytes = kv_row_bytes(a.kv_format, head_size);
    const bool has_bytes = a.has_bytes(), has_floats = a.has_floats();
    const auto take_floats = [&](int64_t count) {
        float* taken = scratch;
        scratch += (count + 15) / 16 * 16;
        return taken;
    };
    float* queries = take_floats(rows * query_floats);
    float* states = take_floats(rows * state);
    float* scores = take_floats(most_block_rows * tile_keys);
    auto* sees = reinterpret_cast<AttentionRow*>(take_floats(4 * head_rows));
    auto* tokens = reinterpret_cast<int32_t*>(take_floats(item.num_queries));
    Tile tile(a, head_rows, scratch);

    int64_t first_key = INT64_MAX, stop_key = 0, next = 0;
    for (int64_t m = 0; m < item.num_members; ++m) {
        const AttentionMember& own = members[m];
        for (int64_t query = own.query; query < own.query_stop; ++query, ++next) {
            const AttentionRow row = a.row(own.request, query);
            first_key = row.first < first_key ? row.first : first_key;
            stop_key = row.stop > stop_key ? row.stop : stop_key;
            tokens[next] = static_cast<int32_t>(a.starts[own.request] + query);
            for (int64_t g = 0; g < group; ++g) sees[next * group + g] = row;
        }
    }
    float* taken = queries;
    for (int64_t head = item.head; head < item.head_stop; ++head) {
        for (int64_t n = 0; n < item.num_queries; ++n) {
            const float* from = a.q + tokens[n] * a.q_stride + head * group * head_size;
            for (int64_t g = 0; g < group; ++g, taken += query_floats)
                Tile::take_query(a, from + g * head_size, taken);
        }
    }
    const int32_t* blocks = a.table + members[0].request * a.table_width;
    clear_states(states, rows, padded, state);
    for (int64_t start = item.tile * tile_keys; start < item.tile_stop * tile_keys;
         start += tile_keys) {
        const int64_t first = first_key > start ? first_key - start : 0;
        const int64_t seen = stop_key - start;
        const int64_t stop = seen < tile_keys ? seen : tile_keys;
        if (first >= stop) continue;
        Ahead ahead;
        const int64_t next_start = start + tile_keys;
        if (next_start < stop_key && next_start < item.tile_stop * tile_keys) {
            ahead.take(a, item, members[item.num_members - 1], next_start);
        } else if (const AttentionItem* other = plan.after(index)) {
            ahead.take(a, *other, *plan.members_of(*other), other->tile * tile_keys);
        }
        ahead.divide((item.head_stop - item.head) * Tile::num_steps(a, first, stop));
        int64_t slots[tile_keys], at[tile_keys];
        int64_t block = (start + first) / a.block_size, held = block * a.block_size - start;
        for (int64_t j = first; j < stop; ++block) {
            const int64_t base = blocks[block] * a.block_stride, before = held;
            held += a.block_size;
            for (; j < stop && j < held; ++j) {
                slots[j] = j - before;  // of the block
                at[j] = base + slots[j] * a.num_kv_heads * row_bytes;
            }
        }
        for (int64_t head = item.head; head < item.head_stop; ++head) {
            const uint8_t* k[tile_keys];
            const uint8_t* v[tile_keys];
            const auto find = [&](const uint8_t* cache, bool has_panels, const uint8_t** to) {
                if (!has_panels) {
                    for (int64_t j = first; j < stop; ++j) to[j] = cache + head * row_bytes + at[j];
                    return;
                }
                for (int64_t j = first; j < stop; j = (j / panel_tokens + 1) * panel_tokens) {
                    const int64_t lane = slots[j] % panel_tokens;
                    to[j] = cache + at[j] + (head * panel_tokens - lane * a.num_kv_heads) * row_bytes;
                }
            };
            find(a.k, has_bytes || has_floats, k);
            find(a.v, has_bytes, v);
            tile.read(k, v, first, stop, ahead);
            if constexpr (Tile::reads_panels) tile.fetch(ahead, head - item.head);
            const int64_t base = (head - item.head) * head_rows;
            const int64_t num_blocks = (head_rows + Tile::block_rows - 1) / Tile::block_rows;
            for (int64_t n = 0; n < num_blocks; ++n) {
                const int64_t row = head_rows * n / num_blocks;
                take_block<Tile>(a, tile, n == 0 ? &ahead : nullptr, start,
                                 head * group + row % group,
                                 head_rows * (n + 1) / num_blocks - row, first, stop, sees + row,
                                 queries + (base + row) * query_floats, scores,
                                 states + (base + row) * state);
                if constexpr (Tile::reads_panels) tile.fetched();
            }
        }
    }
    float* results = states;
    for (int64_t head = item.head; head < item.head_stop; ++head) {
        const int32_t* token = tokens;
        for (int64_t m = 0; m < item.num_members; ++m) {
            const AttentionMember& own = members[m];
            const int64_t own_rows = (own.query_stop - own.query) * group;
            if (own.partial >= 0) {
                std::memcpy(partials + own.partial + head * own_rows * state, results,
                            static_cast<size_t>(own_rows * state) * sizeof(float));
            }
            for (const int32_t* stop = token + own.query_stop - own.query; token < stop; ++token) {
                for (int64_t g = 0; g < group; ++g, results += state) {
                    const int64_t query_head = head * group + g;
                    float* to = a.out + (*token * a.num_query_heads + query_head) * a.value_size;
                    if (own.partial < 0) write_row(a, query_head, results, to);
                }
            }
        }
    }
}

static void attend(const Attention& a, const AttentionPlan& plan, int64_t index, float* partials,
                   float* scratch) {
#if EC_LEVEL == 2
    const bool is_done = ::ec::isa() >= Isa::amx && with_tiles([&](auto unit) {
        using Unit = decltype(unit);
        const auto attend_by = PairTile<Unit>::can_take(a) ? attend_with<PairTile<Unit>>
                               : FourTile<Unit>::can_take(a, plan, index)
                                   ? attend_with<FourTile<Unit>>
                                   : nullptr;
        if (attend_by != nullptr) attend_by(a, plan, index, partials, scratch);
        return attend_by != nullptr;
    });
    if (is_done) return;
    if (::ec::isa() >= Isa::avx512_bf16 && PairVectorTile::can_take(a))
        return attend_with<PairVectorTile>(a, plan, index, partials, scratch);
    if (a.kv_format == static_cast<int64_t>(KVCacheFormat::i8) && ByteTile::can_take(a))
        return attend_with<ByteTile>(a, plan, index, partials, scratch);
#elif EC_LEVEL == 1
    if (a.kv_format == static_cast<int64_t>(KVCacheFormat::i8) && a.head_size <= 512 &&
        !a.is_latent())
        return attend_with<VectorTile<Words>>(a, plan, index, partials, scratch);
#endif
    attend_with<FloatTile>(a, plan, index, partials, scratch);
}

// Joins the partial states of a head's tiles in order and writes their rows.
static void join_tiles(const Attention& a, const AttentionJoin& join, float* partials) {
    const int64_t state = a.state(), group = a.group();
    const int64_t rows = a.num_queries(join.request) * group;
    for (int64_t r = 0; r < rows; ++r) {
        float* own = partials + join.partial + r * state;
        for (int64_t s = 1; s < join.num_tiles; ++s)
            join_state(own, own + s * a.num_kv_heads * rows * state, a.padded());
        const int64_t query_head = join.head * group + r % group;
        const int64_t token = a.starts[join.request] + r / group;
        write_row(a, query_head, own, a.out + (token * a.num_query_heads + query_head) * a.value_size);
    }
}
