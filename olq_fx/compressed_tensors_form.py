"""The configuration by which compressed-tensors, and transformers with it, reads what is saved here.

    form_of(model, weights) -> Form       .config: of `quantization_config`, or None; .differences: what is lost there

Names and layouts of the parts are that library's where it has the format (`olq_fx.state`). A directory is given its
configuration only if it can read every converted weight: of a part of them it would take codes for values.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from olq_fx.formats import Format, get_format
from olq_fx.manifest import SavedWeight
from olq_fx.weights import WeightSpec

_VERSION = "0.20.1"
"""The version of compressed-tensors whose form is written."""

_E8M0: Mapping[str, Any] = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_F32: Mapping[str, Any] = {"scale_dtype": "torch.float32"}

_WEIGHTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fp8_per_tensor_static": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", **_F32}),
    "fp8_per_channel_static": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", **_F32}),
    "int8_per_channel_static": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", **_F32}),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", **_E8M0}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", **_E8M0}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
}
"""The name that the library has for a format, and the arguments that describe it."""

_ACTIVATIONS: Mapping[str, Mapping[str, Any]] = {
    "fp8_per_tensor_dynamic": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8_per_token": {"num_bits": 8, "type": "float", "strategy": "token"},
    "int8_per_token": {"num_bits": 8, "type": "int", "strategy": "token"},
    "mxfp8": {"num_bits": 8, "type": "float", **_E8M0},
    "mxfp4": {"num_bits": 4, "type": "float", **_E8M0},
}
_BLOCKS = "fp8_per_block_"


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How compressed-tensors sees a saved model.

    Attributes:
        config: its configuration; None if there is a weight that it cannot read.
        differences: what it cannot read, or does otherwise, each with the paths it is about.
    """

    config: dict[str, Any] | None
    differences: tuple[str, ...]


def form_of(model: nn.Module, weights: Sequence[SavedWeight]) -> Form:
    """The form of a model.

    Args:
        model: what the paths of the weights are relative to.
        weights: its converted weights.
    """
    unreadable = [(obstacle, weight.path) for weight in weights if (obstacle := _obstacle(model, weight))]
    if unreadable or not weights:
        return Form(None, _listed(unreadable, "compressed-tensors cannot read"))
    missing = [
        (f"activations in {weight.spec.activation}, which it leaves in original precision", weight.path)
        for weight in weights
        if weight.spec.activation and _activation(weight.spec) is None
    ]
    return Form(_config(model, weights), _listed(missing, "compressed-tensors does not have"))


def _obstacle(model: nn.Module, weight: SavedWeight) -> str:
    """Why the library cannot read a weight; "" if it can."""
    spec, format = weight.spec, weight.spec.format
    if _described(format) is None:
        return f"the format {spec.weight}"
    if len(weight.shape) == 3:
        return "experts in one tensor"
    if len(weight.names) > 1:
        return "a weight that several modules share"
    module_path, _, leaf = weight.path.rpartition(".")
    module = model.get_submodule(module_path)
    if not isinstance(module, nn.Linear) or leaf != "weight" or spec.transposed:
        return f"'{leaf}' of a {type(module).__name__}"
    group = format.group[1]
    if group is not None and not format.name.startswith(_BLOCKS) and weight.shape[1] % group:
        return f"rows of {weight.shape[1]}, which are no whole groups of {group}"
    return ""


def _described(format: Format) -> tuple[str, Mapping[str, Any]] | None:
    if format.name.startswith(_BLOCKS):
        about = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(format.group), **_F32}
        return "float-quantized", about
    return _WEIGHTS.get(format.name)


def _activation(spec: WeightSpec) -> Mapping[str, Any] | None:
    if spec.activation.startswith(_BLOCKS):
        group = get_format(spec.activation).group[1]
        return {"num_bits": 8, "type": "float", "strategy": "group", "group_size": group}
    return _ACTIVATIONS.get(spec.activation)


def _config(model: nn.Module, weights: Sequence[SavedWeight]) -> dict[str, Any]:
    """What `config.json` says: a group for each pair of formats, with the modules by name."""

    def pair(weight: SavedWeight) -> tuple[str, str]:
        return weight.spec.weight, weight.spec.activation

    groups = {}
    for number, (_, members) in enumerate(itertools.groupby(sorted(weights, key=pair), pair)):
        groups[f"group_{number}"] = _group(list(members))
    formats = {group["format"] for group in groups.values()}
    taken = {weight.path.rpartition(".")[0] for weight in weights}
    return {
        "quant_method": "compressed-tensors",
        "version": _VERSION,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and n not in taken],
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
    }


def _group(members: Sequence[SavedWeight]) -> dict[str, Any]:
    spec = members[0].spec
    described = _described(spec.format)
    assert described is not None
    name, arguments = described
    activation = _activation(spec)
    if activation is None and name in ("float-quantized", "int-quantized"):
        name = "naive-quantized"  # the names of the two are for those with activations
    return {
        "targets": sorted(weight.path.rpartition(".")[0] for weight in members),
        "format": name,
        "weights": {"symmetric": True, "dynamic": False, **arguments},
        "input_activations": None if activation is None else {"symmetric": True, "dynamic": True, **activation},
        "output_activations": None,
    }


def _listed(found: Sequence[tuple[str, str]], verb: str) -> tuple[str, ...]:
    """What was found, one text for each reason."""
    by_reason: dict[str, list[str]] = {}
    for reason, path in found:
        by_reason.setdefault(reason, []).append(path)
    return tuple(
        f"{verb} {reason}: {', '.join(paths[:3])}{f' and {len(paths) - 3} more' if paths[3:] else ''}"
        for reason, paths in by_reason.items()
    )
