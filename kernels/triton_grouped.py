"""Triton kernels of experts: products of ragged segments of rows, and the activation between two of them.

- `grouped_product`: the dense product of `triton_matmul` with a weight of its own for each tile of rows.
- `gated_tiles`, `gated_rows`: act(gate) x up of the first product, or act(up), quantized at once for the second: where
  `triton_grouped_chain` cannot do it in the first.

Rows from `offsets[E]` on belong to nobody: nothing reads them.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device_experts import gated_value, rows_of, store_rows, ungated_value
from olq_fx.kernels.triton_encode import (
    load_tile,
    raise_statistic,
    row_bits,
    write_row_scale,
    write_row_tile,
    write_tile,
)
from olq_fx.kernels.triton_matmul import sum_over, tile_at, with_constants


@triton.jit
def grouped_product(
    a, a_inner, a_outer, b, b_inner, b_outer, bias, weights, out, table, order, tiles, R, E, N, K, a_stride, a_inner_m,
    a_inner_k, a_outer_m, a_outer_k, b_expert, b_stride, b_inner_expert, b_inner_n, b_inner_k, b_outer_expert,
    b_outer_n, b_outer_k,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr, SWAP: tl.constexpr, GATHER: tl.constexpr,
    SCATTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    B_SHARD: tl.constexpr,
):  # fmt: skip
    """One tile of y: rows of one segment times the weight of its expert. See `triton_matmul.product`.

    `table` (3, tiles): see `triton_routing.tile_table`; a tile of expert E becomes zeros. R: rows of `a`.
    B_SHARD: 0, or rows of a shard that ends within a group: the next one begins anew.
    GATHER: 0, or k: the row at position p is read at `order[p] // k`. SCATTER: whether it is written at `order[p]`.
    `weights`: None, or a float32 for each `order[p]`, which multiplies what has been rounded to the output's dtype.
    """
    tile, tile_n = tile_at(tl.program_id(0), tiles * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP)
    expert = tl.load(table + tile)
    if expert < 0:
        return
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if expert >= E:
        value = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    else:
        ours = expert.to(tl.int64)
        b += ours * b_expert
        if b_inner is not None:
            b_inner += ours * b_inner_expert
        if b_outer is not None:
            b_outer += ours * b_outer_expert
        positions, inside, pairs = rows_of(table, order, tiles, tile, BLOCK_M)
        # What is masked by its row index, as the rows beyond a dense operand are.
        rows = tl.where(inside, pairs // GATHER if GATHER > 0 else positions, R)
        acc = sum_over(
            a, a_inner, a_outer, b, b_inner, b_outer, rows, columns, 0, K, R, N, K, a_stride, a_inner_m, a_inner_k,
            a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, A_SIDE, A_INNER, A_INNER_K,
            A_OUTER, A_GROUP, A_OUTER_K, B_SIDE, B_INNER, B_INNER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PARTS, PROMOTE,
            EVEN_K, UNIFORM_B, SWAP, BLOCK_K, B_SHARD,
        )  # fmt: skip
        value = with_constants(
            acc, a_outer, b_outer, rows, columns, R, N, a_outer_m, b_outer_n, A_OUTER, B_OUTER, A_GROUP, B_GROUP, SWAP
        )
        n = columns[:, None] if SWAP else columns[None, :]
        if bias is not None:
            value += tl.load(bias + ours * N + n, mask=n < N, other=0.0).to(tl.float32)
        if weights is not None:
            positions, inside, pairs = rows_of(table, order, tiles, tile, BLOCK_M)
            weight = tl.load(weights + pairs, mask=inside, other=0.0)
            value = value.to(out.dtype.element_ty).to(tl.float32) * (weight[None, :] if SWAP else weight[:, None])
    # Read again: where they are held over the loop, registers go to local memory.
    positions, inside, pairs = rows_of(table, order, tiles, tile, BLOCK_M)
    store_rows(out, value, pairs if SCATTER else positions, inside, columns, N, SWAP)


@triton.jit
def _between_tile(
    hidden, row_stride, rows, first, R, K, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The tile at (rows, first) of act(gate) x up, from (R, 2 K), or of act(up), from (R, K); 0 outside."""
    columns = first + tl.arange(0, BLOCK_K)
    left = load_tile(hidden, row_stride, 1, rows, columns, R, K)
    if GATED:
        up = load_tile(hidden + K, row_stride, 1, rows, columns, R, K)
        return gated_value(left, up, alpha, limit, KIND, hidden.dtype.element_ty)
    else:
        return ungated_value(left, KIND, hidden.dtype.element_ty)


@triton.jit
def gated_tiles(
    hidden, values, codes, scale, coarse, statistic, offsets, row_stride, scale_row_stride, scale_column_stride, E, K,
    alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, SINK: tl.constexpr, ELEMENT: tl.constexpr,
    SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the activation where statistics lie within a tile, or are given.

    SINK: `codes` quantizes it, as `triton_encode.quantize_tiles` does; `amax` takes the statistic of all rows;
    `values` writes it as it is, (M, K).
    """
    R = tl.load(offsets + E).to(tl.int32)
    if tl.program_id(0) * BLOCK_M >= R:
        return
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_K
    tile = _between_tile(hidden, row_stride, rows, first, R, K, alpha, limit, KIND, GATED, BLOCK_K)
    if SINK == "amax":
        raise_statistic(tile, statistic, False)
    elif SINK == "values":
        store_rows(values, tile, rows, rows < R, first + tl.arange(0, BLOCK_K), K, False)
    else:
        write_tile(
            tile, codes, scale, coarse, statistic, rows, first, scale_row_stride, scale_column_stride, R, K, ELEMENT,
            SCALE, RULE, 1, GROUP_K, COARSE, LOG, NATIVE,
        )  # fmt: skip


@triton.jit
def gated_rows(
    hidden, codes, scale, coarse, offsets, row_stride, scale_row_stride, scale_column_stride, E, K, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Whole rows of the activation, quantized with a statistic of the row; computed twice where they are longer."""
    R = tl.load(offsets + E).to(tl.int32)
    if tl.program_id(0) * BLOCK_M >= R:
        return
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    bits = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for first in range(0, K, BLOCK_K):
        tile = _between_tile(hidden, row_stride, rows, first, R, K, alpha, limit, KIND, GATED, BLOCK_K)
        bits = tl.maximum(bits, row_bits(tile, SCALE))
    of_row = write_row_scale(bits, scale, coarse, rows, scale_row_stride, R, ELEMENT, SCALE, RULE)
    for first in range(0, K, BLOCK_K):
        tile = _between_tile(hidden, row_stride, rows, first, R, K, alpha, limit, KIND, GATED, BLOCK_K)
        write_row_tile(
            tile, of_row, codes, scale, rows, first, scale_row_stride, scale_column_stride, R, K, ELEMENT, SCALE,
            GROUP_K, LOG, NATIVE,
        )  # fmt: skip
