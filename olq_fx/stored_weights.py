"""How converted weights are stored, as text in the header of each safetensors file: enough to make them pending again.

    describe(model) -> dict[str, str]            metadata for the writer of the files
    described(weights) -> dict[str, str]         the same, of what is known without the model
    parts_of(model) -> dict[str, Tensor]         its state dict, in which a weight with several names stands once
    read(files) -> tuple[StoredWeight, ...]      what the files say
    install(model, weights)                      pending weights in their places
    take_parts(model, weight, parts)             the parts of one into its place

A plan made anew could differ from the one that was saved (another version, another device); what is written cannot.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from olq_fx import state
from olq_fx.errors import ConversionError, OlqFxError, PlanError
from olq_fx.weights import Pending, QuantizedWeight, WeightSpec, pending_weight

KEY = "olq_fx"
"""The key of the metadata."""

_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeight:
    """A converted weight in files.

    Attributes:
        names: every path of the parameter; its parts are called after the first.
        spec: how it is stored and used.
        was_trainable: whether the original required a gradient.
    """

    names: tuple[str, ...]
    spec: WeightSpec
    was_trainable: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its parts in the files, in the order of the parts."""
        return state.part_names(self.names[0], self.spec.format)


def _weights_of(model: nn.Module) -> dict[int, tuple[list[str], QuantizedWeight]]:
    """The converted weights of a model with all their names, the first in the order of the modules first."""
    found: dict[int, tuple[list[str], QuantizedWeight]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, weight in state.converted_weights(module).items():
            found.setdefault(id(weight), ([], weight))[0].append(f"{path}.{leaf}" if path else leaf)
    return found


def describe(model: nn.Module) -> dict[str, str]:
    """Metadata for the files of a model."""
    return described(
        StoredWeight(tuple(names), weight.ready().spec, weight.was_trainable)
        for names, weight in _weights_of(model).values()
    )


def described(weights: Iterable[StoredWeight]) -> dict[str, str]:
    """Metadata for the files of these weights: equal specs are written once."""
    specs: dict[tuple[WeightSpec, bool], int] = {}
    found = []
    for weight in weights:
        spec = dataclasses.replace(weight.spec, kernel="")  # which kernels there are is for the reader to say
        found.append([weight.names, specs.setdefault((spec, weight.was_trainable), len(specs))])
    kinds = [{**dataclasses.asdict(spec), "was_trainable": trainable} for spec, trainable in specs]
    return {KEY: json.dumps({"version": _VERSION, "kinds": kinds, "weights": found})}


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model; of a converted weight with several names only the parts under the first."""
    found: dict[str, Tensor] = model.state_dict()
    for names, weight in _weights_of(model).values():
        for name in names[1:]:
            for part in state.part_names(name, weight.spec.format):
                found.pop(part, None)
    return found


def read(files: Sequence[str]) -> tuple[StoredWeight, ...]:
    """The converted weights that safetensors files say they hold.

    Raises:
        PlanError: they say nothing of it, or nothing that this version understands.
    """
    from safetensors import safe_open

    for file in files:
        if not str(file).endswith(".safetensors"):
            continue
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get(KEY)
        if text is not None:
            return _parsed(text, str(file))
    raise PlanError(
        "the configuration says that the weights are quantized by olq_fx, and no file says how "
        f"({', '.join(map(str, files)) or 'there are none'}): save the model again with save_pretrained, as safetensors"
    )


def _parsed(text: str, file: str) -> tuple[StoredWeight, ...]:
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}; this olq_fx reads {_VERSION}")
        kinds = [(bool(kind.pop("was_trainable")), WeightSpec(**kind)) for kind in content["kinds"]]
        for _, spec in kinds:
            _ = spec.format  # an unknown one is an error here
        return tuple(StoredWeight(tuple(names), kinds[kind][1], kinds[kind][0]) for names, kind in content["weights"])
    except (ValueError, KeyError, TypeError, IndexError, OlqFxError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PlanError(f"{file}: what its header says of quantized weights cannot be read: {reason}") from error


def install(model: nn.Module, weights: Iterable[StoredWeight]) -> None:
    """Put a pending weight in the place of each stored one; a second time changes nothing.

    Raises:
        PlanError: the model has no such parameters, or they are no matrices.
    """
    found = [(weight, [_site(model, name) for name in weight.names]) for weight in weights]
    for weight, sites in found:
        module, leaf = sites[0]
        original: Any = module._parameters[leaf]
        if isinstance(original, QuantizedWeight):
            continue
        pending = pending_weight(original, weight.spec, Pending(weight.names[0], original.device))
        parameter: Any = nn.Parameter(pending, requires_grad=False)
        parameter.path, parameter.was_trainable = weight.names[0], weight.was_trainable
        for owner, name in sites:
            state.attach(owner)
            owner._parameters[name] = parameter


def take_parts(model: nn.Module, weight: StoredWeight, parts: Mapping[str, Tensor]) -> None:
    """Give a pending weight its parts, as they are (mapped, if they are), by their names.

    Raises:
        ConversionError: they do not fit; the message says what was expected.
    """
    path, _, _ = weight.names[0].rpartition(".")
    given = {name.removeprefix(f"{path}."): part for name, part in parts.items()}
    try:
        model.get_submodule(path).load_state_dict(given, strict=False, assign=True)
    except RuntimeError as error:
        raise ConversionError(f"{weight.names[0]}: {' '.join(str(error).split())}") from error


def _site(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    module_path, _, leaf = path.rpartition(".")
    try:
        module = model.get_submodule(module_path)
    except AttributeError:
        module = None
    parameter = None if module is None else module._parameters.get(leaf)
    if module is None or parameter is None or parameter.dim() not in (2, 3):
        raise PlanError(f"{path}: the files hold it as a quantized weight, and a {type(model).__name__} has no such")
    return module, leaf
