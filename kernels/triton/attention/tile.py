"""One tile of attention: a block of query rows against a block of keys read through a block table.

Row = token * G + head: the G query heads of a key/value head share one reading of the keys."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def _by_bits(dtype: str, shift: int, mask: int, power: int) -> tl.constexpr:
    """PTX: 4 e4m3 codes in a register become 4 numbers in two, 5 instructions for 2 of them. Sign,
    exponent and fraction move to their places in 16 bits; a product with a power of two, exact for
    what is subnormal in float8, too, mends the exponent (less -0: fma is there from sm_80 on)."""
    lines = [f"prmt.b32 {name}, 0, $2, {order}" for name, order in (("a", 0x5040), ("b", 0x7060))]
    for name, out in (("a", "$0"), ("b", "$1")):
        lines += [
            f"shr.u32 t, {name}, {shift}",
            f"and.b32 {name}, {name}, s",
            f"lop3.b32 {name}, t, {mask}, {name}, 0xEA",  # (t & mask) | a
            f"fma.rn.{dtype}x2 {out}, {name}, p, s",
        ]
    head = f".reg .b32 a, b, t, s, p; mov.b32 s, {0x80008000}; mov.b32 p, {power * 0x10001}; "
    return tl.constexpr("{ " + head + "; ".join(lines) + "; }")


TO_BF16 = _by_bits("bf16", 4, 0x07F007F0, 0x7B80)  # 2**120: exponents begin at -127, not at -7
TO_FP16 = _by_bits("f16", 1, 0x3F803F80, 0x5C00)  # 2**8: at -15


@triton.jit
def widen(x, dtype: tl.constexpr, BY_BITS: tl.constexpr):
    """x in `dtype`, exactly. BY_BITS: x is float8 (e4m3) and dtype has 16 bits, and no unit that
    converts, a sixteenth of the others, takes part; a NaN becomes 480 with its sign."""
    if not BY_BITS or dtype == tl.float32:
        wide = x.to(dtype)
    elif INTERPRETED:
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16)
        half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
        wide = (half.to(tl.float32) * 256.0).to(dtype)
    elif dtype == tl.bfloat16:
        codes = x.to(tl.uint8, bitcast=True)
        wide = tl.inline_asm_elementwise(
            TO_BF16, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        codes = x.to(tl.uint8, bitcast=True)
        wide = tl.inline_asm_elementwise(
            TO_FP16, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4
        )
    return wide


@triton.jit
def attend_tile(
    q_MD,  # [BLOCK_M, D_PAD]
    acc_MD,  # float32 [BLOCK_M, D_PAD], unnormalised output
    peak_M,  # float32 [BLOCK_M], largest raw score so far
    total_M,  # float32 [BLOCK_M], sum of exp2(multiplier * (raw - peak))
    first_key,  # position of the tile's first key, a multiple of BLOCK_N
    key_start,  # no key outside [key_start, key_stop) is seen; a tile begins here but for windows
    key_stop,
    position_M,  # int32 [BLOCK_M], of each row's query
    last_M,  # int32 [BLOCK_M], of the last key that each row sees; unused if BOTH_SIDES
    slope_M,  # float32 [BLOCK_M], ALiBi slopes in units of log2
    k_cache,  # -> [B, S, D] of this key/value head
    v_cache,  # -> likewise, with the same strides
    table,  # -> int32 [M] of this request
    score_scale,  # raw = score_scale * q . k, then tanh or bias; unused without either
    multiplier,
    window,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of keys and of values
    SLOT_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    ONE_QUERY: tl.constexpr,  # whose keys are all of [key_start, key_stop)
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    BY_BITS: tl.constexpr,  # see `widen`
    BOTH_SIDES: tl.constexpr,  # keys behind a query are seen, too
):
    """The running (acc, peak, total) after keys [first_key, first_key + BLOCK_N).

    A tile with nothing visible for a row leaves that row's state bit for bit, and masked and
    unmasked tiles do the same arithmetic: a row does not depend on where its tile begins."""
    # float32 as three tensor-core products of its halves: near its own rounding, and exact products
    # on the plain units take a compiler minutes
    PRECISION: tl.constexpr = "tf32x3" if q_MD.dtype == tl.float32 else "ieee"
    d_D = tl.arange(0, D_PAD)
    n_N = tl.arange(0, BLOCK_N)
    key_N = first_key + n_N
    # powers of two: a tile has whole blocks, or lies in one. Half of a decode's instructions were
    # addresses, so the first key is divided once, and values lie as keys do.
    table_N = table + first_key // S + n_N // S
    slot_N = n_N % S
    if BLOCK_N < S:
        slot_N += first_key % S
    if MASKED:
        inside_N = key_N < key_stop
        if HAS_WINDOW:
            inside_N = inside_N & (key_N >= key_start)
        block_N = tl.load(table_N, mask=inside_N, other=0)
    else:
        block_N = tl.load(table_N)
    at_N = block_N.to(tl.int64) * BLOCK_STRIDE + slot_N * SLOT_STRIDE
    at_ND = at_N[:, None] + d_D[None, :]
    # A slot that was never written may hold NaN. Scores of such keys are replaced, but 0 * NaN is
    # NaN: their values are not read.
    if D == D_PAD:
        k_ND = tl.load(k_cache + at_ND)
        if MASKED:
            v_ND = tl.load(v_cache + at_ND, mask=inside_N[:, None], other=0.0)
        else:
            v_ND = tl.load(v_cache + at_ND)
    else:
        is_element_D = d_D < D
        k_ND = tl.load(k_cache + at_ND, mask=is_element_D[None, :], other=0.0)
        if MASKED:
            seen_ND = inside_N[:, None] & is_element_D[None, :]
            v_ND = tl.load(v_cache + at_ND, mask=seen_ND, other=0.0)
        else:
            v_ND = tl.load(v_cache + at_ND, mask=is_element_D[None, :], other=0.0)

    k_DN = tl.trans(widen(k_ND, q_MD.dtype, BY_BITS))
    raw_MN = tl.dot(q_MD, k_DN, input_precision=PRECISION)
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both infinities
        raw_MN = 1.0 - 2.0 / (tl.exp(2.0 * (raw_MN * score_scale)) + 1.0)
        if HAS_ALIBI:
            raw_MN = raw_MN * multiplier
    if HAS_ALIBI:
        if not HAS_SOFTCAP:
            raw_MN = raw_MN * score_scale
        distance_MN = key_N[None, :] - position_M[:, None]
        raw_MN = raw_MN + slope_M[:, None] * distance_MN.to(tl.float32)
    if MASKED:
        if ONE_QUERY:
            raw_MN = tl.where(inside_N[None, :], raw_MN, float("-inf"))
        else:
            visible_MN = inside_N[None, :]
            if not BOTH_SIDES:
                visible_MN = visible_MN & (key_N[None, :] <= last_M[:, None])
            elif HAS_WINDOW:
                visible_MN = visible_MN & (key_N[None, :] < position_M[:, None] + window)
            if HAS_WINDOW:
                visible_MN = visible_MN & (key_N[None, :] > position_M[:, None] - window)
            raw_MN = tl.where(visible_MN, raw_MN, float("-inf"))

    new_peak_M = tl.maximum(peak_M, tl.max(raw_MN, axis=1))
    # a row that has seen nothing yet has a peak of -inf; -inf - -inf would be NaN
    safe_peak_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    if HAS_ALIBI:
        p_MN = tl.exp2(raw_MN - safe_peak_M[:, None])
        decay_M = tl.exp2(peak_M - safe_peak_M)
    else:
        p_MN = tl.exp2(tl.fma(raw_MN, multiplier, -(safe_peak_M * multiplier)[:, None]))
        decay_M = tl.exp2((peak_M - safe_peak_M) * multiplier)
    total_M = tl.fma(total_M, decay_M, tl.sum(p_MN, axis=1))
    acc_MD = acc_MD * decay_M[:, None]
    p_MN, v_ND = p_MN.to(q_MD.dtype), widen(v_ND, q_MD.dtype, BY_BITS)
    acc_MD = tl.dot(p_MN, v_ND, acc=acc_MD, input_precision=PRECISION)
    return acc_MD, new_peak_M, total_M
