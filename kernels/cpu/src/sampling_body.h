// Passes over one row of logits, and Gumbel noise. Included by every_isa.h: no include guard.
//
// Random bits: Philox4x32-10 (J. Salmon et al., SC 2011) at counter (token / 4, position, stream)
// under the seed; token t has word t % 4. kernels/torch/sampling.py defines them.

constexpr int QUADS = W / 2;  // 64-bit lanes of a register
typedef uint64_t vq __attribute__((vector_size(W * 4)));
typedef uint64_t vq_unaligned __attribute__((vector_size(W * 4), aligned(8), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));

// a * b of numbers below 2^32.
EC_INLINE vq product(vq a, vq b) {
#if EC_LEVEL == 2
    return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif EC_LEVEL == 1
    return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif EC_NEON
    return (vq)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return a * b;
#endif
}

struct Words {
    vq word[4];
};

EC_INLINE Words philox(vq quads, uint64_t seed, uint64_t position) {
    constexpr uint64_t low = 0xFFFFFFFF;
    const vq multiplier0 = vq{} + uint64_t{0xD2511F53}, multiplier1 = vq{} + uint64_t{0xCD9E8D57};
    vq c0 = quads, c1 = vq{} + (position & low), c2 = vq{} + (position >> 32);
    vq c3 = vq{} + uint64_t{0x73616D70};
    uint64_t key0 = seed & low, key1 = seed >> 32;
    for (int round = 0; round < 10; ++round) {
        const vq product0 = product(c0, multiplier0), product1 = product(c2, multiplier1);
        c0 = (product1 >> 32) ^ c1 ^ key0;
        c2 = (product0 >> 32) ^ c3 ^ key1;
        c1 = product1 & low;
        c3 = product0 & low;
        key0 = (key0 + 0x9E3779B9) & low;
        key1 = (key1 + 0xBB67AE85) & low;
    }
    return {{c0, c1, c2, c3}};
}

// words -> -log(-log(u)), u = (upper 23 bits + 1/2) / 2^23.
EC_INLINE vf gumbel_of(vu words) {
    const vf number = __builtin_convertvector((vi)(words >> 9), vf);
    const vf uniform = (number + splat(0.5f)) * splat(1.1920928955078125e-7f);
    return -log_of(-log_of(uniform));
}

static float noise_of_token(uint64_t seed, uint64_t position, int64_t token) {
    const Words words = philox(vq{} + static_cast<uint64_t>(token / 4), seed, position);
    return gumbel_of(vu{} + static_cast<uint32_t>(words.word[token % 4][0]))[0];
}

// The index of the largest of logits[t] - top + noise(first + t) over [0, stop), the lowest of
// equals. first: a multiple of 4.
static int64_t best_of_all(const float* logits, int64_t stop, float top, uint64_t seed,
                           uint64_t position, int64_t first) {
    constexpr int64_t piece = 512;
    uint32_t words[piece + 64];
    vq lanes;
    for (int i = 0; i < QUADS; ++i) lanes[i] = static_cast<uint64_t>(i);
    float found = -INFINITY;
    int64_t at = 0;
    for (int64_t start = 0; start < stop; start += piece) {
        const int64_t size = stop - start < piece ? stop - start : piece;
        for (int64_t i = 0; i < size; i += 4 * QUADS) {
            const vq quads = lanes + static_cast<uint64_t>((first + start + i) / 4);
            const Words four = philox(quads, seed, position);
            const vq low = four.word[0] | (four.word[1] << 32);
            const vq high = four.word[2] | (four.word[3] << 32);
            uint64_t* to = reinterpret_cast<uint64_t*>(words + i);
            for (int q = 0; q < QUADS; ++q) {
                to[2 * q] = low[q];
                to[2 * q + 1] = high[q];
            }
        }
        float sums[piece];
        vf top_sum = splat(-INFINITY);
        int64_t i = 0;
        for (; i + W <= size; i += W) {
            const vu bits = *reinterpret_cast<const vu_unaligned*>(words + i);
            const vf sum = (load(logits + start + i) - splat(top)) + gumbel_of(bits);
            store(sums + i, sum);
            top_sum = max(sum, top_sum);
        }
        float largest = max_of(top_sum);
        for (; i < size; ++i) {
            sums[i] = (logits[start + i] - top) + gumbel_of(vu{} + words[i])[0];
            if (sums[i] > largest) largest = sums[i];
        }
        if (largest > found) {
            found = largest;
            for (at = 0; sums[at] != largest;) ++at;
            at += start;
        }
    }
    return at;
}

// As best_of_all, over `count` ids in rising order, with any first.
static int64_t best_of_tokens(const float* logits, const int32_t* ids, int64_t count, float top,
                              uint64_t seed, uint64_t position, int64_t first) {
    float found = -INFINITY;
    int64_t at = count > 0 ? ids[0] : 0;
    for (int64_t i = 0; i < count; i += QUADS) {
        const int64_t size = count - i < QUADS ? count - i : QUADS;
        vq quads = vq{};
        for (int64_t j = 0; j < size; ++j) quads[j] = static_cast<uint64_t>(first + ids[i + j]) / 4;
        const Words four = philox(quads, seed, position);
        vu bits = vu{};
        for (int64_t j = 0; j < size; ++j)
            bits[j] = static_cast<uint32_t>(four.word[(first + ids[i + j]) % 4][j]);
        const vf noise = gumbel_of(bits);
        for (int64_t j = 0; j < size; ++j) {
            const float sum = (logits[ids[i + j]] - top) + noise[j];
            if (sum > found) {
                found = sum;
                at = ids[i + j];
            }
        }
    }
    return at;
}

