"""Products of a block's rows, and the state at its end: parts of `recur`'s kernel."""

import triton
import triton.language as tl


@triton.jit
def dot(a_MK, b_KN):
    """A product in the precision of float32, on tensor cores."""
    return tl.dot(a_MK, b_KN, input_precision="tf32x3")


@triton.jit
def dot_of_keys(x_MN, y_NL):
    """A product over a key's elements, cut into parts that warps share: a tile of 16 rows is too
    small for them, and its operands too long for their registers."""
    PART: tl.constexpr = 32 if x_MN.shape[1] > 32 else x_MN.shape[1]
    x_MIN = tl.reshape(x_MN, [x_MN.shape[0], x_MN.shape[1] // PART, PART])
    y_INL = tl.reshape(y_NL, [x_MN.shape[1] // PART, PART, y_NL.shape[1]])
    return tl.sum(dot(tl.permute(x_MIN, [1, 0, 2]), y_INL), axis=0)


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, also of numbers far below 0: 2 atanh(e / (2 + e)) is log(1 + e), and its
    series ends soon, as e is at most 1."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    s = z * z
    series = 1.0 / 11.0 + s * (1.0 / 13.0 + s * (1.0 / 15.0))
    series = 1.0 / 5.0 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s * series))
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + s * (1.0 / 3.0 + s * series))


@triton.jit
def row_of(x_SN, row_S, row):
    """One row of a tile."""
    return tl.sum(tl.where((row_S == row)[:, None], x_SN, 0.0), axis=0)


@triton.jit
def closed(state_NP, keys_SN, updates_SP, sums_SD, row_S, S: tl.constexpr):
    """The state behind all rows of a block, from that before them."""
    last_D = row_of(sums_SD, row_S, S - 1)
    is_row_S1 = (row_S < S)[:, None]
    shares_SD = tl.exp(tl.where(is_row_S1, last_D[None, :] - sums_SD, 0.0))
    weighted_SN = tl.where(is_row_S1, keys_SN * shares_SD, 0.0)
    return state_NP * tl.exp(last_D)[:, None] + dot(tl.trans(weighted_SN), updates_SP)


@triton.jit
def decayed_products(x_SN, keys_SN, sums_SD, row_S, stop, IS_VECTOR: tl.constexpr):
    """`e^{c_i - c_j} (k_j . x_i)` [S, S] of each row i and the rows up to it."""
    is_seen_SS = row_S[None, :] <= row_S[:, None]
    if IS_VECTOR:  # a product of two factors could overflow
        products_SS = tl.zeros([x_SN.shape[0], x_SN.shape[0]], tl.float32)
        for row in range(stop):
            sums_D = row_of(sums_SD, row_S, row)
            is_later_S1 = (row_S >= row)[:, None]
            shares_SD = tl.exp(tl.where(is_later_S1, sums_SD - sums_D[None, :], 0.0))
            key_N = row_of(keys_SN, row_S, row)
            of_row_S = tl.sum(shares_SD * x_SN * key_N[None, :], axis=1)
            products_SS = tl.where((row_S == row)[None, :], of_row_S[:, None], products_SS)
    else:
        sums_S = tl.sum(sums_SD, axis=1)
        shares_SS = tl.exp(tl.where(is_seen_SS, sums_S[:, None] - sums_S[None, :], 0.0))
        products_SS = dot_of_keys(x_SN, tl.trans(keys_SN)) * shares_SS
    return tl.where(is_seen_SS, products_SS, 0.0)
