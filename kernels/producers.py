"""What stands before a quantized layer and is computed in one kernel with the quantization: norms and activations.

Their definition in pure PyTorch, which the kernels of `triton_producers` are held to. Values are rounded to a dtype
exactly where PyTorch rounds in eager mode, so that quantizing them gives the codes of the unfused pair:

- An activation is computed in float32 and rounded to the input's dtype, as is its product with `up`.
- A residual is added in the dtype of the sum (PyTorch's promotion), which is the new residual stream and what the norm
  reads.
- A norm is computed in float32 and rounded once, at its end, as `torch.nn.functional.rms_norm` and `layer_norm` do;
  with `Norm.rounds_twice` the normalized value is rounded before it meets the weight, as the RMSNorm of Llama does.

The sums of a norm have a fixed order: columns equal modulo `LONGEST_ROW` are added from left to right, then halves of
the row (padded with zeros to a power of two) until one number is left. Square root and division are rounded correctly.
So norms have the same bits on every device. Activations do not: each device has its own `exp` and `erf`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from olq_fx.errors import ConfigurationError

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu_squared"]
ACTIVATIONS: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu_squared")

LONGEST_ROW = 8192
"""Columns that a kernel keeps in registers; longer rows are computed in parts of so many."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What producers read and write."""


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last axis.

    Attributes:
        eps: added to the mean of squares.
        layer: whether the mean is taken off first (LayerNorm), or not (RMSNorm).
        rounds_twice: whether the normalized value is rounded to the dtype of its input before the weight.
    """

    eps: float = 1e-6
    layer: bool = False
    rounds_twice: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """An activation function, by itself or times a second operand.

    Attributes:
        kind: `silu`, `gelu` (by erf), `gelu_tanh`, `relu_squared`.
        merged: how one tensor (R, 2 K) holds both operands: `paired`, the gate in its first half and `up` in its
            second; `interleaved`, the gate in its even columns. None: there is one operand (R, K), or two tensors.
    """

    kind: ActivationKind
    merged: Literal["paired", "interleaved"] | None = None


def check(tensors: Sequence[Tensor | None], shape: torch.Size | tuple[int, ...]) -> None:
    """Hold operands to one shape and to dtypes that producers read.

    Raises:
        ConfigurationError: one differs.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise ConfigurationError(f"a fused producer reads bfloat16, float16 and float32, not {tensor.dtype}")
        if tensor.shape != shape:
            raise ConfigurationError(f"an operand of shape {tuple(tensor.shape)} beside one of {tuple(shape)}")


def operands(activation: Activation, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Gate and `up`, each (R, K), as views of what an activation is given; `up` is None where there is none.

    Args:
        activation: what is computed.
        inputs: (gate,) or (gate, up), each (R, K); (merged,) of shape (R, 2 K) if `activation.merged`.

    Raises:
        ConfigurationError: their number, shapes or dtypes do not fit.
    """
    if not 1 <= len(inputs) <= (1 if activation.merged else 2) or inputs[0].dim() != 2:
        raise ConfigurationError(f"{activation} takes {'one tensor' if activation.merged else 'one or two tensors'}")
    first = inputs[0]
    check(inputs, first.shape)
    if len({tensor.dtype for tensor in inputs}) > 1:
        raise ConfigurationError("gate and up differ in dtype")
    if activation.merged is None:
        return first, inputs[1] if len(inputs) == 2 else None
    if first.shape[1] % 2:
        raise ConfigurationError(f"gate and up cannot be merged in {first.shape[1]} columns")
    half = first.shape[1] // 2
    if activation.merged == "paired":
        return first[:, :half], first[:, half:]
    return first[:, ::2], first[:, 1::2]


def activate(activation: Activation, inputs: Sequence[Tensor]) -> Tensor:
    """The values of an activation: (R, K) in the dtype of its inputs. See `operands` for these."""
    gate, up = operands(activation, inputs)
    value = _activated(gate.to(torch.float32), activation.kind).to(gate.dtype)
    return value if up is None else (value.to(torch.float32) * up.to(torch.float32)).to(gate.dtype)


def _activated(x: Tensor, kind: ActivationKind) -> Tensor:
    if kind == "silu":
        return x / (1.0 + torch.exp(-x))
    if kind == "gelu":
        return x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))
    if kind == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        return x / (1.0 + torch.exp(-2.0 * inner))
    positive = torch.where(x < 0.0, 0.0, x)
    return positive * positive


def normalize(
    norm: Norm,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The values of a norm, and what it read.

    Args:
        norm: which.
        x: (R, K).
        weight: (K,), or None for ones.
        bias: (K,), or None for zeros.
        residual: (R, K) to be added to `x`, or None.
        dtype: of the values; that of what the norm reads if it is None.

    Returns:
        (R, K) values in `dtype`, and the (R, K) new residual stream, which is `x` where there is no residual.
    """
    stream = x if residual is None else x + residual
    hidden = stream.to(torch.float32)
    if norm.layer:
        hidden = hidden - _row_mean(hidden)
    variance = _row_mean(hidden * hidden) + norm.eps
    # PyTorch's float32 square root is not rounded correctly on every CPU; by way of float64 it is.
    value = hidden * (1.0 / torch.sqrt(variance.to(torch.float64)).to(torch.float32))
    if norm.rounds_twice:
        value = value.to(stream.dtype).to(torch.float32)
    if weight is not None:
        value = value * weight.to(torch.float32)
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(dtype or stream.dtype), stream


def _row_mean(x: Tensor) -> Tensor:
    """(R, K) float32 to (R, 1), in the order that the head of this file defines."""
    k = x.shape[1]
    width = min(row_width(k), LONGEST_ROW)
    total = x.new_zeros(x.shape[0], width)
    padded = functional.pad(x, (0, -k % width))
    for first in range(0, padded.shape[1], width):
        total = total + padded[:, first : first + width]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total / torch.full((), k, dtype=torch.float32, device=x.device)


def row_width(k: int) -> int:
    """The least power of two >= k."""
    return 1 << max(k - 1, 0).bit_length()
