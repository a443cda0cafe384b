"""A model between its plan and its last weight, as the loaders of transformers and diffusers treat it.

weight_at(model, path) -> QuantizedWeight | None
single_device(device_map) -> torch.device | None
device_of(device_map, path) -> torch.device
refuse_offloading(device_map)
report_of_stored(config, model) -> Report
largest_weight(plan) -> int                  bytes of the largest planned weight in original precision
tied(model, ties)                            a context in which parameters that will be tied are
Planned(model, plan).complete(model, report, initialize)
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from olq_fx import conversion, state
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError
from olq_fx.plan import Plan, PlanRow, plan_for
from olq_fx.report import Report
from olq_fx.weights import QuantizedWeight

_INITIALIZED = "_is_hf_initialized"
"""The mark that transformers sets on modules and parameters that need no initial values."""


def weight_at(model: nn.Module, path: str) -> QuantizedWeight | None:
    """The converted or pending weight with this path, if there is one."""
    module_path, _, leaf = path.rpartition(".")
    try:
        module = model.get_submodule(module_path)
    except AttributeError:
        return None
    weight: Any = module._parameters.get(leaf)
    return weight if isinstance(weight, QuantizedWeight) else None


def single_device(device_map: Any) -> torch.device | None:
    """The device of a device map that has one, else None."""
    if isinstance(device_map, dict):
        if len(set(map(str, device_map.values()))) != 1:
            return None
        device_map = next(iter(device_map.values()))
    if device_map is None or device_map in ("auto", "balanced", "balanced_low_0", "sequential", "disk"):
        return None
    return torch.device(device_map)


def device_of(device_map: Any, path: str) -> torch.device:
    """Where a device map puts a parameter; the CPU where there is none."""
    if not isinstance(device_map, dict):
        return torch.device("cpu") if device_map is None else torch.device(device_map)
    while path and path not in device_map:
        path = path.rpartition(".")[0]
    return torch.device(device_map.get(path, "cpu"))


def refuse_offloading(device_map: Any) -> None:
    """Refuse a device map that puts modules on disk, or on the CPU beside other devices.

    Raises:
        ConfigurationError: it does; the message names some.
    """
    if not isinstance(device_map, dict):
        return
    devices = {str(device) for device in device_map.values()}
    for offloaded in ("disk", "cpu"):
        found = [path for path, device in device_map.items() if str(device) == offloaded]
        if found and (offloaded == "disk" or devices != {"cpu"}):
            raise ConfigurationError(
                f"device_map puts {', '.join(map(repr, found[:3]))}{' ...' if found[3:] else ''} on {offloaded!r}: "
                "weights that are offloaded are exchanged by name in each forward pass, which takes quantized ones "
                "apart; give more max_memory, or a format with fewer bits"
            )


def largest_weight(plan: Plan) -> int:
    """Bytes of the largest planned weight in original precision."""
    return max((row.bytes_before for row in plan.rows if row.decision == "quantize"), default=0)


def report_of_stored(config: QuantizationConfig, model: nn.Module) -> Report:
    """The report on a model whose stored weights are in their places: what is not stored is left alone."""
    report = Report(plan_for(config, model, strict=False))
    for row in report.plan.rows:
        if row.decision == "quantize":
            report.mark(row.path, "left alone")
    return report


@contextlib.contextmanager
def tied(model: nn.Module, ties: Mapping[str, str]) -> Iterator[None]:
    """Tie parameters while they are planned, so that they are one row; those that become pending stay tied.

    Args:
        model: on meta; its library ties it after loading.
        ties: of a parameter's path that of the one in whose place it is.
    """
    before = []
    for path, source in ties.items():
        module, leaf = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        own, other = module._parameters.get(leaf), _parameter(model, source)
        if own is not None and other is not None and own.shape == other.shape:
            before.append((module, leaf, own))
            module._parameters[leaf] = other
    try:
        yield
    finally:
        for module, leaf, own in before:
            if not isinstance(module._parameters[leaf], QuantizedWeight):
                module._parameters[leaf] = own


class Planned:
    """A model whose planned weights are pending.

    transformers gives every parameter that no file has random values, in place. A pending weight takes none: its module
    is marked as done until the end, when those that are still pending become plain, get their values and are converted.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        """Mark the modules."""
        self._rows = [row for row in plan.rows if row.decision == "quantize"]
        self._marked = [
            module
            for module in {id(module): module for row in self._rows for module, _ in _sites(model, row)}.values()
            if _INITIALIZED not in vars(module)
        ]
        for module in self._marked:
            setattr(module, _INITIALIZED, True)

    def complete(self, model: nn.Module, report: Report, initialize: Callable[[], object]) -> None:
        """See that every planned weight is converted.

        Args:
            model: loaded.
            report: gets the status of every row.
            initialize: gives all parameters without the mark their initial values.
        """
        for module in self._marked:
            delattr(module, _INITIALIZED)
        for row in self._rows:
            if (weight := weight_at(model, row.path)) is not None and weight.pending is not None:
                _make_plain(model, row, weight)
        if any(
            not getattr(parameter, _INITIALIZED, False)
            for module in self._marked
            for parameter in module.parameters(recurse=False)
        ):
            initialize()
        for row in self._rows:
            convert_plain(model, row)
            report.mark(row.path, "converted")


def convert_plain(model: nn.Module, row: PlanRow) -> None:
    """Convert what a row plans and a loader has put there as a plain tensor, under each name that has one."""
    for name in row.names:
        parameter = _parameter(model, name)
        if not isinstance(parameter, QuantizedWeight):
            names = tuple(other for other in row.names if _parameter(model, other) is parameter)
            conversion.convert_row(model, dataclasses.replace(row, path=name, names=names))


def _make_plain(model: nn.Module, row: PlanRow, weight: QuantizedWeight) -> None:
    """Put a plain parameter without values in the place of a pending one."""
    device = torch.device("cpu") if weight.is_meta else weight.device
    empty = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device)
    parameter = nn.Parameter(empty, requires_grad=row.trainable)
    for module, leaf in _sites(model, row):
        if state.converted_weights(module).get(leaf) is weight:
            module._parameters[leaf] = parameter


def _sites(model: nn.Module, row: PlanRow) -> list[tuple[nn.Module, str]]:
    return [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in row.names]


def _parameter(model: nn.Module, path: str) -> Any:
    module_path, _, leaf = path.rpartition(".")
    return model.get_submodule(module_path)._parameters[leaf]
