"""The operators `torch.ops.olq_fx.*`: schemas, shapes, gradients, and what Inductor inlines instead of them.

- `quantize(x, format, rule)`: (M, K) of a floating dtype to its parts.
- `dequantize(parts, format, k, dtype)`: back to (R, K) of `dtype`.
- `linear(x, weight, weight_format, activation_format, rule, bias, residual)`: (M, K) and the parts of (N, K) to (M, N)
  of the dtype of `x`.
- `quantized_linear(x, activation_format, weight, weight_format, k, dtype, bias, residual)`: the same of two lists of
  parts, to (M, N) of `dtype`. An empty `activation_format` says that `x` is a list of one tensor, in its original
  precision: what a compiler makes of a weight-only `linear`.

A tensor in a format is a list of plain tensors, its parts (`numerics.part_specs`). An empty `activation_format` of
`linear` leaves activations in their original precision. Weights take no gradient; that of the input of `linear` is
straight through its quantization: what the product with the dequantized weight would have. `quantized_linear` is what
compiled inference calls: it has no gradient (an error where one is wanted) and so no call to Python for autograd.

A CPU tensor goes to the native kernels where they can be built, a GPU's tensor to the Triton kernels
(`registry.select` says whether); everything else to `reference`, which defines the values. `kernel` names one of the
registry that must run the product; "" is the best.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics, torch_private
from olq_fx.errors import UnsupportedError
from olq_fx.formats import get_format
from olq_fx.kernels import native, reference, triton_ops

_SCHEMAS = (
    "quantize(Tensor x, str format, str rule) -> Tensor[]",
    "dequantize(Tensor[] parts, str format, int k, ScalarType dtype) -> Tensor",
    "linear(Tensor x, Tensor[] weight, str weight_format, str activation_format, str rule, Tensor? bias, "
    'Tensor? residual, str kernel="") -> Tensor',
    "quantized_linear(Tensor[] x, str activation_format, Tensor[] weight, str weight_format, int k, ScalarType dtype, "
    'Tensor? bias, Tensor? residual, str kernel="") -> Tensor',
)

LIBRARY: Any = torch.library.Library("olq_fx", "DEF")  # type: ignore[no-untyped-call]
"""Where the operators are defined; `expert_ops` adds those of experts."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What a compiler puts in the place of the operators: plain aten for quantization, so that it fuses.

    The product stays one opaque call, because it decodes the weight inside; `linear` becomes a quantization and that.
    """
    ops = torch.ops.olq_fx
    return {
        **quantization(),
        ops.dequantize.default: reference.dequantize,
        ops.linear.default: _decomposed_linear,
    }


def quantization() -> dict[Any, Callable[..., Any]]:
    """The one of `decompositions` that a graph of many layers has most often, and that is longest."""
    return {torch.ops.olq_fx.quantize.default: _decomposed_quantize}


def stays_whole(x: Tensor, format: str, rule: str) -> bool:
    """Whether a quantization is one call even in compiled code.

    A GPU without float8 (before compute capability 8.9) has no such type for a compiler to write; our kernels write
    bytes.
    """
    if x.device.type != "cuda":
        return False
    found = get_format(format)
    return "e4m3" in (found.element, found.scale) and torch.cuda.get_device_capability(x.device) < (8, 9)


def _decomposed_quantize(x: Tensor, format: str, rule: str) -> list[Tensor]:
    return list(numerics.quantize(x, get_format(format), rule))


def _decomposed_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None,
    residual: Tensor | None,
    kernel: str = "",
) -> Any:
    parts = torch.ops.olq_fx.quantize.default(x, activation_format, rule) if activation_format else [x]
    return torch.ops.olq_fx.quantized_linear.default(
        parts, activation_format, weight, weight_format, x.shape[1], x.dtype, bias, residual, kernel
    )


def _quantize_shape(x: Tensor, format: str, rule: str) -> list[Tensor]:
    reference.check_quantize(x, format, rule)
    rows, k = x.shape
    specs = numerics.part_specs(get_format(format), rows, k)
    return [x.new_empty(spec.shape, dtype=spec.dtype) for spec in specs]


def _dequantize_shape(parts: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> Tensor:
    reference.check_parts(parts, format, k)
    return parts[0].new_empty((parts[0].shape[0], k), dtype=dtype)


def _linear_shape(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None,
    residual: Tensor | None,
    kernel: str = "",
) -> Tensor:
    check_devices(x=[x], weight=weight, bias=[bias], residual=[residual])
    if activation_format:
        reference.check_quantize(x, activation_format, rule)
    m, k = reference.check_activation(x)
    reference.check_operands(m, k, weight, weight_format, bias, residual)
    return x.new_empty((m, weight[0].shape[0]))


def _quantized_linear_shape(
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
    check_devices(x=x, weight=weight, bias=[bias], residual=[residual])
    m = reference.check_quantized_activation(x, activation_format, k)
    reference.check_operands(m, k, weight, weight_format, bias, residual)
    return x[0].new_empty((m, weight[0].shape[0]), dtype=dtype)


def check_devices(**operands: Sequence[Tensor | None]) -> None:
    """Hold the operands of a product to one kind of device.

    With a single operand on meta torch calls the function that knows shapes only, and what it returns has no values.

    Raises:
        RuntimeError: they are on several, as torch says of plain tensors.
    """
    kinds = {name: tensor.device.type for name, given in operands.items() for tensor in given if tensor is not None}
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{name} on {kind}" for name, kind in kinds.items())
        raise RuntimeError(f"the operands of a quantized linear must be on one device, but there is {found}")


def _not_differentiable(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(
        "olq_fx.quantize and olq_fx.dequantize have no gradient; olq_fx.linear has that of the dequantized product"
    )


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, weight_format, _, _, bias, residual, _ = inputs
    ctx.save_for_backward(*weight)
    ctx.weight_format, ctx.k, ctx.input_dtype = weight_format, x.shape[1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    # Read once: checkpointing computes saved tensors anew when they are asked for, and only once.
    weight = list(ctx.saved_tensors)
    x = _input_gradient(ctx, weight, gradient) if ctx.needs_input_grad[0] else None
    # A kernel that was not named is no input.
    kernel = (None,) * (len(ctx.needs_input_grad) - 7)
    return x, [None] * len(weight), None, None, None, *_added_gradients(ctx, gradient), *kernel


def _input_gradient(ctx: Any, weight: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """That of the product with the dequantized weight, in float32, rounded once."""
    decoded = torch.ops.olq_fx.dequantize(weight, ctx.weight_format, ctx.k, torch.float32)
    return reference.product(gradient.to(torch.float32), decoded).to(ctx.input_dtype)


def _added_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of bias and residual, which autograd drops where they are not wanted."""
    bias = None if ctx.bias_dtype is None else gradient.to(torch.float32).sum(0).to(ctx.bias_dtype)
    residual = None if ctx.residual_dtype is None else gradient.to(ctx.residual_dtype)
    return bias, residual


def _register() -> None:
    for schema in _SCHEMAS:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    fakes: tuple[Callable[..., Any], ...] = (_quantize_shape, _dequantize_shape, _linear_shape, _quantized_linear_shape)
    implementations = (reference.quantize, reference.dequantize, reference.linear, reference.quantized_linear)
    for implementation, fake in zip(implementations, fakes, strict=True):
        name = f"olq_fx::{implementation.__name__}"
        LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        LIBRARY.impl(name, getattr(native, implementation.__name__), "CPU")
        LIBRARY.impl(name, getattr(triton_ops, implementation.__name__), "CUDA")
        for module in (reference, native, triton_ops):
            torch_private.hide_from_dynamo(getattr(module, implementation.__name__))
        torch.library.register_fake(name, fake, lib=LIBRARY)
    for name in ("olq_fx::quantize", "olq_fx::dequantize"):
        torch.library.register_autograd(name, _not_differentiable, lib=LIBRARY)
    torch.library.register_autograd("olq_fx::linear", _linear_backward, setup_context=_save_linear, lib=LIBRARY)


_register()
