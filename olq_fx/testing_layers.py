"""What converted layers and the operators of olq_fx compute, held to the definition of the formats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx.formats import get_format
from olq_fx.numerics import dequantize, quantize
from olq_fx.testing_bits import assert_same_bits
from olq_fx.testing_bounds import assert_product_close
from olq_fx.weights import QuantizedWeight


def operands(x: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """The dequantized operands of a converted layer, by the definition of the formats and without any kernel.

    Args:
        x: (..., K), the input of the layer.
        weight: its converted weight, (N, K) or, where it is transposed, (K, N).

    Returns:
        Activations (M, K) and weight (N, K), both float32; M is the product of the leading extents of `x`.
    """
    spec = weight.spec
    with torch.no_grad():
        values = weight.dequantize(torch.float32)
    values = values.T if spec.transposed else values
    flat = x.detach().reshape(-1, x.shape[-1])
    if not spec.activation:
        return flat.float(), values
    fmt = get_format(spec.activation)
    return dequantize(quantize(flat, fmt, spec.activation_rule), fmt, flat.shape[1]), values


def assert_layer_close(
    actual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> None:
    """Assert that `actual` is what a layer with a converted weight gives for `x`, within the derived bound.

    Args:
        actual: (..., N), the output.
        x: (..., K), the input.
        weight: the converted weight.
        bias: (N,) or None.
        residual: shaped like `actual` or None, added after the rounding of the product.

    Raises:
        AssertionError: an element lies outside the bound, a shape is wrong, or the weight is not converted.
    """
    if not isinstance(weight, QuantizedWeight):
        raise AssertionError(f"the weight is not converted: {type(weight).__name__} {weight.dtype}")
    left, right = operands(x, weight)
    if actual.shape != (*x.shape[:-1], right.shape[0]):
        raise AssertionError(f"output {tuple(actual.shape)} for input {tuple(x.shape)} and weight {tuple(right.shape)}")
    flat = actual.detach().reshape(-1, right.shape[0])
    added = None if residual is None else residual.detach().reshape(flat.shape)
    assert_product_close(flat, left, right, bias=None if bias is None else bias.detach(), residual=added)


def assert_operator_right(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Assert that one call of an operator of olq_fx gave what the definition gives for the same input bits.

    Codes, scales and dequantized values must be equal in every bit, a product within the derived bound.

    Args:
        operator: an overload in `torch.ops.olq_fx`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: what it returned.

    Raises:
        AssertionError: it is something else.
        KeyError: the operator is not one of olq_fx, or one that is not known here.
    """
    names = [argument.name for argument in operator._schema.arguments]
    _CHECKS[str(operator.overloadpacket)](result, **dict(zip(names, args, strict=False)), **kwargs)


def _check_quantize(result: Sequence[Tensor], x: Tensor, format: str, rule: str) -> None:
    assert_same_bits(tuple(result), quantize(x, get_format(format), rule), name=f"parts of {format}")


def _check_dequantize(result: Tensor, parts: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> None:
    assert_same_bits(result, dequantize(tuple(parts), get_format(format), k, dtype), name=f"values of {format}")


def _check_linear(
    result: Tensor,
    x: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    kernel: str = "",
) -> None:
    k = x.shape[1]
    left = x.detach().float()
    if activation_format:
        fmt = get_format(activation_format)
        left = dequantize(quantize(x.detach(), fmt, rule), fmt, k)
    right = dequantize(tuple(weight), get_format(weight_format), k)
    if result.dtype != x.dtype:
        raise AssertionError(f"dtype {result.dtype} of a product of {x.dtype}")
    assert_product_close(result, left, right, bias=bias, residual=residual)


def _check_quantized_linear(
    result: Tensor,
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    kernel: str = "",
) -> None:
    # Without an activation format the only part is the input itself.
    left = dequantize(tuple(x), get_format(activation_format), k) if activation_format else x[0].detach().float()
    right = dequantize(tuple(weight), get_format(weight_format), k)
    if result.dtype != dtype:
        raise AssertionError(f"dtype {result.dtype}, asked for {dtype}")
    assert_product_close(result, left, right, bias=bias, residual=residual)


_CHECKS: dict[str, Callable[..., None]] = {
    "olq_fx.quantize": _check_quantize,
    "olq_fx.dequantize": _check_dequantize,
    "olq_fx.linear": _check_linear,
    "olq_fx.quantized_linear": _check_quantized_linear,
}
