"""How a weight is seen by the operations that use it: through transpositions, row slices, casts and reshapes.

A view is run once on a tensor without data, and its strides say where its elements lie in the stored matrix. So every
operation that makes a view is understood (`.t()`, `[a:b]`, `chunk`, `permute`, einops), without a list of them. A stack
of matrices is seen in the same way, with one axis more (`stack_views`).

    dims of  w.view(H, D, K).transpose(0, 1)  with w stored (N, K):   (rows, step 1), (rows, step D), (columns, step 1)
"""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from olq_fx import torch_private
from olq_fx.passes.fxtools import tensor_of, value_of, written

ROWS, COLUMNS, NEITHER = 0, 1, -1

_COPIES = frozenset(
    ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", "cpu", "cuda")
)
"""Methods whose result holds the same values (in another dtype, perhaps) and no storage of the input."""

_METADATA = frozenset(("size", "numel", "dim", "stride", "is_contiguous", "storage_offset", "is_floating_point"))
"""Methods that ask for no values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a view.

    Attributes:
        axis: along which axis of the stored weight it runs; NEITHER for one of size 1 or a broadcast one.
        size: its extent.
        step: how many rows or columns (or matrices) apart its neighbours are.
    """

    axis: int
    size: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class WeightView:
    """What a node sees of a stored matrix, or of a stack of them.

    Attributes:
        weight: the graph input.
        dims: the dimensions of the view.
        start: along each axis, the first that it sees of what is stored.
        stored: the shape of what is stored: (rows, columns) of a matrix.
        value: a tensor without data in the shape of the view.
        layout: the dense tensor that `value` is a view of: (stride, dimension) of its dimensions, and where it starts.
    """

    weight: Node
    dims: tuple[Dim, ...]
    start: tuple[int, ...]
    stored: tuple[int, ...]
    value: Tensor
    layout: "_Layout"


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    strides: tuple[tuple[int, Dim], ...]
    start: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as a linear layer uses it: rows `start` to `stop` of (N, K).

    Attributes:
        weight: the graph input.
        transposed: whether it is stored as (K, N).
        start, stop: the rows used.
        rows: N.
        columns: K.
    """

    weight: Node
    transposed: bool
    start: int
    stop: int
    rows: int
    columns: int


def stored_matrix(weight: Node) -> WeightView | None:
    """The view that a graph input has of itself; None unless it is a dense matrix of static shape."""
    return stored_weight(weight, 2)


def stored_weight(weight: Node, rank: int) -> WeightView | None:
    """The view that a graph input has of itself; None unless it is dense, of static shape and of this rank."""
    tensor = tensor_of(weight)
    if tensor is None or tensor.dim() != rank or not all(isinstance(extent, int) for extent in tensor.shape):
        return None
    value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if not _is_dense(value):
        return None
    dims = tuple(Dim(axis if extent > 1 else NEITHER, extent, 1) for axis, extent in enumerate(tensor.shape))
    return view_of_dense(weight, value, dims, (0,) * rank, tuple(tensor.shape))


def view_of_dense(
    weight: Node, value: Tensor, dims: tuple[Dim, ...], start: tuple[int, ...], stored: tuple[int, ...]
) -> WeightView:
    """A view of which nothing is known but what its dimensions are; views of it are read from its own strides."""
    return WeightView(weight, dims, start, stored, value, _layout_of(value, dims, start))


def uses_of(view: WeightView, node: Node | None = None) -> Iterator[tuple[Node, Node, WeightView]]:
    """Every operation on a weight that is more than another view of it, as (user, operand, the operand's view)."""
    node = view.weight if node is None else node
    for user in list(node.users):
        if asks_for_metadata(user):
            continue
        for result, seen in views_of(user, node, view):
            if seen is None:
                yield user, node, view
            else:
                yield from uses_of(seen, result)


def asks_for_metadata(user: Node) -> bool:
    """Whether a node reads no values of a weight."""
    return user.op == "call_method" and user.target in _METADATA


def views_of(user: Node, node: Node, view: WeightView) -> Iterator[tuple[Node, WeightView | None]]:
    """The views that `user` makes of `node`, or (user, None) if it does something else with it."""
    made = _run(user, node, view.value)
    if isinstance(made, Tensor):
        yield user, _seen(made, user, view)
    elif isinstance(made, (tuple, list)) and made and all(isinstance(piece, Tensor) for piece in made):
        picks = [pick for pick in user.users if pick.target is operator.getitem and isinstance(pick.args[1], int)]
        if len(picks) != len(user.users):
            yield user, None
        for pick in picks:
            yield pick, _seen(made[pick.args[1]], pick, view)  # type: ignore[index]
    else:
        yield user, None


def _run(user: Node, node: Node, value: Tensor) -> Any:
    """What a user makes of a weight without data, None if it cannot be a view: it has other inputs, or writes."""
    if user.op not in ("call_function", "call_method") or written(user) or torch_private.is_higher_order(user.target):
        return None
    others = [other for other in user.all_input_nodes if other is not node]
    if others and user.target != "type_as":
        return None
    result = tensor_of(user)
    if result is None and not isinstance(value_of(user), (tuple, list)):
        return None

    def stand_in(other: Node) -> Any:
        tensor = tensor_of(other)
        if other is node or tensor is None:
            return value
        return torch.empty((), dtype=tensor.dtype, device="meta")

    args, kwargs = map_arg((user.args, dict(user.kwargs)), stand_in)
    weight = tensor_of(node)
    if result is not None and weight is not None and result.device != weight.device:
        return None
    try:
        if user.op == "call_method":
            return getattr(args[0], str(user.target))(*args[1:], **kwargs)
        return user.target(*args, **kwargs) if callable(user.target) else None
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError, ValueError):
        return None


