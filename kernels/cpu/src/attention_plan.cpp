// Cuts a step's attention into items. See attention.h.
#include <cstring>

#include "attention.h"

namespace ec {
namespace {

constexpr int64_t most_item_rows = 96;    // of several requests, or heads
constexpr int64_t most_whole_rows = 384;  // of one request and head: a tile is read once for all
constexpr int64_t most_split_rows = 32;  // rows of a head up to which tiles are items

struct Request {
    int64_t num_queries, first_tile, stop_tile;
};

Request request_of(const Attention& a, int64_t r) {
    Request found;
    found.num_queries = a.num_queries(r);
    found.first_tile = a.first_key(r, 0) / tile_keys;
    found.stop_tile = (a.lengths[r] + tile_keys - 1) / tile_keys;
    return found;
}

bool is_split(const Attention& a, const Request& request) {
    return a.splits && request.num_queries * a.group() <= std::max(most_split_rows, a.group());
}

// Tiles of split requests whose keys lie in the same blocks, as behind a common prefix: they are
// read once for all. A tile is found by its first block; another one that falls on the same
// place forgets it, which costs speed only.
class SharedTiles {
public:
    explicit SharedTiles(const Attention& a) : a_(a) {
        for (Place& place : places_) place = {-1, -1, -1};
    }

    // Tiles that a window cuts, or that are not full, or in part of a block, are not shared.
    bool may_share(int64_t r, int64_t tile) const {
        return a_.window == 0 && tile_keys % a_.block_size == 0 &&
               (tile + 1) * tile_keys <= a_.position(r);
    }

