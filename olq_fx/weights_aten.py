"""What aten operators do on converted weights: copies, products, lookups, and reading as plain values.

Views are in `weights_views`. Whatever is not listed in the two and is not made of what is listed is refused by name:
arithmetic on a weight would silently leave the quantized product, and values cannot be written in place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics, torch_distributed
from olq_fx.errors import PendingWeightError, UnsupportedError
from olq_fx.weights_encoding import check_values, encode_into
from olq_fx.weights_gathered import new_piece
from olq_fx.weights_products import times_right
from olq_fx.weights_tensor import Pending, QuantizedWeight, implements, unsupported
from olq_fx.weights_views import is_row_axis, transposed

aten = torch.ops.aten

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that a weight may have nominally."""


# Copies.


@implements(aten._to_copy.default, metadata_only=True)
def _to_copy(
    func: Any,
    weight: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> QuantizedWeight:
    """A new nominal dtype, which the parts do not depend on; and a new device, to which they are moved."""
    if dtype is not None and dtype not in FLOATING:
        raise UnsupportedError(f"{weight.label} is quantized and cannot be {dtype}; weight.dequantize() has its values")
    stride = None if memory_format == torch.contiguous_format else weight.stride()
    if device is None or device == weight.device:
        return weight.like(dtype=dtype, size=weight.shape, stride=stride)
    if device.type == "meta" or weight.pending is not None:
        path = weight.path if weight.pending is None else weight.pending.path
        parts = [part.to("meta") for part in weight.parts]
        return weight.like(parts=parts, dtype=dtype, size=weight.shape, stride=stride, pending=Pending(path, device))
    with weight.ordinary():
        parts = [part.to(device, non_blocking=non_blocking) for part in weight.parts]
    return weight.like(parts=parts, dtype=dtype, size=weight.shape, stride=stride)


@implements(aten.clone.default, metadata_only=True)
def _clone(func: Any, weight: QuantizedWeight, *, memory_format: torch.memory_format | None = None) -> QuantizedWeight:
    stride = None if memory_format == torch.contiguous_format else weight.stride()
    with weight.ordinary():
        parts = [part.clone() for part in weight.parts]
    return weight.like(parts=parts, size=weight.shape, stride=stride)


@implements(aten._pin_memory.default)
def _pin_memory(func: Any, weight: QuantizedWeight, device: torch.device | None = None) -> QuantizedWeight:
    return weight.like(parts=[part.pin_memory() for part in weight.parts])


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, weight: QuantizedWeight, device: torch.device | None = None) -> bool:
    return all(part.is_pinned() for part in weight.parts)


@implements(aten.empty_like.default, metadata_only=True)
def _empty_like(func: Any, weight: QuantizedWeight, *, device: torch.device | None = None, **options: Any) -> Any:
    """Storage without values is a weight without data (as `Module.to_empty` makes them): pending."""
    pending = Pending(weight.path, weight.device if device is None else device)
    dtype = options.get("dtype")
    return weight.like(parts=[part.to("meta") for part in weight.parts], dtype=dtype, pending=pending)


@implements(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
    metadata_only=True,
)
def _new(func: Any, weight: QuantizedWeight, *args: Any, **options: Any) -> Any:
    """A plain tensor: only shape, dtype and device are asked of the weight. For `fully_shard`, storage for a piece."""
    if func is aten.new_zeros.default and torch_distributed.sharded_by_fsdp():
        return new_piece(weight.ready(), args[0])
    shape = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    return func(shape, *args, **{**options, "device": options.get("device") or weight.device})


