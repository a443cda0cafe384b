"""Views of converted weights: transposition, rows, broadcasting. They share the parts, and no data are touched."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from olq_fx import torch_distributed, torch_private
from olq_fx.kernels.reference import rows_of
from olq_fx.weights_tensor import QuantizedWeight, implements, unsupported

aten = torch.ops.aten

aliasing: Callable[..., Any] = torch_private.return_and_correct_aliasing
"""Tells autograd and the compiler that a result aliases its base."""


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default, metadata_only=True)
def _alias(func: Any, weight: QuantizedWeight) -> Any:
    alias = weight.view_like()
    return aliasing(func, (weight,), {}, alias) if type(weight) is QuantizedWeight else alias


@implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, metadata_only=True)
def _view(func: Any, weight: QuantizedWeight, size: Sequence[int], stride: Sequence[int] | None = None) -> Any:
    """The same matrix, with broadcast leading dimensions merged or split (as torch.matmul does).

    `fully_shard` keeps a flat view of each parameter; of one with parts it never looks into it.
    """
    if tuple(size) == (-1,) and torch_distributed.sharded_by_fsdp():
        return weight.view_like()
    shape = _inferred(weight, size)
    if not weight.shape or tuple(shape[-2:]) != tuple(weight.shape[-2:]):
        raise unsupported(func, (weight,), {})
    leading = [0] * (len(shape) - 2)
    return weight.view_like(
        size=shape, stride=[*leading, *weight.stride()[-2:]] if len(shape) >= 2 else weight.stride()
    )


def _inferred(weight: QuantizedWeight, size: Sequence[int]) -> list[int]:
    known = 1
    for length in size:
        known *= length if length != -1 else 1
    return [weight.numel() // known if length == -1 else length for length in size]


@implements(aten.as_strided.default, metadata_only=True)
def _as_strided(
    func: Any, weight: QuantizedWeight, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """The same weight, which `fully_shard` asks for in this way."""
    same = tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not storage_offset
    if not same:
        raise unsupported(func, (weight,), {})
    return weight.view_like()


@implements(aten.expand.default, metadata_only=True)
def _expand(func: Any, weight: QuantizedWeight, size: Sequence[int], *, implicit: bool = False) -> Any:
    shape = [own if given == -1 else given for given, own in zip(size[-2:], weight.shape[-2:], strict=False)]
    if weight.dim() < 2 or tuple(shape) != tuple(weight.shape[-2:]):
        raise unsupported(func, (weight,), {})
    result = weight.view_like(size=[*size[:-2], *shape], stride=[*[0] * (len(size) - 2), *weight.stride()[-2:]])
    return aliasing(func, (weight, size), {}, result)


@implements(aten.t.default, metadata_only=True)
def _t(func: Any, weight: QuantizedWeight) -> Any:
    return aliasing(func, (weight,), {}, transposed(weight))


@implements(aten.transpose.int, metadata_only=True)
def _transpose(func: Any, weight: QuantizedWeight, dim0: int, dim1: int) -> Any:
    axes = {dim0 % weight.dim(), dim1 % weight.dim()}
    last = {weight.dim() - 2, weight.dim() - 1}
    if len(axes) == 1:
        return _alias(aten.alias.default, weight)
    if axes != last:
        raise unsupported(func, (weight,), {})
    return aliasing(func, (weight, dim0, dim1), {}, transposed(weight))


@implements(aten.permute.default, metadata_only=True)
def _permute(func: Any, weight: QuantizedWeight, dims: Sequence[int]) -> Any:
    order = [dim % weight.dim() for dim in dims]
    if order == list(range(weight.dim())):
        return _alias(aten.alias.default, weight)
    if order != [1, 0]:
        raise unsupported(func, (weight,), {})
    return aliasing(func, (weight, dims), {}, transposed(weight))


def transposed(weight: QuantizedWeight) -> QuantizedWeight:
    """The view with its last two dimensions exchanged."""
    spec = dataclasses.replace(weight.spec, transposed=not weight.spec.transposed)
    *leading, rows, columns = weight.shape
    *leading_strides, row_stride, column_stride = weight.stride()
    return weight.view_like(
        spec=spec, size=[*leading, columns, rows], stride=[*leading_strides, column_stride, row_stride]
    )


@implements(aten.slice.Tensor, metadata_only=True)
def _slice(
    func: Any, weight: QuantizedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    length = weight.shape[dim]
    begin, stop = bounds(length, 0 if start is None else start, length if end is None else end)
    if (begin, stop, step) == (0, length, 1):
        return _alias(aten.alias.default, weight)
    if step != 1 or not is_row_axis(weight, dim):
        raise unsupported(func, (weight,), {})
    return aliasing(func, (weight, dim, start, end, step), {}, rows(weight, begin, stop))


@implements(aten.split.Tensor, metadata_only=True)
def _split(func: Any, weight: QuantizedWeight, size: int, dim: int = 0) -> Any:
    length = weight.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, size)] if length else [0]
    return _split_with_sizes(aten.split_with_sizes.default, weight, sizes, dim)


@implements(aten.split_with_sizes.default, metadata_only=True)
def _split_with_sizes(func: Any, weight: QuantizedWeight, sizes: Sequence[int], dim: int = 0) -> Any:
    if sum(sizes) != weight.shape[dim]:
        raise RuntimeError(f"split_with_sizes expects sizes that sum to {weight.shape[dim]}, not {list(sizes)}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(aten.slice.Tensor, weight, dim, start, start + n) for start, n in zip(starts, sizes, strict=True)]


@implements(aten.select.int, metadata_only=True)
def _select(func: Any, weight: QuantizedWeight, dim: int, index: int) -> Any:
    """One row, as a weight of shape (K,)."""
    if not is_row_axis(weight, dim):
        raise unsupported(func, (weight,), {})
    length, k = weight.shape[dim], weight.reduction_size
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of range for dimension {dim} with size {length}")
    row = rows(weight, index % length, index % length + 1)
    spec = dataclasses.replace(row.spec, transposed=False)
    result = row.view_like(spec=spec, size=[k], stride=[weight.stride()[1 - dim % 2]])
    return aliasing(func, (weight, dim, index), {}, result)


def rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Rows `start` to `stop` of N. Where they begin within a block of 128, its leading rows are kept and skipped."""
    first, last = start + weight.spec.skip, stop + weight.spec.skip
    skip = first % (weight.spec.format.group[0] or 1)
    parts = rows_of(weight.parts, weight.spec.format, first - skip, last)
    spec = dataclasses.replace(weight.spec, skip=skip, rows_of_larger=True)
    k, n = weight.reduction_size, stop - start
    return weight.view_like(parts=parts, spec=spec, size=[k, n] if spec.transposed else [n, k], stride=weight.stride())


def is_row_axis(weight: QuantizedWeight, dim: int) -> bool:
    """Whether a dimension of a matrix is N, along which it can be cut."""
    return weight.dim() == 2 and dim % 2 == (1 if weight.spec.transposed else 0)


def bounds(length: int, start: int, end: int) -> tuple[int, int]:
    """Where a slice of an axis of this length begins and ends."""
    start, end = (min(max(bound + length if bound < 0 else bound, 0), length) for bound in (start, end))
    return start, max(start, end)
