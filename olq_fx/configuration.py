"""What a user asks for: `QuantizationConfig`.

API:
    QuantizationConfig.parse(source, **keys)   from any accepted form; extra keys are keys of the same dictionary
    QuantizationConfig(quantization, linear=..., moe=..., ignore=..., targets=..., include=..., options)
    QuantizationConfig.from_dict(d), .to_dict()   round trip: from_dict(to_dict(c)) == c; to_dict is plain JSON
    .slot(kind)                  the Slot for a kind ("linear" | "moe"; an embedding counts as linear), or None
    .asks_moe                    whether `moe` was asked for itself, not as part of a scheme
    .nothing                     whether it is `none`: leave everything alone
    .rules(slot), .weight_rule(format_name), .activation_rule(format_name)    scale rules under the options

Fields hold what was resolved: `quantization` is the canonical name of a scheme or None, `linear` and `moe` are the
slots in force (the scheme's own, unless replaced), `targets` a tuple of (pattern, Slot), sorted.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from olq_fx import configuration_sources as sources
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
from olq_fx.errors import ConfigurationError, nearest, shown
from olq_fx.formats import get_format
from olq_fx.schemes import Slot, canonical

LATER: Mapping[str, tuple[object, ...]] = {
    "components": (),
    "weight_block_size": (),
    "num_bf16_fallback_layers": (0,),
    "fast_accum": (False,),
    "skip_unprofitable": (False,),
    "linear_backend": ("auto",),
    "moe_backend": ("auto",),
}
"""Keys of the language that this version does not serve yet, each with the values that ask for nothing."""


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class QuantizationConfig:
    """What becomes of the layers of a model. Immutable, hashable; equal configurations mean the same.

    Attributes:
        quantization: canonical name of the scheme, or None.
        linear: weight and activation format of dense layers; None leaves them alone.
        moe: the same of expert layers.
        ignore: patterns of layers to leave alone.
        targets: (pattern, Slot) pairs, sorted by pattern; with targets there are no `linear` and `moe`.
        include: names or patterns of layers to quantize although they are left alone by default.
        per_token_activation: beside `fp8_per_tensor_static`, activations have a scale a token, not one a tensor.
        mxfp4_scale: the scale rules of `mxfp4` and `mxfp4_dualscale`.
        four_over_six: nvfp4 weights choose between 6 and 4 as the code of a block's maximum.
        power_of_two_scales: scales of `fp8_per_block_dynamic` are powers of two.
        allow_nonfinite: weights with NaN or Inf are converted instead of refused.
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
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        if self.nothing and isinstance(quantization, str) and canonical(quantization) != NONE:
            raise ConfigurationError(f"quantization {shown(quantization)}: {_NOTHING_LEFT}")

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
                found[option] = dataclasses.asdict(value) if isinstance(value, ScaleRules) else value
        return found

    @property
    def nothing(self) -> bool:
        """Whether everything is left alone, which is what `none` and None ask for."""
        return self.linear is None and self.moe is None and not self.targets

    @property
    def asks_moe(self) -> bool:
        """Whether `moe` was asked for by itself, not only as part of a scheme."""
        inherited = parse_slot("moe", INHERIT, self.quantization, self.per_token_activation)
        return self.moe is not None and self.moe != inherited

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
}
"""The options of `QuantizationConfig` and their defaults."""

_KEYS = (*(field.name for field in dataclasses.fields(QuantizationConfig)), "activation_scheme", *LATER)
_NOTHING_LEFT = (
    "leaves nothing to quantize; name a scheme, `linear`, `moe` or `targets` "
    "(and to leave everything alone on purpose, write None or 'none')"
)


def _source_keys(source: object) -> dict[str, object]:
    """The keys of the positional argument of `parse`, which may be missing."""
    if source is INHERIT:
        return {}
    return sources.read(source.to_dict() if isinstance(source, QuantizationConfig) else source)


def _known_keys(given: Mapping[str, object]) -> dict[str, Any]:
    """The keys that the constructor takes.

    Raises:
        ConfigurationError: a key is unknown, belongs to a later version, or asks for static activations.
    """
    values = dict(given)
    for key in given:
        if key not in _KEYS:
            known = [*_KEYS, *sources.KEY_ALIASES, sources.NESTED]
            close = nearest(key, known)
            if not close.startswith("did you mean") and not any(name in _KEYS for name in given):
                close += "; configurations of single components are not available in this version of olq_fx"
            raise ConfigurationError(f"unknown key {shown(key)} in the configuration; {close}")
    for key, harmless in LATER.items():
        if key in values:
            _refuse_later(key, values.pop(key), harmless)
    if "activation_scheme" in values:
        _only_dynamic(values.pop("activation_scheme"))
    return values


def _refuse_later(key: str, value: object, harmless: Sequence[object]) -> None:
    """Reject a key of a later version, unless its value asks for what happens anyway."""
    if any(value == one and type(value) is type(one) for one in harmless):
        return
    only = f" (only {harmless[0]!r} is)" if harmless else ""
    raise ConfigurationError(f"the key {key!r} is not available in this version of olq_fx{only}; got {shown(value)}")


def _only_dynamic(value: object) -> None:
    if not isinstance(value, str):
        raise sources.wrong_type("activation_scheme is a string", value)
    if canonical(value) == "static":
        raise ConfigurationError(
            "activation_scheme 'static': there is no calibration here, activations are quantized dynamically; "
            "for static scales load a checkpoint that is already quantized"
        )
    if canonical(value) != "dynamic":
        raise ConfigurationError(f"unknown activation_scheme {shown(value)}; valid: dynamic")
