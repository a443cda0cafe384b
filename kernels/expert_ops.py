"""The operators of experts, `torch.ops.olq_fx.*`: schemas, shapes, gradients and what runs them.

- `grouped_linear(x, offs, weight, weight_format, activation_format, rule, bias, shards)`: (M, K), whose rows from
  `offs[e - 1]` to `offs[e]` belong to expert e, and the parts of (E, N, K) to (M, N). Rows from `offs[E - 1]` on belong
  to nobody here and become 0.
- `gathered_linear(x, ids, ...)`: the same of rows in any order: row i belongs to expert `ids[i]`, to nobody where that
  is not from 0 to E - 1. No weight is gathered.
- `quantized_grouped_linear(x, activation_format, offs, weight, weight_format, k, dtype, bias, shards)` and
  `quantized_gathered_linear(x, activation_format, ids, ...)`: the same of an activation that is quantized already, a
  list of parts, or of one tensor where `activation_format` is empty. What belongs to nobody has counted for a statistic
  of the whole tensor, if whoever quantized let it. They are what compiled inference calls.
- `experts(x, ids, weights, gate_up..., down..., activation_format, rule, activation, ...)`: a whole layer of experts,
  (T, H) to (T, H): see `experts.layer`.

The parts of a weight, and its shards, are those of `experts.part_specs_of_stack`. As in `ops`, an empty
`activation_format` leaves activations in original precision, weights take no gradient, and that of the input of the
first two is what the product with the dequantized weights would have; the others have none.

A CPU tensor goes to the native kernels, a GPU's to the Triton kernels where `support.grouped` says that they take the
call; everything else to the definition in `experts`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from olq_fx import torch_private
from olq_fx.errors import ConversionError
from olq_fx.formats import get_format
from olq_fx.kernels import experts, native_experts, ops, reference, support
from olq_fx.kernels.experts import Gated, Layer, Segments, Stack
from olq_fx.kernels.support import capability_of

_STACK = "Tensor[] weight, str weight_format, str activation_format, str rule, Tensor? bias, int shards=1"
_QUANTIZED = "Tensor[] weight, str weight_format, int k, ScalarType dtype, Tensor? bias, int shards=1"
_SCHEMAS = (
    f"grouped_linear(Tensor x, Tensor offs, {_STACK}) -> Tensor",
    f"gathered_linear(Tensor x, Tensor ids, {_STACK}) -> Tensor",
    f"quantized_grouped_linear(Tensor[] x, str activation_format, Tensor offs, {_QUANTIZED}) -> Tensor",
    f"quantized_gathered_linear(Tensor[] x, str activation_format, Tensor ids, {_QUANTIZED}) -> Tensor",
    "gathered_linear_backward(Tensor gradient, Tensor ids, Tensor[] weight, str weight_format, int shards, int k, "
    "ScalarType dtype) -> Tensor",
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor[] gate_up, str gate_up_format, Tensor? gate_up_bias, "
    "int gate_up_shards, Tensor[] down, str down_format, Tensor? down_bias, str activation_format, str rule, "
    "str activation, float alpha, float limit) -> Tensor",
)

_NO_GRADIENT = (
    "olq_fx.{} has no gradient; olq_fx.grouped_linear and olq_fx.gathered_linear have those of the dequantized products"
)


def grouped_linear(
    x: Tensor,
    offs: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None,
    shards: int = 1,
) -> Tensor:
    """The product of rows in the order of their experts, each with the weight of its own.

    Args:
        x: (M, K) of a floating dtype.
        offs: (E,) int32 or int64: the end of each expert's rows, as `torch.nn.functional.grouped_mm` takes it.
        weight: the parts of (E, N, K).
        weight_format, activation_format, rule: as `ops.linear` takes them.
        bias: (E, N) or None.
        shards: how many matrices each weight is made of; see `experts.Stack`.

    Returns:
        (M, N) in the dtype of `x`; rows that belong to nobody are 0.

    Raises:
        ConversionError: operands do not fit.
    """
    stack = Stack(weight, weight_format, bias, shards)
    _check_segments(offs, stack, reference.check_activation(x)[1])
    segments = Segments(functional.pad(offs, (1, 0)))
    if activation_format and _spans_rows(activation_format):
        # What belongs to nobody may be anything, and would count for a statistic of the whole tensor.
        x = torch.where((torch.arange(x.shape[0], device=x.device) < segments.offsets[-1])[:, None], x, 0)
    return _product(x, segments, stack, activation_format, rule)


def gathered_linear(
    x: Tensor,
    ids: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None,
    shards: int = 1,
) -> Tensor:
    """The product of each row with the weight of expert `ids[i]`; the other arguments are those of `grouped_linear`.

    Args:
        x: (M, K).
        ids: (M,) integers.

    Returns:
        (M, N) in the dtype of `x`; rows of experts that are not here are 0.
    """
    stack = Stack(weight, weight_format, bias, shards)
    m, k = reference.check_activation(x)
    _check_rows(m, ids, stack, k)
    if activation_format and _spans_rows(activation_format):
        x = torch.where(((ids >= 0) & (ids < len(weight[0])))[:, None], x, 0)
    return _product(x, _routed(ids[:, None], len(weight[0])), stack, activation_format, rule, by_order=True)


def quantized_grouped_linear(
    x: Sequence[Tensor],
    activation_format: str,
    offs: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    shards: int = 1,
) -> Tensor:
    """`grouped_linear` of an activation that is quantized already.

    Args:
        x: the parts of (M, K), or a list of one tensor.
        activation_format: their format, "" for original precision.
        offs: (E,) int32 or int64.
        weight, weight_format, bias, shards: as `grouped_linear` takes them.
        k: K.
        dtype: of the result.

    Returns:
        (M, N); rows that belong to nobody are 0.

    Raises:
        ConversionError: operands do not fit.
        UnsupportedError: a gradient is wanted.
    """
    reference.refuse_gradient(*x, bias, said=_NO_GRADIENT.format("quantized_grouped_linear"))
    stack = Stack(weight, weight_format, bias, shards)
    reference.check_quantized_activation(x, activation_format, k)
    _check_segments(offs, stack, k)
    segments = Segments(functional.pad(offs, (1, 0)))
    return _multiplied(x, activation_format, stack, k, dtype, segments, by_order=False)


def quantized_gathered_linear(
    x: Sequence[Tensor],
    activation_format: str,
    ids: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    shards: int = 1,
) -> Tensor:
    """`gathered_linear` of an activation that is quantized already.

    Args:
        ids: (M,) integers.
        x, activation_format, weight, weight_format, k, dtype, bias, shards: as `quantized_grouped_linear` takes them.

    Raises:
        ConversionError: operands do not fit.
        UnsupportedError: a gradient is wanted.
    """
    reference.refuse_gradient(*x, bias, said=_NO_GRADIENT.format("quantized_gathered_linear"))
    stack = Stack(weight, weight_format, bias, shards)
    _check_rows(reference.check_quantized_activation(x, activation_format, k), ids, stack, k)
    return _multiplied(x, activation_format, stack, k, dtype, _routed(ids[:, None], len(weight[0])), by_order=True)


def layer(x: Tensor, ids: Tensor, weights: Tensor, *described: Any) -> Tensor:
    """All experts of a layer: `experts.layer` of (T, H).

    Args:
        x: (T, H).
        ids, weights: (T, k), which experts each token chooses, and what their results count.
        described: the arguments of `_layer`.

    Raises:
        ConversionError: operands do not fit.
        UnsupportedError: a gradient is wanted.
    """
    whole = _layer(*described)
    reference.refuse_gradient(x, weights, whole.gate_up.bias, whole.down.bias, said=_NO_GRADIENT.format("experts"))
    formats, activation_format = (whole.gate_up.format, whole.down.format), whole.activation_format
    if x.is_cuda and all(_triton_takes(x, format, activation_format, x.dtype) for format in formats):
        from olq_fx.kernels import triton_expert_layer

        with torch.cuda.device(x.device):
            return triton_expert_layer.layer(x, ids, weights, whole, capability_of(x.device))
    return experts.layer(x, ids, weights, whole, _of_device(x), torch.ops.olq_fx.quantize.default)


def _layer(
    gate_up: Sequence[Tensor],
    gate_up_format: str,
    gate_up_bias: Tensor | None,
    gate_up_shards: int,
    down: Sequence[Tensor],
    down_format: str,
    down_bias: Tensor | None,
    activation_format: str,
    rule: str,
    activation: str,
    alpha: float,
    limit: float,
) -> Layer:
    """A layer of the arguments of the operator, which are the fields of `experts.Layer` one by one."""
    return Layer(
        Stack(gate_up, gate_up_format, gate_up_bias, gate_up_shards),
        Stack(down, down_format, down_bias),
        Gated(kind_of(activation), alpha, limit),
        activation_format,
        rule,
    )


def kind_of(name: str) -> Any:
    """The name of an activation, if it is one.

    Raises:
        ConversionError: it is none.
    """
    if name not in experts.KINDS:
        raise ConversionError(f"there is no activation {name!r} between experts; there are {', '.join(experts.KINDS)}")
    return name


def _product(
    x: Tensor, segments: Segments, stack: Stack, activation_format: str, rule: str, *, by_order: bool = False
) -> Tensor:
    """Quantize the rows, and multiply those of each segment: see `_multiplied`."""
    parts = torch.ops.olq_fx.quantize.default(x, activation_format, rule) if activation_format else [x]
    return _multiplied(parts, activation_format, stack, x.shape[1], x.dtype, segments, by_order=by_order)


def _multiplied(
    x: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    k: int,
    dtype: torch.dtype,
    segments: Segments,
    *,
    by_order: bool,
) -> Tensor:
    """Multiply the rows of each segment; `by_order`: they lie, and go, where the order says."""
    args, first = (x, activation_format, stack, k, dtype, segments), x[0]
    if first.is_cuda and _triton_takes(first, stack.format, activation_format, dtype):
        from olq_fx.kernels import triton_experts

        with torch.cuda.device(first.device):
            return triton_experts.grouped_linear(
                *args, gather=by_order, scatter=by_order, capability=capability_of(first.device)
            )
    return _of_device(first)(*args, gather=by_order, scatter=by_order)


def _of_device(x: Tensor) -> Callable[..., Tensor]:
    """What multiplies on the device of `x` where Triton's kernels do not."""
    return native_experts.grouped_linear if x.device.type == "cpu" else experts.grouped_linear