// The lowest index of x >= limit; 0 if there is none.
static int64_t first_at_least(const float* x, int64_t size, float limit) {
    const vf limits = splat(limit);
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const uint32_t bits = at_least(load(x + i), limits);
        if (bits != 0) return i + __builtin_ctz(bits);
    }
    for (; i < size; ++i)
        if (x[i] >= limit) return i;
    return 0;
}

// The index of the largest, the lowest of equals; 0 if there is none but NaN.
static int64_t largest_of(const float* x, int64_t size) {
    vf tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int c = 0; c < 4; ++c) tops[c] = max(load(x + i + c * W), tops[c]);
    float largest = max_of(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    for (; i < size; ++i) largest = x[i] > largest ? x[i] : largest;
    return first_at_least(x, size, largest);
}

static bool has_nan(const float* x, int64_t size) {
    vi found[2] = {vi{}, vi{}};
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W)
        for (int c = 0; c < 2; ++c) {
            const vf v = load(x + i + c * W);
            found[c] |= v != v;
        }
    bool any = false;
    for (int lane = 0; lane < W; ++lane) any |= (found[0][lane] | found[1][lane]) != 0;
    for (; i < size; ++i) any |= x[i] != x[i];
    return any;
}

// Tokens without a bit in the mask [ceil(size / 32)] become -inf.
static Tops mask_row(float* x, int64_t size, const uint32_t* mask) {
    vu lanes;
    for (int lane = 0; lane < W; ++lane) lanes[lane] = static_cast<uint32_t>(lane);
    const vf none = splat(-INFINITY);
    vf before = none, after = none;
    vi nan = vi{};
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const vu bits = vu{} + (mask[i / 32] >> (i % 32));
        const vf v = load(x + i);
        const vf kept = ((bits >> lanes) & 1u) != 0u ? v : none;
        store(x + i, kept);
        nan |= v != v;
        before = max(v, before);
        after = max(kept, after);
    }
    Tops tops = {max_of(before), max_of(after)};
    bool has_nan = false;
    for (int lane = 0; lane < W; ++lane) has_nan |= nan[lane] != 0;
    for (; i < size; ++i) {
        has_nan |= x[i] != x[i];
        tops.before = x[i] > tops.before ? x[i] : tops.before;
        if (!((mask[i / 32] >> (i % 32)) & 1u)) x[i] = -INFINITY;
        tops.after = x[i] > tops.after ? x[i] : tops.after;
    }
    if (has_nan) tops.before = NAN;
    return tops;
}

// Ids of x >= limit in rising order into `ids`, which has room for `size`. Returns how many.
static int64_t find_at_least(const float* x, int64_t size, float limit, int32_t* ids) {
    int64_t count = 0, i = 0;
    const vf limits = splat(limit);
    for (; i + W <= size; i += W) {
        uint32_t bits = at_least(load(x + i), limits);
        while (bits != 0) {
            ids[count++] = static_cast<int32_t>(i + __builtin_ctz(bits));
            bits &= bits - 1;
        }
    }
    for (; i < size; ++i)
        if (x[i] >= limit) ids[count++] = static_cast<int32_t>(i);
    return count;
}

// The sum of e^(x - top) over x >= limit.
static double sum_of_weights(const float* x, int64_t size, float top, float limit) {
    double total = 0.0;
    const vf limits = splat(limit);
    for (int64_t start = 0; start < size; start += 1024) {
        const int64_t stop = size - start < 1024 ? size : start + 1024;
        vf sum = vf{};
        int64_t i = start;
        for (; i + W <= stop; i += W) {
            const vf v = load(x + i);
            sum = sum + (v >= limits ? exp_of(v - splat(top)) : vf{});
        }
        float rest = sum_of(sum);
        for (; i < stop; ++i)
            if (x[i] >= limit) rest += exp_of(splat(x[i] - top))[0];
        total += rest;
    }
    return total;
}

static void weights_of(const float* x, const int32_t* ids, int64_t count, float top, float* out) {
    for (int64_t i = 0; i < count; i += W) {
        vf v = splat(top);
        const int64_t size = count - i < W ? count - i : W;
        for (int64_t j = 0; j < size; ++j) v[j] = x[ids[i + j]];
        const vf weight = exp_of(v - splat(top));
        for (int64_t j = 0; j < size; ++j) out[i + j] = weight[j];
    }
}

static void penalise(float* logits, const uint8_t* in_prompt, const float* counts, int64_t size,
                     float repetition, float presence, float frequency) {
    for (int64_t i = 0; i < size; ++i) {
        const bool in_output = counts[i] > 0.0f;
        float x = logits[i];
        if (repetition != 1.0f && (in_prompt[i] != 0 || in_output)) {
            x = x > 0.0f ? x / repetition : x * repetition;
        }
        if (frequency != 0.0f) x -= frequency * counts[i];
        if (presence != 0.0f && in_output) x -= presence;
        logits[i] = x;
    }
}
