"""What a checkpoint declares of itself: a model's `config` may say that its weights were quantized by others.

API:
    declarations(places) -> dict[str, Declaration]    path of a model within the model -> what its config declares
    Declaration: path, method, schemes, skipped, only, experts_only
        .covers(kind, module_path)     whether the checkpoint brings this weight quantized
        .agrees(scheme)                whether it is what that scheme asks for
    declaration_of(config) -> Declaration | None      what one configuration declares

Read is the key `quantization_config` (older files: `compression_config`) of a transformers or diffusers configuration,
dictionary or object. Names of methods, of their options and of what they skip are those of the files themselves.
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from olq_fx.errors import ConfigurationError
from olq_fx.left_alone import Place
from olq_fx.patterns import REGEX_PREFIX, compile_pattern
from olq_fx.schemes import SCHEMES, canonical

KEYS = ("quantization_config", "compression_config")
"""Where a configuration declares a method."""

OWN = "olq_fx"
"""The method of this library. An object that names it is of `olq_fx.integrations`, which loads the model: weights say
themselves what is quantized. Only a dictionary, as it stands in a file, speaks of weights that are not here."""

_SKIPPED = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules"),
    "llm_int8_skip_modules",
)
"""Options that list what a method left in original precision."""

_WEIGHT_ONLY: Mapping[str, str] = {
    "fp8_per_channel": "fp8_weight_only",
    "int8": "int8_per_channel_weight_only",
    "mxfp8": "mxfp8_weight_only",
    "mxfp4": "mxfp4_weight_only",
    "nvfp4_per_token": "nvfp4_weight_only",
}
"""Of a scheme the one with the same weights and activations in original precision."""

_ALGORITHMS: Mapping[str, str] = {
    "FP8": "fp8_per_tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_per_channel",
    "FP8_PB_REAL": "fp8_per_block",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4_per_token",
    "W4A16_NVFP4": "nvfp4_weight_only",
}
"""The values of modelopt's `quant_algo`."""

_GROUPS: Mapping[tuple[object, ...], str] = {
    ("float", 8, "tensor"): "fp8_per_tensor",
    ("float", 8, "channel"): "fp8_per_channel",
    ("float", 8, "block"): "fp8_per_block",
    ("float", 8, "group", 32): "mxfp8",
    ("float", 4, "group", 32): "mxfp4",
    ("float", 4, "tensor_group"): "nvfp4_per_token",
    ("int", 8, "channel"): "int8",
}
"""The weights of compressed-tensors' groups: kind of number, bits, strategy, and the size where it tells them apart."""

_QUARK: Mapping[tuple[object, ...], str] = {
    ("fp8_e4m3", "per_tensor"): "fp8_per_tensor",
    ("fp8_e4m3", "per_channel"): "fp8_per_channel",
    ("int8", "per_channel"): "int8",
    ("fp4", "per_group", 32): "mxfp4",
}
"""The weights of quark: dtype, qscheme, and the group's size where it tells them apart."""

