"""What is to be done with every stored tensor, checked against the model before any values are read.

planner = Planner(slots, naming)
steps = [*planner.add(tensor), ..., *planner.finish()]
planner.problems, .unexpected, .missing(), .refused, .twins
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from olq_fx.errors import nearest
from olq_fx.loading_names import Apart, Ignored, Naming, Piece, Together, Whole
from olq_fx.loading_slots import Place, Slot
from olq_fx.loading_stored import StoredTensor
from olq_fx.weights import FLOATING

_SHOWN = 8
"""How many of many things a message lists."""

_WHOLE = -1
"""In the place of a piece's number: of all values, which come under one of the names of their place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """Values for a place.

    Attributes:
        slot: the place.
        place: where in it; None for the whole.
        values: what goes there.
    """

    slot: Slot
    place: Place | None
    values: Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What is read together, and what becomes of it.

    Attributes:
        inputs: what is read: one tensor, or all that the values of one weight are computed of.
        deliver: gives the values for places, of those of the inputs.
        again: whether the place has its values by then, under another of its names: they must be the same.
        slots: the places that get values.
    """

    inputs: tuple[StoredTensor, ...]
    deliver: Callable[[Sequence[Tensor]], Sequence[Delivery]]
    again: bool = False
    slots: tuple[Slot, ...] = ()


