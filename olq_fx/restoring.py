"""`restore_`: a saved model back into a module, mapped from its files, with the bytes that were saved.

    restore_(model, directory, device=None, verify="files") -> Restored

The model may be plain, on meta or with memory: it becomes converted as the manifest says, without a configuration. It
may be planned, on meta: its formats must be those of the manifest. It may be converted: it is given the saved values in
the storage that it has. Everything is compared before anything is changed.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from olq_fx import state
from olq_fx.errors import ConfigurationError, SavedModelError, nearest, shown
from olq_fx.manifest import Manifest, SavedWeight, check_files, read_manifest
from olq_fx.tensor_files import Entry, checksum, layout_of, mapped
from olq_fx.weights import QuantizedStack, QuantizedWeight, WeightSpec, become
from olq_fx.weights_encoding import without_values
from olq_fx.whole_directories import recover

Verify = Literal["files", "all", "nothing"]
"""What is held against the manifest: names, sizes and blocks of the files; every byte too; or nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored.

    Attributes:
        manifest: of the directory.
        buffers_without_data: buffers on meta that no state dict has, nor this directory.
    """

    manifest: Manifest
    buffers_without_data: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A parameter or buffer of the model, in every module that holds it."""

    path: str
    sites: tuple[tuple[nn.Module, str], ...]
    is_buffer: bool

    @property
    def tensor(self) -> Any:
        module, leaf = self.sites[0]
        return (module._buffers if self.is_buffer else module._parameters)[leaf]

    def install(self, tensor: Any) -> None:
        for module, leaf in self.sites:
            (module._buffers if self.is_buffer else module._parameters)[leaf] = tensor


def restore_(
    model: nn.Module,
    directory: str | os.PathLike[str],
    device: torch.device | None = None,
    verify: Verify = "files",
) -> Restored:
    """Restore a saved model.

    On the CPU the tensors are pages of the files, which the system reads when they are used: the directory may be
    replaced meanwhile, but its files must not be written to.

    Args:
        model: of the architecture that was saved.
        directory: what `olq_fx.save` has written.
        device: where tensors go that have no memory yet; by default the CPU.
        verify: what to hold against the manifest.

    Returns:
        What was restored.

    Raises:
        SavedModelError: the directory is damaged, stale or foreign, or is not of this model in these formats. The model
            is as it was.
        ConfigurationError: `verify` is something else.
    """
    if verify not in ("files", "all", "nothing"):
        raise ConfigurationError(f"verify={shown(verify)}; {nearest(str(verify), ('files', 'all', 'nothing'))}")
    root: nn.Module = getattr(model, "_orig_mod", model)
    place = Path(os.fspath(directory))
    recover(place)
    manifest = read_manifest(place)
    if verify != "nothing":
        check_files(place, manifest)
    where = _where(place, manifest)
    places = _places(root)
    _compare(root, place, manifest, {name: entry for name, (entry, _) in where.items()}, places)
    tensors = _mapped(place, where)
    if verify == "all":
        _check_all(place, manifest, tensors)
    with torch.inference_mode(False), torch.no_grad():
        _fill(manifest, tensors, places, torch.device("cpu") if device is None else device)
    bare = [path for path, slot in places.items() if slot.is_buffer and slot.tensor.is_meta]
    return Restored(manifest=manifest, buffers_without_data=tuple(bare))


def _where(directory: Path, manifest: Manifest) -> dict[str, tuple[Entry, str]]:
    """What tensors the files have, each with the name of its file.

    Raises:
        SavedModelError: a file is damaged, or a tensor is in none or two of them.
    """
    found: dict[str, tuple[Entry, str]] = {}
    for file in manifest.files:
        for name, placed in layout_of(directory / file.name).items():
            if name in found:
                raise SavedModelError(f"'{name}' is in two files of {directory}: {found[name][1]} and {file.name}")
            found[name] = placed.entry, file.name
    lost = sorted(set(manifest.checksums) - set(found))
    if lost:
        raise SavedModelError(f"{directory} is not whole: no file has '{lost[0]}' ({len(lost)} tensors are missing)")
    return found


def _mapped(directory: Path, where: Mapping[str, tuple[Entry, str]]) -> dict[str, Tensor]:
    by_file: dict[str, list[str]] = {}
    for name, (_, file) in where.items():
        by_file.setdefault(file, []).append(name)
    found: dict[str, Tensor] = {}
    for file, names in by_file.items():
        found |= mapped(directory / file, names)
    return found