@implements(aten.copy_.default, metadata_only=True)
def _copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Into a weight: converted into its storage, or the parts of an equal one. Out of a weight: its values."""
    if not isinstance(target, QuantizedWeight):
        assert isinstance(source, QuantizedWeight)
        return target.copy_(source.dequantize(), non_blocking)
    if source is target:
        return target
    if target.pending is not None:
        raise PendingWeightError(f"'{target.pending.path}' has no storage yet that {func} could write to")
    if isinstance(source, QuantizedWeight):
        copy_parts(target, source)
    else:
        _refresh(target, source)
    mark_as_changed(target.parts)
    return target


def mark_as_changed(parts: Sequence[Tensor]) -> None:
    """Let a backward pass that needs the old values notice; below autograd, writing does not do so by itself."""
    for part in parts:
        if not part.is_inference():
            torch.autograd.graph.increment_version(part)


def copy_parts(target: QuantizedWeight, source: QuantizedWeight) -> None:
    """Write the parts of an equal weight into those of `target`.

    Raises:
        UnsupportedError: it is stored in another way.
    """
    kept = dataclasses.replace(
        source.ready().spec, rows_of_larger=target.spec.rows_of_larger, kernel=target.spec.kernel
    )
    if kept != target.spec or source.shape != target.shape:
        raise UnsupportedError(
            f"{target.label} ({target!r}) cannot take the parts of {source!r}; copy_ original-precision values"
        )
    if target.spec.rows_of_larger:
        _check_rows_stand_alone(target)
    for own, given in zip(target.parts, source.parts, strict=True):
        own.copy_(given)


def _refresh(target: QuantizedWeight, source: Tensor) -> None:
    if target.dim() != 2:
        raise UnsupportedError(f"only a whole matrix can be copied into {target.label}")
    if target.spec.rows_of_larger:
        _check_rows_stand_alone(target)
    check_values(source, target.label)
    encode_into(target.parts, source.detach().expand(target.shape), target.spec)


def _check_rows_stand_alone(target: QuantizedWeight) -> None:
    """Rows can be given new values alone if no scale is shared with rows outside them."""
    spec, n = target.spec, target.shape[1 if target.spec.transposed else 0]
    height = spec.format.group[0]
    shares = spec.format.coarse is not None and spec.format.coarse[0] is None
    if shares or height is None or spec.skip or n % height:
        raise UnsupportedError(
            f"these rows of {target.label} share scales with others in {spec.weight}: copy_ the whole matrix"
        )


# Products.


@implements(aten.mm.default, aten.bmm.default)
def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return _multiply(func, a, b)


@implements(aten.mv.default)
def _mv(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return _multiply(func, a, b.unsqueeze(1)).squeeze(1)


@implements(aten.addmm.default)
def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(bias, QuantizedWeight):
        raise unsupported(func, (bias,), {})
    if isinstance(b, QuantizedWeight) and (beta, alpha) == (1, 1) and tuple(bias.shape) == (b.shape[1],):
        return times_right(a, b, bias)
    product = _multiply(func, a, b)
    # As torch has it: with beta = 0 the addend does not count, not even a NaN in it.
    return product * alpha if beta == 0 else torch.add(beta * bias, product, alpha=alpha)


@implements(aten.linear.default)
def _linear(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, QuantizedWeight) or isinstance(x, QuantizedWeight):
        raise unsupported(func, (x, weight, bias), {})
    if x.dim() < 2 or (bias is not None and bias.dtype != x.dtype):
        return func.decompose(x, weight, bias)
    return times_right(x, transposed(weight), bias)


def _multiply(func: Any, a: Tensor, b: Tensor) -> Tensor:
    if isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        raise unsupported(func, (a, b), {})
    if isinstance(b, QuantizedWeight):
        return times_right(a, b)
    assert isinstance(a, QuantizedWeight)
    return times_right(b.mT, transposed(a)).mT


# Lookups: only the rows that are asked for are decoded.


@implements(aten.embedding.default)
def _embedding(func: Any, weight: Tensor, indices: Tensor, *options: Any, **named: Any) -> Tensor:
    return _looked_up(func, weight, indices)


@implements(aten.index_select.default)
def _index_select(func: Any, weight: QuantizedWeight, dim: int, index: Tensor) -> Tensor:
    if not is_row_axis(weight, dim) or weight.spec.transposed:
        raise unsupported(func, (weight,), {})
    return _looked_up(func, weight, index)


@implements(aten.index.Tensor)
def _index(func: Any, weight: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    first, *others = indices
    if first is None or first.dtype == torch.bool or any(other is not None for other in others):
        raise unsupported(func, (weight,), {})
    return _looked_up(func, weight, torch.where(first < 0, first + weight.shape[0], first))


def _looked_up(func: Any, weight: Tensor, indices: Tensor) -> Tensor:
    """(*indices, K) in the nominal dtype."""
    if not isinstance(weight, QuantizedWeight) or weight.dim() != 2 or weight.spec.transposed:
        raise unsupported(func, (weight,), {})
    format, k = weight.spec.format, weight.reduction_size
    position = indices.reshape(-1) + weight.spec.skip
    heights = (1, format.group[0], format.coarse[0] if format.coarse else None)
    parts = tuple(
        part if height is None else _pick(part, position // height)
        for part, height in zip(weight.parts, heights, strict=False)
    )
    by_row = format if format.group[0] is None else dataclasses.replace(format, group=(1, format.group[1]))
    return numerics.dequantize(parts, by_row, k, weight.dtype).reshape(*indices.shape, k)


def _pick(part: Tensor, position: Tensor) -> Tensor:
    if part.dtype == torch.float8_e4m3fn:
        return part.view(torch.uint8).index_select(0, position).view(part.dtype)
    return part.index_select(0, position)


# Reading: statistics and comparisons mean the values, and nobody takes their result for a weight.


@implements(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dtype,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.std.correction,
    aten.var.correction,
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.max.default,
    aten.min.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.median.default,
    aten.histc.default,
    aten.std_mean.correction,
    aten.var_mean.correction,
    aten.abs.default,
    aten.isnan.default,
    aten.isinf.default,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.equal.default,
    aten.count_nonzero.default,
    aten.any.default,
    aten.all.default,
    aten._local_scalar_dense.default,
)
def _read(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*map(_values, args), **kwargs)


def _values(argument: Any) -> Any:
    return argument.dequantize() if isinstance(argument, QuantizedWeight) else argument
