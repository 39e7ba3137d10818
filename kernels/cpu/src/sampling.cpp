// Chooses tokens: Gumbel-max over all of a row, or over what min_p, top_k and top_p leave.
//
// The same definition as kernels/torch/sampling.py; sums of probabilities run in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "buffers.h"
#include "dispatch.h"
#include "pool.h"

namespace ec {
// The largest logit of a row before and after its mask; the first is NaN if there is one.
struct Tops {
    float before, after;
};
}  // namespace ec

#define EC_BODY "sampling_body.h"
#include "every_isa.h"

namespace ec {
namespace {

constexpr float largest_noise = 16.64f;  // just above that of the largest random number
constexpr float no_limit = -std::numeric_limits<float>::infinity();

struct Row {
    const float* logits;
    int64_t size;
    int64_t best;
    float top;
    int64_t first;   // token of logits[0]
    int32_t* ids;    // [size]
    float* numbers;  // [size]
};

// The candidates that reach far enough down: thresholds fall until `is_enough(count)`.
template <typename Enough>
int64_t find_candidates(const Row& row, float limit, Enough is_enough) {
    for (const float depth : {4.0f, 8.0f, 16.0f, 32.0f}) {
        if (row.top - depth <= limit) break;
        const int64_t count =
            EC_CHOOSE(find_at_least)(row.logits, row.size, row.top - depth, row.ids);
        if (is_enough(count)) return count;
    }
    return EC_CHOOSE(find_at_least)(row.logits, row.size, limit, row.ids);
}

float kth_largest(const Row& row, int64_t k) {
    const int64_t count = find_candidates(row, no_limit, [&](int64_t found) { return found >= k; });
    if (count < k) return no_limit;  // NaN among the logits
    for (int64_t i = 0; i < count; ++i) row.numbers[i] = row.logits[row.ids[i]];
    std::nth_element(row.numbers, row.numbers + k - 1, row.numbers + count, std::greater<float>());
    return row.numbers[k - 1];
}

// Ids that top_p leaves of the logits at or above `limit`, in rising order, into row.ids.
int64_t keep_top_p(const Row& row, float limit, float top_p) {
    const double all = EC_CHOOSE(sum_of_weights)(row.logits, row.size, row.top, limit);
    const double wanted = static_cast<double>(top_p) * all;
    const int64_t count = find_candidates(row, limit, [&](int64_t found) {
        EC_CHOOSE(weights_of)(row.logits, row.ids, found, row.top, row.numbers);
        double sum = 0.0;
        for (int64_t i = 0; i < found; ++i) sum += row.numbers[i];
        return sum >= wanted;
    });
    std::sort(row.ids, row.ids + count, [&](int32_t a, int32_t b) {
        return row.logits[a] > row.logits[b] || (row.logits[a] == row.logits[b] && a < b);
    });
    EC_CHOOSE(weights_of)(row.logits, row.ids, count, row.top, row.numbers);
    double before = 0.0;
    int64_t kept = 0;
    while (kept < count && (kept == 0 || before < wanted)) before += row.numbers[kept++];
    std::sort(row.ids, row.ids + kept);
    return kept;
}

int64_t choose(const Row& row, uint64_t seed, uint64_t position, int64_t top_k, float top_p,
               float min_p) {
    if (!(row.top > no_limit)) return row.best;
    float limit = no_limit;
    if (min_p > 0.0f) limit = row.top + std::log(min_p);
    if (top_k > 0 && top_k < row.size) limit = std::max(limit, kth_largest(row, top_k));
    // What the largest noise could not lift over the likeliest token's own sum needs none.
    const float own_noise = EC_CHOOSE(noise_of_token)(seed, position, row.first + row.best);
    const float least_candidate = row.top + (own_noise - (largest_noise + 0.01f));
    int64_t count;
    if (top_p < 1.0f) {
        count = keep_top_p(row, limit, top_p);
    } else {
        count = EC_CHOOSE(find_at_least)(row.logits, row.size, std::max(limit, least_candidate), row.ids);
        // cheaper than token by token
        if (count > row.size / 6 && least_candidate >= limit && row.first % 4 == 0)
            return EC_CHOOSE(best_of_all)(row.logits, row.size, row.top, seed, position, row.first);
    }
    return EC_CHOOSE(best_of_tokens)(row.logits, row.ids, count, row.top, seed, position,
                                     row.first);
}

thread_local Buffer row_ids;
thread_local Buffer row_numbers;

}  // namespace
}  // namespace ec

// logits [num_rows, size], rows `stride` floats apart -> chosen [num_rows]. top_k (0: no limit),
// top_p (1: no limit) and min_p (0: no limit) are all given, or all null: no limits.
// Column i has the noise of token `first_token` + i.
EC_EXPORT const char* ec_sample(const float* logits, int64_t stride, int64_t num_rows, int64_t size,
                                const int64_t* seeds, const int64_t* positions,
                                const int64_t* top_k, const float* top_p, const float* min_p,
                                int64_t first_token, int64_t* chosen) {
    using namespace ec;
    if (size < 1 || size > std::numeric_limits<int32_t>::max()) {
        return refuse("a vocabulary of %ld, it must be in [1, 2^31)", size);
    }
    for (int64_t r = 0; top_k != nullptr && r < num_rows; ++r) {
        if (top_k[r] < 0) {
            return refuse("top_k of row %ld is %ld, it must be 0 (no limit) or above", r, top_k[r]);
        }
    }
    parallel(num_rows, [&](int64_t r, int) {
        Row row;
        row.logits = logits + r * stride;
        row.size = size;
        row.best = EC_CHOOSE(largest_of)(row.logits, size);
        row.top = row.logits[row.best];
        row.first = first_token;
        row.ids = row_ids.reserve<int32_t>(size);
        row.numbers = row_numbers.reserve<float>(size);
        const bool free = top_k == nullptr;
        chosen[r] = choose(row, static_cast<uint64_t>(seeds[r]),
                           static_cast<uint64_t>(positions[r]), free ? 0 : top_k[r],
                           free ? 1.0f : top_p[r], free ? 0.0f : min_p[r]);
    });
    return nullptr;
}

