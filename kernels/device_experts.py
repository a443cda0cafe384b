"""What the kernels of experts share, as functions of Triton's language: rows of a tile, and what is between products.

KIND is one of `experts.KINDS`, DTYPE the type that is rounded to, wherever PyTorch rounds.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device_producers import activated


@triton.jit
def rows_of(table, order, tiles, tile, BLOCK_M: tl.constexpr):
    """The positions (BLOCK_M,) of a tile, whether they are within its segment, and their pairs."""
    positions = tl.load(table + tiles + tile) + tl.arange(0, BLOCK_M)
    inside = positions < tl.load(table + 2 * tiles + tile)
    if order is None:
        return positions, inside, positions
    else:
        return positions, inside, tl.load(order + positions, mask=inside, other=0).to(tl.int32)


@triton.jit
def store_rows(out, value, rows, inside, columns, N, SWAP: tl.constexpr):
    """Write a tile, or its transpose, to rows (M, N) of `out`."""
    m, n = (rows[None, :], columns[:, None]) if SWAP else (rows[:, None], columns[None, :])
    mask = (inside[None, :] if SWAP else inside[:, None]) & (n < N)
    tl.store(out + m.to(tl.int64) * N + n, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """The float32 values of `x` after a cast to DTYPE and back."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def gated_value(gate, up, alpha, limit, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """act(gate) x up of float32 tiles; 0 where both are, for every KIND."""
    if KIND == "clamped":
        bound = rounded(tl.zeros(gate.shape, dtype=tl.float32) + limit, DTYPE)
        # Comparisons keep NaN, which a minimum drops.
        gate = tl.where(gate > bound, bound, gate)
        up = tl.where(up > bound, bound, tl.where(up < -bound, -bound, up))
        sigmoid = tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), 1.0 + tl.exp(-rounded(gate * alpha, DTYPE)))
        value = rounded(gate * rounded(sigmoid, DTYPE), DTYPE)
        up = rounded(up + 1.0, DTYPE)
    else:
        value = rounded(activated(gate, KIND), DTYPE)
    return rounded(value * up, DTYPE)


@triton.jit
def ungated_value(up, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """act(up) of a float32 tile."""
    return rounded(activated(up, KIND), DTYPE)
