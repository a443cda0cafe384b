"""Products with a converted weight, below autograd, on matrices.

Run eagerly, a product is one operator. Recorded by make_fx, the quantization of the input is written out
(`weights_recording`), and the product is the operator that takes quantized inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from olq_fx import torch_private
from olq_fx.errors import UnsupportedError
from olq_fx.kernels import reference
from olq_fx.weights_expert_products import all_of_one, rows_along_k
from olq_fx.weights_recording import quantized_once
from olq_fx.weights_stack import QuantizedStack
from olq_fx.weights_tensor import QuantizedWeight


def times_right(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight + bias`: (..., C) times the last two dimensions (C, D) of `weight`.

    Raises:
        UnsupportedError: the product runs along N, and this is no backward pass: the groups of scales run along K.
        RuntimeError: dtypes or shapes differ, as for plain tensors.
    """
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    _check_operands(flat, weight, bias)
    if weight.spec.transposed:
        y = along_k(flat, weight, bias)
    elif bias is None and torch_private.in_backward():
        y = _along_n(flat, weight)
    else:
        raise UnsupportedError(
            f"{weight.label} was quantized along its last axis, but this product runs along the other one; "
            "leave the layer in original precision (ignore) or multiply by weight.dequantize()"
        )
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def along_k(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """(M, K) to (M, N): `x` is quantized to the activation format."""
    if isinstance(weight, QuantizedStack):
        return rows_along_k(x, weight, all_of_one(weight, x.shape[0]), bias)
    skip = weight.spec.skip
    if not skip:
        return _emit(x, weight, bias)
    padded = None if bias is None else functional.pad(bias, (skip, 0))
    return _emit(x, weight, padded)[:, skip:].contiguous()


def _emit(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    spec, parts = weight.spec, weight.parts
    recording = torch_private.current_recording() if spec.activation else None
    if recording is None:
        y: Tensor = torch.ops.olq_fx.linear.default(
            x, parts, spec.weight, spec.activation, spec.activation_rule, bias, None, spec.kernel
        )
        return y
    quantized = quantized_once(x, spec.activation, spec.activation_rule, recording)
    product: Tensor = torch.ops.olq_fx.quantized_linear.default(
        quantized, spec.activation, parts, spec.weight, x.shape[1], x.dtype, bias, None, spec.kernel
    )
    return product


def _along_n(gradient: Tensor, weight: QuantizedWeight) -> Tensor:
    """(M, N) to (M, K): the gradient of the dequantized product, computed in float32 and rounded once."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    matrix = weight.like(size=weight.shape[-2:], stride=weight.stride()[-2:]).dequantize(wide)
    return reference.product(gradient.to(wide), matrix).to(gradient.dtype)


def _check_operands(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Refuse what `torch.addmm` refuses of plain tensors; the operators below would be more lenient."""
    c, d = weight.shape[-2:]
    if x.shape[1] != c:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({x.shape[0]}x{x.shape[1]} and {c}x{d}; {weight.label})"
        )
    if x.dtype != weight.dtype:
        raise RuntimeError(
            f"mat1 and mat2 must have the same dtype, but got {x.dtype} and {weight.dtype} ({weight.label})"
        )
    if bias is not None and bias.dtype != x.dtype:
        raise RuntimeError(f"bias and mat2 must have the same dtype, but got {bias.dtype} and {x.dtype}")
