// Paged attention: what one call computes, and how it is cut into items.
//
//   sequence   |tile 0: keys [0, 128)  |tile 1: keys [128, 256) |tile 2 ...
//
// A tile's keys have a softmax of their own, and the tiles' results are joined in order
// (arXiv:1805.02867). Tiles begin at multiples of their size, whatever the window or the chunk, so
// a token's bits depend on its own sequence alone, and are the same when it is computed in a
// prompt or one by one, or beside others with the same prefix.
//
// Scores are in units of log2(e): their weights are powers of 2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "kv_cache.h"

namespace ec {

constexpr int64_t tile_keys = 128;
constexpr int most_rows_at_once = 6;      // in registers
constexpr int64_t most_block_rows = 32;   // whose scores against a tile are kept
constexpr float log2_e = 1.44269504088896341f;

// A query's position, the keys [first, stop) that it sees, and the row of its sequence's first
// token among those of the step, which for a sequence that is not whole in it lies before them.
struct AttentionRow {
    int32_t position, first, stop, start;
};

// One call. H query heads, K key/value heads, D head size; rows of q are [H, D], of out [H, value
// size]. Where that is another, values are the last elements of the keys, which lie in rows.
struct Attention {
    const float* q;
    int64_t q_stride;  // floats from one token to the next
    const uint8_t* k;  // blocks, see kv_cache.h
    const uint8_t* v;
    int64_t block_stride;  // bytes from a block of either to the next
    float* out;  // [T, H, value size]
    const int32_t* starts;
    const int32_t* lengths;
    const int32_t* table;
    int64_t table_width, block_size, num_query_heads, num_kv_heads, head_size, value_size;
    int64_t window;  // 0: none
    bool bidirectional;  // steps hold whole sequences, and a window reaches to both sides
    int64_t kv_format;
    bool rounds;  // queries and weights may be rounded to bfloat16
    float scale;
    float softcap;        // 0: none
    const float* sinks;   // [H] or null
    const float* slopes;  // [H] or null
    const float* distance_biases;  // [H, 2 * reach + 1] of keys before, at and behind a query; or null
    int64_t reach;
    const float* const* query_positions;  // [H][T, buckets], of a query and a key's distance; or null
    const float* const* key_positions;    // [H][T, buckets], of the key
    const int32_t* buckets;               // [2 * reach + 1], of distances as above
    int64_t num_buckets;
    const int32_t* ends;  // [T] never falling in a request: behind the last key seen; or null
    bool splits;  // tiles of few rows may be computed apart

    bool is_latent() const { return value_size != head_size; }
    bool has_floats() const { return !is_latent() && has_float_panels(kv_format, block_size); }
    bool has_bytes() const {
        return !is_latent() && has_byte_panels(kv_format, block_size, head_size);
    }
    int64_t group() const { return num_query_heads / num_kv_heads; }
    int64_t num_queries(int64_t request) const { return starts[request + 1] - starts[request]; }
    // Of the request's first token in this step.
    int64_t position(int64_t request) const { return lengths[request] - num_queries(request); }
    int64_t first_key(int64_t request, int64_t query) const {
        const int64_t first = position(request) + query - window + 1;
        return window != 0 && first > 0 ? first : 0;
    }
    int64_t stop_key(int64_t request, int64_t query) const {
        const int64_t own = position(request) + query, length = lengths[request];
        if (ends != nullptr) return ends[starts[request] + query];
        if (!bidirectional) return own + 1;
        return window != 0 && own + window < length ? own + window : length;
    }
    // Whether scores are changed one by one.
    bool changes_scores() const {
        return softcap != 0.0f || slopes != nullptr || distance_biases != nullptr || buckets != nullptr;
    }
    AttentionRow row(int64_t request, int64_t query) const {
        return {static_cast<int32_t>(position(request) + query),
                static_cast<int32_t>(first_key(request, query)),
                static_cast<int32_t>(stop_key(request, query)),
                static_cast<int32_t>(starts[request] - position(request))};
    }
    // Floats of one row's state: its sum of values, padded to whole registers, then the largest
    // score and the sum of weights.
    int64_t padded() const { return (value_size + 15) / 16 * 16; }
    int64_t state() const { return padded() + 16; }
};

// Queries [query, query_stop) of a request's tokens in this step, taken by an item.
struct AttentionMember {
    int32_t request, query, query_stop;
    int64_t partial;  // where its rows' states go, in floats: [K][query][H / K]; -1: into `out`
};

// Key/value heads [head, head_stop) and tiles [tile, tile_stop) of one member, or of
// several whose keys there lie in the same blocks. Rows of the item are [head][query][H / K], the
// queries those of its members in turn.
struct AttentionItem {
    int64_t member, num_members, num_queries;
    int64_t head, head_stop, tile, tile_stop;

    int64_t rows(const Attention& a) const { return (head_stop - head) * num_queries * a.group(); }
};

// A head of a request whose tiles were computed apart, the first one's states at `partial`.
struct AttentionJoin {
    int64_t request, head, partial, num_tiles;
};

struct AttentionPlan {
    std::vector<AttentionMember> members;
    std::vector<AttentionItem> items;
    std::vector<AttentionJoin> joins;
    int64_t partial_floats;
    int64_t most_rows, most_queries;  // of an item

    void make(const Attention& a, int64_t num_requests);

    const AttentionMember* members_of(const AttentionItem& item) const {
        return &members[static_cast<size_t>(item.member)];
    }

    // What the thread that computes item `index` will probably take next, or null: the others take
    // one each before it, those that are in the middle of theirs too.
    const AttentionItem* after(int64_t index) const {
        const int64_t next = index + num_threads();
        return next < static_cast<int64_t>(items.size())
                   ? &items[static_cast<size_t>(next)]
                   : nullptr;
    }
};

// Floats that one item needs while it is computed.
inline int64_t scratch_floats(const Attention& a, const AttentionPlan& plan) {
    constexpr int64_t line = 16;
    return plan.most_rows * (a.head_size + line + a.state()) +
           plan.most_queries * (2 + 4 * a.group()) +
           tile_keys * (2 * a.head_size + a.padded() + line) + most_block_rows * tile_keys +
           8 * line;
}

}  // namespace ec
