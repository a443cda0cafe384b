"""Kernels that apply one function of `olq_fx.kernels.device_producers` to given numbers."""

import triton
import triton.language as tl

from olq_fx.kernels.device_producers import (
    activated,
    activation_tile,
    centered,
    gelu,
    gelu_tanh,
    hidden_tile,
    normed,
    reciprocal_root,
    relu_squared,
    rounded_to,
    row_mean,
    silu,
)


@triton.jit
def elementwise_kernel(x, y, out, N: tl.constexpr, NAME: tl.constexpr, KEY: tl.constexpr):
    """N numbers `x` (and `y`, or None). KEY: a dtype or an activation."""
    at = tl.arange(0, N)
    value = tl.load(x + at)
    if NAME == "rounded_to":
        result = rounded_to(value, KEY)
    elif NAME == "activated":
        result = activated(value, KEY)
    elif NAME == "silu":
        result = silu(value)
    elif NAME == "gelu":
        result = gelu(value)
    elif NAME == "gelu_tanh":
        result = gelu_tanh(value)
    elif NAME == "relu_squared":
        result = relu_squared(value)
    else:
        tl.static_assert(NAME == "reciprocal_root")
        result = reciprocal_root(value, tl.load(y + at))
    tl.store(out + at, result)


@triton.jit
def mean_kernel(x, out, K, R: tl.constexpr, S: tl.constexpr, LOG: tl.constexpr):
    """(R, S = 2^LOG) numbers to the means of K columns."""
    rows = tl.arange(0, R)
    tile = tl.load(x + rows[:, None] * S + tl.arange(0, S)[None, :])
    tl.store(out + rows, row_mean(tile, K, LOG))


@triton.jit
def hidden_kernel(
    x, residual, out, x_row_stride, x_column_stride, residual_row_stride, residual_column_stride, R, K,
    STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile (BLOCK_M, BLOCK_K) that holds all of two tensors (R, K)."""
    source = (x, residual, x_row_stride, x_column_stride, residual_row_stride, residual_column_stride, R, K)
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    tile = hidden_tile(source, rows, columns, STREAM)
    tl.store(out + rows[:, None] * BLOCK_K + columns[None, :], tile)


@triton.jit
def centered_kernel(x, mean, out, R, K, LAYER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile (BLOCK_M, BLOCK_K) `x` and means (BLOCK_M,) of its rows."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    at = rows[:, None] * BLOCK_K + columns[None, :]
    tl.store(out + at, centered(tl.load(x + at), tl.load(mean + rows), rows, columns, R, K, LAYER))


@triton.jit
def normed_kernel(
    x, root, weight, bias, out, R, K, NORMED: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile (BLOCK_M, BLOCK_K) `x`, roots (BLOCK_M,) of its rows, weight and bias (K,)."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    at = rows[:, None] * BLOCK_K + columns[None, :]
    tile = normed(tl.load(x + at), tl.load(root + rows), weight, bias, rows, columns, R, K, NORMED, DTYPE)
    tl.store(out + at, tile)


@triton.jit
def activation_kernel(
    gate, up, out, gate_row_stride, gate_column_stride, up_row_stride, up_column_stride, R, K, first,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile (BLOCK_M, BLOCK_K) at column `first`."""
    source = (gate, up, gate_row_stride, gate_column_stride, up_row_stride, up_column_stride, R, K)
    rows = tl.arange(0, BLOCK_M)
    tile = activation_tile(source, rows, first, BLOCK_K, KIND, INTERLEAVED, DTYPE)
    tl.store(out + rows[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], tile)
