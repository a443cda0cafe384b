"""The places of a model that take values, and how values get there.

    slots_of(model) -> dict[str, Slot]         by every name that a place has
    bare_buffers(model) -> dict[str, Slot]     what no file brings: buffers on meta that are not saved
    Filling(device, dtype, offload).put(slot, place, values)

A weight that is planned for quantization converts; one that is converted is given new values in the storage that it
has; an ordinary parameter or buffer on meta gets storage, and one that has storage keeps it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx import state, torch_private
from olq_fx.conversion import shards_of
from olq_fx.errors import LoadError
from olq_fx.expert_layouts import layout_of
from olq_fx.weights import Pending, QuantizedWeight, WeightSpec, become, fill, pending_weight, settle
from olq_fx.weights_encoding import check_values, encode

Place = Callable[[Tensor], Tensor]
"""The view of a tensor that takes a piece of its values."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A parameter or buffer, in all its places.

    Attributes:
        names: all that it has; the first is the one it is called by.
        sites: modules that hold it, and its name there.
        is_buffer: whether it is a buffer.
    """

    names: tuple[str, ...]
    sites: tuple[tuple[nn.Module, str], ...]
    is_buffer: bool

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.names[0]

    @property
    def tensor(self) -> Tensor:
        """What stands there now."""
        module, leaf = self.sites[0]
        found: Any = (module._buffers if self.is_buffer else module._parameters)[leaf]
        return found  # type: ignore[no-any-return]

    def install(self, tensor: Any) -> None:
        """Put another tensor in all its places."""
        for module, leaf in self.sites:
            (module._buffers if self.is_buffer else module._parameters)[leaf] = tensor

    @property
    def weight(self) -> QuantizedWeight | None:
        """What stands there, if it is planned for quantization."""
        tensor = self.tensor
        return tensor if isinstance(tensor, QuantizedWeight) else None

    @property
    def has_storage(self) -> bool:
        """Whether there is memory that keeps its place."""
        weight = self.weight
        return not self.tensor.is_meta if weight is None else weight.pending is None


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """The parameters and saved buffers of a model, each under every name that it has.

    Raises:
        LoadError: one of them is of a kind that cannot be loaded.
    """
    return _by_name(_places(model, saved=True))


def bare_buffers(model: nn.Module) -> dict[str, Slot]:
    """The buffers on meta that are not saved with the model, so that no file has them."""
    found = _by_name(_places(model, saved=False))
    return {name: slot for name, slot in found.items() if slot.tensor.is_meta}


def _places(model: nn.Module, *, saved: bool) -> Iterator[tuple[str, nn.Module, str, Tensor, bool]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None and saved:
                yield prefix + leaf, module, leaf, parameter, False
        for leaf, buffer in module._buffers.items():
            if buffer is not None and saved == (leaf not in module._non_persistent_buffers_set):
                yield prefix + leaf, module, leaf, buffer, True


def _by_name(places: Iterator[tuple[str, nn.Module, str, Tensor, bool]]) -> dict[str, Slot]:
    same: dict[int, list[tuple[str, nn.Module, str, Tensor, bool]]] = {}
    for place in places:
        if nn.parameter.is_lazy(place[3]):
            raise LoadError(f"'{place[0]}' has no shape yet: run the model once before it is loaded")
        same.setdefault(id(place[3]), []).append(place)
    slots = {}
    for group in same.values():
        sites = {(id(module), leaf): (module, leaf) for _, module, leaf, _, _ in group}
        slot = Slot(tuple(name for name, *_ in group), tuple(sites.values()), group[0][4])
        slots.update(dict.fromkeys(slot.names, slot))
    return slots


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """How values get to their places.

    Attributes:
        device: where what has no storage yet gets it, and where weights are converted.
        dtype: of floating parameters and buffers from then on; None leaves them theirs.
        offload: where converted weights go afterwards; None leaves them where they were converted.
        gathered: pieces that wait for the rest of their tensor, each with what is missing.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    offload: torch.device | None = None
    gathered: dict[Slot, tuple[Tensor, int]] = dataclasses.field(default_factory=dict)

    def put(self, slot: Slot, place: Place | None, values: Tensor) -> None:
        """Give a place its values, or a piece of them.

        Args:
            slot: the place.
            place: where in it; None for the whole.
            values: of the shape of the place.

        Raises:
            ConversionError: the weight cannot be converted (NaN, say).
        """
        weight = slot.weight
        if isinstance(values, QuantizedWeight):
            self._put_quantized(slot, place, values)
            return
        if place is not None and (weight is None or weight.pending is None):
            whole = self._gather(slot, place, values)
            if whole is None:
                return
            values = whole
        if weight is None:
            self._put_plain(slot, values, owned=place is not None)
        elif weight.pending is None:
            self._refresh(weight, values)
        else:
            self._convert(weight, place, values)

    def _put_quantized(self, slot: Slot, place: Place | None, values: QuantizedWeight) -> None:
        """Give a place a weight that was quantized by others: codes and scales as they are."""
        near = values.to(self.device)
        assert isinstance(near, QuantizedWeight)
        if place is None and slot.weight is None:
            self._install(slot, near)
            return
        weight = slot.weight
        if weight is None:
            self._install(slot, pending_weight(slot.tensor, _spec_of(slot, near), Pending(slot.name, self.device)))
            weight = slot.weight
        assert weight is not None
        if weight.pending is None:
            self.put(slot, place, near.dequantize()) if place is not None else weight.copy_(near)
        elif place is None:
            fill(weight, near)
        else:
            place(weight).copy_(near)
            settle(weight)

    def _install(self, slot: Slot, weight: QuantizedWeight) -> None:
        tensor = slot.tensor
        dtype = self._dtype_for(tensor)
        parameter: Any = nn.Parameter(weight.like(dtype=dtype, size=tensor.shape, stride=tensor.stride()), False)
        parameter.path, parameter.was_trainable = slot.name, tensor.requires_grad
        slot.install(parameter)
        for module, _ in slot.sites:
            state.attach(module)

    def differs(self, slot: Slot, values: Tensor) -> bool:
        """Whether a place that was given values would become another one by these."""
        weight = slot.weight
        if isinstance(values, QuantizedWeight) and (weight is None or weight.spec.weight != values.spec.weight):
            values = values.dequantize()
        if weight is None:
            return not torch.equal(slot.tensor, values.to(slot.tensor.device, slot.tensor.dtype))
        near = values.to(weight.device if isinstance(values, QuantizedWeight) else self.device)
        parts = near.parts if isinstance(near, QuantizedWeight) else encode(near, weight.spec, weight.device)
        pairs = zip(weight.ready().parts, parts, strict=True)
        return not all(torch.equal(own.view(torch.uint8), part.view(torch.uint8)) for own, part in pairs)

    def _gather(self, slot: Slot, place: Place, values: Tensor) -> Tensor | None:
        """Keep a piece apart until all are there, so that nothing is ever half old and half new."""
        tensor = slot.tensor
        if slot not in self.gathered:
            plain = slot.weight is None and tensor.is_meta
            dtype = self._dtype_for(tensor) if plain else values.dtype
            whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device)
            self.gathered[slot] = (whole, tensor.numel())
        whole, missing = self.gathered.pop(slot)
        place(whole).copy_(values)
        missing -= values.numel()
        if not missing:
            return whole
        self.gathered[slot] = (whole, missing)
        return None

    def _dtype_for(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _put_plain(self, slot: Slot, values: Tensor, *, owned: bool) -> None:
        """Give an ordinary tensor its values; those that are owned are nobody else's and become its storage."""
        tensor = slot.tensor
        if not tensor.is_meta:
            tensor.copy_(values)
            return
        dtype = self._dtype_for(tensor)
        if owned:
            fresh = values
        else:
            fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device).copy_(values)
        if not slot.is_buffer:
            fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            fresh.__dict__.update(tensor.__dict__)
        slot.install(fresh)

    def _refresh(self, weight: QuantizedWeight, values: Tensor) -> None:
        check_values(values, weight.label)
        where = self.device if weight.device == self.offload else weight.device
        if weight.device == where:
            weight.copy_(values)
        else:
            parts = encode(values.to(where), weight.spec, where)
            weight.copy_(weight.like(parts=parts))
        self._name_dtype(weight)

    def _convert(self, weight: QuantizedWeight, place: Place | None, values: Tensor) -> None:
        assert weight.pending is not None
        if not weight.is_meta and weight.device != self.device and weight.arrival is None:
            become(weight, weight.like(pending=Pending(weight.pending.path, self.device)))
        near = values.to(self.device)
        if place is None:
            fill(weight, near)
        else:
            place(weight).copy_(near)
            settle(weight)
        if weight.pending is None:
            self._name_dtype(weight)
            if self.offload is not None and weight.device != self.offload:
                pinned = weight.device.type == "cuda"
                parts = [part.to(self.offload) for part in weight.parts]
                become(weight, weight.like(parts=[part.pin_memory() if pinned else part for part in parts]))

    def _name_dtype(self, weight: QuantizedWeight) -> None:
        if self.dtype is not None and weight.dtype != self.dtype:
            become(weight, weight.like(dtype=self.dtype))


def _spec_of(slot: Slot, piece: QuantizedWeight) -> WeightSpec:
    """How a parameter is stored whose matrices come one by one, as a piece of it is."""
    module, leaf = slot.sites[0]
    layout = layout_of(module, leaf, slot.tensor)
    if layout is None:
        return piece.spec
    rows = layout.logical(tuple(slot.tensor.shape))[-2]
    shards = shards_of(piece.spec.format, rows, layout.shards, layout.interleaved)
    return dataclasses.replace(piece.spec, transposed=layout.transposed, **shards)


def obstacle(slot: Slot, filling: Filling, *, moved: bool) -> str:
    """Why a place cannot be filled, whatever with; "" if nothing speaks against it.

    Args:
        slot: the place.
        filling: how it would be.
        moved: whether its values must be on the device of `filling` afterwards.
    """
    tensor, weight = slot.tensor, slot.weight
    if weight is None and tensor.is_meta and torch_private.is_traceable_wrapper_subclass(tensor):
        return f"it is a {type(tensor).__name__} on meta, whose parts cannot be loaded"
    if slot.has_storage and moved and tensor.device not in (filling.device, filling.offload):
        return f"it has storage on {tensor.device}, not on {filling.device}: move the model first, or leave device out"
    return ""