_TORCHAO: Mapping[str, tuple[str, ...]] = {
    "Float8DynamicActivationFloat8WeightConfig": ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block"),
    "Float8WeightOnlyConfig": ("fp8_weight_only",),
    "Int8DynamicActivationInt8WeightConfig": ("int8",),
    "Int8WeightOnlyConfig": ("int8_per_channel_weight_only",),
    "MXDynamicActivationMXWeightConfig": ("mxfp8", "mxfp4"),
    "NVFP4DynamicActivationNVFP4WeightConfig": ("nvfp4_per_token",),
    "NVFP4WeightOnlyConfig": ("nvfp4_weight_only",),
}
"""The classes of torchao's configurations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Declaration:
    """A model's own word that its checkpoint is quantized.

    Attributes:
        path: of the model whose configuration says so; "" for the root.
        method: its `quant_method`, as written.
        schemes: the schemes that ask for the same.
        skipped: names and patterns of what it left in original precision.
        only: names and patterns of what it quantized, where it lists that; empty if it is all that is not skipped.
        experts_only: whether only the weights of experts are quantized (mxfp4, as gpt-oss has it).
        block: the rows and columns of blocks that share a scale, where it says so.
    """

    path: str
    method: str
    schemes: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    experts_only: bool = False
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        """For messages."""
        of = f"of {self.path} " if self.path else ""
        same = f" ({' or '.join(self.schemes)} here)" if self.schemes else ""
        return f"the checkpoint's configuration {of}declares that it is quantized by {self.method!r}{same}"

    def agrees(self, scheme: str) -> bool:
        """Whether a scheme, by its canonical name, is what the checkpoint has."""
        return scheme in self.schemes

    def covers(self, kind: str, module_path: str) -> bool:
        """Whether a weight that is quantized by default comes quantized from the checkpoint.

        Args:
            kind: `linear`, `moe` or `embedding`.
            module_path: of its module, from the root of the whole model.
        """
        if kind == "embedding" or (self.experts_only and kind != "moe"):
            return False
        inner = module_path.removeprefix(self.path).removeprefix(".") if self.path else module_path
        return not _named(self.skipped)(inner) and (not self.only or _named(self.only)(inner))


def declarations(places: Iterable[Place]) -> dict[str, Declaration]:
    """What the configurations of a model and of the models within it declare, by their paths.

    Configurations are anything that others have put there: what cannot be read as a declaration is none.

    Args:
        places: of the modules, those around others first. A configuration that several modules share is the first's.
    """
    found: dict[str, Declaration] = {}
    seen: set[int] = set()
    for place in places:
        held = place.module.__dict__
        config = held.get("config", held.get("_internal_dict"))
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        declared = _declared(config)
        if declared is not None:
            found[place.path] = _read(place.path, declared)
    return found


def declaration_of(config: object) -> Declaration | None:
    """What the configuration of one model declares, a dictionary or an object; None if nothing."""
    declared = _declared(config)
    return None if declared is None else _read("", declared)


def _declared(config: object) -> Mapping[str, Any] | None:
    """The dictionary in which a configuration declares a method, or None."""
    for key in KEYS:
        try:
            given = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
            value = _dictionary(given)
        except Exception:  # a property or a conversion of another library, that fails in its own way
            continue
        if value and (value is given or value.get("quant_method") != OWN):
            return value
    return None


def _dictionary(value: Any) -> Mapping[str, Any] | None:
    """A declaration that is a dictionary, or an object with one; None for anything else."""
    if value is not None and not isinstance(value, Mapping):
        to_dict = getattr(value, "to_dict", None)
        value = to_dict() if callable(to_dict) else getattr(value, "__dict__", None)
    return value if isinstance(value, Mapping) else None


def _read(path: str, declared: Mapping[str, Any]) -> Declaration:
    inner = declared.get("quantization")
    if isinstance(inner, Mapping):  # modelopt's own file has its options one level deeper
        declared = {**declared, **inner}
    method = declared.get("quant_method", declared.get("method"))
    name = str(getattr(method, "value", method) or "a method that it does not name")
    spelled = canonical(name)
    return Declaration(
        path=path,
        method=name,
        schemes=tuple(dict.fromkeys(_schemes(spelled, declared))),
        skipped=tuple(name for key in _SKIPPED for name in _names(declared.get(key))),
        only=tuple(_only(spelled, declared)),
        experts_only=spelled in ("mxfp4", "gpt_oss_mxfp4"),
        block=_extents(declared.get("weight_block_size")),
    )


def _extents(value: object) -> tuple[int, int] | None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(one, int) for one in value):
        return value[0], value[1]
    return None


def _names(value: object) -> Iterator[str]:
    """The names in an option that lists some, or has one."""
    names = [value] if isinstance(value, str) else value
    if isinstance(names, (list, tuple, set, frozenset)):
        yield from (name for name in names if isinstance(name, str) and name)


def _only(method: str, declared: Mapping[str, Any]) -> Iterator[str]:
    """What a method lists as quantized: the targets of compressed-tensors' groups, the layers of modelopt's mixtures.

    Targets may be names of classes, as `Linear`, which mean all layers that are candidates here.
    """
    groups, layers = declared.get("config_groups"), declared.get("quantized_layers")
    if isinstance(groups, Mapping):
        of_groups = [
            list(_names(group.get("targets"))) if isinstance(group, Mapping) else [] for group in groups.values()
        ]
        if all(targets and not any(map(_is_class, targets)) for targets in of_groups):
            yield from (name for targets in of_groups for name in targets)
    elif method.startswith("modelopt") and isinstance(layers, Mapping):
        yield from _names(list(layers))


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[0].isupper()


def _schemes(method: str, declared: Mapping[str, Any]) -> Iterator[str]:
    """The schemes that ask for what a declared method has; none where there is no such scheme."""
    if method in SCHEMES:  # `fp8` is the alias of one
        yield method
    if method == "fp8_per_tensor":
        yield "fp8_per_block" if declared.get("weight_block_size") else "fp8_per_channel"
    elif method == "fbgemm_fp8":
        yield "fp8_per_channel"
    elif method in ("mxfp4", "gpt_oss_mxfp4"):
        yield from ("mxfp4", "mxfp4_weight_only")
    elif method.startswith("modelopt"):
        yield from _known(_ALGORITHMS.get(str(declared.get("quant_algo")).upper()))
    elif method == "compressed_tensors":
        yield from _of_groups(declared.get("config_groups"))
    elif method == "quark":
        yield from _of_quark(declared.get("global_quant_config"))
    elif method == "torchao":
        yield from _of_torchao(declared.get("quant_type"))


def _known(scheme: str | None) -> tuple[str, ...]:
    return () if scheme is None else (scheme,)


def _of_groups(groups: object) -> tuple[str, ...]:
    """What all groups of compressed-tensors have in common."""
    if not isinstance(groups, Mapping) or not groups:
        return ()
    found = {_of_group(group) for group in groups.values()}
    return _known(found.pop()) if len(found) == 1 else ()


def _of_group(group: object) -> str | None:
    """The scheme of one group: `weights` and `input_activations`, each a kind of number, a strategy and a size."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        return None
    scheme = _row(_GROUPS, weights, "type", "num_bits", "strategy")
    return scheme if group.get("input_activations") else _WEIGHT_ONLY.get(scheme or "")