def _check_all(directory: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Hold every byte against the manifest.

    Raises:
        SavedModelError: a tensor is not what it was.
    """
    for name, tensor in tensors.items():
        if checksum(tensor) != manifest.checksums.get(name):
            raise SavedModelError(f"'{name}' of {directory} is damaged: its bytes are not those that were saved")


def _places(model: nn.Module) -> dict[str, _Place]:
    """Every parameter and buffer by each of its paths."""
    holders: dict[int, list[tuple[str, nn.Module, str, bool]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):
            for leaf, tensor in tensors.items():
                if tensor is not None:
                    holders.setdefault(id(tensor), []).append((prefix + leaf, module, leaf, is_buffer))
    found: dict[str, _Place] = {}
    for group in holders.values():
        sites = {(id(module), leaf): (module, leaf) for _, module, leaf, _ in group}
        place = _Place(group[0][0], tuple(sites.values()), group[0][3])
        found.update({path: place for path, *_ in group})
    return found


def _compare(
    model: nn.Module, directory: Path, manifest: Manifest, stored: Mapping[str, Entry], places: Mapping[str, _Place]
) -> None:
    """Hold a model against what is stored.

    Raises:
        SavedModelError: they differ; the message lists how, by path.
    """
    weights = {name: weight for weight in manifest.weights for name in weight.names}
    parts = {part for weight in manifest.weights for part in weight.parts}
    wrong = [text for weight in manifest.weights if (text := _misfit(weight, stored, places))]
    for name, entry in stored.items():
        if name not in parts and (text := _plain_misfit(name, entry, places)):
            wrong.append(text)
    wrong += [f"'{name}' is not in the model" for name in manifest.ties if name not in places]
    known = {*stored, *manifest.ties, *weights}
    absent = [name for name in _saved_names(model) if name not in known]
    wrong += [f"'{name}' is not in the directory" for name in absent]
    if wrong:
        more = f" and {len(wrong) - 8} more" if wrong[8:] else ""
        raise SavedModelError(f"{directory} is not of this model: {'; '.join(wrong[:8])}{more}. Nothing was loaded")


def _saved_names(model: nn.Module) -> list[str]:
    """The paths of everything that a state dict has."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = [leaf for leaf, buffer in module._buffers.items() if buffer is not None]
        names += [prefix + leaf for leaf in kept if leaf not in module._non_persistent_buffers_set]
    return names


def _misfit(weight: SavedWeight, stored: Mapping[str, Entry], places: Mapping[str, _Place]) -> str:
    """Why a saved weight cannot go into the model; "" if it can."""
    for name in weight.names:
        if name not in places:
            return f"'{name}' is not in the model; {nearest(name, places)}"
    if fault := _part_fault(weight, stored):
        return fault
    for place in {id(places[name]): places[name] for name in weight.names}.values():
        there = place.tensor
        if isinstance(there, QuantizedWeight):
            if there.spec != weight.spec:
                return f"'{place.path}' is saved in {_differing(weight.spec, there.spec)} in the model"
        elif not isinstance(there, nn.Parameter):
            return f"'{place.path}' is no parameter of the model"
        if tuple(there.shape) != weight.shape:
            return f"'{place.path}' is saved with the shape {weight.shape}, in the model it has {tuple(there.shape)}"
    return ""


def _differing(saved: WeightSpec, there: WeightSpec) -> str:
    """`A, but held in B`: the formats, or what else differs between two weights."""
    if (saved.weight, saved.activation) != (there.weight, there.activation):
        return (
            f"{saved.weight} / {saved.activation or 'none'}, but planned or held in "
            f"{there.weight} / {there.activation or 'none'}"
        )
    names = [field.name for field in dataclasses.fields(WeightSpec)]
    other = [name for name in names if getattr(saved, name) != getattr(there, name)]
    said = [f"{name}={shown(getattr(saved, name))}" for name in other]
    held = [f"{name}={shown(getattr(there, name))}" for name in other]
    return f"{saved.weight} with {', '.join(said)}, but planned or held with {', '.join(held)}"


def _part_fault(weight: SavedWeight, stored: Mapping[str, Entry]) -> str:
    """What is wrong with the parts of a weight in the files; "" if they are as its format says."""
    expected = _expected_parts(weight)
    if len(expected) != len(weight.parts):
        return f"'{weight.path}' is saved with {len(weight.parts)} parts, {weight.spec.weight} has {len(expected)}"
    for name, (shape, dtype) in zip(weight.parts, expected, strict=True):
        found = stored.get(name)
        if found is None:
            return f"no file has '{name}'"
        if found.dtype != dtype or _numel(found.shape) != _numel(shape):
            return f"'{name}' is stored as {found.dtype} {found.shape}, {weight.spec.weight} has {dtype} {shape}"
    return ""


def _expected_parts(weight: SavedWeight) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return _parts_of(weight.spec, weight.shape)


@functools.lru_cache(maxsize=1024)  # a model has many weights of few shapes, each asked for twice
def _parts_of(spec: WeightSpec, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    if len(shape) not in (2, 3):
        return ()
    if spec.skip:  # rows in front that belong to the block of the first one
        shape = (shape[0] + spec.skip, *shape[1:])
    return tuple((tuple(part.shape), part.dtype) for part in without_values(spec, shape))


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _plain_misfit(name: str, entry: Entry, places: Mapping[str, _Place]) -> str:
    """Why a plain tensor cannot go into the model; "" if it can."""
    place = places.get(name)
    if place is None:
        return f"'{name}' is not in the model; {nearest(name, places)}"
    there = place.tensor
    if isinstance(there, QuantizedWeight):
        return f"'{name}' is saved in original precision ({entry.dtype}), but planned or held in {there.spec.weight}"
    if tuple(there.shape) != entry.shape:
        return f"'{name}' is saved with the shape {entry.shape}, in the model it has {tuple(there.shape)}"
    return ""


def _fill(
    manifest: Manifest, tensors: Mapping[str, Tensor], places: Mapping[str, _Place], device: torch.device
) -> None:
    """Put everything into its place."""
    parts: set[str] = set()
    for weight in manifest.weights:
        parts.update(weight.parts)
        own = {id(places[name]): places[name] for name in weight.names}
        _put_weight(weight, [tensors[name] for name in weight.parts], list(own.values()), device)
    for name, tensor in tensors.items():
        if name not in parts:
            _put_plain(places[name], tensor, device)
    for other, name in manifest.ties.items():
        if places[other] is not places[name]:
            _tie(places[other], places[name], tensors[name], device)


def _put_weight(weight: SavedWeight, found: list[Tensor], places: list[_Place], device: torch.device) -> None:
    """Put the parts of a weight into a model; several places that were one parameter are one again."""
    there = places[0].tensor
    if isinstance(there, QuantizedWeight) and there.pending is None:
        for own, part in zip(there.parts, found, strict=True):
            own.copy_(part.reshape(own.shape))
        if there.dtype != weight.dtype:
            become(there, there.like(dtype=weight.dtype))
    else:
        near = device if not isinstance(there, QuantizedWeight) or there.is_meta else there.device
        there = _weight(weight, [part.to(near) for part in found], there)
    for place in places:
        if place.tensor is not there:
            place.install(there)
        for module, _ in place.sites:
            state.attach(module)


def _weight(weight: SavedWeight, parts: list[Tensor], there: Any) -> QuantizedWeight:
    """The converted weight over some parts: the pending one if there is one, else a new parameter."""
    expected = _expected_parts(weight)
    shaped = [part.reshape(shape) for part, (shape, _) in zip(parts, expected, strict=True)]
    kind = QuantizedStack if len(weight.shape) == 3 else QuantizedWeight
    fresh = kind(shaped, weight.spec, weight.dtype, weight.shape, weight.stride)
    if isinstance(there, QuantizedWeight):
        fresh.path, fresh.was_trainable = there.path, there.was_trainable
        become(there, fresh)
        return there
    # What nn.Parameter marks a tensor of another class with; it would make an alias of each first, which takes longer
    # than mapping the weight.
    untyped: Any = fresh
    untyped._is_param = True
    fresh.path, fresh.was_trainable = weight.path, weight.trainable
    return fresh


def _put_plain(place: _Place, tensor: Tensor, device: torch.device) -> None:
    """Put a plain tensor into a model: into the memory that is there, or as it is."""
    there = place.tensor
    if not there.is_meta:
        there.copy_(tensor)
        if there.dtype != tensor.dtype:
            there.data = there.data.to(tensor.dtype).copy_(tensor)
        return
    place.install(_like(there, tensor.to(device)))


def _like(there: Tensor, tensor: Tensor) -> Tensor:
    """A tensor as parameter or buffer, whichever stood there; the attributes that others set on it go along."""
    if not isinstance(there, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=there.requires_grad and tensor.is_floating_point())
    parameter.__dict__.update(there.__dict__)
    return parameter


def _tie(other: _Place, place: _Place, tensor: Tensor, device: torch.device) -> None:
    """Give a second name of a saved tensor its value: the tensor itself, where nothing else is there."""
    if other.tensor.is_meta and other.is_buffer == place.is_buffer:
        other.install(place.tensor)
    else:
        _put_plain(other, tensor, device)
