"""Triton kernels that multiply quantized operands: y (M, N) = a (M, K) @ b (N, K).T, accumulated in float32 or int32.

An operand is codes with up to two scales, by how they enter:

- an *inner* scale is multiplied into the codes before the matrix instruction, which is exact: e8m0 and e4m3 scales of
  e4m3 and e2m1 codes give numbers that bfloat16 has (below 2^-126 it has fewer bits; so has the product then);
- an *outer* scale is float32 and is applied to sums: once, at the end, where it is the same along K, else to the sum
  over one BLOCK_K, which ends where its groups end. That also moves narrow accumulators of fp8 instructions into
  float32 at least each 128 along K.

Activations in float32 or fp16 are split into bfloat16 parts whose sum they are (exactly: 24 = 3 x 8 bits).

SIDE names what an operand is: `plain` values, or its element. DOT names what enters the matrix instruction: `fp8`,
`int8`, `fp16`, `bf16`, or (`scaled`) codes with their inner scales, which the instruction of sm_100 and sm_120 applies.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device import LARGEST, from_bits
from olq_fx.kernels.triton_operands import block_scaled, operand


@triton.jit
def dot_scaled(a, a_scale, b, b_scale, acc, A_SIDE: tl.constexpr, B_SIDE: tl.constexpr, SWAP: tl.constexpr):
    """`acc` + a @ b.T, or its transpose, of operands whose inner scales the instruction applies."""
    if SWAP:
        return tl.dot_scaled(b, b_scale, B_SIDE, tl.trans(a), a_scale, A_SIDE, acc)
    else:
        return tl.dot_scaled(a, a_scale, A_SIDE, tl.trans(b), b_scale, B_SIDE, acc)


@triton.jit
def dot(a, b, acc, PARTS: tl.constexpr, SWAP: tl.constexpr):
    """`acc` + a @ b.T, or its transpose; `a` as the sum of PARTS bfloat16 where there are more than one."""
    if PARTS == 1:
        return _dot(a, b, acc, SWAP)
    else:
        rest = a.to(tl.float32)
        for _ in tl.static_range(PARTS):
            # Cut off, not rounded: nothing overflows, and what is left has the other bits. Of NaN and Inf nothing is.
            bits = rest.to(tl.int32, bitcast=True)
            high = from_bits(bits & -65536)
            high = tl.where(rest != rest, rest, high)
            acc = _dot(high.to(tl.bfloat16), b, acc, SWAP)
            rest = tl.where(tl.abs(rest) < float("inf"), rest - high, 0.0)
        return acc


@triton.jit
def _dot(a, b, acc, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(b, tl.trans(a), acc, out_dtype=acc.dtype)
    else:
        return tl.dot(a, tl.trans(b), acc, out_dtype=acc.dtype)


@triton.jit
def _outer(
    scale, rows, column, R, row_stride, column_stride, GROUP_R: tl.constexpr, SHARD_R: tl.constexpr = 0
):  # fmt: skip
    """The outer scales (rows,) of a K-block.

    GROUP_R, SHARD_R: see `_group_at`; GROUP_R is 0 for the whole axis.
    """
    high = _group_at(rows, GROUP_R, SHARD_R) if GROUP_R > 0 else rows * 0
    at = high.to(tl.int64) * row_stride + tl.cast(column, tl.int64) * column_stride
    return tl.load(scale + at, mask=rows < R, other=0.0)


@triton.jit
def _group_at(rows, GROUP_R: tl.constexpr, SHARD_R: tl.constexpr):
    """The groups of GROUP_R rows that rows are in. SHARD_R: 0, or the rows after which groups begin anew."""
    if SHARD_R > 0:
        return rows // SHARD_R * ((SHARD_R + GROUP_R - 1) // GROUP_R) + rows % SHARD_R // GROUP_R
    else:
        return rows // GROUP_R


@triton.jit
def scaled(value, a, b):
    """value x a x b, in the order in which nothing leaves float32 that the result does not leave.

    Codes and their sums lie between 2^-20 and 2^44 in size. So a factor between 2^-100 and 2^80 may come first; of two
    that are both outside, one large and one small, the product is between.
    """
    a_first = (a >= 7.888609052210118e-31) & (a <= 1.2089258196146292e24)
    b_first = (b >= 7.888609052210118e-31) & (b <= 1.2089258196146292e24)
    first = tl.where(a_first, a, tl.where(b_first, b, a * b))
    second = tl.where(a_first, b, tl.where(b_first, a, 1.0))
    return (value * first) * second


@triton.jit
def tile_at(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a program's tile: GROUP tiles down before one to the right, so that operands stay in L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = pid % (GROUP * tiles_n)
    return first + inside % height, inside // height


@triton.jit
def with_constants(
    acc, a_outer, b_outer, rows, columns, M, N, a_outer_m, b_outer_n, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr,
    A_GROUP: tl.constexpr, B_GROUP: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Sums times the scales that are the same along K, in float32.

    A_OUTER, B_OUTER: `const` for a scale that is the same along K, `reciprocal` for one that is kept as 1 / g.
    """
    value = acc.to(tl.float32)
    if (A_OUTER == "const") or (B_OUTER == "const") or (B_OUTER == "reciprocal"):
        left = constant_scale(a_outer, rows, M, a_outer_m, A_OUTER, A_GROUP)
        right = constant_scale(b_outer, columns, N, b_outer_n, B_OUTER, B_GROUP)
        if SWAP:
            value = scaled(
                value, tl.broadcast_to(left[None, :], value.shape), tl.broadcast_to(right[:, None], value.shape)
            )
        else:
            value = scaled(
                value, tl.broadcast_to(left[:, None], value.shape), tl.broadcast_to(right[None, :], value.shape)
            )
    return value


