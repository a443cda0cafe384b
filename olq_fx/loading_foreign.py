"""Checkpoints that hold weights in quantized form: their tensors, put together to what a model has places for.

    regrouped(source, model, slots, naming) -> Regrouped

Every such weight becomes one stored tensor under the name of its parameter. Read, it is a converted weight: its place
takes codes and scales as they are. What has no format here is read as its values.

The parts of a planned weight as our own state dicts have them are known by their names, shapes and dtypes, and come
first: they lie shard by shard, which no other library does.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx import foreign, state
from olq_fx.declared import Declaration, declaration_of
from olq_fx.errors import LoadError, OlqFxError
from olq_fx.expert_layouts import layout_of
from olq_fx.foreign import Foreign, Header, Known
from olq_fx.formats import get_format
from olq_fx.loading_names import Naming, Piece, Whole
from olq_fx.loading_slots import Slot
from olq_fx.loading_sources import Source
from olq_fx.loading_stored import StoredTensor
from olq_fx.schemes import SCHEMES
from olq_fx.weights import QuantizedStack, QuantizedWeight, WeightSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Regrouped:
    """The tensors of a source.

    Attributes:
        tensors: all, those of one weight put together.
        taken: names of weights that come quantized, each with its format, or with what it is dequantized from.
        left_out: names of tensors that are not needed.
    """

    tensors: tuple[StoredTensor, ...]
    taken: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()


def regrouped(source: Source, model: nn.Module, slots: Mapping[str, Slot], naming: Naming) -> Regrouped:
    """Put together what belongs to one quantized weight.

    Args:
        source: what is loaded; if it is files with a `config.json` beside them, what that declares counts.
        model: that it is for.
        slots: its places.
        naming: where names go.

    Raises:
        LoadError: codes and scales that do not belong together, or a weight that is planned in another format.
    """
    tensors = source.tensors
    by_name = {tensor.name: tensor for tensor in tensors}
    ours = _ours(slots, by_name)
    declared = _declaration(model, source.directory)
    block = None if declared is None else declared.block
    known = {name: _known(slot) for name, slot in slots.items()}
    mine = {part.name for parts in ours.values() for part in parts}
    headers = {name: Header(tensor.shape, tensor.dtype) for name, tensor in by_name.items() if name not in mine}
    found = foreign.groups(headers, known, block)
    if not found.weights and not ours:
        return Regrouped(tuple(tensors))
    used = {name: weight for weight in found.weights for name in weight.names.values()}
    first = {parts[0].name: name for name, parts in ours.items()}
    whole: list[StoredTensor] = []
    for tensor in tensors:
        weight = used.get(tensor.name)
        if tensor.name in first:
            name = first[tensor.name]
            whole.append(_stored_parts(name, slots[name], ours[name]))
        elif weight is not None and tensor.name == weight.names["codes"]:
            whole.append(_Reader(weight, by_name, slots, naming, declared).stored())
        elif weight is None and tensor.name not in mine and tensor.name not in found.left_out:
            whole.append(tensor)
    taken = [(name, _format(slots[name])) for name in ours]
    taken += [(weight.target, weight.format or f"original precision, of {weight.why}") for weight in found.weights]
    return Regrouped(tuple(whole), tuple(taken), found.left_out)


def _ours(slots: Mapping[str, Slot], tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[StoredTensor, ...]]:
    """The planned weights whose parts are there as our state dicts have them, by their names."""
    found = {}
    for name, slot in slots.items():
        weight = slot.weight
        if weight is None:
            continue
        before, dot, leaf = name.rpartition(".")
        parts = [tensors.get(before + dot + part) for part in state.part_names(leaf, weight.spec.format)]
        there = [(part.shape, part.dtype) for part in parts if part is not None]
        if tuple(there) == state.part_shapes(weight):
            found[name] = tuple(part for part in parts if part is not None)
    return found


def _format(slot: Slot) -> str:
    assert slot.weight is not None
    return slot.weight.spec.weight


def _stored_parts(name: str, slot: Slot, parts: Sequence[StoredTensor]) -> StoredTensor:
    """The parts of a planned weight as one tensor: read, it is such a weight."""
    weight = slot.weight
    assert weight is not None
    shapes = [tuple(part.shape) for part in weight.parts]

    def read() -> QuantizedWeight:
        found = [part.read().reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        foreign.check_finite(found, weight.spec.weight, name)
        kind = QuantizedStack if weight.dim() == 3 else QuantizedWeight
        return kind(found, weight.spec, weight.dtype, weight.shape, weight.stride())

    return _together(name, tuple(weight.shape), weight.dtype, parts, read)


def _together(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[StoredTensor], read: Callable[[], Tensor]
) -> StoredTensor:
    """Several stored tensors as one."""

    def touch() -> None:
        for part in parts:
            part.touch()

    def release() -> None:
        for part in parts:
            part.release()

    return StoredTensor(
        name=name, shape=shape, dtype=dtype, file=parts[0].file, read=read, touch=touch, release=release
    )


def _declaration(model: nn.Module, directory: Path | None) -> Declaration | None:
    config: Any = getattr(model, "config", None)
    path = None if directory is None else directory / "config.json"
    if path is not None and path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise LoadError(f"{path} is no JSON: {error}") from error
    return None if config is None else declaration_of(config)


def _known(slot: Slot) -> Known:
    """What tells how codes belong to a place."""
    shape, weight = tuple(slot.tensor.shape), slot.weight
    rows, columns = (None, None) if weight is None else weight.spec.format.group
    block = (rows, columns) if rows is not None and rows > 1 and columns is not None else None
    module, leaf = slot.sites[0]
    layout = layout_of(module, leaf, slot.tensor) if len(shape) == 3 else None
    if layout is None:
        return Known(shape, block=block)
    return Known(layout.logical(shape), layout.shards, layout.interleaved, block)


class _Reader:
    """Reads one weight."""

    def __init__(
        self,
        weight: Foreign,
        tensors: Mapping[str, StoredTensor],
        slots: Mapping[str, Slot],
        naming: Naming,
        declared: Declaration | None,
    ) -> None:
        self._weight, self._declared = weight, declared
        self._tensors = {what: tensors[name] for what, name in weight.names.items()}
        self._slot, self._is_whole = self._place(slots, naming)

    def _place(self, slots: Mapping[str, Slot], naming: Naming) -> tuple[Slot | None, bool]:
        codes = self._tensors["codes"]
        route = naming.route(dataclasses.replace(codes, name=self._weight.target, shape=self._weight.shape))
        if not isinstance(route, (Whole, Piece)):
            return None, False
        slot = slots[route.target]
        planned = slot.weight
        if planned is not None and self._weight.format not in ("", planned.spec.weight):
            method = "the checkpoint" if self._declared is None else f"'{self._declared.method}'"
            raise LoadError(
                f"'{slot.name}' is already quantized by {method} in {self._weight.format}, and planned in "
                f"{planned.spec.weight}: plan that format for it, or ignore it"
            )
        apart = planned is not None and planned.spec.shards > 1 and isinstance(route, Whole)
        if apart and self._weight.format and not self._weight.names["codes"].endswith("_blocks"):
            raise LoadError(
                f"'{slot.name}' is planned in {self._weight.format} with scales of gate and up apart, and the "
                "checkpoint has them together: ignore it, so that it is taken as it is"
            )
        return slot, isinstance(route, Whole)

    def stored(self) -> StoredTensor:
        """What the loader sees: the shape of the parameter, and a floating dtype."""
        parts = [self._tensors["codes"], *(part for what, part in self._tensors.items() if what != "codes")]
        return _together(self._weight.target, self._shape(), self._dtype(), parts, self._read)

    def _transposed(self) -> bool:
        if self._slot is None or not self._is_whole or len(self._weight.shape) != 3:
            return False
        module, leaf = self._slot.sites[0]
        layout = layout_of(module, leaf, self._slot.tensor)
        return layout is not None and layout.transposed

    def _shape(self) -> tuple[int, ...]:
        *experts, n, k = self._weight.shape
        return (*experts, k, n) if self._transposed() else self._weight.shape

    def _dtype(self) -> torch.dtype:
        dtype = torch.bfloat16 if self._slot is None else self._slot.tensor.dtype
        return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16

    def _read(self) -> Tensor:
        found = {what: tensor.read() for what, tensor in self._tensors.items()}
        try:
            if self._weight.parts is None:
                assert self._weight.values is not None
                values = self._weight.values(found)
                return values.mT if self._transposed() else values
            parts = self._weight.parts(found)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, OlqFxError):
                raise
            raise LoadError(f"{self._tensors['codes'].label} and its scales cannot be read: {error}") from error
        return self._converted(parts)

    def _converted(self, parts: Sequence[Tensor]) -> QuantizedWeight:
        spec = self._spec()
        if spec.shards > 1 and spec.interleaved:  # the parts lie shard by shard
            parts = [torch.cat([part[:, shard :: spec.shards] for shard in range(spec.shards)], 1) for part in parts]
        kind = QuantizedStack if len(self._weight.shape) == 3 else QuantizedWeight
        return kind(tuple(parts), spec, self._dtype(), self._shape())

    def _spec(self) -> WeightSpec:
        """How the weight is used: as it is planned; else as the checkpoint or, by default, its format has it."""
        slot = self._slot
        if slot is not None and self._is_whole and slot.weight is not None:
            return slot.weight.spec
        format = get_format(self._weight.format)
        activation = _activation(format.default_activation or "", self._declared)
        spec = WeightSpec(
            weight=format.name,
            activation=activation,
            weight_rule=format.weight_rule,
            activation_rule=get_format(activation).activation_rule if activation else "",
            transposed=self._transposed(),
        )
        if slot is None or not self._is_whole or len(self._weight.shape) != 3:
            return spec
        module, leaf = slot.sites[0]
        layout = layout_of(module, leaf, slot.tensor)
        if layout is None or not layout.interleaved:
            return spec
        return dataclasses.replace(spec, shards=layout.shards, interleaved=True)


def _activation(default: str, declared: Declaration | None) -> str:
    """The activation format of a weight: none where all that the checkpoint declares has none."""
    if declared is None or not declared.schemes:
        return default
    weight_only = any(SCHEMES[scheme].linear.activation is None for scheme in declared.schemes)
    return "" if weight_only else default
