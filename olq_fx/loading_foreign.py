"""Checkpoints that others have quantized: their tensors, put together to the weights that a model has places for.

    regrouped(tensors, model, slots, naming, directory) -> Regrouped

Every weight that others have quantized becomes one stored tensor under the name of its parameter. Read, it is a
converted weight: its place takes codes and scales as they are. What has no format here is read as its values.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx import foreign
from olq_fx.declared import Declaration, declaration_of
from olq_fx.errors import LoadError, OlqFxError
from olq_fx.expert_layouts import layout_of
from olq_fx.foreign import Foreign, Header
from olq_fx.formats import get_format
from olq_fx.loading_names import Naming, Piece, Whole
from olq_fx.loading_slots import Slot
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


def regrouped(
    tensors: Sequence[StoredTensor], model: nn.Module, slots: Mapping[str, Slot], naming: Naming, label: str
) -> Regrouped:
    """Put together what belongs to one quantized weight.

    Args:
        tensors: of a source.
        model: that they are for.
        slots: its places.
        naming: where names go.
        label: of the source: if that is a directory with `config.json`, what that declares counts.

    Raises:
        LoadError: codes and scales that do not belong together, or a weight that is planned in another format.
    """
    declared = _declaration(model, label)
    block = None if declared is None else declared.block
    by_name = {tensor.name: tensor for tensor in tensors}
    headers = {name: Header(tensor.shape, tensor.dtype) for name, tensor in by_name.items()}
    found = foreign.groups(headers, {name: _logical(slot) for name, slot in slots.items()}, block)
    if not found.weights:
        return Regrouped(tuple(tensors))
    used = {name: weight for weight in found.weights for name in weight.names.values()}
    whole: list[StoredTensor] = []
    for tensor in tensors:
        weight = used.get(tensor.name)
        if weight is None:
            whole += [] if tensor.name in found.left_out else [tensor]
        elif tensor.name == weight.names["codes"]:
            whole.append(_Reader(weight, by_name, slots, naming, declared).stored())
    taken = tuple((weight.target, weight.format or f"original precision, of {weight.why}") for weight in found.weights)
    return Regrouped(tuple(whole), taken, found.left_out)


def _declaration(model: nn.Module, label: str) -> Declaration | None:
    path = Path(label)
    path = (path if path.is_dir() else path.parent) / "config.json"
    config: Any = getattr(model, "config", None)
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise LoadError(f"{path} is no JSON: {error}") from error
    return None if config is None else declaration_of(config)


def _logical(slot: Slot) -> tuple[int, ...]:
    """(N, K) or (E, N, K) of a place."""
    shape = tuple(slot.tensor.shape)
    module, leaf = slot.sites[0]
    layout = layout_of(module, leaf, slot.tensor) if len(shape) == 3 else None
    return shape if layout is None else layout.logical(shape)


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
        return slot, isinstance(route, Whole)

    def stored(self) -> StoredTensor:
        """What the loader sees: the shape of the parameter, and a floating dtype."""
        first = self._tensors["codes"]
        return StoredTensor(
            name=self._weight.target,
            shape=self._shape(),
            dtype=self._dtype(),
            file=first.file,
            read=self._read,
            touch=self._touch,
            release=self._release,
        )

    def _touch(self) -> None:
        for tensor in self._tensors.values():
            tensor.touch()

    def _release(self) -> None:
        for tensor in self._tensors.values():
            tensor.release()

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
        except (RuntimeError, ValueError) as error:
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