@triton.jit
def finish(
    acc, a_outer, b_outer, bias, residual, out, rows, columns, M, N, a_outer_m, b_outer_n,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_GROUP: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Scales, bias, one rounding to the output's dtype, the residual as an addition of its own; written to `out`."""
    value = with_constants(
        acc, a_outer, b_outer, rows, columns, M, N, a_outer_m, b_outer_n, A_OUTER, B_OUTER, A_GROUP, B_GROUP, SWAP
    )
    m, n = (rows[None, :], columns[:, None]) if SWAP else (rows[:, None], columns[None, :])
    inside = (m < M) & (n < N)
    if bias is not None:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    at = m.to(tl.int64) * N + n
    rounded = value.to(out.dtype.element_ty)
    if residual is not None:
        more = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (rounded.to(tl.float32) + more).to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)


@triton.jit
def constant_scale(scale, rows, R, row_stride, OUTER: tl.constexpr, GROUP_R: tl.constexpr):
    """The scales (rows,) that are the same along K; ones where there is none."""
    ones = tl.full(rows.shape, 1.0, tl.float32)
    if OUTER == "const":
        return _outer(scale, rows, 0, R, row_stride, 0, GROUP_R)
    elif OUTER == "reciprocal":
        # Of rows beyond the last one too: 1 / 0 is no scale.
        return tl.div_rn(ones, _outer(scale, tl.minimum(rows, R - 1), 0, R, row_stride, 0, GROUP_R))
    else:
        return ones


