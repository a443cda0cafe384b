"""What of a model goes into files: its tensors by the names of its state dict, those of one parameter together.

contents_of(model) -> Contents            also of a model on meta, whose weights are planned but not there
Contents.groups, .weights, .ties, .buffers, .values
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx import state, torch_private
from olq_fx.errors import SaveError
from olq_fx.manifest import SavedWeight
from olq_fx.tensor_files import Entry
from olq_fx.weights import QuantizedWeight


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The tensors of one parameter or buffer: its first path, and how they are stored."""

    path: str
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors of a model.

    Attributes:
        groups: in the order of the state dict, shared ones once.
        weights: the converted ones among them, or those that will be.
        ties: other names of plain tensors, each with the name of the one that is stored.
        buffers: what the state dict leaves out: buffers that are not persistent.
        values: the tensors of all groups by their names; on meta where a model has none yet.
        waiting: names of those that have no values.
    """

    groups: tuple[Group, ...]
    weights: tuple[SavedWeight, ...]
    ties: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    waiting: tuple[str, ...]


def contents_of(model: nn.Module) -> Contents:
    """The tensors of a model, none of them copied.

    Raises:
        SaveError: something in its state dict is no plain tensor.
    """
    given: dict[str, Any] = model.state_dict()
    holders = _weights(model)
    part_of = {
        key: (path, weight)
        for path, (weight, names) in holders.items()
        for name in names
        for key in _keys(name, weight)
    }
    groups: dict[str, Group] = {}
    values: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[Any, str] = {}
    who = {name: id(tensor) for name, tensor in _tensors(model)}
    for key, value in given.items():
        if key in part_of:
            path, weight = part_of[key]
            if path not in groups:
                groups[path] = Group(path, _entries(path, weight))
                values |= _values(path, weight, given)
            continue
        _check(key, value)
        same = first.setdefault(_identity(who.get(key, key), value), key)
        if same != key:
            ties[key] = same
            continue
        groups[key] = Group(key, (Entry(key, tuple(value.shape), value.dtype),))
        values[key] = value
    buffers = dict(_other_buffers(model))
    waiting = [name for name, value in {**values, **buffers}.items() if value.is_meta]
    waiting += [path for path, (weight, _) in holders.items() if weight.pending is not None]
    return Contents(
        groups=tuple(groups.values()),
        weights=tuple(_saved(weight, names) for weight, names in holders.values()),
        ties=ties,
        buffers=buffers,
        values=values,
        waiting=tuple(dict.fromkeys(waiting)),
    )


def _weights(model: nn.Module) -> dict[str, tuple[QuantizedWeight, tuple[str, ...]]]:
    """The converted weights with all their paths, by the first one."""
    found: dict[int, tuple[QuantizedWeight, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, weight in state.converted_weights(module).items():
            found.setdefault(id(weight), (weight, []))[1].append(f"{path}.{leaf}" if path else leaf)
    return {names[0]: (weight, tuple(names)) for weight, names in found.values()}


def part_keys(path: str, weight: QuantizedWeight) -> tuple[str, ...]:
    """The names of the parts of a weight in a state dict."""
    prefix, dot, leaf = path.rpartition(".")
    return tuple(prefix + dot + name for name in state.part_names(leaf, weight.spec.format))


def _keys(path: str, weight: QuantizedWeight) -> tuple[str, ...]:
    """What the state dict has of a weight: while it is pending, itself."""
    return part_keys(path, weight) if weight.pending is None else (path,)


def _entries(path: str, weight: QuantizedWeight) -> tuple[Entry, ...]:
    shapes = state.part_shapes(weight)
    return tuple(Entry(key, shape, dtype) for key, (shape, dtype) in zip(part_keys(path, weight), shapes, strict=True))


def _values(path: str, weight: QuantizedWeight, given: Mapping[str, Any]) -> dict[str, Tensor]:
    if weight.pending is not None:
        return {}
    missing = [key for key in part_keys(path, weight) if key not in given]
    if missing:
        raise SaveError(f"the state dict of the model has no {', '.join(missing)}: a hook of its modules took it out")
    return {key: given[key] for key in part_keys(path, weight)}


def _saved(weight: QuantizedWeight, names: tuple[str, ...]) -> SavedWeight:
    return SavedWeight(
        names=names,
        parts=part_keys(names[0], weight),
        spec=weight.spec,
        shape=tuple(weight.shape),
        stride=weight.stride(),
        dtype=weight.dtype,
        trainable=weight.was_trainable,
    )


def _check(key: str, value: object) -> None:
    """Refuse what no file of plain tensors holds.

    Raises:
        SaveError: it is such a thing.
    """
    if not isinstance(value, Tensor):
        raise SaveError(f"'{key}' of the state dict is {type(value).__name__}, and only tensors can be saved")
    if torch_private.is_traceable_wrapper_subclass(value) and not isinstance(value, QuantizedWeight):
        raise SaveError(
            f"'{key}' is a {type(value).__name__}, whose parts cannot be saved; make it a plain tensor first"
        )
    if value.layout != torch.strided:
        raise SaveError(f"'{key}' has the layout {value.layout}, and only dense tensors can be saved")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model, under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _identity(who: object, value: Tensor) -> object:
    """Equal for names of one tensor. On meta there is no memory to tell it by, but parameters are who they are."""
    if value.is_meta or not value.numel():
        return who
    about = (value.storage_offset(), tuple(value.shape), value.stride(), value.dtype, value.device)
    return value.untyped_storage().data_ptr(), about


def _other_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for leaf in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(leaf)
            if buffer is not None:
                yield f"{path}.{leaf}" if path else leaf, buffer
