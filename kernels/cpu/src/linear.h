// Dense products: x [T, E] times a packed weight [N, E] -> [T, N], in float32.
//
// Outputs are grouped in panels of 32; the last one is padded with zeros. P = ceil(N / 32) panels,
// G = ceil(E / 32) groups of inputs.
//
//   f32        [P][E][32] float
//   bf16       [P][G * 16][32][2] bfloat16: two inputs that follow one another, zeros behind the last
//   i8_row     [P][G] records: codes [8][32][4], code = weight + 128; row_scales [P * 32] float
//   q8_group   [P][G] records: 32 scales f16, then codes [8][32][4], code = weight + 128
//   q4_group   [P][G] records: 32 scales f16, then nibbles, code = weight + 8
//   q4_minimum [P][G] records: 32 scales f16, 32 minima f16, then nibbles
//   q4_k       [P][E / 256] records: 32 d f16, 32 dmin f16, scales [8][32] u8, minima [8][32] u8,
//              then 8 groups of nibbles
//   q6_k       [P][E / 256] records: 32 d f16, scales [16][32] s8, then 8 groups of codes of 6 bits,
//              code = weight + 32
//   q5_k       as q4_k, behind the nibbles of each group a plane of fifth bits
//   mxfp4      [P][G] records: 32 scales e8m0, then nibbles, each the place of a code in `e2m1_codes`
//   q5_minimum as q4_minimum, with a plane of fifth bits
//   iq4_group  as q4_group, iq4_k: [P][E / 256] records: 32 d f16, scales [8][32] s8, then 8 groups of
//              nibbles; both: places of codes in `iq4_codes`, code = weight + 128
//   q3_k       [P][E / 256] records: 32 d f16, scales [16][32] s8, then 8 groups of codes of 2 bits, each
//              with a plane of third bits; code = weight + 4
//   q2_k       [P][E / 256] records: 32 d f16, 32 dmin f16, scales and minima [16][32] in low and high
//              halves of bytes, then 8 groups of codes of 2 bits
//   table_k    [P][E / 256] records: 32 d f16, a line of the cache with 16 codes = weight + 128 and a
//              float, which d is multiplied with; scales [16][32] s8, then 8 groups of nibbles, places of codes
//
// Four inputs that follow one another lie in one dword, as the dot products of the vector units
// take them. Nibbles of a group are [4][32][4] bytes: byte j holds inputs 4j... in its low half,
// 16 + 4j... in its high half. A plane of single bits is [32][4] bytes: bit 2j is of inputs 4j...,
// 2j + 1 of 16 + 4j... Codes of 6 bits are [2][3][32][4] bytes: of a half of the inputs, three bytes hold
// three codes, and in their two highest bits the fourth, its lowest bits first. Those of 2 bits are
// [2][32][4] bytes: bits 2j and 2j + 1 are of inputs 4j... of a half.
//
// A weight is scale * (code - zero) (+ minimum). Activations are quantised to signed bytes, with a
// scale a group of 32 (one a row costs SmolLM2 4 % of perplexity); dots of bytes are exact integers,
// the float32 sums over groups run in their order. So a row's bits do not depend on the others.
// To bf16 weights activations are rounded to bf16 (to even); products and sums are float32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "activation.h"
#include "buffers.h"
#include "dispatch.h"
#include "rope.h"

