// How the KV cache keeps the elements of one head of one token: float32, bfloat16, or signed bytes
// with their scale behind them.
//
//   f32   [D] float
//   bf16  [D] the upper halves of floats, rounded to even
//   i8    [D] codes, then a float32 scale = max|x| / 127; x = code * scale
//
// Rows lie one behind the other, so a row of i8 may begin anywhere. But where blocks are whole panels,
// 16 tokens of a head beside each other, keys of f32 lie as attention multiplies them, and so do, of
// heads of whole sixteens, keys and values of i8:
//
//   rows          [slots][K][D]
//   keys of f32   [slots / 16][K][D][16]
//   keys of i8    [slots / 16][K]: [D / 4][16][4] codes + 128, [16] scales
//   values of i8  [slots / 16][K]: [4][D][4] codes, of fours of tokens, [16] scales
//
// Slots are those of a block; blocks lie any distance apart, the same for keys and values.
// kernels/cpu/kv_cache.py has the same in torch.
#pragma once

#include <cstdint>

#include "half.h"

namespace ec {

enum class KVCacheFormat : int64_t { f32 = 0, bf16 = 1, i8 = 2 };

constexpr int64_t panel_tokens = 16;

// Of keys.
inline bool has_float_panels(int64_t kind, int64_t block_size) {
    return kind == static_cast<int64_t>(KVCacheFormat::f32) && block_size % panel_tokens == 0;
}

// Of keys and values.
inline bool has_byte_panels(int64_t kind, int64_t block_size, int64_t head_size) {
    return kind == static_cast<int64_t>(KVCacheFormat::i8) && block_size % panel_tokens == 0 &&
           head_size % 16 == 0;
}

inline bool is_kv_format(int64_t kind) { return kind >= 0 && kind <= 2; }

inline int64_t kv_row_bytes(int64_t kind, int64_t head_size) {
    switch (static_cast<KVCacheFormat>(kind)) {
        case KVCacheFormat::f32:
            return head_size * 4;
        case KVCacheFormat::bf16:
            return head_size * 2;
        case KVCacheFormat::i8:
            return head_size + 4;
    }
    return 0;
}

// Bytes from a block's start to the panel of a slot and head.
inline int64_t panel_offset(int64_t slot, int64_t head, int64_t num_heads, int64_t row_bytes) {
    return (slot / panel_tokens * num_heads + head) * panel_tokens * row_bytes;
}

}  // namespace ec
