"""Reading a packed weight in a kernel: `quantised_weights.QuantisedWeight`, its numbers scaled."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load_factors(
    factors_ptr,  # [N, G]
    at_NG,  # [BLOCK_N, GROUPS * SIDES]
    valid_NG,
    supers_ptr,  # float32, or None
    at_N,  # [BLOCK_N]
    valid_N,
    GROUPS: tl.constexpr,
    SIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scales or offsets: (of low nibbles, of high ones) float32 [BLOCK_N, GROUPS, 1]."""
    factor_NG = tl.load(factors_ptr + at_NG, mask=valid_NG, other=0).to(tl.float32)
    if supers_ptr is not None:
        factor_NG *= tl.load(supers_ptr + at_N, mask=valid_N, other=0.0)[:, None]
    if SIDES == 2:
        low_NG, high_NG = tl.split(tl.reshape(factor_NG, (BLOCK_N, GROUPS, 2)))
    else:
        low_NG, high_NG = factor_NG, factor_NG
    return low_NG[:, :, None], high_NG[:, :, None]


@triton.jit
def _level(x, LEVELS: tl.constexpr):
    """The whole number nearest to a polynomial at x; x itself if it has no coefficients."""
    DEGREE: tl.constexpr = len(LEVELS) - 1
    if DEGREE >= 0:
        value = tl.full(x.shape, LEVELS[DEGREE], tl.float32)
        for i in tl.static_range(1, DEGREE + 1):
            value = value * x + LEVELS[DEGREE - i]
        x = (value + 12582912.0) - 12582912.0  # 3 * 2**22: what is below 1 is rounded off
    return x