namespace ec {

constexpr int64_t panel_outputs = 32;
constexpr int64_t group_inputs = 32;
constexpr int64_t superblock_inputs = 256;
// 128 bytes of a panel of floats: one input of f32, two of bf16. A chain of additions has so many.
constexpr int64_t chain_steps = 768;

enum class LinearKind : int32_t {
    f32 = 0,
    i8_row = 1,
    q8_group = 2,
    q4_group = 3,
    q4_minimum = 4,
    q4_k = 5,
    q6_k = 6,
    bf16 = 7,
    mxfp4 = 8,
    q5_k = 9,
    q5_minimum = 10,
    iq4_group = 11,
    iq4_k = 12,
    q3_k = 13,
    q2_k = 14,
    table_k = 15,
    q6_k_bytes = 100,  // q6_k with a byte a code, within a product of many rows; no weight is so
};

// Mirrored by `LinearArguments` in kernels/cpu/weights.py. `row_scales` (i8_row only) and `bias`
// (or null) hold P * 32 floats.
struct LinearWeight {
    int32_t kind;
    int32_t reserved;
    int64_t num_outputs;
    int64_t num_inputs;
    const uint8_t* blob;
    int64_t blob_bytes;
    const float* row_scales;
    const float* bias;
};

// Twice each value of e2m1 (OCP Microscaling Formats 1.0), plus 12: a byte as the dot products take it.
constexpr int32_t e2m1_zero = 12;
constexpr uint8_t e2m1_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The values of IQ4_NL and IQ4_XS, plus 128.
constexpr uint8_t iq4_codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};

enum class Table : uint8_t { none, e2m1, iq4, own };

// What a weight in groups consists of, in order: f16 values (or exponents), the superblock's bytes (two
// of each output a group), codes.
struct Record {
    bool row_scale;  // none in the record
    bool minimum;
    bool superblock;
    bool halves;  // of a group have a scale each
    bool to_255;  // codes do; others stay below 64
    int bits;     // of a code: 8, 6, 4 or 2
    bool plane;   // of a bit above, behind these
    Table table;  // where the codes are; with that of e2m1 scales are powers of 2
    int32_t zero;        // what codes subtract; 0 where the minimum says it
    int32_t sum_factor;  // what an activation's sums are multiplied with, negated
    int groups;
    int64_t table_at, bytes_at, codes_at, plane_at, group_bytes, bytes;
};

constexpr Record record_of(LinearKind kind) {
    using K = LinearKind;
    const auto is = [kind](auto... kinds) { return ((kind == kinds) || ...); };
    Record r{};
    r.row_scale = is(K::i8_row);
    r.plane = is(K::q5_k, K::q5_minimum, K::q3_k);
    r.minimum = is(K::q4_minimum, K::q5_minimum, K::q4_k, K::q5_k, K::q2_k);
    r.halves = is(K::q6_k, K::q6_k_bytes, K::q3_k, K::q2_k, K::table_k);
    r.superblock = r.halves || is(K::q4_k, K::q5_k, K::iq4_k);
    r.table = is(K::mxfp4)                  ? Table::e2m1
              : is(K::iq4_group, K::iq4_k)  ? Table::iq4
              : is(K::table_k)              ? Table::own
                                            : Table::none;
    r.bits = is(K::i8_row, K::q8_group, K::q6_k_bytes) ? 8
             : is(K::q6_k)                             ? 6
             : is(K::q3_k, K::q2_k)                    ? 2
                                                       : 4;
    r.to_255 = is(K::i8_row, K::q8_group) || r.table == Table::iq4 || r.table == Table::own;
    r.zero = r.minimum                   ? 0
             : r.to_255                  ? 128
             : is(K::q6_k, K::q6_k_bytes) ? 32
             : is(K::q3_k)               ? 4
             : r.table == Table::e2m1    ? e2m1_zero
                                         : 8;
    r.sum_factor = r.halves && r.minimum ? 1 : r.zero;
    r.groups = r.superblock ? superblock_inputs / group_inputs : 1;
    r.table_at = 2 * panel_outputs * (r.row_scale ? 0 : r.minimum ? 2 : 1);
    if (r.table == Table::e2m1) r.table_at = panel_outputs;
    r.bytes_at = r.table_at + (r.table == Table::own ? 64 : 0);
    r.codes_at = r.bytes_at;
    if (r.superblock) r.codes_at += r.groups * panel_outputs * (r.halves || r.minimum ? 2 : 1);
    r.plane_at = panel_outputs * group_inputs / 8 * r.bits;
    r.group_bytes = r.plane_at + (r.plane ? panel_outputs * group_inputs / 8 : 0);
    r.bytes = r.codes_at + r.groups * r.group_bytes;
    return r;
}

