"""What a user asks for: `QuantizationConfig`.

API:
    QuantizationConfig.parse(source, **keys)   from any accepted form; extra keys are keys of the same dictionary
    QuantizationConfig(quantization, linear=..., moe=..., ignore=..., targets=..., include=..., components=..., options)
    QuantizationConfig.from_dict(d), .to_dict()   round trip: from_dict(to_dict(c)) == c; to_dict is plain JSON
    .of(path)                    (prefix, configuration) of the component that a path lies in; ("", itself) of the rest
    .slot(kind)                  the Slot for a kind ("linear" | "moe"; an embedding counts as linear), or None
    .with_blocks(slot)           the same slot in the formats for `weight_block_size`
    .asks(kind)                  whether formats of a kind were asked for themselves, not as part of a scheme
    .nothing, .rest_nothing      whether everything, or all but the components, is left alone
    .rules(slot), .weight_rule(format_name), .activation_rule(format_name)    scale rules under the options

Fields hold what was resolved: `quantization` is the canonical name of a scheme or None, `linear` and `moe` are the
slots in force (the scheme's own, unless replaced), `targets` a tuple of (pattern, Slot), sorted.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from olq_fx import configuration_options as options
from olq_fx import configuration_sources as sources
from olq_fx.configuration_components import DEFAULT, components_alone, longest_prefix, parse_prefix
from olq_fx.configuration_values import (
    INHERIT,
    NONE,
    ScaleRules,
    SlotLike,
    check_only_targets,
    parse_flag,
    parse_patterns,
    parse_scale_rules,
    parse_scheme,
    parse_slot,
    parse_targets,
    slot_to_dict,
)
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, nearest, shown
from olq_fx.formats import block_formats, get_format
from olq_fx.schemes import Slot, canonical


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class QuantizationConfig:
    """What becomes of the layers of a model. Immutable, hashable; equal configurations mean the same.

    Attributes:
        quantization: canonical name of the scheme, or None.
        linear: weight and activation format of dense layers; None leaves them alone. With the weight format
            `schemes.KEPT` (an activation given alone) it is for weights that are quantized already.
        moe: the same of expert layers.
        ignore: patterns of layers to leave alone.
        targets: (pattern, Slot) pairs, sorted by pattern; with targets there are no `linear` and `moe`.
        include: names or patterns of layers to quantize although they are left alone by default.
        per_token_activation: beside `fp8_per_tensor_static`, activations have a scale a token, not one a tensor.
        mxfp4_scale: the scale rules of `mxfp4` and `mxfp4_dualscale`.
        four_over_six: nvfp4 weights choose between 6 and 4 as the code of a block's maximum.
        power_of_two_scales: scales of `fp8_per_block_dynamic` are powers of two.
        allow_nonfinite: weights with NaN or Inf are converted instead of refused.
        weight_block_size: the blocks (N, K) of `fp8_per_block`; its activations have groups of 1 x K.
        num_bf16_fallback_layers: how many leading blocks of each numbered list of blocks keep original precision; None
            is 5 for weights in `mxfp4_dualscale` in lists of more than 10 blocks, and 0 for all others.
        fast_accum: products may accumulate less precisely where a kernel has that: `triton_fast_accum` on a GPU.
        skip_unprofitable: layers that would become larger, or are expected to become slower, are left alone.
        linear_backend, moe_backend: the kernel that must run the layers of a kind, or `auto`.
        packed_modules_mapping: fused names and their shards beside those of `fused_layers.FUSED_LAYERS`.
        components: (path prefix, configuration) pairs, sorted; all else here speaks of what lies in none of them.
    """

    quantization: str | None
    linear: Slot | None
    moe: Slot | None
    ignore: tuple[str, ...]
    targets: tuple[tuple[str, Slot], ...]
    include: tuple[str, ...]
    per_token_activation: bool
    mxfp4_scale: ScaleRules
    four_over_six: bool
    power_of_two_scales: bool
    allow_nonfinite: bool
    weight_block_size: tuple[int, int]
    num_bf16_fallback_layers: int | None
    fast_accum: bool
    skip_unprofitable: bool
    linear_backend: str
    moe_backend: str
    packed_modules_mapping: tuple[tuple[str, tuple[str, ...]], ...]
    components: "tuple[tuple[str, QuantizationConfig], ...]"

    def __init__(
        self,
        quantization: str | None = None,
        *,
        linear: SlotLike = INHERIT,
        moe: SlotLike = INHERIT,
        ignore: str | Sequence[str] | None = None,
        targets: "Mapping[str, SlotLike] | Sequence[tuple[str, Slot]] | None" = None,
        include: str | Sequence[str] | None = None,
        per_token_activation: bool = True,
        mxfp4_scale: "ScaleRules | str | Mapping[str, str]" = ScaleRules(),  # noqa: B008 (immutable)
        four_over_six: bool = True,
        power_of_two_scales: bool = False,
        allow_nonfinite: bool = False,
        weight_block_size: Sequence[int] = options.BLOCK_SIZE,
        num_bf16_fallback_layers: int | None = None,
        fast_accum: bool = False,
        skip_unprofitable: bool = False,
        linear_backend: str = options.AUTO,
        moe_backend: str = options.AUTO,
        packed_modules_mapping: "Mapping[str, Sequence[str]] | Sequence[tuple[str, Sequence[str]]] | None" = None,
        components: "Mapping[str, object] | Sequence[tuple[str, QuantizationConfig]] | None" = None,
    ) -> None:
        """Resolve the keys of a configuration; each takes what the dictionary takes under its name.

        Raises:
            ConfigurationError: an unknown name, a contradiction, a malformed pattern, a scheme with nothing left of it.
            ConfigurationTypeError: a value of a type that its key never takes.
        """
        name = parse_scheme(quantization)
        per_token = parse_flag("per_token_activation", per_token_activation)
        resolved = parse_targets(targets, per_token)
        if resolved:
            check_only_targets(name, linear, moe)
        values: dict[str, object] = {
            "quantization": name,
            "linear": parse_slot("linear", linear, name, per_token),
            "moe": parse_slot("moe", moe, name, per_token),
            "ignore": parse_patterns("ignore", ignore),
            "targets": resolved,
            "include": parse_patterns("include", include),
            "per_token_activation": per_token,
            "mxfp4_scale": parse_scale_rules(mxfp4_scale),
            "four_over_six": parse_flag("four_over_six", four_over_six),
            "power_of_two_scales": parse_flag("power_of_two_scales", power_of_two_scales),
            "allow_nonfinite": parse_flag("allow_nonfinite", allow_nonfinite),
            "weight_block_size": options.parse_block_size(weight_block_size),
            "num_bf16_fallback_layers": options.parse_layer_count("num_bf16_fallback_layers", num_bf16_fallback_layers),
            "fast_accum": parse_flag("fast_accum", fast_accum),
            "skip_unprofitable": parse_flag("skip_unprofitable", skip_unprofitable),
            "linear_backend": options.parse_backend("linear_backend", linear_backend),
            "moe_backend": options.parse_backend("moe_backend", moe_backend),
            "packed_modules_mapping": options.parse_fused(packed_modules_mapping),
            "components": (),
        }
        self._set(values)
        self._take_components(_parse_components(components))
        if self.nothing and isinstance(quantization, str) and canonical(quantization) != NONE:
            raise ConfigurationError(f"quantization {shown(quantization)}: {_NOTHING_LEFT}")

    def _set(self, values: "Mapping[str, object]") -> None:
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def _take_components(self, components: "dict[str, QuantizationConfig]") -> None:
        """Take the configurations of components; that called `default` is what this one says of the rest."""
        rest = components.pop(DEFAULT, None)
        given = [key for key, value in self.to_dict().items() if value is not None]
        if rest is not None:
            if given:
                raise ConfigurationError(
                    f"components: 'default' speaks of all that lies in no component, and so do the keys beside "
                    f"components: {', '.join(given)}; write them in one of the two"
                )
            self._set({name: getattr(rest, name) for name in _FIELDS})
        elif components and given and self.rest_nothing:
            raise ConfigurationError(
                f"the keys beside components speak of what lies in none of them, and that is left alone: "
                f"{', '.join(given)}; write them in the configuration of a component"
            )
        self._set({"components": tuple(sorted(components.items()))})

    @classmethod
    def parse(cls, source: object = INHERIT, /, **keys: object) -> "QuantizationConfig":
        """The configuration in any of its forms.

        Args:
            source: a scheme name, a dictionary, a JSON text, the path of a JSON or YAML file, a QuantizationConfig, or
                None, which leaves everything alone.
            **keys: keys of the same dictionary.

        Raises:
            ConfigurationError: see the class; also for an unknown key, a malformed text and a key given twice.
            ConfigurationTypeError: `source` or a value is of a type that is never accepted.
        """
        if isinstance(source, QuantizationConfig) and not keys:
            return source
        given = _source_keys(source)
        if keys:
            given = sources.merge(given, sources.read(keys), "(in the configuration and as an argument)")
        values = _known_keys(given)
        config = cls(**values)
        if config.nothing and "quantization" not in values:
            raise ConfigurationError(f"the configuration {_NOTHING_LEFT}")
        return config

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object]) -> "QuantizationConfig":
        """The inverse of `to_dict`; any dictionary that `parse` takes."""
        if not isinstance(mapping, Mapping):
            raise sources.wrong_type("from_dict takes a dictionary", mapping)
        return cls.parse(mapping)

    def to_dict(self) -> dict[str, Any]:
        """The shortest dictionary that means the same, of plain JSON values."""
        found: dict[str, Any] = {}
        if self.quantization is not None or self.nothing:
            found["quantization"] = self.quantization
        for kind, slot in (("linear", self.linear), ("moe", self.moe)):
            if slot != parse_slot(kind, INHERIT, self.quantization, self.per_token_activation):
                found[kind] = slot_to_dict(slot)
        for key, patterns in (("ignore", self.ignore), ("include", self.include)):
            if patterns:
                found[key] = list(patterns)
        if self.targets:
            found["targets"] = {pattern: slot_to_dict(slot) for pattern, slot in self.targets}
        for option in OPTIONS:
            value = getattr(self, option)
            if value != OPTIONS[option]:
                found[option] = _plain(value)
        if self.components:
            found["components"] = {prefix: _component_to_dict(config) for prefix, config in self.components}
        return found

    @property
    def rest_nothing(self) -> bool:
        """Whether all that lies in no component is left alone."""
        return self.linear is None and self.moe is None and not self.targets

    @property
    def nothing(self) -> bool:
        """Whether everything is left alone, which is what `none` and None ask for."""
        return self.rest_nothing and all(config.nothing for _, config in self.components)

    def of(self, path: str) -> "tuple[str, QuantizationConfig]":
        """The component that a module or parameter path lies in, by the longest prefix, and what is asked of it.

        `transformer` is a prefix of `transformer.proj_out` and not of `transformer_2.proj_out`. What lies in no
        component has the prefix "" and this configuration.
        """
        known = dict(self.components)
        prefix = longest_prefix(path, known)
        return prefix, known.get(prefix, self)

    def with_blocks(self, slot: Slot) -> Slot:
        """A slot of this configuration in the formats that `weight_block_size` makes of `fp8_per_block`."""
        if self.weight_block_size == options.BLOCK_SIZE:
            return slot
        weight, activation = block_formats(*self.weight_block_size)
        plain_weight, plain_activation = block_formats(*options.BLOCK_SIZE)
        return Slot(
            weight if slot.weight == plain_weight else slot.weight,
            activation if slot.activation == plain_activation else slot.activation,
        )

    def asks(self, kind: str) -> bool:
        """Whether formats of a kind (`linear`, `moe`, `embedding`) are asked for, not only a scheme that has them."""
        key = "moe" if kind == "moe" else "linear"
        slot = self.slot(kind)
        return slot is not None and slot != parse_slot(key, INHERIT, self.quantization, self.per_token_activation)

    def slot(self, kind: str) -> Slot | None:
        """What layers of a kind (`linear`, `moe`, `embedding`) become where no target says otherwise.

        An embedding has no activations; its weight is that of `linear`.
        """
        if kind == "moe":
            return self.moe
        return self.linear

    def rules(self, slot: Slot) -> tuple[str, str]:
        """The scale rules of a slot's weight and activation; "" for activations in original precision."""
        return self.weight_rule(slot.weight), self.activation_rule(slot.activation) if slot.activation else ""

    def weight_rule(self, name: str) -> str:
        """The scale rule by which weights of the format called `name` are converted."""
        format = get_format(name)
        if "mse" in format.rules:
            return self.mxfp4_scale.weight
        if "four_over_six" in format.rules:
            return "four_over_six" if self.four_over_six else "amax"
        return format.weight_rule

    def activation_rule(self, name: str) -> str:
        """The scale rule by which activations of the format called `name` are quantized."""
        format = get_format(name)
        if "mse" in format.rules:
            return self.mxfp4_scale.activation
        if "power_of_two" in format.rules and self.power_of_two_scales:
            return "power_of_two"
        return format.activation_rule


