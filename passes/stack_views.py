"""How a stack of experts' matrices is seen by the operations that use it: through views, and through picks of experts.

    w[i], w.select(0, i)          one expert, by a number or by a tensor with one
    w[ids], index_select(0, ids)  the matrices of experts, one for each of `ids`: dimensions of `ids` along the experts
    w.unbind(0), w[a:b], .mT, ... views, as of any weight (`weight_views`)

Which experts are picked depends on data. It does not matter: what is asked here is along which stored axis each
dimension runs.
"""

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from olq_fx import torch_private
from olq_fx.passes.fxtools import arguments, is_call, tensor_of, value_of
from olq_fx.passes.weight_views import (
    NEITHER,
    Dim,
    WeightView,
    asks_for_metadata,
    decoded,
    stored_weight,
    view_of_dense,
    views_of,
)

EXPERTS = 0
"""The stored axis along which experts lie; the other two are 1 and 2."""

_INDICES = frozenset((torch.int32, torch.int64))
"""What a tensor of numbers holds by which experts are picked; one of bool or uint8 is a mask."""

_STAND_IN = 2
"""The extent of a view without data where the graph knows none, or 0: more than 1, so that its axis stays known."""


def stored_stack(weight: Node) -> WeightView | None:
    """The view that a graph input has of itself; None unless it is a dense stack of matrices of floating numbers."""
    tensor = tensor_of(weight)
    return stored_weight(weight, 3) if tensor is not None and tensor.is_floating_point() else None


def uses_of_stack(view: WeightView, node: Node | None = None) -> Iterator[tuple[Node, Node, WeightView]]:
    """Every operation on a stack that neither views it nor picks from it, as (user, operand, the operand's view)."""
    node = view.weight if node is None else node
    for user in list(node.users):
        if asks_for_metadata(user):
            continue
        picked = _picked(user, node, view)
        found = [(user, picked)] if picked is not None else views_of(user, node, view)
        for result, seen in found:
            if seen is None or _is_other(seen, view):
                yield user, node, view
            else:
                yield from uses_of_stack(seen, result)


def _is_other(seen: WeightView, view: WeightView) -> bool:
    """Whether a view has other values (it is cast), or the same ones several times (it is expanded)."""
    broadcast = any(
        size > 1 and stride == 0 for size, stride in zip(seen.value.shape, seen.value.stride(), strict=True)
    )
    return broadcast or seen.value.dtype != view.value.dtype


def _picked(user: Node, node: Node, view: WeightView) -> WeightView | None:
    """The view that a call has of the experts that it picks by an index from the graph; None if it does not."""
    call = _index(user, node)
    result = tensor_of(user)
    if call is None or result is None or len(view.dims) < 2 or view.dims[0].axis not in (EXPERTS, NEITHER):
        return None
    index, rest = call
    if not _is_index(index):
        return None
    try:
        whole = view.value[(slice(None), *rest)]
    except (IndexError, TypeError, ValueError):
        return None
    inner = decoded(whole, view)
    if inner is None or whole.dim() != view.value.dim():
        return None
    leading = tuple(map(_extent, result.shape[: result.dim() - whole.dim() + 1]))
    return _gathered(inner, leading)


def _gathered(inner: WeightView, leading: tuple[int, ...]) -> WeightView | None:
    """What is left of a view of experts if its first dimension gives way to those of an index."""
    count, rest = math.prod(leading), tuple(inner.value.shape[1:])
    value = torch.empty((count, *rest), dtype=inner.value.dtype, device="meta")
    dims = (Dim(EXPERTS if count > 1 else NEITHER, count, 1), *inner.dims[1:])
    dense = view_of_dense(inner.weight, value, dims, inner.start, inner.stored)
    return decoded(value.view(*leading, *rest), dense)


def _index(user: Node, node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """(index along the first dimension, plain indices of the others) of a call that picks from a node."""
    if is_call(user, operator.getitem, "__getitem__"):
        index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
        plain = all(each is Ellipsis or isinstance(each, slice) for each in index[1:])
        return (index[0], index[1:]) if index and user.args[0] is node and plain else None
    if is_call(user, torch.index_select, "index_select", torch.select, "select"):
        bound = arguments(user, "input", "dim", "index")
        if bound is None or len(bound) != 3 or bound["input"] is not node or bound["dim"] not in (0, -_rank(node)):
            return None
        return bound["index"], ()
    return None


def _rank(node: Node) -> int:
    tensor = tensor_of(node)
    return -1 if tensor is None else tensor.dim()


def _is_index(index: Any) -> bool:
    """Whether an index is a number, or a tensor of numbers, that the graph computes."""
    value = value_of(index) if isinstance(index, Node) else None
    if isinstance(value, Tensor):
        return value.dtype in _INDICES
    return isinstance(value, torch.SymInt) or (isinstance(value, int) and not isinstance(value, bool))


def _extent(extent: Any) -> int:
    """An extent as the graph saw it; another where it did not."""
    return torch_private.hint_of(extent) or _STAND_IN