@triton.jit
def accumulated(
    acc, partial, a_outer, b_outer, a_rows, b_rows, first, M, N, a_outer_m, a_outer_k, b_outer_n, b_outer_k,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_OUTER_K: tl.constexpr, UNIFORM_B: tl.constexpr, SWAP: tl.constexpr,
    B_SHARD: tl.constexpr = 0,
):  # fmt: skip
    """`acc` plus the sum over one K-block times its outer scales. B_SHARD: of b's groups, see `_group_at`."""
    left = tl.full(a_rows.shape, 1.0, tl.float32)
    if A_OUTER == "k":
        left = _outer(a_outer, a_rows, first // A_OUTER_K, M, a_outer_m, a_outer_k, A_GROUP)
    return accumulated_rows(
        acc, partial, left, b_outer, b_rows, first, N, b_outer_n, b_outer_k, B_OUTER, B_GROUP, B_OUTER_K, UNIFORM_B,
        SWAP, B_SHARD,
    )  # fmt: skip


@triton.jit
def accumulated_rows(
    acc, partial, left, b_outer, b_rows, first, N, b_outer_n, b_outer_k, B_OUTER: tl.constexpr, B_GROUP: tl.constexpr,
    B_OUTER_K: tl.constexpr, UNIFORM_B: tl.constexpr, SWAP: tl.constexpr, B_SHARD: tl.constexpr = 0,
):  # fmt: skip
    """`accumulated` with the outer scales of a's rows, `left`."""
    if B_OUTER != "k":
        return _added(acc, partial, left[None, :] if SWAP else left[:, None])
    if UNIFORM_B:
        # All columns of the tile share one scale: one product a row, not one an element.
        high = _group_at(tl.min(b_rows, axis=0), B_GROUP, B_SHARD)
        right = tl.load(b_outer + high.to(tl.int64) * b_outer_n + tl.cast(first // B_OUTER_K, tl.int64) * b_outer_k)
        both = tl.minimum(left * right, LARGEST)
        both = tl.where(left == left, both, left)
        return _added(acc, partial, both[None, :] if SWAP else both[:, None])
    right = _outer(b_outer, b_rows, first // B_OUTER_K, N, b_outer_n, b_outer_k, B_GROUP, B_SHARD)
    both = right[:, None] * left[None, :] if SWAP else left[:, None] * right[None, :]
    return _added(acc, partial, tl.where(both < float("inf"), both, tl.where(both == both, LARGEST, both)))


@triton.jit
def _added(acc, partial, scale):
    """acc + partial x scale, contracted: said here, and not left to the compiler, so that all kernels have its bits."""
    return tl.fma(partial, tl.broadcast_to(scale, partial.shape), acc)


@triton.jit
def sum_over(
    a, a_inner, a_outer, b, b_inner, b_outer, rows, columns, start, end, M, N, K, a_stride, a_inner_m, a_inner_k,
    a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr, SWAP: tl.constexpr, BLOCK_K: tl.constexpr,
    B_SHARD: tl.constexpr = 0,
):  # fmt: skip
    """The sums of one tile over columns `start` to `end` of K, but for the scales that are the same along K.

    `rows` of `a` need not follow each other; one that is M or more counts as zeros. B_SHARD: of b's groups, see
    `_group_at`. The rest is as in `product`.
    """
    HIGH: tl.constexpr = columns.shape[0] if SWAP else rows.shape[0]
    WIDE: tl.constexpr = rows.shape[0] if SWAP else columns.shape[0]
    TYPE: tl.constexpr = tl.int32 if DOT == "int8" else tl.float32
    acc = tl.zeros((HIGH, WIDE), dtype=TYPE)
    for first in range(start, end, BLOCK_K):
        start_from = tl.zeros((HIGH, WIDE), dtype=TYPE) if PROMOTE else acc
        if DOT == "scaled":
            left, left_scale = block_scaled(
                a,
                a_inner,
                rows,
                first,
                M,
                K,
                a_stride,
                a_inner_m,
                a_inner_k,
                A_SIDE,
                A_INNER,
                A_INNER_K,
                EVEN_K,
                BLOCK_K,
            )
            right, right_scale = block_scaled(
                b,
                b_inner,
                columns,
                first,
                N,
                K,
                b_stride,
                b_inner_n,
                b_inner_k,
                B_SIDE,
                B_INNER,
                B_INNER_K,
                EVEN_K,
                BLOCK_K,
            )
            found = dot_scaled(left, left_scale, right, right_scale, start_from, A_SIDE, B_SIDE, SWAP)
        else:
            left = operand(
                a, a_inner, rows, first, M, K, a_stride, a_inner_m, a_inner_k, A_SIDE, A_INNER, A_INNER_K, DOT, EVEN_K,
                BLOCK_K,
            )  # fmt: skip
            right = operand(
                b, b_inner, columns, first, N, K, b_stride, b_inner_n, b_inner_k, B_SIDE, B_INNER, B_INNER_K, DOT,
                EVEN_K, BLOCK_K,
            )  # fmt: skip
            found = dot(left, right, start_from, PARTS, SWAP)
        if PROMOTE:
            acc = accumulated(
                acc, found, a_outer, b_outer, rows, columns, first, M, N, a_outer_m, a_outer_k, b_outer_n, b_outer_k,
                A_OUTER, B_OUTER, A_GROUP, B_GROUP, A_OUTER_K, B_OUTER_K, UNIFORM_B, SWAP, B_SHARD,
            )  # fmt: skip
        else:
            acc = found
    return acc


@triton.jit
def product(
    a, a_inner, a_outer, b, b_inner, b_outer, bias, residual, out, partials, M, N, K, a_stride, a_inner_m, a_inner_k,
    a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr, SWAP: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of y, or (SPLIT_K above 1) of one of the SPLIT_K sums that make it, into `partials` (SPLIT_K, M, N).

    A_OUTER, B_OUTER: "" none, `const` the same along K, `reciprocal`, `k` one for each A_OUTER_K columns.
    PROMOTE: whether the sum over a K-block starts anew and is added in float32.
    SWAP: weights on the side of the matrix instruction that is 64 high, so that few tokens fill it.
    """
    tile_m, tile_n = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    start = tl.program_id(1) * per_split * BLOCK_K
    end = tl.minimum(start + per_split * BLOCK_K, K)
    acc = sum_over(
        a, a_inner, a_outer, b, b_inner, b_outer, rows, columns, start, end, M, N, K, a_stride, a_inner_m, a_inner_k,
        a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, A_SIDE, A_INNER, A_INNER_K,
        A_OUTER, A_GROUP, A_OUTER_K, B_SIDE, B_INNER, B_INNER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PARTS, PROMOTE,
        EVEN_K, UNIFORM_B, SWAP, BLOCK_K,
    )  # fmt: skip
    if SPLIT_K == 1:
        finish(
            acc, a_outer, b_outer, bias, residual, out, rows, columns, M, N, a_outer_m, b_outer_n, A_OUTER, B_OUTER,
            A_GROUP, B_GROUP, SWAP,
        )  # fmt: skip
    else:
        m, n = (rows[None, :], columns[:, None]) if SWAP else (rows[:, None], columns[None, :])
        at = (tl.program_id(1).to(tl.int64) * M + m) * N + n
        tl.store(partials + at, acc, mask=(m < M) & (n < N))


@triton.jit
def add_partials(
    partials, a_outer, b_outer, bias, residual, out, M, N, a_outer_m, b_outer_n, A_OUTER: tl.constexpr,
    B_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_GROUP: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of `product` with SPLIT_K above 1, added in their order, finished and written."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=partials.dtype.element_ty)
    for split in tl.static_range(SPLIT_K):
        acc += tl.load(partials + split * tl.cast(M, tl.int64) * N + at, mask=inside, other=0)
    finish(
        acc, a_outer, b_outer, bias, residual, out, rows, columns, M, N, a_outer_m, b_outer_n, A_OUTER, B_OUTER,
        A_GROUP, B_GROUP, False,
    )  # fmt: skip
