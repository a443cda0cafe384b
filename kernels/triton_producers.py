"""Triton kernels that compute what a quantized layer reads and quantize it at once: norms and activations.

- `norm_rows`: RMSNorm and LayerNorm of rows that fit in one tile, before them the addition of a residual.
- `norm_long_rows`: the same of longer rows, which are read and computed again for each pass.
- `activation_tiles`: activations, gated or not, where statistics lie within a tile or are given.
- `activation_rows`: the same where a statistic belongs to a whole row; longer rows are computed twice.

What is done with the values is SINK: "tiles" and "rows" quantize them by `write_tile` and `write_row_tile` of
`triton_encode`, whose arguments the others are; "amax" takes the statistic of a whole tensor; "none" does nothing.
Where `values` is not None they are written there, row by row: the kernel without quantization is the same kernel.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device_producers import (
    activation_tile,
    centered,
    hidden_tile,
    normed,
    reciprocal_root,
    row_mean,
)
from olq_fx.kernels.triton_encode import raise_statistic, row_bits, write_row_scale, write_row_tile, write_tile


@triton.jit
def store_tile(out, tile, row_stride, column_stride, rows, columns, R, K):
    """Write a float32 tile to an (R, K) tensor in its dtype."""
    at = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    tl.store(out + at, tile.to(out.dtype.element_ty), mask=(rows[:, None] < R) & (columns[None, :] < K))


@triton.jit
def finish_tile(
    tile, of_row, sink, rows, first, SINK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Do with a tile of values, rounded to their dtype, what SINK says. `of_row`: for "rows" the scales of rows."""
    values, codes, scale, coarse, statistic, scale_row_stride, scale_column_stride, R, K = sink
    if values is not None:
        store_tile(values, tile, K, 1, rows, first + tl.arange(0, tile.shape[1]), R, K)
    if SINK == "amax":
        raise_statistic(tile, statistic, False)
    elif SINK == "tiles":
        write_tile(
            tile, codes, scale, coarse, statistic, rows, first, scale_row_stride, scale_column_stride, R, K, ELEMENT,
            SCALE, RULE, 1, GROUP_K, COARSE, LOG, NATIVE,
        )  # fmt: skip
    elif SINK == "rows":
        write_row_tile(
            tile, of_row, codes, scale, rows, first, scale_row_stride, scale_column_stride, R, K, ELEMENT, SCALE,
            GROUP_K, LOG, NATIVE,
        )  # fmt: skip


@triton.jit
def norm_rows(
    x, residual, new_residual, weight, bias, values, codes, scale, coarse, statistic, x_row_stride, x_column_stride,
    residual_row_stride, residual_column_stride, new_row_stride, new_column_stride, scale_row_stride,
    scale_column_stride, R, K, eps, LAYER: tl.constexpr, STREAM: tl.constexpr, NORMED: tl.constexpr,
    DTYPE: tl.constexpr, SINK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, LOG_ROW: tl.constexpr,
):  # fmt: skip
    """A norm of rows of at most BLOCK_K = 2^LOG_ROW columns. STREAM, NORMED, DTYPE: see `device_producers`."""
    source = (x, residual, x_row_stride, x_column_stride, residual_row_stride, residual_column_stride, R, K)
    sink = (values, codes, scale, coarse, statistic, scale_row_stride, scale_column_stride, R, K)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    hidden = hidden_tile(source, rows, columns, STREAM)
    mean = None
    if LAYER:
        mean = row_mean(hidden + 0.0, K, LOG_ROW)  # as if added to 0: no mean is -0.0
    distance = centered(hidden, mean, rows, columns, R, K, LAYER)
    root = reciprocal_root(row_mean(distance * distance, K, LOG_ROW), eps)
    tile = normed(distance, root, weight, bias, rows, columns, R, K, NORMED, DTYPE)
    if new_residual is not None:
        store_tile(new_residual, hidden, new_row_stride, new_column_stride, rows, columns, R, K)
    of_row = None
    if SINK == "rows":
        of_row = write_row_scale(row_bits(tile, SCALE), scale, coarse, rows, scale_row_stride, R, ELEMENT, SCALE, RULE)
    finish_tile(tile, of_row, sink, rows, 0, SINK, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE)