inline int64_t num_panels(const LinearWeight& w) {
    return (w.num_outputs + panel_outputs - 1) / panel_outputs;
}
inline int64_t num_groups(const LinearWeight& w) {
    return (w.num_inputs + group_inputs - 1) / group_inputs;
}

inline bool is_float(const LinearWeight& w) {
    const auto kind = static_cast<LinearKind>(w.kind);
    return kind == LinearKind::f32 || kind == LinearKind::bf16;
}

// Of a panel of floats, each 128 bytes.
inline int64_t num_steps(const LinearWeight& w) {
    return static_cast<LinearKind>(w.kind) == LinearKind::f32 ? w.num_inputs
                                                              : num_groups(w) * group_inputs / 2;
}

// One group of a row of activations, a line of the cache: x = scale * code. Sums are of codes; `start` values are
// -zero * sum, where a dot product of unsigned codes begins so that it ends as that of weights.
struct ActivationGroup {
    int8_t codes[group_inputs];
    float scale;
    float scaled_sum;  // scale * sum
    int32_t start;
    int32_t start_low;  // inputs 0..15
    int32_t start_high;  // inputs 16..31
    // Of each half, for AVX2 and a zero of 32 at most: inputs 0, 1, 4, 5... and 2, 3, 6, 7..., whose
    // products share 16 bits of a dword.
    int16_t start_pairs[2][2];
    int32_t unused;
};

// Rows of quantised activations. The last group's codes are padded with zeros.
struct Activations {
    const ActivationGroup* groups;  // [T][stride]
    int64_t stride;
};

// Dwords from a row of so many to the next: an odd number of lines of the cache, so that rows of a
// tile do not drive each other out.
inline int64_t spread_stride(int64_t num_dwords) {
    constexpr int64_t line_dwords = 16;
    return ((num_dwords + line_dwords - 1) / line_dwords | 1) * line_dwords;
}

// Rows of activations in bfloat16, zeros behind the last input: two that follow one another in one
// dword. `stride` dwords from a row to the next.
struct PairedActivations {
    const uint32_t* pairs;
    int64_t stride;

    static int64_t stride_of(int64_t num_inputs) {
        return spread_stride((num_inputs + 1) / 2);
    }
};

// Rows of activations as a product by integers or in bfloat16 reads them. Whoever makes the rows
// writes them here as well, while they are in a cache, or in place of floats that nobody reads.
class InputRows {
public:
    // Makes room. False: `w` reads floats, or there is no memory.
    bool begin(const LinearWeight& w, int64_t num_rows);

    // The lines that a group of 32 columns of rows [row, row_stop) will be written to.
    void fetch(int64_t row, int64_t row_stop, int64_t column) const {
        for (; row < row_stop; ++row) {
            fetch_to_write(pairs_ != nullptr
                               ? static_cast<const void*>(pairs_ + row * stride_ + column / 2)
                               : groups_ + row * stride_ + column / group_inputs);
        }
    }

    void write_row(int64_t row, const float* values, int64_t num_inputs) const;

    // A group of 32 columns of `num_rows` rows, which lie `values_stride` floats apart.
    void write_columns(int64_t row, int64_t num_rows, int64_t column, const float* values,
                       int64_t values_stride) const;

    // Of this row and those behind it.
    Activations groups(int64_t row) const { return {groups_ + row * stride_, stride_}; }
    PairedActivations pairs(int64_t row) const { return {pairs_ + row * stride_, stride_}; }

private:
    Buffer buffer_;
    ActivationGroup* groups_ = nullptr;
    uint32_t* pairs_ = nullptr;
    int64_t stride_ = 0;
    int32_t zero_ = 0;
};

// Results, `stride` floats from a row to the next.
struct Results {
    float* at;
    int64_t stride;
    // Written past the caches: more than they hold, each line once and whole. Rows of logits lie a
    // multiple of 4 KiB apart, so those of a tile would drive each other out as well.
    bool streams = false;
    // Added to what is there, instead of written over it; of floats only.
    bool adds = false;

    Results from_row(int64_t row) const { return {at + row * stride, stride, streams, adds}; }
};

