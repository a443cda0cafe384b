"""What aten operators do on the converted weights of experts: products with all or chosen ones, views, new values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import torch_distributed
from olq_fx.errors import PendingWeightError, UnsupportedError
from olq_fx.weights_aten import copy_parts, mark_as_changed
from olq_fx.weights_encoding import check_values, encode_into
from olq_fx.weights_expert_products import Rows, one_each, product
from olq_fx.weights_stack import (
    STACK_ATEN,
    QuantizedStack,
    chosen,
    expert,
    implements_stack,
    of_experts,
    of_rows,
)
from olq_fx.weights_tensor import ATEN, METADATA_ONLY, QuantizedWeight, unsupported
from olq_fx.weights_views import aliasing, bounds, transposed

aten = torch.ops.aten

_AS_MATRICES = (
    *(aten._to_copy.default, aten.clone.default, aten._pin_memory.default, aten.is_pinned.default),
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default),
    *(aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default),
    *(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.as_strided.default),
    *(aten.t.default, aten.transpose.int, aten.mm.default, aten.mv.default, aten.addmm.default, aten.linear.default),
    *(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.std.correction),
    *(aten.var.correction, aten.amax.default, aten.amin.default, aten.aminmax.default, aten.max.default),
    *(aten.min.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.median.default),
    *(aten.histc.default, aten.std_mean.correction, aten.var_mean.correction, aten.abs.default, aten.isnan.default),
    *(aten.isinf.default, aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar, aten.equal.default),
    *(aten.count_nonzero.default, aten.any.default, aten.all.default, aten._local_scalar_dense.default),
)
"""What a stack does as a matrix does: copies, the exchange of the last two dimensions, products of the matrix of one
expert, and all that reads values."""

STACK_ATEN.update({operator: ATEN[operator] for operator in _AS_MATRICES})

GROUPED_FALLBACK = "transformers.grouped_mm_fallback.default"
"""An operator of transformers; it is known by its name, since its library need not be here."""


# Products.


@implements_stack(aten.bmm.default)
def _bmm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    if isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        raise unsupported(func, (a, b), {})
    if isinstance(b, QuantizedStack):
        return one_each(a, b)
    assert isinstance(a, QuantizedStack)
    other = transposed(a)
    assert isinstance(other, QuantizedStack)
    return one_each(b.mT, other).mT


@implements_stack(aten.baddbmm.default)
def _baddbmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(bias, QuantizedWeight):
        raise unsupported(func, (bias,), {})
    found = _bmm(aten.bmm.default, a, b)
    # As torch has it: with beta = 0 the addend does not count, not even a NaN in it.
    return found * alpha if beta == 0 else torch.add(beta * bias, found, alpha=alpha)


@implements_stack(aten._grouped_mm.default)
def _grouped_mm(
    func: Any,
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows in the order of their experts; without ends of their rows one batch of rows for each expert."""
    if not isinstance(weight, QuantizedStack) or isinstance(x, QuantizedWeight) or bias is not None:
        raise unsupported(func, (x, weight, bias), {})
    if out_dtype not in (None, x.dtype):
        raise UnsupportedError(f"a grouped product of {weight.label} has the dtype of its input, not {out_dtype}")
    if offs is None:
        return one_each(x, weight)
    if x.dim() != 2 or weight.dim() != 3 or weight.ids is not None:
        raise unsupported(func, (weight,), {})
    return product(x, weight, Rows(ends=offs))


