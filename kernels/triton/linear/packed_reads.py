"""Reading a packed weight in a kernel: `quantised_weights.QuantisedWeight`, its numbers scaled."""

import triton
import triton.language as tl


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
    words_ptr = packed_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    w_W = j_start // 4 + tl.arange(0, BLOCK_J // 4)
    at_NW = words_ptr + n_N[:, None] * (J // 4) + w_W[None, :]
    if IN_BOUNDS:
        words_NW = tl.load(at_NW)
    else:
        words_NW = tl.load(at_NW, mask=(n_N < N)[:, None] & (w_W < J // 4)[None, :], other=0)
    # bytes (8 a + 2 w + b) of a run are byte (2 a + b) of its word w
    SIDE: tl.constexpr = (BLOCK_N, BLOCK_J // 16, 8)
    left_NRI = tl.reshape(tl.join(words_NW & 255, (words_NW >> 8) & 255), SIDE)
    right_NRI = tl.reshape(tl.join((words_NW >> 16) & 255, words_NW >> 24), SIDE)
    bytes_NRAI = tl.permute(tl.join(left_NRI, right_NRI), (0, 1, 3, 2))
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
        low_NGI = q_NGI * low_scale_NG1
        high_NGI = low_NGI
    elif packed_ptr.dtype.element_ty == tl.int8:
        # e2m1: float16's exponent begins 14 lower
        bits_NGI = bytes_NGI.to(tl.uint16)
        low_bits_NGI = ((bits_NGI & 8) << 12) | ((bits_NGI & 7) << 9)
        high_bits_NGI = ((bits_NGI & 128) << 8) | ((bits_NGI & 112) << 5)
        low_NGI = low_bits_NGI.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        high_NGI = high_bits_NGI.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        low_NGI = low_NGI * low_scale_NG1
        high_NGI = high_NGI * high_scale_NG1
    else:
        low_NGI = (bytes_NGI & 15 | 0x4B000000).to(tl.float32, bitcast=True)
        high_NGI = (bytes_NGI & 240 | 0x49000000).to(tl.float32, bitcast=True)
        zero = 0.0 if HAS_OFFSETS else 8.0
        low_NGI = _level(low_NGI - (8388608.0 + zero), LEVELS) * low_scale_NG1
        high_NGI = _level(high_NGI - (524288.0 + zero), LEVELS) * high_scale_NG1
    if HAS_OFFSETS:
        low_NGI = low_NGI + low_offset_NG1
        high_NGI = high_NGI + high_offset_NG1
    low_NJ = tl.reshape(low_NGI, (BLOCK_N, BLOCK_J))
    high_NJ = tl.reshape(high_NGI, (BLOCK_N, BLOCK_J))
    return low_NJ, high_NJ
