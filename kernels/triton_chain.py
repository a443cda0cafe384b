"""A Triton kernel for linear -> pointwise chain -> quantization: the MLP's first half, or any layer before another.

One program computes a tile of the product, rounds it as the product by itself would be, applies the chain with its
roundings, and quantizes groups that lie within the tile. So codes and scales are those of the unfused kernels.

Gate and up of a gated MLP are rows of one weight (2 I, K): the first and the second half (`paired`), or alternating
(`interleaved`). Either way a tile takes the rows of both by turns, so that columns 2 i and 2 i + 1 of the product meet.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device_producers import activated, rounded_to
from olq_fx.kernels.triton_encode import write_tile
from olq_fx.kernels.triton_matmul import sum_over, tile_at, with_constants

PACKS_WIDE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether a tile 128 high packs more than one group of a row to e2m1: triton 3.6 then leaves some in local memory."""


@triton.jit
def _weight_rows(first, WIDTH, N, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weight that make BLOCK_N columns of the result from `first` on; N (none) beyond the last one."""
    if GATED == "paired":
        turn = tl.arange(0, 2 * BLOCK_N)
        column = first + turn // 2
        return tl.where(column < WIDTH, (turn % 2) * WIDTH + column, N)
    elif GATED == "interleaved":
        return 2 * first + tl.arange(0, 2 * BLOCK_N)
    else:
        return first + tl.arange(0, BLOCK_N)


@triton.jit
def _chained(
    y, KIND: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The activation of a tile that is rounded to DTYPE, times its other half where there is one."""
    if GATED != "":
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N, 2)))
        return rounded_to(rounded_to(activated(gate, KIND), DTYPE) * up, DTYPE)
    elif KIND != "":
        return rounded_to(activated(y, KIND), DTYPE)
    else:
        return y


@triton.jit
def product_chain(
    a, a_inner, a_outer, b, b_inner, b_outer, bias, residual, values, codes, scale, M, N, K, a_stride, a_inner_m,
    a_inner_k, a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, scale_row_stride,
    scale_column_stride,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_K: tl.constexpr,
    LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_N columns of the result; N counts the rows of the weight. The rest is as in `product`.

    `residual`: added to the product after its rounding, and the sum rounded, before the activation; None with GATED.
    `values`: where the result is written in its dtype too, or None.
    KIND: "" or an activation of `device_producers`. GATED: "", `paired`, `interleaved`.
    """
    WIDTH = N if GATED == "" else N // 2
    tile_m, tile_n = tile_at(tl.program_id(0), M, WIDTH, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tile_n * BLOCK_N
    columns = _weight_rows(first, WIDTH, N, GATED, BLOCK_N)
    acc = sum_over(
        a, a_inner, a_outer, b, b_inner, b_outer, rows, columns, 0, K, M, N, K, a_stride, a_inner_m, a_inner_k,
        a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, A_SIDE, A_INNER, A_INNER_K, A_OUTER,
        A_GROUP, A_OUTER_K, B_SIDE, B_INNER, B_INNER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PARTS, PROMOTE, EVEN_K,
        UNIFORM_B, False, BLOCK_K,
    )  # fmt: skip
    y = with_constants(
        acc, a_outer, b_outer, rows, columns, M, N, a_outer_m, b_outer_n, A_OUTER, B_OUTER, A_GROUP, B_GROUP, False
    )
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    y = rounded_to(y, DTYPE)
    at = rows.to(tl.int64)[:, None] * WIDTH + (first + tl.arange(0, BLOCK_N))[None, :]
    inside = (rows[:, None] < M) & ((first + tl.arange(0, BLOCK_N))[None, :] < WIDTH)
    if residual is not None:
        y = rounded_to(y + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32), DTYPE)
    result = _chained(y, KIND, GATED, DTYPE, BLOCK_M, BLOCK_N)
    if values is not None:
        tl.store(values + at, result.to(values.dtype.element_ty), mask=inside)
    write_tile(
        result, codes, scale, None, None, rows, first, scale_row_stride, scale_column_stride, M, WIDTH, ELEMENT, SCALE,
        RULE, 1, GROUP_K, 0, LOG, NATIVE,
    )  # fmt: skip
