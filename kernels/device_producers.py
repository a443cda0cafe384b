"""What stands before a quantized layer, as functions of Triton's language: norms, activations, their rounding.

On tiles of float32, whose values are rounded to a dtype exactly where PyTorch rounds in eager mode. The definition is
`olq_fx.kernels.producers`. Norms have its bits on every device: their sums have a fixed order, square roots and
divisions are rounded correctly. Activations take `exp` and `erf` as the device has them: `tl.exp` is ex2.approx of a
rounded product, with a relative error of at most 2^-22 + |x| 2^-23, and so is SiLU's and that of GELU by tanh. In bf16
and fp16 that is one step of the dtype at most (two after a gated product, whose factor may be one step off), from what
any other device with such an error gives. GELU by erf cancels below -3: there |x| 2^-22 may be added, as in PyTorch.

What is read travels as a tuple: (first, second, row and column stride of the first, of the second, R, K), where the
second may be None.
"""

import triton
import triton.language as tl

from olq_fx.kernels.triton_encode import load_tile


@triton.jit
def rounded_to(x, DTYPE: tl.constexpr):
    """The float32 values of `x` after a cast to bf16 or fp16 and back; of "fp32" as they are."""
    if DTYPE == "bf16":
        return x.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == "fp16":
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def row_mean(tile, K, LOG: tl.constexpr):
    """(R, 2^LOG), 0 beyond column K, to the means of rows: halves are added until one is left.

    A sum of two has no order. So this one's does not depend on how a tile lies in registers, which differs between
    kernels, as it would for one `tl.sum` of the row.
    """
    total = tile
    for _ in tl.static_range(LOG):
        total = tl.sum(tl.reshape(total, (total.shape[0], 2, total.shape[1] // 2)), axis=1)
    total = tl.reshape(total, (total.shape[0],))
    return tl.div_rn(total, tl.zeros(total.shape, dtype=tl.float32) + K)


@triton.jit
def reciprocal_root(variance, eps):
    """1 / sqrt(variance + eps), both rounded correctly (`tl.rsqrt` is an approximation)."""
    return tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))


@triton.jit
def hidden_tile(source, rows, columns, STREAM: tl.constexpr):
    """What a norm reads: a tile of the first tensor, plus that of the second (the residual) rounded to STREAM."""
    x, residual, x_row_stride, x_column_stride, residual_row_stride, residual_column_stride, R, K = source
    tile = load_tile(x, x_row_stride, x_column_stride, rows, columns, R, K)
    if residual is not None:
        other = load_tile(residual, residual_row_stride, residual_column_stride, rows, columns, R, K)
        tile = rounded_to(tile + other, STREAM)
    return tile


@triton.jit
def centered(tile, mean, rows, columns, R, K, LAYER: tl.constexpr):
    """What a norm scales: `tile`, for LAYER less the means of its rows; 0 outside of the tensor."""
    if LAYER:
        return tl.where((rows[:, None] < R) & (columns[None, :] < K), tile - mean[:, None], 0.0)
    else:
        return tile


@triton.jit
def normed(distance, root, weight, bias, rows, columns, R, K, NORMED: tl.constexpr, DTYPE: tl.constexpr):
    """The norm of a tile: times the reciprocal root of its row, weight (K,) and bias (K,); either may be None.

    NORMED: what the first product is rounded to. 0 outside of the tensor, also where a row is not finite.
    """
    value = rounded_to(distance * root[:, None], NORMED)
    if weight is not None:
        value = value * tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        value = value + tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    return tl.where((rows[:, None] < R) & (columns[None, :] < K), rounded_to(value, DTYPE), 0.0)


@triton.jit
def activation_tile(
    source, rows, first, BLOCK_K: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr
):
    """The tile at (rows, first) of an activation of the first tensor, times the second; 0 outside of (R, K).

    INTERLEAVED: the first is (R, 2 K), with the columns of `up` between its own, and the second is None.
    """
    gate, up, gate_row_stride, gate_column_stride, up_row_stride, up_column_stride, R, K = source
    columns = first + tl.arange(0, BLOCK_K)
    if INTERLEAVED:
        wide = 2 * first + tl.arange(0, 2 * BLOCK_K)
        both = load_tile(gate, gate_row_stride, gate_column_stride, rows, wide, R, 2 * K)
        before, factor = tl.split(tl.reshape(both, (both.shape[0], BLOCK_K, 2)))
        return rounded_to(rounded_to(activated(before, KIND), DTYPE) * factor, DTYPE)
    else:
        before = load_tile(gate, gate_row_stride, gate_column_stride, rows, columns, R, K)
        value = rounded_to(activated(before, KIND), DTYPE)
        if up is not None:
            value = rounded_to(value * load_tile(up, up_row_stride, up_column_stride, rows, columns, R, K), DTYPE)
        return value


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation KIND of float32 values, not yet rounded. Each is 0 at 0."""
    if KIND == "silu":
        return silu(x)
    elif KIND == "gelu":
        return gelu(x)
    elif KIND == "gelu_tanh":
        return gelu_tanh(x)
    else:
        return relu_squared(x)


@triton.jit
def silu(x):
    """x / (1 + exp(-x))."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """x / 2 (1 + erf(x / sqrt 2)), with the cancellation in the lower tail that PyTorch's has."""
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + exp(-2 u)), which does not cancel."""
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return tl.div_rn(x, 1.0 + tl.exp(-2.0 * inner))


@triton.jit
def relu_squared(x):
    """max(x, 0)^2; of NaN it is NaN."""
    positive = tl.where(x < 0.0, 0.0, x)
    return positive * positive