OPTIONS: Mapping[str, object] = {
    "per_token_activation": True,
    "mxfp4_scale": ScaleRules(),
    "four_over_six": True,
    "power_of_two_scales": False,
    "allow_nonfinite": False,
    "weight_block_size": options.BLOCK_SIZE,
    "num_bf16_fallback_layers": None,
    "fast_accum": False,
    "skip_unprofitable": False,
    "linear_backend": options.AUTO,
    "moe_backend": options.AUTO,
    "packed_modules_mapping": (),
}
"""The options of `QuantizationConfig` and their defaults."""

_FIELDS = tuple(field.name for field in dataclasses.fields(QuantizationConfig))
_KEYS = (*_FIELDS, "activation_scheme")
_NOTHING_LEFT = (
    "leaves nothing to quantize; name a scheme, `linear`, `moe` or `targets` "
    "(and to leave everything alone on purpose, write None or 'none')"
)


def _plain(value: object) -> object:
    """An option's value as JSON has it."""
    if isinstance(value, ScaleRules):
        return dataclasses.asdict(value)
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return {name: list(shards) for name, shards in value}
    return list(value) if isinstance(value, tuple) else value


def _component_to_dict(config: QuantizationConfig) -> dict[str, Any] | None:
    """What stands under the prefix of a component: None for one that is only left alone."""
    found = config.to_dict()
    return None if found == {"quantization": None} else found