// Weights that a thread will probably read next. They are fetched into its second cache while it
// computes, a part with every tile: a first tile alone would wait for memory, and memory for the
// others.
struct Upcoming {
    const uint8_t* at;  // null: not known
    int64_t bytes;

    // What one of `num_tiles` fetches, in `num_strides` equal strides of whole lines; the last ones
    // may have none.
    Upcoming part(int64_t tile, int64_t num_tiles, int64_t num_strides) const {
        const int64_t num_all = 64 * num_tiles * num_strides;
        const int64_t stride = (bytes + num_all - 1) / num_all * 64;
        const int64_t start = tile * stride * num_strides;
        return {at + start, start < bytes ? stride : 0};
    }
};

// One stride of a part.
template <int LOCALITY = 2>
inline void fetch(Upcoming& soon) {
    for (int64_t line = 0; line < soon.bytes; line += 64)
        __builtin_prefetch(soon.at + line, 0, LOCALITY);
    soon.at += soon.bytes;
}

// Panels [panel, panel_stop) for rows [row, row_stop), and what comes after the last of them.
struct LinearTask {
    int64_t panel, panel_stop;
    int64_t row, row_stop;
    Upcoming after;
};

void linear_f32(const LinearWeight& w, const float* x, int64_t x_stride, const Results& out,
                const LinearTask& task);
void linear_bf16(const LinearWeight& w, const PairedActivations& x, const Results& out,
                 const LinearTask& task);
void linear_integer(const LinearWeight& w, const Activations& x, const Results& out,
                    const LinearTask& task);

// A tile writes lines that no cache holds yet: fetch them while it computes.
inline void prefetch_results(const float* at, int64_t stride, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; ++r) {
        fetch_to_write(at + r * stride);
        fetch_to_write(at + r * stride + 16);
    }
}

// What is fetched at a time: a panel of bytes, the first chain of one of floats. More than a share
// of the second cache would drive out what is being read.
inline Upcoming upcoming_panel(const LinearWeight& w, int64_t panel) {
    constexpr int64_t most_bytes = 256 << 10;
    const int64_t panel_bytes = w.blob_bytes / num_panels(w);
    int64_t bytes = panel_bytes;
    if (is_float(w)) bytes = std::min(num_steps(w), chain_steps) * panel_outputs * 4;
    return {w.blob + panel * panel_bytes, bytes <= most_bytes ? bytes : 0};
}

// Null, or why `w` cannot be read.
const char* check_weight(const LinearWeight& w);

// What is done with a product's results while they are in a cache: one of `gate` and `rotary`.
struct Behind {
    GatedRows* gate = nullptr;  // joins the halves of each row, of whole panels, into `out`
    const InputRows* then = nullptr;  // what `gate` makes is written there, too
    bool skips_out = false;           // and only there
    const Rotary* rotary = nullptr;  // rotates the heads, of whole panels, in `out`, and keeps them
};

// x [num_rows, num_inputs] times `w` -> out. `ready`: its rows for this product, or null; then `x`
// need not be written. `next`: the weight that the same threads take after it, or null. Null, or why
// it cannot be done.
const char* linear(const LinearWeight& w, const LinearWeight* next, const float* x,
                   const InputRows* ready, int64_t num_rows, int64_t x_stride, int64_t num_inputs,
                   float* out, int64_t out_stride, const Behind& behind);

// Quantises one row of `num_inputs` floats. `zero` is the weight's `Record::sum_factor`.
void quantise_row(const float* x, int64_t num_inputs, int32_t zero,
                  ActivationGroup* groups);

// The same for one group of each of some rows, which lie `x_stride` floats apart, to groups that lie
// `stride` apart.
void quantise_columns(const float* x, int64_t x_stride, int64_t num_rows, int32_t zero,
                      ActivationGroup* groups, int64_t stride);

// Rounds one row to bfloat16; writes whole groups of 32, the last one padded with zeros.
void round_row(const float* x, int64_t num_inputs, uint32_t* pairs);

}  // namespace ec