@triton.jit
def _load_words(
    packed_ptr, n_N, j_start, N: tl.constexpr, J: tl.constexpr, IN_BOUNDS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """uint32 [BLOCK_N, BLOCK_J / 4]; zeros past the end."""
    words_ptr = packed_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    w_W = j_start // 4 + tl.arange(0, BLOCK_J // 4)
    at_NW = words_ptr + n_N[:, None] * (J // 4) + w_W[None, :]
    if IN_BOUNDS:
        words_NW = tl.load(at_NW)
    else:
        words_NW = tl.load(at_NW, mask=(n_N < N)[:, None] & (w_W < J // 4)[None, :], other=0)
    return words_NW


@triton.jit
def _in_order(
    left_0_NW, left_1_NW, right_0_NW, right_1_NW, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Of each word what its bytes 0, 2, 1 and 3 give, which are bytes 2 w, 2 w + 1, 2 w + 8 and
    2 w + 9 of its run: [BLOCK_N, BLOCK_J / 16, 2, 8], in the order of the run."""
    SIDE: tl.constexpr = (BLOCK_N, BLOCK_J // 16, 8)
    left_NRI = tl.reshape(tl.join(left_0_NW, left_1_NW), SIDE)
    right_NRI = tl.reshape(tl.join(right_0_NW, right_1_NW), SIDE)
    return tl.permute(tl.join(left_NRI, right_NRI), (0, 1, 3, 2))


@triton.jit
def _halves(words_NW, dtype: tl.constexpr):
    """The last 4 bits of the lower and of the upper half of each word, as q of 128 + q (bfloat16)
    or 1024 + q (float16): numbers whose last bits count ones."""
    if INTERPRETED:
        pairs_NW = (words_NW & 0x000F000F) | (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
    elif dtype == tl.bfloat16:  # (a & b) | c in one instruction: ptxas takes two
        pairs_NW = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;", "=r,r", [words_NW], tl.uint32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pairs_NW = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;", "=r,r", [words_NW], tl.uint32,
            is_pure=True, pack=1,
        )  # fmt: skip
    lower_NW = pairs_NW.to(tl.uint16).to(dtype, bitcast=True)
    return lower_NW, (pairs_NW >> 16).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def _fma(a, b, c):
    """`a * b + c`, rounded once, two 16-bit numbers in an instruction (left to itself LLVM swaps
    the two before and after)."""
    if INTERPRETED:
        result = (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(a.dtype)
    elif a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], a.dtype, is_pure=True, pack=2
        )
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], a.dtype, is_pure=True, pack=2
        )
    return result


@triton.jit
def _scaled(q, scale, offset, HAS_OFFSET: tl.constexpr):
    """`q * scale + offset` in the dtype of q and offset; q whole numbers of at most 4 bits, scale
    float32. Rounded once where there is no offset and scale is a float16's number."""
    if q.dtype == tl.bfloat16:
        # 4 bits of the scale, then its other 7: the first product is exact, and comes first or,
        # beside an offset, last, so that what is rounded before is small
        upper = (scale.to(tl.int32, bitcast=True) & -1048576).to(tl.float32, bitcast=True)
        lower = (scale - upper).to(tl.bfloat16)
        if HAS_OFFSET:
            scaled = _fma(q, upper.to(tl.bfloat16), _fma(q, lower, offset))
        else:
            scaled = _fma(q, lower, _fma(q, upper.to(tl.bfloat16), offset))
    else:
        scaled = _fma(q, scale.to(q.dtype), offset)
    return scaled


@triton.jit
def load_codes(
    packed_ptr, scales_ptr, offsets_ptr, supers_ptr, n_N, j_start, N: tl.constexpr,
    J: tl.constexpr, GROUP_J: tl.constexpr, HAS_OFFSETS: tl.constexpr, ZEROS: tl.constexpr,
    IN_BOUNDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """As `load_scaled`, int4 as 16-bit numbers, two in an instruction. Where a block has one
    group they are q less its zero point, and its scale is still to be multiplied with.

    Minima (offsets that are no zero points) come with 8 times the scale to q less 8: a sum that is
    small, so three roundings of it and of the weight are about as far from exact as one."""
    SIDES: tl.constexpr = 2 if GROUP_J == 8 else 1
    SPAN_J: tl.constexpr = GROUP_J * SIDES
    GROUPS: tl.constexpr = BLOCK_J // SPAN_J if SPAN_J < BLOCK_J else 1
    ROW_GROUPS: tl.constexpr = J // GROUP_J
    words_NW = _load_words(packed_ptr, n_N, j_start, N, J, IN_BOUNDS, BLOCK_J)
    FIRST: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    low_0_NW, low_1_NW = _halves(words_NW, dtype)
    low_8_NW, low_9_NW = _halves(words_NW >> 8, dtype)
    high_0_NW, high_1_NW = _halves(words_NW >> 4, dtype)
    high_8_NW, high_9_NW = _halves(words_NW >> 12, dtype)
    low_NRAI = _in_order(low_0_NW, low_1_NW, low_8_NW, low_9_NW, BLOCK_N, BLOCK_J)
    high_NRAI = _in_order(high_0_NW, high_1_NW, high_8_NW, high_9_NW, BLOCK_N, BLOCK_J)
    low_NGI = tl.reshape(low_NRAI, (BLOCK_N, GROUPS, BLOCK_J // GROUPS))
    high_NGI = tl.reshape(high_NRAI, (BLOCK_N, GROUPS, BLOCK_J // GROUPS))
    g_G = j_start // GROUP_J + tl.arange(0, GROUPS * SIDES)
    at_NG = n_N[:, None] * ROW_GROUPS + g_G[None, :]
    valid_NG = (n_N < N)[:, None] & (g_G < ROW_GROUPS)[None, :]
    low_zero_NG1 = tl.full((1, 1, 1), 8.0, tl.float32)
    high_zero_NG1 = low_zero_NG1
    if ZEROS:
        low_zero_NG1, high_zero_NG1 = _load_factors(
            offsets_ptr, at_NG, valid_NG, None, n_N, n_N < N, GROUPS, SIDES, BLOCK_N
        )
    one_NG1 = tl.full((1, 1, 1), 1.0, dtype)
    low_NGI = _fma(low_NGI, one_NG1, (-FIRST - low_zero_NG1).to(dtype))
    high_NGI = _fma(high_NGI, one_NG1, (-FIRST - high_zero_NG1).to(dtype))
    if GROUPS * SIDES > 1:
        COLUMNS: tl.constexpr = 2 if HAS_OFFSETS else 1
        # past the end scales are zeros
        at_N = (n_N * (J // 128) + tl.minimum(j_start, J - 1) // 128) * COLUMNS
        low_scale_NG1, high_scale_NG1 = _load_factors(
            scales_ptr, at_NG, valid_NG, supers_ptr, at_N, n_N < N, GROUPS, SIDES, BLOCK_N
        )
        low_offset_NG1 = tl.full((1, 1, 1), 0.0, dtype)
        high_offset_NG1 = low_offset_NG1
        HAS_MINIMA: tl.constexpr = HAS_OFFSETS and not ZEROS
        if HAS_MINIMA:
            low_minimum_NG1, high_minimum_NG1 = _load_factors(
                offsets_ptr, at_NG, valid_NG, supers_ptr, at_N + 1, n_N < N, GROUPS, SIDES, BLOCK_N
            )
            low_offset_NG1 = (low_minimum_NG1 + 8.0 * low_scale_NG1).to(dtype)
            high_offset_NG1 = (high_minimum_NG1 + 8.0 * high_scale_NG1).to(dtype)
        low_NGI = _scaled(low_NGI, low_scale_NG1, low_offset_NG1, HAS_MINIMA)
        high_NGI = _scaled(high_NGI, high_scale_NG1, high_offset_NG1, HAS_MINIMA)
    return tl.reshape(low_NGI, (BLOCK_N, BLOCK_J)), tl.reshape(high_NGI, (BLOCK_N, BLOCK_J))


@triton.jit
def load_scaled(
    packed_ptr,  # uint8 or int8 [N, J]; with BITS == 8, uint8 is e4m3; with 4, int8 is e2m1
    scales_ptr,  # [N, G]
    offsets_ptr,  # [N, G]; unused without HAS_OFFSETS
    supers_ptr,  # float32 [N, K / 256, 1 or, with HAS_OFFSETS, 2], or None
    n_N,  # int64 [BLOCK_N]
    j_start,
    N: tl.constexpr,
    J: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_J: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ZEROS: tl.constexpr,  # offsets are zero points
    LEVELS: tl.constexpr,  # as in `QuantisedWeight`
    IN_BOUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Bytes [j_start, j_start + BLOCK_J) of some rows: (low, high) float32 [BLOCK_N, BLOCK_J].

    8 bits have no high half. GROUP_J is the bytes of a group: groups are whole numbers of blocks,
    or blocks of groups; two of 16 4-bit inputs share 16 bytes. IN_BOUNDS says that no block reaches
    beyond N or J."""
    SIDES: tl.constexpr = 2 if BITS == 4 and GROUP_J == 8 else 1
    SPAN_J: tl.constexpr = GROUP_J * SIDES
    GROUPS: tl.constexpr = BLOCK_J // SPAN_J if SPAN_J < BLOCK_J else 1
    ROW_GROUPS: tl.constexpr = J // GROUP_J
    g_G = j_start // GROUP_J + tl.arange(0, GROUPS * SIDES)
    words_NW = _load_words(packed_ptr, n_N, j_start, N, J, IN_BOUNDS, BLOCK_J)
    bytes_NRAI = _in_order(
        words_NW & 255, (words_NW >> 16) & 255, (words_NW >> 8) & 255, words_NW >> 24,
        BLOCK_N, BLOCK_J,
    )  # fmt: skip
    at_NG = n_N[:, None] * ROW_GROUPS + g_G[None, :]
    valid_NG = (n_N < N)[:, None] & (g_G < ROW_GROUPS)[None, :]
    SUPER_J: tl.constexpr = 32 * BITS
    COLUMNS: tl.constexpr = 2 if HAS_OFFSETS else 1
    # past the end scales are zeros
    at_N = (n_N * (J // SUPER_J) + tl.minimum(j_start, J - 1) // SUPER_J) * COLUMNS
    low_scale_NG1, high_scale_NG1 = _load_factors(
        scales_ptr, at_NG, valid_NG, supers_ptr, at_N, n_N < N, GROUPS, SIDES, BLOCK_N
    )
    if HAS_OFFSETS:
        low_offset_NG1, high_offset_NG1 = _load_factors(
            offsets_ptr, at_NG, valid_NG, supers_ptr, at_N + 1, n_N < N, GROUPS, SIDES, BLOCK_N
        )
    bytes_NGI = tl.reshape(bytes_NRAI, (BLOCK_N, GROUPS, BLOCK_J // GROUPS)).to(tl.int32)
    # 2**23 + q and 2**19 + q, by their bits: exact, and units that convert are few
    if BITS == 8:
        if packed_ptr.dtype.element_ty == tl.uint8:
            # float8: float16's exponent begins 8 lower
            bits_NGI = bytes_NGI.to(tl.uint16)
            half_NGI = ((bits_NGI & 128) << 8) | ((bits_NGI & 127) << 7)
            q_NGI = half_NGI.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            q_NGI = (bytes_NGI ^ 128 | 0x4B000000).to(tl.float32, bitcast=True)
            q_NGI = q_NGI - (8388608.0 + 128.0)
        low_NGI = q_NGI
        high_NGI = q_NGI
    elif packed_ptr.dtype.element_ty == tl.int8:
        # e2m1: float16's exponent begins 14 lower
        bits_NGI = bytes_NGI.to(tl.uint16)
        low_bits_NGI = ((bits_NGI & 8) << 12) | ((bits_NGI & 7) << 9)
        high_bits_NGI = ((bits_NGI & 128) << 8) | ((bits_NGI & 112) << 5)
        low_NGI = low_bits_NGI.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        high_NGI = high_bits_NGI.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        low_NGI = (bytes_NGI & 15 | 0x4B000000).to(tl.float32, bitcast=True)
        high_NGI = (bytes_NGI & 240 | 0x49000000).to(tl.float32, bitcast=True)
        zero = 0.0 if HAS_OFFSETS else 8.0
        low_NGI = _level(low_NGI - (8388608.0 + zero), LEVELS)
        high_NGI = _level(high_NGI - (524288.0 + zero), LEVELS)
    if ZEROS:
        low_NGI -= low_offset_NG1
        high_NGI -= high_offset_NG1
    low_NGI *= low_scale_NG1
    high_NGI *= high_scale_NG1
    if HAS_OFFSETS and not ZEROS:
        low_NGI = low_NGI + low_offset_NG1
        high_NGI = high_NGI + high_offset_NG1
    low_NJ = tl.reshape(low_NGI, (BLOCK_N, BLOCK_J))
    high_NJ = tl.reshape(high_NGI, (BLOCK_N, BLOCK_J))
    return low_NJ, high_NJ


@triton.jit
def add_packed(
    acc_NM, x_low_JM, x_high_JM, packed_ptr, scales_ptr, offsets_ptr, supers_ptr, n_N, j_start,
    N: tl.constexpr, J: tl.constexpr, BITS: tl.constexpr, GROUP_J: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, ZEROS: tl.constexpr, LEVELS: tl.constexpr,
    IN_BOUNDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """`acc + w x` over BLOCK_J bytes of each row. w is rounded to the dtype of x, of int4 with
    minima as `load_codes` says; but where a group of int4 fills the block its scale multiplies the
    sum, and nothing is rounded."""
    dtype: tl.constexpr = x_low_JM.dtype
    ONE_GROUP: tl.constexpr = GROUP_J >= BLOCK_J
    IS_PLAIN: tl.constexpr = BITS == 4 and packed_ptr.dtype.element_ty == tl.uint8 and not LEVELS
    IS_EXACT: tl.constexpr = ONE_GROUP or scales_ptr.dtype.element_ty == tl.float16
    HAS_MINIMA: tl.constexpr = HAS_OFFSETS and not ZEROS
    # scales in bytes may be too small for float16; groups of 16 with minima are Q2_K's, whose codes
    # do not lie around 8
    IN_GROUPS: tl.constexpr = GROUP_J >= 16 and not ONE_GROUP
    HAS_PAIRS: tl.constexpr = IS_PLAIN and dtype != tl.float32 and (
        (IS_EXACT and supers_ptr is None and (IN_GROUPS or not HAS_MINIMA))
        or (HAS_MINIMA and IN_GROUPS and dtype == tl.bfloat16)
    )  # fmt: skip
    if HAS_PAIRS:
        low_NJ, high_NJ = load_codes(
            packed_ptr, scales_ptr, offsets_ptr, supers_ptr, n_N, j_start, N, J, GROUP_J,
            HAS_OFFSETS, ZEROS, IN_BOUNDS, BLOCK_N, BLOCK_J, dtype,
        )  # fmt: skip
        if ONE_GROUP:
            part_NM = tl.dot(high_NJ, x_high_JM, tl.dot(low_NJ, x_low_JM))
            # steps past the end add zeros, by a scale that is there
            at_N = scales_ptr + n_N * (J // GROUP_J) + tl.minimum(j_start, J - 1) // GROUP_J
            scale_N = tl.load(at_N, mask=n_N < N, other=0).to(tl.float32)
            return acc_NM + part_NM * scale_N[:, None]
    else:
        low_wide_NJ, high_wide_NJ = load_scaled(
            packed_ptr, scales_ptr, offsets_ptr, supers_ptr, n_N, j_start, N, J, BITS, GROUP_J,
            HAS_OFFSETS, ZEROS, LEVELS, IN_BOUNDS, BLOCK_N, BLOCK_J,
        )  # fmt: skip
        low_NJ, high_NJ = low_wide_NJ.to(dtype), high_wide_NJ.to(dtype)
    acc_NM = tl.dot(low_NJ, x_low_JM, acc_NM, input_precision="ieee")
    if BITS == 4:
        acc_NM = tl.dot(high_NJ, x_high_JM, acc_NM, input_precision="ieee")
    return acc_NM
