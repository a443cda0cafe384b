"""Views of pending weights: places for values that come in pieces.

    weight[3].copy_(x), weight.data[:128] = x, weight.narrow(0, 0, 64).copy_(x), weight.chunk(2)[1].t().copy_(x)

A view is caught above autograd, which would refer to the weight as its base, so that the weight could not be given its
data. It is kept as the same view of a tensor on meta: whatever functions made it, its offset and strides say which
elements it has. Once the weight has data, the view is made again from it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import torch_private
from olq_fx.weights_arrival import arrive, settle
from olq_fx.weights_tensor import QuantizedWeight, overrides, root_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One function of the chain that made a view.

    Attributes:
        function, arguments, options: the call; the tensor before it is its first argument.
        index: which of its results, where it has several.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    index: int | None

    def __call__(self, tensor: Tensor) -> Any:
        found = self.function(tensor, *self.arguments, **self.options)
        return found if self.index is None else found[self.index]


class PendingPiece(torch.Tensor):
    """A view of a pending weight. It takes values (`copy_`, `[...] =`, `zero_`, `fill_`) and has none itself.

    Attributes:
        root: the weight.
        place: the same view of a tensor on meta.
        steps: how it was made of the weight.
    """

    root: QuantizedWeight
    place: Tensor
    steps: tuple[_Step, ...]

    @staticmethod
    def __new__(
        cls: type["PendingPiece"], root: QuantizedWeight, place: Tensor, steps: tuple[_Step, ...]
    ) -> "PendingPiece":
        """The piece of `root` at `place`."""
        self: PendingPiece = torch.Tensor._make_wrapper_subclass(
            cls, place.shape, place.stride(), place.storage_offset(), dtype=root.dtype, device=root.device
        )
        self.root, self.place, self.steps = root, place, steps
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What it is a piece of."""
        return f"PendingPiece(shape {tuple(self.shape)} of {self.root!r})"

    def current(self) -> Any:
        """The view of the weight, if that has data.

        Raises:
            PendingWeightError: it has none.
        """
        found: Any = self.root.ready()
        for step in self.steps:
            found = step(found)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views of the view, and what writes to it; the rest needs data."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], PendingPiece):
            piece = args[0]
            if func in _VIEWS or func in _ALIASES:
                return _viewed(piece.root, piece.place, piece.steps, func, args[1:], kwargs)
            if func in _WRITERS:
                return _WRITERS[func](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What needs data has it from the weight."""
        found, named = _current(args), {key: _current(item) for key, item in (kwargs or {}).items()}
        return func(*found, **named)


def _current(item: Any) -> Any:
    """What stands for a piece, also in lists of tensors, where operators such as `cat` have them."""
    if isinstance(item, (list, tuple)):
        return type(item)(map(_current, item))
    return item.current() if isinstance(item, PendingPiece) else item


torch_private.hide_from_dynamo(PendingPiece.__torch_function__)
torch_private.hide_from_dynamo(PendingPiece.__torch_dispatch__)


def _methods(*names: str) -> list[Any]:
    """The functions of these names that torch hands to a tensor's own handling of them."""
    places = (Tensor, torch, torch.functional)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


_ALIASES = (Tensor.data.__get__, Tensor.detach, torch.detach)  # type: ignore[attr-defined]
"""What gives the same elements; of a weight itself it is an alias of its own kind."""

_VIEWS = frozenset(
    [
        *_methods("narrow", "select", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk"),
        *_methods("t", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute", "adjoint"),
        *_methods("view", "reshape", "view_as", "reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"),
        *_methods("as_strided", "diagonal", "unfold", "unsafe_split", "hsplit", "vsplit", "dsplit"),
        *(Tensor.__getitem__, Tensor.__iter__, Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__),  # type: ignore[attr-defined]
    ]
)
"""Functions that give views of a tensor, or lists of them."""


@overrides(*_VIEWS)
def _view(func: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a pending weight, places for values; of any other tensor what it is."""
    if not isinstance(weight, QuantizedWeight) or weight.pending is None or not torch_private.runs_at_once():
        return func(weight, *args, **kwargs)
    place = torch.empty_strided(weight.shape, weight.stride(), device="meta")
    return _viewed(root_of(weight), place, (), func, args, kwargs)


def _viewed(
    root: QuantizedWeight,
    place: Tensor,
    steps: tuple[_Step, ...],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The pieces that a function makes of a place.

    Raises:
        PendingWeightError: it makes a copy or reads bits as another dtype, which would need data.
    """
    found = func(place, *args, **kwargs)
    if isinstance(found, Tensor):
        return _piece(root, place, found, (*steps, _Step(func, args, kwargs, None)))
    if func is Tensor.__iter__:
        func, args = Tensor.unbind, ()
    pieces = [_piece(root, place, one, (*steps, _Step(func, args, kwargs, index))) for index, one in enumerate(found)]
    return iter(pieces) if not isinstance(found, (tuple, list)) else type(found)(pieces)


def _piece(root: QuantizedWeight, before: Tensor, place: Tensor, steps: tuple[_Step, ...]) -> PendingPiece:
    if place.dtype != before.dtype or not torch_private.shares_storage(before, place):
        root.ready()
    return PendingPiece(root, place, steps)


def _copy_(piece: PendingPiece, source: Tensor, non_blocking: bool = False) -> PendingPiece:
    settle(piece.root)
    if piece.root.pending is None:
        piece.current().copy_(source)
    else:
        arrive(piece.root, piece.place, source)
    return piece


def _fill_(piece: PendingPiece, value: Any) -> PendingPiece:
    return _copy_(piece, torch.as_tensor(value, dtype=piece.dtype))


def _zero_(piece: PendingPiece) -> PendingPiece:
    return _fill_(piece, 0.0)


def _set_item(piece: PendingPiece, index: Any, value: Any) -> None:
    _put(piece[index], value)


def _put(place: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _copy_(place, value)
    else:
        _fill_(place, value)


_WRITERS: dict[Any, Callable[..., Any]] = {
    Tensor.copy_: _copy_,
    Tensor.fill_: _fill_,
    Tensor.zero_: _zero_,
    Tensor.__setitem__: _set_item,
}
"""What puts values into a piece."""


@overrides(Tensor.__setitem__)
def _set_item_of_weight(func: Any, weight: Any, index: Any, value: Any) -> None:
    """Into a pending weight, a copy into a piece of it; else what torch does."""
    if isinstance(weight, QuantizedWeight) and weight.pending is not None:
        _put(_view(Tensor.__getitem__, weight, index), value)
    else:
        func(weight, index, value)