def _seen(made: Tensor, node: Node, before: WeightView) -> WeightView | None:
    """The view that a result is of the stored matrix; None if its values are others."""
    if not made.is_floating_point():
        return None
    if torch_private.shares_storage(made, before.value):
        return decoded(made, before)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _COPIES and made.shape == before.value.shape:
        return dataclasses.replace(before, value=made, layout=_layout_of(made, before.dims, before.start))
    # `w.data` has no storage in common where there is no storage.
    if name == "_get_data_attr":
        return dataclasses.replace(before, value=before.value)
    return None


def _is_dense(value: Tensor) -> bool:
    """Whether every element has a place of its own and there are no gaps."""
    expected = 1
    for extent, stride in sorted(zip(value.shape, value.stride(), strict=True), key=lambda pair: pair[1]):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return value.storage_offset() == 0


def _layout_of(value: Tensor, dims: tuple[Dim, ...], start: tuple[int, ...]) -> _Layout:
    pairs = [(stride, dim) for stride, dim in zip(value.stride(), dims, strict=True) if dim.size > 1]
    return _Layout(tuple(sorted(pairs, key=lambda pair: -pair[0])), start)


def decoded(made: Tensor, before: WeightView) -> WeightView | None:
    """Read from strides and offset what a view sees."""
    layout = before.layout
    dims = []
    for size, stride in zip(made.shape, made.stride(), strict=True):
        if size == 1 or stride == 0:
            dims.append(Dim(NEITHER, int(size), 0))
            continue
        base = next((pair for pair in layout.strides if pair[0] <= stride), None)
        if base is None or stride % base[0] or (size - 1) * (stride // base[0]) >= base[1].size:
            return None
        dims.append(Dim(base[1].axis, int(size), base[1].step * (stride // base[0])))
    start = list(layout.start)
    rest = made.storage_offset()
    for stride, dim in layout.strides:
        if dim.axis != NEITHER:
            start[dim.axis] += rest // stride * dim.step
        rest %= stride
    return dataclasses.replace(before, dims=tuple(dims), start=tuple(start), value=made)


def as_matrix(view: WeightView, reduced: int, kept: tuple[int, ...]) -> Matrix | str:
    """Read a view as rows of (N, K).

    Args:
        view: of the weight's operand.
        reduced: the dimension of the view that a product sums over.
        kept: the dimensions that become output features, in the order in which they do.

    Returns:
        The matrix, or why it is none.
    """
    along = view.dims[reduced].axis
    if along == NEITHER:
        along = next((1 - view.dims[dim].axis for dim in kept if view.dims[dim].axis != NEITHER), reduced % 2)
    across = 1 - along
    if view.dims[reduced].size != view.stored[along] or view.start[along] or view.dims[reduced].step not in (0, 1):
        return "it is used through a slice along its reduction axis"
    count = 1
    for index in reversed(kept):
        dim = view.dims[index]
        if dim.size > 1 and (dim.axis != across or dim.step != count):
            return "its rows are used in another order than they are stored in"
        count *= dim.size
    start = view.start[across]
    return Matrix(view.weight, along == ROWS, start, start + count, view.stored[across], view.stored[along])
