"""Which places of a model a stored tensor goes to: by its name, or by the rules of the library that the model is from.

Naming(names).route(tensor) -> Whole | Piece | Apart | Together | Ignored | None
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from olq_fx.loading_slots import Place, Slot
from olq_fx.loading_stored import StoredTensor


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """It is all values of a place."""

    target: str


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """It is a piece of the values of a place.

    Attributes:
        target: the place.
        key: which piece: no two of a place have the same.
        place: where in it.
        siblings: of one of several that differ by a number, a text with `{}` for it; else "".
        count: how many of those there are.
    """

    target: str
    key: tuple[str, int]
    place: Place
    siblings: str = ""
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Apart:
    """The values of several places are computed of it.

    Attributes:
        split: gives the values by the names of their places.
    """

    split: Callable[[Tensor], Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Together:
    """The values of one or several places are computed of it and others.

    Attributes:
        group: those with the same group belong together.
        merge: gives the values by the names of their places, of tensors with their names.
    """

    group: str
    merge: Callable[[Sequence[tuple[str, Tensor]]], Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Ignored:
    """The library that the model is from says that the model does without it."""


Route = Whole | Piece | Apart | Together | Ignored | None


class Naming:
    """A tensor goes where its name says."""

    def __init__(self, names: Collection[str]) -> None:
        """The names are those of all places."""
        self._names = names

    def route(self, tensor: StoredTensor) -> Route:
        """Where a tensor goes; None if nowhere."""
        return Whole(tensor.name) if tensor.name in self._names else None

    def may_miss(self, name: str) -> bool:
        """Whether the model does without values for a place."""
        return False

    def twin(self, name: str) -> str:
        """The place whose values another one takes that is called `name` and has got none; "" if there is none."""
        return ""

    def recompute(self, buffers: Sequence[Slot]) -> dict[Slot, Tensor]:
        """The values of buffers that the model's own code computes; those that it cannot compute are left out."""
        return {}