def _source_keys(source: object) -> dict[str, object]:
    """The keys of the positional argument of `parse`, which may be missing."""
    if source is INHERIT:
        return {}
    return sources.read(source.to_dict() if isinstance(source, QuantizationConfig) else source)


def _known_keys(given: Mapping[str, object]) -> dict[str, Any]:
    """The keys that the constructor takes.

    Raises:
        ConfigurationError: a key is unknown, or asks for static activations.
    """
    if components_alone(given, [*_KEYS, *sources.KEY_ALIASES, sources.NESTED]):
        rest = {key: value for key, value in given.items() if key == "quantization"}
        return {**rest, "components": {key: value for key, value in given.items() if key not in rest}}
    values = dict(given)
    for key in given:
        if key not in _KEYS:
            known = [*_KEYS, *sources.KEY_ALIASES, sources.NESTED]
            close = nearest(key, known)
            if not close.startswith("did you mean"):
                close = f"valid: {', '.join(_KEYS)}; the configuration of a component stands under 'components'"
            raise ConfigurationError(f"unknown key {shown(key)} in the configuration; {close}")
    if "activation_scheme" in values:
        options.parse_dynamic(values.pop("activation_scheme"))
    return values


def _parse_components(value: object) -> dict[str, QuantizationConfig]:
    """The configurations of components by prefix, those of components within components beside them."""
    if value is None:
        return {}
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)  # the form that the configuration itself has
    if not isinstance(value, Mapping):
        raise sources.wrong_type("components is a dictionary of path prefixes", value)
    found: dict[str, QuantizationConfig] = {}
    for prefix, asked in value.items():
        own = parse_prefix(prefix)
        config = _component(own, asked)
        within = {own: dataclasses.replace(config, components=())} if config.components else {own: config}
        for inner, part in config.components:
            within[inner if own == DEFAULT else f"{own}.{inner}"] = part
        for path, part in within.items():
            if path in found:
                raise ConfigurationError(f"components: {path!r} is given twice, once of them within another component")
            found[path] = part
    return found


def _component(prefix: str, asked: object) -> QuantizationConfig:
    try:
        return QuantizationConfig.parse(asked)
    except (ConfigurationError, ConfigurationTypeError) as error:
        raise type(error)(f"components[{prefix!r}]: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"components[{prefix!r}]: components within components without an end") from None
