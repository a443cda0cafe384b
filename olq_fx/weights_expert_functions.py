"""matmul and einsum with the converted weights of experts: what torch takes apart in ways that depend on strides.

Above autograd: each becomes one `torch.bmm` with batches of rows, (L, R, C) times (L, C, D), L the leading dimensions
of the weight as one.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from olq_fx.weights_stack import QuantizedStack


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` where one of the two is a stack of at least three dimensions."""
    if isinstance(b, QuantizedStack):
        return _times(a.unsqueeze(0), b).squeeze(-2) if a.dim() == 1 else _times(a, b)
    assert isinstance(a, QuantizedStack)
    if b.dim() == 1:
        return _times(b.unsqueeze(0), a.mT).squeeze(-2)
    return _times(b.mT, a.mT).mT


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """(..., M, C) times (*lead, C, D), the dimensions before the last two broadcast."""
    lead = weight.shape[:-2]
    count = len(lead)
    if x.dim() < count + 2:
        x = x.reshape(*(1,) * (count + 2 - x.dim()), *x.shape)
    extra = x.shape[: x.dim() - count - 2]
    x = x.expand(*extra, *lead, *x.shape[-2:])
    # What the weight does not have in front goes to the rows.
    front = x.movedim(tuple(range(len(extra))), tuple(range(count, count + len(extra))))
    y = _bmm(front.reshape(*lead, -1, x.shape[-1]), weight)
    y = y.reshape(*lead, *extra, x.shape[-2], y.shape[-1])
    return y.movedim(tuple(range(count, count + len(extra))), tuple(range(len(extra))))


def _bmm(x: Tensor, weight: Tensor) -> Tensor:
    """(*lead, R, C) times (*lead, C, D)."""
    lead = weight.shape[:-2]
    if len(lead) > 1:
        weight = weight.view(math.prod(lead), *weight.shape[-2:])
    y = torch.bmm(x.reshape(math.prod(lead), *x.shape[-2:]), weight)
    return y.reshape(*lead, *y.shape[-2:])


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertAxes:
    """How an einsum is a product with a matrix for each place along the leading axes of a weight.

    Attributes:
        lead: the leading axes of the weight.
        free: the axes of the input that are neither those nor summed over.
        reduced, features: the axis that is summed over, and the other one of the last two of the weight.
        rows_first: whether the weight reads (..., N, K), not (..., K, N).
    """

    lead: tuple[str, ...]
    free: tuple[str, ...]
    reduced: str
    features: str
    rows_first: bool


def expert_axes(weight: Sequence[str], x: Sequence[str], output: Sequence[str]) -> ExpertAxes | None:
    """Read an einsum of a weight of at least three axes and an input; None if it is no such product.

    >>> expert_axes("efd", "btd", "btef")
    ExpertAxes(lead=('e',), free=('b', 't'), reduced='d', features='f', rows_first=True)
    """
    *lead, first, second = weight
    reduced = [axis for axis in (first, second) if axis in x and axis not in output]
    distinct = all(len(set(term)) == len(term) for term in (weight, x, output))
    if len(reduced) != 1 or not distinct:
        return None
    (k,) = reduced
    n = second if k == first else first
    free = [axis for axis in x if axis != k and axis not in lead]
    if n in x or sorted(output) != sorted([*lead, *free, n]):
        return None
    return ExpertAxes(tuple(lead), tuple(free), k, n, k == second)


def einsum(axes: ExpertAxes, x_term: Sequence[str], output: Sequence[str], x: Tensor, weight: Tensor) -> Tensor:
    """The product that `axes` describe.

    Args:
        axes: of `expert_axes`.
        x_term, output: the axes of the input and of the result.
        x: the input.
        weight: a stack.
    """
    present = [axis for axis in axes.lead if axis in x_term]
    ordered = x.permute([x_term.index(axis) for axis in (*present, *axes.free, axes.reduced)])
    for position, axis in enumerate(axes.lead):
        if axis not in present:
            ordered = ordered.unsqueeze(position)
    lead = weight.shape[:-2]
    free = ordered.shape[len(lead) : -1]
    rows = ordered.expand(*lead, *ordered.shape[len(lead) :]).reshape(*lead, math.prod(free), ordered.shape[-1])
    y = _bmm(rows, weight.mT if axes.rows_first else weight)
    y = y.reshape(*lead, *free, y.shape[-1])
    have = (*axes.lead, *axes.free, axes.features)
    return y.permute([have.index(axis) for axis in output])