def _routed(ids: Tensor, count: int) -> Segments:
    """The segments of pairs (T, k): of Triton's kernels on a GPU, which do not wait for it."""
    if ids.is_cuda and not support.why_not(capability_of(ids.device)):
        from olq_fx.kernels import triton_sorting

        with torch.cuda.device(ids.device):
            return triton_sorting.route(ids.contiguous(), count)
    return experts.route(ids, count)


def _triton_takes(x: Tensor, weight_format: str, activation_format: str, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels multiply `x`, which may be codes, to a result of `dtype`."""
    return bool(
        support.grouped(
            weight_format,
            activation_format,
            dtype=dtype,
            activation_dtype=None if activation_format else x.dtype,
            capability=capability_of(x.device),
        )
    )


def _spans_rows(format: str) -> bool:
    """Whether a statistic of the format is one of the whole tensor."""
    found = get_format(format)
    return (None, None) in (found.group, found.coarse)


def _check_segments(offs: Tensor, stack: Stack, k: int) -> None:
    """Hold the ends of segments and the weight of experts to each other by their shapes.

    Raises:
        ConversionError: one of them does not fit.
    """
    _check_stack(stack, k)
    if offs.shape != stack.parts[0].shape[:1] or offs.dtype not in (torch.int32, torch.int64):
        raise ConversionError(
            f"the ends of the rows of {stack.parts[0].shape[0]} experts are so many int32 or int64, not {offs.dtype} "
            f"{tuple(offs.shape)}"
        )


def _check_rows(rows: int, ids: Tensor, stack: Stack, k: int) -> None:
    """Hold the experts of rows and the weight of experts to each other by their shapes.

    Raises:
        ConversionError: one of them does not fit.
    """
    _check_stack(stack, k)
    if ids.shape != (rows,) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConversionError(f"{rows} rows have so many experts, not {ids.dtype} {tuple(ids.shape)}")


def _check_stack(stack: Stack, k: int) -> None:
    if not stack.parts or stack.parts[0].dim() != 3:
        shapes = [tuple(part.shape) for part in stack.parts]
        raise ConversionError(f"the weights of experts have parts (E, N, ...), not {shapes}")
    count, n = stack.parts[0].shape[:2]
    experts.check_stack(stack, count, n, k)


def _stack(
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None,
    shards: int = 1,
) -> Stack:
    """The weights of the arguments of both products."""
    return Stack(weight, weight_format, bias, shards)


def _grouped_shape(x: Tensor, offs: Tensor, *described: Any) -> Tensor:
    stack = _stack(*described)
    ops.check_devices(x=[x], offs=[offs], weight=stack.parts, bias=[stack.bias])
    _check_segments(offs, stack, reference.check_activation(x)[1])
    return x.new_empty((x.shape[0], stack.parts[0].shape[1]))


def _gathered_shape(x: Tensor, ids: Tensor, *described: Any) -> Tensor:
    stack = _stack(*described)
    ops.check_devices(x=[x], ids=[ids], weight=stack.parts, bias=[stack.bias])
    m, k = reference.check_activation(x)
    _check_rows(m, ids, stack, k)
    return x.new_empty((m, stack.parts[0].shape[1]))


def _quantized_grouped_shape(
    x: Sequence[Tensor],
    activation_format: str,
    offs: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    shards: int = 1,
) -> Tensor:
    ops.check_devices(x=x, offs=[offs], weight=weight, bias=[bias])
    m = reference.check_quantized_activation(x, activation_format, k)
    _check_segments(offs, Stack(weight, weight_format, bias, shards), k)
    return x[0].new_empty((m, weight[0].shape[1]), dtype=dtype)


def _quantized_gathered_shape(
    x: Sequence[Tensor],
    activation_format: str,
    ids: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    shards: int = 1,
) -> Tensor:
    ops.check_devices(x=x, ids=[ids], weight=weight, bias=[bias])
    m = reference.check_quantized_activation(x, activation_format, k)
    _check_rows(m, ids, Stack(weight, weight_format, bias, shards), k)
    return x[0].new_empty((m, weight[0].shape[1]), dtype=dtype)


def _layer_shape(x: Tensor, ids: Tensor, weights: Tensor, *described: Any) -> Tensor:
    whole = _layer(*described)
    stacks = {"gate_up": whole.gate_up, "down": whole.down}
    ops.check_devices(x=[x], ids=[ids], weights=[weights], **{name: each.parts for name, each in stacks.items()})
    experts.check_layer(x, ids, weights, whole)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, where, weight, ctx.weight_format, _, _, bias, ctx.shards = inputs
    ctx.save_for_backward(where, *weight)
    ctx.k, ctx.input_dtype = x.shape[1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _grouped_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    offs, *weight = ctx.saved_tensors
    rows = torch.arange(gradient.shape[0], device=gradient.device, dtype=offs.dtype)
    return _backward(ctx, gradient, torch.searchsorted(offs, rows, right=True), weight)


def _gathered_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    ids, *weight = ctx.saved_tensors
    count = len(weight[0])
    return _backward(ctx, gradient, torch.where((ids >= 0) & (ids < count), ids.to(torch.int64), count), weight)


def _backward(ctx: Any, gradient: Tensor, ids: Tensor, weight: Sequence[Tensor]) -> tuple[Any, ...]:
    """Straight through the quantization of the input; `ids` is E where a row belongs to nobody."""
    x = bias = None
    if ctx.needs_input_grad[0]:
        x = torch.ops.olq_fx.gathered_linear_backward.default(
            gradient, ids, weight, ctx.weight_format, ctx.shards, ctx.k, ctx.input_dtype
        )
    if ctx.bias_dtype is not None:
        count = len(weight[0])
        sums = gradient.new_zeros((count + 1, gradient.shape[1]), dtype=torch.float32)
        bias = sums.index_add(0, ids, gradient.to(torch.float32))[:count].to(ctx.bias_dtype)
    # What was not given is no input.
    missing = (None,) * (len(ctx.needs_input_grad) - 7)
    return x, None, [None] * len(weight), None, None, None, bias, *missing


def gathered_linear_backward(
    gradient: Tensor,
    ids: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    shards: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the rows (M, K) of `gathered_linear`: in float32, one expert at a time, rounded once.

    Args:
        gradient: (M, N) of the result.
        ids: (M,) integers from 0 to E; E is nobody, whose rows get 0.
        weight, weight_format, shards: as `gathered_linear` takes them.
        k: K.
        dtype: of the result.
    """
    stack, wide = Stack(weight, weight_format, None, shards), gradient.to(torch.float32)
    x = wide.new_zeros((gradient.shape[0], k))
    for expert in torch.unique(ids).tolist():
        if expert < len(weight[0]):
            mine = ids == expert
            x[mine] = reference.product(wide[mine], experts.values_of(stack, expert, k))
    return x.to(dtype)


def _backward_shape(
    gradient: Tensor,
    ids: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    shards: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    return gradient.new_empty((gradient.shape[0], k), dtype=dtype)


def _register() -> None:
    """Define the operators; what each device runs is decided by the functions themselves."""
    library = ops.LIBRARY
    for schema in _SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    implementations: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "grouped_linear": (grouped_linear, _grouped_shape),
        "gathered_linear": (gathered_linear, _gathered_shape),
        "quantized_grouped_linear": (quantized_grouped_linear, _quantized_grouped_shape),
        "quantized_gathered_linear": (quantized_gathered_linear, _quantized_gathered_shape),
        "gathered_linear_backward": (gathered_linear_backward, _backward_shape),
        "experts": (layer, _layer_shape),
    }
    for name, (implementation, fake) in implementations.items():
        library.impl(f"olq_fx::{name}", implementation, "CompositeExplicitAutograd")
        torch_private.hide_from_dynamo(implementation)
        torch.library.register_fake(f"olq_fx::{name}", fake, lib=library)
    torch.library.register_autograd("olq_fx::grouped_linear", _grouped_backward, setup_context=_save, lib=library)
    torch.library.register_autograd("olq_fx::gathered_linear", _gathered_backward, setup_context=_save, lib=library)


_register()
