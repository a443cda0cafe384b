"""A Triton kernel for the first product of experts with the activation after it, quantized at once for the second.

One program computes a tile of gate and the same tile of up, one sum after the other, each as `triton_grouped` does: a
shard is a matrix by itself, so scales and bits are those of two products. What is between two products of experts then
needs no kernel.

- `codes`: groups that lie within a tile are quantized.
- `values`: act(gate) x up in the dtype, for a second product that reads it so.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device_experts import gated_value, rows_of, store_rows, ungated_value
from olq_fx.kernels.triton_encode import write_tile
from olq_fx.kernels.triton_matmul import sum_over, tile_at, with_constants


@triton.jit
def _shard(
    a, a_inner, a_outer, b, b_inner, b_outer, bias, rows, columns, R, WIDTH, K, a_stride, a_inner_m, a_inner_k,
    a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr, SWAP: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile of the product with a matrix (WIDTH, K), in DTYPE: what is held then takes fewer registers."""
    acc = sum_over(
        a, a_inner, a_outer, b, b_inner, b_outer, rows, columns, 0, K, R, WIDTH, K, a_stride, a_inner_m, a_inner_k,
        a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, A_SIDE, A_INNER, A_INNER_K,
        A_OUTER, A_GROUP, A_OUTER_K, B_SIDE, B_INNER, B_INNER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PARTS, PROMOTE,
        EVEN_K, UNIFORM_B, SWAP, BLOCK_K,
    )  # fmt: skip
    value = with_constants(
        acc, a_outer, b_outer, rows, columns, R, WIDTH, a_outer_m, b_outer_n, A_OUTER, B_OUTER, A_GROUP, B_GROUP, SWAP
    )
    if bias is not None:
        n = columns[:, None] if SWAP else columns[None, :]
        value += tl.load(bias + n, mask=n < WIDTH, other=0.0).to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def grouped_chain(  # noqa: C901
    a, a_inner, a_outer, b, b_inner, b_outer, bias, like, values, codes, scale, table, order, tiles, R, E, WIDTH, K,
    alpha, limit, a_stride, a_inner_m, a_inner_k, a_outer_m, a_outer_k, b_expert, b_stride, b_inner_expert, b_inner_n,
    b_inner_k, b_outer_expert, b_outer_n, b_outer_k, b_outer_shard, scale_row_stride, scale_column_stride,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr, SWAP: tl.constexpr, GATHER: tl.constexpr,
    KIND: tl.constexpr, SHARDS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    RULE: tl.constexpr, GROUP_K: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of (M, WIDTH). See `triton_grouped.grouped_product`; rows that belong to nobody are not written.

    WIDTH: rows of a shard. `b_outer_shard`: from the outer scales of a shard to those of the next one.
    `like`: of the type that products and activations are rounded to.
    `values` (M, WIDTH), or None; then codes and scales are written, as `triton_encode.write_tile` does.
    SHARDS: 2 where gate and up are multiplied, 1 where there is no gate. KIND: see `device_experts`.
    """
    tile, tile_n = tile_at(tl.program_id(0), tiles * BLOCK_M, WIDTH, BLOCK_M, BLOCK_N, GROUP)
    expert = tl.load(table + tile)
    if expert < 0:
        return
    first = tile_n * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    ours = expert.to(tl.int64)
    b += ours * b_expert
    if b_inner is not None:
        b_inner += ours * b_inner_expert
    if b_outer is not None:
        b_outer += ours * b_outer_expert
    if bias is not None:
        bias += ours * SHARDS * WIDTH
    positions, inside, pairs = rows_of(table, order, tiles, tile, BLOCK_M)
    rows = tl.where(inside, pairs // GATHER if GATHER > 0 else positions, R)
    DTYPE: tl.constexpr = like.dtype.element_ty
    left = _shard(
        a, a_inner, a_outer, b, b_inner, b_outer, bias, rows, columns, R, WIDTH, K, a_stride, a_inner_m, a_inner_k,
        a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, A_SIDE, A_INNER, A_INNER_K,
        A_OUTER, A_GROUP, A_OUTER_K, B_SIDE, B_INNER, B_INNER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PARTS, PROMOTE,
        EVEN_K, UNIFORM_B, SWAP, DTYPE, BLOCK_K,
    )  # fmt: skip
    if SHARDS == 2:
        wide = tl.cast(WIDTH, tl.int64)
        b += wide * b_stride
        if b_inner is not None:
            b_inner += wide * b_inner_n
        if b_outer is not None:
            b_outer += b_outer_shard
        if bias is not None:
            bias += WIDTH
        up = _shard(
            a, a_inner, a_outer, b, b_inner, b_outer, bias, rows, columns, R, WIDTH, K, a_stride, a_inner_m, a_inner_k,
            a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, A_SIDE, A_INNER, A_INNER_K,
            A_OUTER, A_GROUP, A_OUTER_K, B_SIDE, B_INNER, B_INNER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PARTS, PROMOTE,
            EVEN_K, UNIFORM_B, SWAP, DTYPE, BLOCK_K,
        )  # fmt: skip
        result = gated_value(left.to(tl.float32), up.to(tl.float32), alpha, limit, KIND, DTYPE)
    else:
        result = ungated_value(left.to(tl.float32), KIND, DTYPE)
    # Read again, as in `grouped_product`.
    positions, inside, pairs = rows_of(table, order, tiles, tile, BLOCK_M)
    if values is not None:
        store_rows(values, result, positions, inside, columns, WIDTH, SWAP)
    else:
        if SWAP:
            result = tl.trans(result)
        end = tl.load(table + 2 * tiles + tile)
        write_tile(
            result, codes, scale, None, None, positions, first, scale_row_stride, scale_column_stride, end, WIDTH,
            ELEMENT, SCALE, RULE, 1, GROUP_K, 0, LOG, NATIVE,
        )  # fmt: skip
