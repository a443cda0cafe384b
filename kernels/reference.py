"""The operators in pure PyTorch: their definition, and what runs where no kernel does.

`y = round(x^ @ w^.T + bias)`, with x^ and w^ the dequantized operands in float32, accumulated in float32 and rounded
once to the output's dtype; a residual is added to that in float32 and the sum rounded again, as the two operations do
apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.errors import ConfigurationError, ConversionError, UnsupportedError, nearest
from olq_fx.formats import Format, get_format

_BLOCK_ROWS = 128
_PANEL_ELEMENTS = 1 << 24


def quantize(x: Tensor, format: str, rule: str) -> list[Tensor]:
    """`numerics.quantize` with the format's name: (M, K) to its parts, each laid out row by row."""
    parts = numerics.quantize(x, get_format(format), rule)
    # Cut from something padded, an empty part calls itself contiguous with the strides of what it was cut from.
    return [part if part.numel() else torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]


def dequantize(parts: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> Tensor:
    """`numerics.dequantize` with the format's name: parts to (R, K) of `dtype`."""
    check_parts(parts, format, k)
    return numerics.dequantize(tuple(parts), get_format(format), k, dtype)


def linear(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None,
    residual: Tensor | None,
    kernel: str = "",
) -> Tensor:
    """Quantize `x` (M, K) to `activation_format` ("" leaves it as it is) and multiply by the weight (N, K).

    Returns:
        (M, N) in the dtype of `x`.
    """
    rows, k = check_activation(x)
    check_operands(rows, k, weight, weight_format, bias, residual)
    if activation_format:
        decoded = numerics.dequantize(
            numerics.quantize(x, get_format(activation_format), rule), get_format(activation_format), k
        )
    else:
        decoded = x.to(torch.float32)
    return _product(decoded, weight, weight_format, x.dtype, bias, residual)


def quantized_linear(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    kernel: str = "",
) -> Tensor:
    """The product of already quantized activations (M, K) and weight (N, K), as (M, N) of `dtype`.

    An empty `activation_format` says that `x` is a list of one tensor, in its original precision.

    Raises:
        UnsupportedError: a gradient is wanted of one of the arguments.
    """
    refuse_gradient(*x, bias, residual)
    check_quantized_activation(x, activation_format, k)
    decoded = dequantize(x, activation_format, k, torch.float32) if activation_format else x[0].to(torch.float32)
    check_operands(decoded.shape[0], k, weight, weight_format, bias, residual)
    return _product(decoded, weight, weight_format, dtype, bias, residual)


def rows_of(parts: Sequence[Tensor], format: Format, start: int, stop: int) -> tuple[Tensor, ...]:
    """The parts of rows `start` to `stop` of a quantized tensor, as views; `start` begins a group."""
    high = (1, format.group[0], format.coarse[0] if format.coarse else None)
    sliced = []
    for part, rows in zip(parts, high, strict=False):
        sliced.append(part if rows is None else part[start // rows : -(-stop // rows)])
    return tuple(sliced)


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of float32 matrices in true float32 arithmetic, whatever precision the user allows for products.

    `torch.set_float32_matmul_precision` lets a device round the operands to TF32 or bf16 first. That is a choice about
    models in float32; the operands here are exact values whose products have a derived bound. Where it is in force the
    product is computed in float64: slow, but no global setting is changed under the feet of other threads.
    """
    if _rounds_operands(a.device.type):
        return (a.to(torch.float64) @ b.to(torch.float64)).to(torch.float32)
    return a @ b


def finish(accumulated: Tensor, dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Bias in float32, one rounding to `dtype`, then the residual as an addition of its own."""
    if bias is not None:
        accumulated = accumulated + bias.to(torch.float32)
    y = accumulated.to(dtype)
    return y if residual is None else (y.to(torch.float32) + residual.to(torch.float32)).to(dtype)


_NO_GRADIENT = "olq_fx.quantized_linear has no gradient; olq_fx.linear has that of the dequantized product"


def refuse_gradient(*arguments: Tensor | None, said: str = _NO_GRADIENT) -> None:
    """Let nobody lose a gradient in silence where there is none.

    Raises:
        UnsupportedError: autograd is recording, and an argument takes part in it; `said` is the message.
    """
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in arguments):
        raise UnsupportedError(said)


def check_quantize(x: Tensor, format: str, rule: str) -> None:
    """Hold the arguments of a quantization to what `numerics.quantize` takes.

    Raises:
        ConfigurationError: no format has that name, or the format has no such rule.
        ConversionError: `x` is not a 2-D tensor of a floating dtype.
    """
    found = get_format(format)
    if rule not in found.rules:
        raise ConfigurationError(f"{found.name} has no scale rule {rule!r}; {nearest(rule, found.rules)}")
    if x.dim() != 2 or not x.is_floating_point():
        raise ConversionError(f"{found.name} quantizes a 2-D floating tensor, not {x.dtype} of shape {tuple(x.shape)}")


def check_activation(x: Tensor) -> tuple[int, int]:
    """(M, K) of an activation.

    Raises:
        ConversionError: it is not a 2-D tensor of a floating dtype.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ConversionError(
            f"a quantized linear takes a 2-D floating activation, not {x.dtype} of shape {tuple(x.shape)}"
        )
    rows, k = x.shape
    return rows, k


def check_quantized_activation(x: Sequence[Tensor], format: str, k: int) -> int:
    """M of an already quantized activation, or of a list of one tensor (M, k) where `format` is empty.

    Raises:
        ConfigurationError: no format has that name.
        ConversionError: the tensors are not those of an (M, k) activation.
    """
    if format:
        check_parts(x, format, k)
        return x[0].shape[0]
    if len(x) != 1 or check_activation(x[0])[1] != k:
        given = ", ".join(str(tuple(tensor.shape)) for tensor in x)
        raise ConversionError(f"an activation in original precision is one tensor of shape (M, {k}), not {given}")
    return x[0].shape[0]


def check_parts(parts: Sequence[Tensor], format: str, k: int) -> None:
    """Hold the parts of a quantized tensor to what their format says.

    Raises:
        ConfigurationError: no format has that name.
        ConversionError: their number, shapes or dtypes are not those of an (R, k) tensor in that format.
    """
    found = get_format(format)
    expected = numerics.part_specs(found, parts[0].shape[0] if parts and parts[0].dim() == 2 else 0, k)
    fits = len(parts) == len(expected) and all(
        tuple(part.shape) == spec.shape and part.dtype == spec.dtype for part, spec in zip(parts, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(f"{spec.name} {spec.dtype} {spec.shape}" for spec in expected)
        given = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise ConversionError(f"{found.name} with K = {k} is stored as {wanted}; given: {given or 'nothing'}")


def check_operands(
    m: int, k: int, weight: Sequence[Tensor], weight_format: str, bias: Tensor | None, residual: Tensor | None
) -> None:
    """Hold weight, bias (N,) and residual (M, N) of a product to its shape.

    Raises:
        ConversionError: one of them does not fit.
    """
    check_parts(weight, weight_format, k)
    n = weight[0].shape[0]
    if bias is not None and tuple(bias.shape) != (n,):
        raise ConversionError(f"the bias of a quantized linear with N = {n} has shape ({n},), not {tuple(bias.shape)}")
    if residual is not None and tuple(residual.shape) != (m, n):
        raise ConversionError(f"the residual of a quantized linear has shape ({m}, {n}), not {tuple(residual.shape)}")


def _product(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """Decode the weight a panel of rows at a time, so that the float32 copy never exceeds 64 MiB (or 128 rows)."""
    format, k, n = get_format(weight_format), x.shape[1], weight[0].shape[0]
    height = max(_BLOCK_ROWS, _PANEL_ELEMENTS // max(k, 1) // _BLOCK_ROWS * _BLOCK_ROWS)
    if n <= height:
        return finish(product(x, numerics.dequantize(tuple(weight), format, k).T), dtype, bias, residual)
    y = x.new_empty((x.shape[0], n))
    for start in range(0, n, height):
        stop = min(start + height, n)
        panel = numerics.dequantize(rows_of(weight, format, start, stop), format, k)
        y[:, start:stop] = product(x, panel.T)
    return finish(y, dtype, bias, residual)


def _rounds_operands(device_type: str) -> bool:
    """Whether the user's settings let float32 products of that device round their operands."""
    if device_type == "cpu":
        return torch.backends.mkldnn.matmul.fp32_precision not in ("none", "ieee")  # type: ignore[attr-defined]
    if device_type == "cuda":
        return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")
    return False