@implements_stack(GROUPED_FALLBACK)
def _grouped_mm_fallback(func: Any, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    found: Tensor = _grouped_mm(func, input, weight, offs)
    return found


@implements_stack("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_fallback_backward(
    func: Any, input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the rows; a converted weight has none, so that nobody reads what stands in its place."""
    if not isinstance(weight, QuantizedStack):
        raise unsupported(func, (input, weight), {})
    oriented = transposed(weight)
    assert isinstance(oriented, QuantizedStack)
    return product(grad_output, oriented, Rows(ends=offs)), grad_output.new_empty(weight.shape, device="meta")


# Views.


@implements_stack(aten.select.int)
def _select(func: Any, weight: QuantizedStack, dim: int, index: int) -> Any:
    """The matrix of one expert."""
    if dim % weight.dim() != 0 or weight.dim() < 3:
        raise unsupported(func, (weight,), {})
    length = weight.shape[0]
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of range for dimension {dim} with size {length}")
    found = expert(weight, index % length)
    return aliasing(func, (weight, dim, index), {}, found) if type(found) is type(weight) else found


@implements_stack(aten.unbind.int)
def _unbind(func: Any, weight: QuantizedStack, dim: int = 0) -> list[Any]:
    return [_select(aten.select.int, weight, dim, index) for index in range(weight.shape[dim])]


@implements_stack(aten.slice.Tensor)
def _slice(
    func: Any, weight: QuantizedStack, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    axis, length = dim % weight.dim(), weight.shape[dim]
    begin, stop = bounds(length, 0 if start is None else start, length if end is None else end)
    if (begin, stop, step) == (0, length, 1):
        return STACK_ATEN[aten.alias.default](aten.alias.default, weight)
    rows_axis = weight.dim() - (1 if weight.spec.transposed else 2)
    found: QuantizedStack | None = None
    if axis == rows_axis:
        found = of_rows(weight, begin, stop, step)
    elif axis == 0 and weight.dim() > 2 and step == 1:
        found = of_experts(weight, begin, stop)
    if found is None:
        raise unsupported(func, (weight,), {})
    return aliasing(func, (weight, dim, start, end, step), {}, found)


@implements_stack(aten.split.Tensor)
def _split(func: Any, weight: QuantizedStack, size: int, dim: int = 0) -> Any:
    length = weight.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, size)] if length else [0]
    return _split_with_sizes(aten.split_with_sizes.default, weight, sizes, dim)


@implements_stack(aten.split_with_sizes.default)
def _split_with_sizes(func: Any, weight: QuantizedStack, sizes: Sequence[int], dim: int = 0) -> Any:
    if sum(sizes) != weight.shape[dim]:
        raise RuntimeError(f"split_with_sizes expects sizes that sum to {weight.shape[dim]}, not {list(sizes)}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(aten.slice.Tensor, weight, dim, start, start + n) for start, n in zip(starts, sizes, strict=True)]


@implements_stack(aten.permute.default)
def _permute(func: Any, weight: QuantizedStack, dims: Sequence[int]) -> Any:
    """The last two dimensions exchanged, or nothing."""
    count = weight.dim()
    order = [dim % count for dim in dims]
    if order == list(range(count)):
        return STACK_ATEN[aten.alias.default](aten.alias.default, weight)
    if order != [*range(count - 2), count - 1, count - 2]:
        raise unsupported(func, (weight,), {})
    return aliasing(func, (weight, dims), {}, transposed(weight))


@implements_stack(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.expand.default)
def _same_shape(func: Any, weight: QuantizedStack, size: Sequence[int], *others: Any, **options: Any) -> Any:
    """A view of the same shape; chosen experts may be numbered along other leading dimensions."""
    if tuple(size) == (-1,) and torch_distributed.sharded_by_fsdp():
        return STACK_ATEN[aten.alias.default](aten.alias.default, weight)
    if weight.ids is not None and func is not aten.expand.default and tuple(size[-2:]) == tuple(weight.shape[-2:]):
        ids = weight.ids.reshape(list(size[:-2]))
        return weight.choosing(ids, [*ids.shape, *weight.shape[-2:]])
    known = [own if given == -1 else given for given, own in zip(size, weight.shape, strict=False)]
    if len(size) != weight.dim() or tuple(known) != tuple(weight.shape):
        raise unsupported(func, (weight,), {})
    return STACK_ATEN[aten.alias.default](aten.alias.default, weight)


# Chosen experts.


@implements_stack(aten.index.Tensor)
def _index(func: Any, weight: Tensor, indices: Sequence[Tensor | None]) -> Any:
    first, *others = indices
    if not isinstance(weight, QuantizedStack) or weight.dim() < 3 or first is None or first.dtype == torch.bool:
        raise unsupported(func, (weight,), {})
    if any(other is not None for other in others):
        raise unsupported(func, (weight,), {})
    return chosen(weight, first)


@implements_stack(aten.index_select.default)
def _index_select(func: Any, weight: QuantizedStack, dim: int, index: Tensor) -> Any:
    if dim % weight.dim() != 0 or weight.dim() < 3:
        raise unsupported(func, (weight,), {})
    return chosen(weight, index)


# New values.


@implements_stack(aten.copy_.default)
def _copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Into a stack: converted into its storage, or the parts of an equal one. Out of a stack: its values."""
    if not isinstance(target, QuantizedStack):
        assert isinstance(source, QuantizedWeight)
        return target.copy_(source.dequantize(), non_blocking)
    if source is target:
        return target
    if target.pending is not None:
        raise PendingWeightError(f"'{target.pending.path}' has no storage yet that {func} could write to")
    if target.ids is not None or target.spec.rows_of_larger:
        raise UnsupportedError(f"chosen experts or rows of {target.label} are no place for values: copy_ whole experts")
    if isinstance(source, QuantizedWeight):
        copy_parts(target, source)
    else:
        _refresh(target, source)
    mark_as_changed(target.parts)
    return target


def _refresh(target: QuantizedStack, source: Tensor) -> None:
    values = source.detach().expand(target.shape)
    check_values(values, target.label)
    # The parts of the matrix of one expert have an axis in front that its values have not.
    encode_into(target.parts, values.reshape(target.experts, *values.shape[-2:]), target.spec)


METADATA_ONLY.update(
    {
        *(aten.select.int, aten.unbind.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default),
        *(aten.permute.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default),
        *(aten.expand.default, aten.copy_.default),
    }
)