def _of_quark(whole: object) -> tuple[str, ...]:
    weight = whole.get("weight") if isinstance(whole, Mapping) else None
    if not isinstance(whole, Mapping) or not isinstance(weight, Mapping):
        return ()
    scheme = _row(_QUARK, weight, "dtype", "qscheme")
    return _known(scheme if whole.get("input_tensors") else _WEIGHT_ONLY.get(scheme or ""))


def _row(table: Mapping[tuple[object, ...], str], weights: Mapping[str, Any], *keys: str) -> str | None:
    """The row of a table for these values, with the group's size where that tells rows apart."""
    found = [weights.get(key) for key in (*keys, "group_size")]
    if not all(isinstance(value, Hashable) for value in found):
        return None  # no value of these options
    return table.get(tuple(found)) or table.get(tuple(found[:-1]))


def _of_torchao(kind: object) -> tuple[str, ...]:
    """Of `quant_type`: the class's name, an object of it, or `{"default": {"_type": name}}` as it is stored."""
    if isinstance(kind, Mapping):
        kind = kind.get("default", kind)
    if isinstance(kind, Mapping):
        kind = kind.get("_type")
    return _TORCHAO.get(kind if isinstance(kind, str) else type(kind).__name__, ())


@functools.lru_cache(maxsize=64)
def _named(names: tuple[str, ...]) -> "_Named":
    return _Named(names)


class _Named:
    """Which paths a list of names means: a module's whole path or its end, and all below it.

    Files write `lm_head`, `model.layers.0.mlp.gate`, `model.layers.*.self_attn`, `re:.*router`.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        """An expression that has no meaning is no name of anything."""
        plain = [name for name in names if not name.startswith(REGEX_PREFIX)]
        self._exact = frozenset(name for name in plain if not set(name) & set("*?["))
        globs = [fnmatch.translate(name) for name in plain if name not in self._exact]
        self._globs = re.compile("|".join(globs)) if globs else None
        self._expressions = []
        for name in names:
            if name.startswith(REGEX_PREFIX):
                try:
                    self._expressions.append(compile_pattern(name))
                except ConfigurationError:
                    continue

    def __call__(self, path: str) -> bool:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if self._globs is not None and self._globs.match(whole):
                return True
            if any(".".join(parts[start:end]) in self._exact for start in range(end)):
                return True
        return any(expression.matches(path) for expression in self._expressions)