// Of each row of logits [num_rows, size], rows `stride` floats apart: the lowest id of its largest,
// and that logit; NaN if there is one in the row. With masks [., ceil(size / 32)]: after tokens
// without a bit in masks[mask_of[row]] became -inf, and `before` is the largest before that; none of
// a row is -1.
EC_EXPORT const char* ec_best_of_rows(float* logits, int64_t stride, int64_t num_rows, int64_t size,
                                      int64_t* ids, float* best, const int64_t* mask_of,
                                      const uint32_t* masks, float* before) {
    using namespace ec;
    if (size < 1) return refuse("rows of no logits have no best one");
    const auto largest_of = EC_CHOOSE(largest_of);
    const auto has_nan = EC_CHOOSE(has_nan);
    const int64_t num_words = (size + 31) / 32;
    parallel(num_rows, [&](int64_t r, int) {
        float* row = logits + r * stride;
        if (mask_of != nullptr && mask_of[r] >= 0) {
            const Tops tops = EC_CHOOSE(mask_row)(row, size, masks + mask_of[r] * num_words);
            ids[r] = EC_CHOOSE(first_at_least)(row, size, tops.after);
            best[r] = tops.after;
            before[r] = tops.before;
            return;
        }
        ids[r] = largest_of(row, size);
        best[r] = has_nan(row, size) ? std::numeric_limits<float>::quiet_NaN() : row[ids[r]];
        if (before != nullptr) before[r] = best[r];
    });
    return nullptr;
}

// Of each row of logits [num_rows, size], rows `stride` floats apart, after softmax: log-probabilities
// `own` of tokens ids [num_rows, num_ids]; how many tokens are likelier than the first of these, plus
// 1; and the num_top likeliest, falling, the lower id first in a tie. NaN in a row: all of it is.
EC_EXPORT const char* ec_token_logprobs(const float* logits, int64_t stride, int64_t num_rows,
                                        int64_t size, const int64_t* ids, int64_t num_ids,
                                        int64_t num_top, float* own, int64_t* ranks,
                                        int64_t* top_ids, float* top) {
    using namespace ec;
    if (size < 1 || size > std::numeric_limits<int32_t>::max()) {
        return refuse("a vocabulary of %ld, it must be in [1, 2^31)", size);
    }
    if (num_ids < 1 || num_top < 0 || num_top > size) {
        return refuse("%ld tokens and the %ld likeliest of %ld", num_ids, num_top, size);
    }
    for (int64_t i = 0; i < num_rows * num_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= size) return refuse("token %ld is not in [0, %ld)", ids[i], size);
    }
    parallel(num_rows, [&](int64_t r, int) {
        Row row{};
        row.logits = logits + r * stride;
        row.size = size;
        row.top = row.logits[EC_CHOOSE(largest_of)(row.logits, size)];
        row.ids = row_ids.reserve<int32_t>(size);
        row.numbers = row_numbers.reserve<float>(size);
        float log_sum = std::numeric_limits<float>::quiet_NaN();
        if (!EC_CHOOSE(has_nan)(row.logits, size) && row.top > no_limit) {
            const double sum = EC_CHOOSE(sum_of_weights)(row.logits, size, row.top, no_limit);
            log_sum = static_cast<float>(std::log(sum));
        }
        const auto logprob = [&](int64_t id) { return row.logits[id] - row.top - log_sum; };
        for (int64_t i = 0; i < num_ids; ++i) own[r * num_ids + i] = logprob(ids[r * num_ids + i]);
        const float first = row.logits[ids[r * num_ids]];
        int64_t above = 0;
        for (int64_t i = 0; i < size; ++i) above += row.logits[i] > first;
        ranks[r] = above + 1;
        int64_t count = 0;
        if (num_top > 0 && log_sum == log_sum) {
            count = find_candidates(row, no_limit, [&](int64_t found) { return found >= num_top; });
            std::partial_sort(row.ids, row.ids + num_top, row.ids + count, [&](int32_t a, int32_t b) {
                return row.logits[a] > row.logits[b] || (row.logits[a] == row.logits[b] && a < b);
            });
        }
        for (int64_t i = 0; i < num_top; ++i) {
            const int64_t id = count == 0 ? i : row.ids[i];
            top_ids[r * num_top + i] = id;
            top[r * num_top + i] = logprob(id);
        }
    });
    return nullptr;
}

EC_EXPORT const char* ec_penalise(float* logits, const uint8_t* in_prompt, const float* counts,
                                  int64_t size, float repetition, float presence,
                                  float frequency) {
    EC_CHOOSE(penalise)(logits, in_prompt, counts, size, repetition, presence, frequency);
    return nullptr;
}