    // The group of tiles that this one has joined, or -1 for one that others may join.
    int64_t join(int64_t r, int64_t tile, int64_t group_if_new) {
        const int64_t blocks = tile_keys / a_.block_size;
        const int32_t* own = a_.table + r * a_.table_width + tile * blocks;
        Place& place = places_[static_cast<size_t>(own[0] * 31 + tile) % num_places];
        if (place.tile == tile) {
            const int32_t* other = a_.table + place.request * a_.table_width + tile * blocks;
            const auto bytes = static_cast<size_t>(blocks) * sizeof(int32_t);
            if (std::memcmp(own, other, bytes) == 0) return place.group;
        }
        place = {r, tile, group_if_new};
        return -1;
    }

private:
    static constexpr size_t num_places = 512;
    struct Place {
        int64_t request, tile, group;
    };
    const Attention& a_;
    Place places_[num_places];
};

// Larger items first would not help: the last ones of a long prompt are the largest.
void add_whole(const Attention& a, const Request& request, int64_t r, AttentionPlan& plan) {
    const int64_t rows = request.num_queries * a.group(), threads = num_threads();
    int64_t num_parts = std::min((rows + most_whole_rows - 1) / most_whole_rows, request.num_queries);
    // a few large items are made as many for one thread as for the other
    while (num_parts * a.num_kv_heads % threads != 0 && num_parts * a.num_kv_heads < 8 * threads &&
           rows > num_parts * most_split_rows && num_parts < request.num_queries)
        ++num_parts;
    for (int64_t t = num_parts - 1; t >= 0; --t) {
        const int64_t query = request.num_queries * t / num_parts;
        const int64_t query_stop = request.num_queries * (t + 1) / num_parts;
        AttentionItem item;
        item.member = static_cast<int64_t>(plan.members.size());
        item.num_members = 1;
        item.num_queries = query_stop - query;
        item.tile = a.first_key(r, query) / tile_keys;
        item.tile_stop = (a.stop_key(r, query_stop - 1) + tile_keys - 1) / tile_keys;
        plan.members.push_back({static_cast<int32_t>(r), static_cast<int32_t>(query),
                                static_cast<int32_t>(query_stop), -1});
        for (int64_t head = 0; head < a.num_kv_heads; ++head) {
            item.head = head;
            item.head_stop = head + 1;
            plan.items.push_back(item);
        }
    }
}

// Items [0, num_whole) wait for the units, those behind, of a tile and few rows, for memory: spread
// among each other both are busy. A small one comes last.
void spread(const Attention& a, std::vector<AttentionItem>& items, size_t num_whole) {
    if (num_whole == 0 || num_whole == items.size()) return;
    thread_local std::vector<AttentionItem> in_turn;
    const auto work = [&](const AttentionItem& item) {
        return item.rows(a) * (item.tile_stop - item.tile);
    };
    int64_t all_whole = 0, done_whole = 0;
    for (size_t i = 0; i < num_whole; ++i) all_whole += work(items[i]);
    const auto all_tiles = static_cast<int64_t>(items.size() - num_whole);
    in_turn.clear();
    for (size_t whole = 0, tile = num_whole; in_turn.size() < items.size();) {
        const auto done_tiles = static_cast<int64_t>(tile - num_whole);
        if (whole < num_whole && done_whole * all_tiles <= done_tiles * all_whole) {
            done_whole += work(items[whole]);
            in_turn.push_back(items[whole++]);
        } else {
            in_turn.push_back(items[tile++]);
        }
    }
    items.swap(in_turn);
}

}  // namespace

void AttentionPlan::make(const Attention& a, int64_t num_requests) {
    members.clear();
    items.clear();
    joins.clear();
    partial_floats = most_rows = most_queries = 0;
    thread_local std::vector<AttentionItem> tiles;  // of split requests, all heads
    thread_local std::vector<std::vector<AttentionMember>> sharers;
    tiles.clear();
    SharedTiles shared(a);
    for (int64_t r = 0; r < num_requests; ++r) {
        const Request request = request_of(a, r);
        if (request.num_queries == 0) continue;
        if (!is_split(a, request)) {
            add_whole(a, request, r, *this);
            continue;
        }
        const int64_t num_tiles = request.stop_tile - request.first_tile;
        const int64_t head_floats = request.num_queries * a.group() * a.state();
        AttentionMember member{static_cast<int32_t>(r), 0,
                               static_cast<int32_t>(request.num_queries), -1};
        for (int64_t head = 0; num_tiles > 1 && head < a.num_kv_heads; ++head)
            joins.push_back({r, head, partial_floats + head * head_floats, num_tiles});
        for (int64_t s = request.first_tile; s < request.stop_tile; ++s) {
            if (num_tiles > 1) {
                member.partial = partial_floats;
                partial_floats += a.num_kv_heads * head_floats;
            }
            const auto own = static_cast<int64_t>(tiles.size());
            const int64_t found = shared.may_share(r, s) ? shared.join(r, s, own) : -1;
            if (found >= 0) {
                sharers[static_cast<size_t>(found)].push_back(member);
                continue;
            }
            AttentionItem tile{};
            tile.tile = s;
            tile.tile_stop = s + 1;
            tiles.push_back(tile);
            if (sharers.size() < tiles.size()) sharers.emplace_back();
            sharers[static_cast<size_t>(own)].assign(1, member);
        }
    }
    const size_t num_whole = items.size();
    // One item for all heads reads the cache in one stream; few items are cut to feed the threads.
    const bool is_crowd = static_cast<int64_t>(tiles.size()) >= 8 * num_threads();
    for (size_t i = 0; i < tiles.size(); ++i) {
        AttentionItem item = tiles[i];
        const std::vector<AttentionMember>& all = sharers[i];
        for (size_t first = 0; first < all.size();) {
            item.member = static_cast<int64_t>(members.size());
            item.num_queries = 0;
            size_t stop = first;
            for (; stop < all.size(); ++stop) {
                const int64_t more = all[stop].query_stop - all[stop].query;
                if (stop > first && (item.num_queries + more) * a.group() > most_item_rows) break;
                item.num_queries += more;
                members.push_back(all[stop]);
            }
            item.num_members = static_cast<int64_t>(stop - first);
            first = stop;
            const int64_t head_rows = item.num_queries * a.group();
            const int64_t heads = is_crowd ? std::max(int64_t{1}, most_item_rows / head_rows) : 1;
            for (item.head = 0; item.head < a.num_kv_heads; item.head = item.head_stop) {
                item.head_stop = std::min(item.head + heads, a.num_kv_heads);
                items.push_back(item);
            }
        }
    }
    spread(a, items, num_whole);
    for (const AttentionItem& item : items) {
        most_rows = std::max(most_rows, item.rows(a));
        most_queries = std::max(most_queries, item.num_queries);
    }
}

}  // namespace ec