class Planner:
    """Matches stored tensors with the places of a model.

    Attributes:
        problems: what does not fit, each a sentence.
        unexpected: the tensors that have no place.
        refused: places with tensors that do not fit.
        twins: places that take the values of others, which are tied to them but another parameter.
    """

    def __init__(self, slots: Mapping[str, Slot], naming: Naming) -> None:
        """Nothing has a place yet."""
        self._slots, self._naming = slots, naming
        self.problems: list[str] = []
        self.unexpected: list[StoredTensor] = []
        self.twins: dict[Slot, Slot] = {}
        self._seen: dict[str, StoredTensor] = {}
        self._taken: dict[Slot, dict[tuple[str, int], StoredTensor]] = {}
        self._left: dict[Slot, int] = {}
        self.refused: set[Slot] = set()
        self._siblings: dict[Slot, dict[str, int]] = {}
        self._groups: dict[str, tuple[Together, list[StoredTensor]]] = {}

    def add(self, tensor: StoredTensor) -> list[Step]:
        """What is to be done with a tensor: nothing yet if others must come first."""
        if self._is_second(self._seen.setdefault(tensor.name, tensor), tensor):
            return []
        route = self._naming.route(tensor)
        if route is None:
            self.unexpected.append(tensor)
        elif isinstance(route, Together):
            self._groups.setdefault(route.group, (route, []))[1].append(tensor)
        elif isinstance(route, Whole):
            return self._step((tensor,), self._whole(route.target), key=(route.target, _WHOLE))
        elif isinstance(route, Piece):
            self._siblings.setdefault(self._slots[route.target], {})[route.siblings] = route.count
            return self._step((tensor,), self._piece(route), key=route.key)
        elif isinstance(route, Apart):
            return self._step((tensor,), self._by_name(lambda values: route.split(values[0])))
        else:
            assert isinstance(route, Ignored)
        return []

    def finish(self) -> list[Step]:
        """What is to be done once all tensors are known."""
        steps = []
        for route, tensors in self._groups.values():
            names = [tensor.name for tensor in tensors]

            def merged(
                values: Sequence[Tensor], route: Together = route, names: Sequence[str] = names
            ) -> Mapping[str, Tensor]:
                return route.merge(list(zip(names, values, strict=True)))

            steps += self._step(tuple(tensors), self._by_name(merged))
        self._groups.clear()
        for slot in self._all():
            if slot not in self._taken:
                twin = next((self._slots.get(self._naming.twin(name)) for name in slot.names), None)
                if twin is not None and twin in self._taken:
                    self.twins[slot] = twin
        return steps

    def complete(self, slot: Slot) -> bool:
        """Whether a place gets all its values."""
        return self._left.get(slot) == 0

    def missing(self) -> dict[Slot, str]:
        """The places that do not get all their values, each with what is missing, but not those that may miss."""
        found = {}
        for slot in self._all():
            tensors = self._taken.get(slot)
            if slot in self.refused:
                continue
            if tensors is None and slot not in self.twins and not any(map(self._naming.may_miss, slot.names)):
                found[slot] = f"'{slot.name}'"
            elif tensors is not None and self._left[slot]:
                found[slot] = self._partly(slot, tensors)
        return found

    def nowhere(self) -> str:
        """The tensors that have no place, with the names that they may have meant."""
        free = [slot.name for slot in self.missing()] or list(self._slots)
        named = [f"{tensor.label} ({nearest(tensor.name, free)})" for tensor in self.unexpected[:_SHOWN]]
        return listed(named, len(self.unexpected))

    def _all(self) -> list[Slot]:
        return list(dict.fromkeys(self._slots.values()))

    def _partly(self, slot: Slot, tensors: Mapping[tuple[str, int], StoredTensor]) -> str:
        """Which values of a place are missing, by the names that they would have where these are numbered."""
        there = {tensor.name for tensor in tensors.values()}
        wanted = [
            siblings.format(number)
            for siblings, count in self._siblings.get(slot, {}).items()
            if siblings
            for number in range(count)
        ]
        absent = [f"'{name}'" for name in wanted if name not in there]
        some = f", of which {listed(absent[:_SHOWN], len(absent))}" if absent else ""
        return f"{self._left[slot]} of {slot.tensor.numel()} values of '{slot.name}'{some}"

    def _is_second(self, first: StoredTensor, tensor: StoredTensor) -> bool:
        if first is tensor:
            return False
        where = f": in {first.file} and in {tensor.file}" if tensor.file else ""
        self.problems.append(f"'{tensor.name}' is there twice{where}")
        return True

    def _whole(self, target: str) -> Callable[[Sequence[Tensor]], list[Delivery]]:
        return lambda values: [Delivery(self._slots[target], None, values[0])]

    def _piece(self, route: Piece) -> Callable[[Sequence[Tensor]], list[Delivery]]:
        return lambda values: [Delivery(self._slots[route.target], route.place, values[0])]

    def _by_name(
        self, compute: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    ) -> Callable[[Sequence[Tensor]], list[Delivery]]:
        return lambda values: [Delivery(self._slots[name], None, found) for name, found in compute(values).items()]

    def _step(
        self,
        inputs: tuple[StoredTensor, ...],
        deliver: Callable[[Sequence[Tensor]], list[Delivery]],
        key: tuple[str, int] = ("", 0),
    ) -> list[Step]:
        """Try a step on tensors without values, and note what it gives to which place."""
        empty = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in inputs]
        named = listed([tensor.label for tensor in inputs[:_SHOWN]], len(inputs))
        try:
            deliveries = deliver(empty)
        except Exception as error:  # whatever the code of another library makes of tensors that do not fit
            self.problems.append(f"{named} cannot be converted for this model: {type(error).__name__}: {error}")
            return []
        problems = [f"{named}: {problem}" for problem in map(_misfit, deliveries) if problem]
        if problems:
            self.refused.update(delivery.slot for delivery in deliveries)
        again = [self._take(delivery, inputs[0], key) for delivery in deliveries] if not problems else []
        self.problems += problems
        slots = tuple(delivery.slot for delivery in deliveries)
        return [Step(inputs, deliver, any(again), slots)] if not problems and None not in again else []

    def _take(self, delivery: Delivery, tensor: StoredTensor, key: tuple[str, int]) -> bool | None:
        """Note that a place gets values: whether it has them by then under another name; None if it must not."""
        slot = delivery.slot
        taken = self._taken.setdefault(slot, {})
        self._left.setdefault(slot, slot.tensor.numel())
        by_names = bool(taken) and all(number == _WHOLE for _, number in taken)
        if by_names and key[1] == _WHOLE and key not in taken:
            taken[key] = tensor
            return True
        other = taken.get(key) or (next(iter(taken.values()), None) if by_names or delivery.place is None else None)
        if other is not None:
            self.problems.append(f"{other.label} and {tensor.label} are both values of '{slot.name}'")
            return None
        taken[key] = tensor
        self._left[slot] -= delivery.values.numel()
        return False


def _misfit(delivery: Delivery) -> str:
    """Why values do not fit into their place; "" if they do."""
    slot, values = delivery.slot, delivery.values
    tensor, place = slot.tensor, delivery.place
    like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    try:
        shape = (like if place is None else place(like)).shape
    except (RuntimeError, IndexError) as error:
        return f"there is no place for it in '{slot.name}', {tuple(tensor.shape)}: {error}"
    where = f"'{slot.name}'" if place is None else f"its place in '{slot.name}'"
    if values.shape != shape:
        return f"its shape is {tuple(values.shape)}, that of {where} {tuple(shape)}"
    if slot.weight is not None and values.dtype not in FLOATING:
        return (
            f"its dtype is {_name(values.dtype)}, and {where} is quantized from "
            f"{', '.join(map(_name, FLOATING))} only; is it quantized already?"
        )
    if values.dtype != tensor.dtype and not (values.dtype in FLOATING and tensor.dtype in FLOATING):
        return f"its dtype is {_name(values.dtype)}, that of {where} {_name(tensor.dtype)}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(some: Sequence[str], count: int) -> str:
    """Some of `count` things in a message."""
    return ", ".join(some) + (f" and {count - len(some)} more" if count > len(some) else "")