@triton.jit
def norm_long_rows(
    x, residual, new_residual, weight, bias, values, codes, scale, coarse, statistic, x_row_stride, x_column_stride,
    residual_row_stride, residual_column_stride, new_row_stride, new_column_stride, scale_row_stride,
    scale_column_stride, R, K, eps, LAYER: tl.constexpr, STREAM: tl.constexpr, NORMED: tl.constexpr,
    DTYPE: tl.constexpr, SINK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, LOG_ROW: tl.constexpr,
):  # fmt: skip
    """A norm of rows of any length, in parts of BLOCK_K = 2^LOG_ROW columns.

    The new residual is written by the last pass: it may lie where the old one does, which all passes read.
    """
    source = (x, residual, x_row_stride, x_column_stride, residual_row_stride, residual_column_stride, R, K)
    sink = (values, codes, scale, coarse, statistic, scale_row_stride, scale_column_stride, R, K)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mean, root = _moments(source, rows, eps, LAYER, STREAM, BLOCK_M, BLOCK_K, LOG_ROW)
    of_row = None
    if SINK == "rows":
        bits = tl.zeros((BLOCK_M,), dtype=tl.int32)
        for first in range(0, K, BLOCK_K):
            columns = first + tl.arange(0, BLOCK_K)
            distance = centered(hidden_tile(source, rows, columns, STREAM), mean, rows, columns, R, K, LAYER)
            tile = normed(distance, root, weight, bias, rows, columns, R, K, NORMED, DTYPE)
            bits = tl.maximum(bits, row_bits(tile, SCALE))
        of_row = write_row_scale(bits, scale, coarse, rows, scale_row_stride, R, ELEMENT, SCALE, RULE)
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        hidden = hidden_tile(source, rows, columns, STREAM)
        distance = centered(hidden, mean, rows, columns, R, K, LAYER)
        tile = normed(distance, root, weight, bias, rows, columns, R, K, NORMED, DTYPE)
        if new_residual is not None:
            store_tile(new_residual, hidden, new_row_stride, new_column_stride, rows, columns, R, K)
        finish_tile(tile, of_row, sink, rows, first, SINK, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE)


@triton.jit
def _moments(
    source, rows, eps, LAYER: tl.constexpr, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    LOG_ROW: tl.constexpr,
):  # fmt: skip
    """The means (BLOCK_M,) of long rows (0 unless LAYER) and their reciprocal roots."""
    R = source[6]
    K = source[7]
    mean = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if LAYER:
        total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        for first in range(0, K, BLOCK_K):
            total += hidden_tile(source, rows, first + tl.arange(0, BLOCK_K), STREAM)
        mean = row_mean(total, K, LOG_ROW)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        distance = centered(hidden_tile(source, rows, columns, STREAM), mean, rows, columns, R, K, LAYER)
        squares += distance * distance
    return mean, reciprocal_root(row_mean(squares, K, LOG_ROW), eps)


@triton.jit
def activation_tiles(
    gate, up, values, codes, scale, coarse, statistic, gate_row_stride, gate_column_stride, up_row_stride,
    up_column_stride, scale_row_stride, scale_column_stride, R, K, KIND: tl.constexpr, INTERLEAVED: tl.constexpr,
    DTYPE: tl.constexpr, SINK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of an activation."""
    source = (gate, up, gate_row_stride, gate_column_stride, up_row_stride, up_column_stride, R, K)
    sink = (values, codes, scale, coarse, statistic, scale_row_stride, scale_column_stride, R, K)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_K
    tile = activation_tile(source, rows, first, BLOCK_K, KIND, INTERLEAVED, DTYPE)
    finish_tile(tile, None, sink, rows, first, SINK, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE)


@triton.jit
def activation_rows(
    gate, up, values, codes, scale, coarse, statistic, gate_row_stride, gate_column_stride, up_row_stride,
    up_column_stride, scale_row_stride, scale_column_stride, R, K, KIND: tl.constexpr, INTERLEAVED: tl.constexpr,
    DTYPE: tl.constexpr, SINK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Whole rows of an activation, quantized with a statistic of the row. ONCE: they have at most BLOCK_K columns."""
    source = (gate, up, gate_row_stride, gate_column_stride, up_row_stride, up_column_stride, R, K)
    sink = (values, codes, scale, coarse, statistic, scale_row_stride, scale_column_stride, R, K)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if ONCE:
        tile = activation_tile(source, rows, 0, BLOCK_K, KIND, INTERLEAVED, DTYPE)
        bits = row_bits(tile, SCALE)
        of_row = write_row_scale(bits, scale, coarse, rows, scale_row_stride, R, ELEMENT, SCALE, RULE)
        finish_tile(tile, of_row, sink, rows, 0, SINK, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE)
    else:
        bits = tl.zeros((BLOCK_M,), dtype=tl.int32)
        for first in range(0, K, BLOCK_K):
            tile = activation_tile(source, rows, first, BLOCK_K, KIND, INTERLEAVED, DTYPE)
            bits = tl.maximum(bits, row_bits(tile, SCALE))
        of_row = write_row_scale(bits, scale, coarse, rows, scale_row_stride, R, ELEMENT, SCALE, RULE)
        for first in range(0, K, BLOCK_K):
            tile = activation_tile(source, rows, first, BLOCK_K, KIND, INTERLEAVED, DTYPE)
            finish_tile(tile, of_row, sink, rows, first, SINK, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE)
