// Keys and values of the next tile, fetched while one is computed; see attention.h. Included by
// attention_body.h: no include guard.

// Where keys in panels [depth][16] and values of a tile and a head lie; the last ones are repeated.
struct Places {
    const float* panels[tile_keys / panel_tokens];
    const float* values[tile_keys];
    int64_t num_keys;
};

// Blocks lie anywhere in memory, so the processor cannot guess the next. A tile's lines asked for
// at once would have to be waited for: a few are asked for with each step of reading a tile, or,
// where nothing of it is read but by products, with their steps.
class Ahead {
public:
    // What the tile at `start` holds of a member's sequence, for all heads of the item.
    void take(const Attention& a, const AttentionItem& item, const AttentionMember& member,
              int64_t start) {
        row_bytes_ = kv_row_bytes(a.kv_format, a.head_size);
        is_latent_ = a.is_latent();
        const int32_t* blocks = a.table + member.request * a.table_width;
        const bool has_bytes = a.has_bytes();
        const int64_t seen = a.stop_key(member.request, member.query_stop - 1);
        const int64_t stop = has_bytes ? (seen + panel_tokens - 1) / panel_tokens * panel_tokens : seen;
        int64_t block = start / a.block_size, block_stop = (block + 1) * a.block_size;
        k_ = a.k + item.head * row_bytes_ * (has_bytes || a.has_floats() ? panel_tokens : 1);
        v_ = a.v + item.head * row_bytes_ * (has_bytes ? panel_tokens : 1);
        num_heads_ = item.head_stop - item.head;
        for (int64_t key = start; key < start + tile_keys && key < stop; ++key) {
            if (key == block_stop) {
                ++block;
                block_stop += a.block_size;
            }
            const int64_t slot = a.block_size - (block_stop - key);  // of the block
            // panels of bytes follow one another: a part of all is taken for a row
            const int64_t lane = has_bytes ? slot % panel_tokens : 0;
            at_[num_rows_++] = blocks[block] * a.block_stride +
                               ((slot - lane) * a.num_kv_heads + lane * num_heads_) * row_bytes_;
        }
    }

    // All of it is asked for within `num_steps` > 0 steps, at an even pace.
    void divide(int64_t num_steps) { pace_ = ((num_rows_ << 16) + num_steps - 1) / num_steps; }

    void step() {
        due_ += pace_;
        const int64_t due = due_ >> 16 < num_rows_ ? due_ >> 16 : num_rows_;
        for (; next_ < due; ++next_) {
            for (int64_t line = 0; line < num_heads_ * row_bytes_; line += 64) {
                __builtin_prefetch(k_ + at_[next_] + line, 0, 2);
                if (!is_latent_) __builtin_prefetch(v_ + at_[next_] + line, 0, 2);
            }
        }
    }

    // Of the item's head, where its keys lie in panels of floats. False: there are none.
    bool find(int64_t head, Places& places) const {
        if (head >= num_heads_ || num_rows_ == 0) return false;
        places.num_keys = num_rows_;
        for (int64_t j = 0; j < tile_keys; ++j) {
            const int64_t at = at_[j < num_rows_ ? j : num_rows_ - 1];
            places.values[j] = reinterpret_cast<const float*>(v_ + at + head * row_bytes_);
        }
        for (int64_t j = 0; j < tile_keys; j += panel_tokens) {
            const int64_t at = at_[j < num_rows_ ? j : 0];
            const uint8_t* panel = k_ + at + head * row_bytes_ * panel_tokens;
            places.panels[j / panel_tokens] = reinterpret_cast<const float*>(panel);
        }
        return true;
    }

private:
    const uint8_t* k_ = nullptr;
    const uint8_t* v_ = nullptr;
    int64_t at_[tile_keys];  // bytes
    int64_t row_bytes_ = 0, num_heads_ = 0;
    int64_t num_rows_ = 0, next_ = 0;
    bool is_latent_ = false;
    int64_t pace_ = 0, due_ = 0;  // rows, in parts of 2^16
};
