"""The values of a configuration's keys: what each may be, and what it resolves to.

One function a key. Names are compared in their canonical spelling; a value of a type that its key never takes is a
`ConfigurationTypeError`, any other mistake a `ConfigurationError` that says where it was and what is nearest.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from olq_fx.configuration_sources import wrong_type
from olq_fx.errors import ConfigurationError, nearest, shown
from olq_fx.formats import FORMATS, Format
from olq_fx.patterns import compile_pattern
from olq_fx.schemes import ALIASES, KEPT, ONLINE, SCHEMES, Slot, canonical, get_scheme

SlotLike: TypeAlias = "Slot | str | Mapping[str, str | None] | None"

NONE = "none"
"""The name that leaves everything alone, as None does."""


class _Inherit:
    """Says that a slot is not given, which differs from a slot of None: that layer kind is left alone."""

    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Any = _Inherit()
"""A slot that is not given: the scheme's own is in force."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleRules:
    """The mxfp4 scale rule of weights and of activations: `floor`, `even`, `ceil` or `mse`."""

    weight: str = FORMATS["mxfp4"].weight_rule
    activation: str = FORMATS["mxfp4"].activation_rule


def parse_scheme(value: object) -> str | None:
    """The canonical scheme name of the key `quantization`; None for `none`, `online` and None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type("quantization is a scheme name or None", value)
    name = canonical(value)
    if name in (NONE, ONLINE):
        return None
    if name not in SCHEMES:
        raise ConfigurationError(f"unknown scheme {shown(value)}; {nearest(name, [*SCHEMES, *ALIASES, ONLINE, NONE])}")
    return name


def _scheme_slot(name: str, kind: str, per_token: bool) -> Slot:
    """The slot of a scheme for a kind, under the option `per_token_activation`."""
    scheme = get_scheme(name)
    slot = scheme.moe if kind == "moe" else scheme.linear
    if slot.activation is None or slot.activation != FORMATS[slot.weight].default_activation:
        return slot
    return Slot(slot.weight, _default_activation(FORMATS[slot.weight], per_token))


def _default_activation(weight: Format, per_token: bool) -> str | None:
    """The activation format that goes with a weight format when none is named."""
    if weight.name == "fp8_per_tensor_static" and not per_token:
        return "fp8_per_tensor_dynamic"
    return weight.default_activation


def parse_slot(kind: str, value: object, scheme: str | None, per_token: bool) -> Slot | None:
    """The slot in force for `linear` or `moe`, of what the configuration gives under that key and of the scheme."""
    base = None if scheme is None else _scheme_slot(scheme, kind, per_token)
    return base if value is INHERIT else _slot(kind, kind, value, base, per_token)


def _slot(where: str, kind: str, value: object, base: Slot | None, per_token: bool) -> Slot | None:
    """The slot that a value says: None, a name, or `{weight, activation}` over the slot `base` of the scheme."""
    if value is None or (isinstance(value, str) and canonical(value) == NONE):
        return None
    if isinstance(value, Slot):
        value = slot_to_dict(value)
    if isinstance(value, str):
        return _named_slot(where, kind, value, per_token)
    if isinstance(value, Mapping):
        return _slot_of_sides(where, value, base, per_token)
    raise wrong_type(f"{where} is a scheme name, a weight format or {{weight, activation}}", value)


def _named_slot(where: str, kind: str, value: str, per_token: bool) -> Slot:
    """The slot of a bare string: of a scheme first, else of a weight format."""
    name = canonical(value)
    if name in SCHEMES:
        return _scheme_slot(name, kind, per_token)
    if name == ONLINE:
        raise ConfigurationError(f"{where}: 'online' is no scheme of its own; name a scheme or a weight format")
    if name in FORMATS:
        weight = _weight_format(where, value)
        return Slot(weight.name, _default_activation(weight, per_token))
    valid = [*SCHEMES, *ALIASES, *(f.name for f in FORMATS.values() if f.weight)]
    raise ConfigurationError(f"{where}: unknown scheme or weight format {shown(value)}; {nearest(name, valid)}")


def _slot_of_sides(where: str, sides: Mapping[object, object], base: Slot | None, per_token: bool) -> Slot | None:
    """The slot of `{weight, activation}`, either of which may be absent."""
    for key in sides:
        _check_side(where, key)
    if not sides:
        raise ConfigurationError(f"{where} is empty; name its weight format, its activation format or both")
    activation = _side(where, "activation", sides.get("activation"))
    if "weight" not in sides and base is None:
        if where not in ("linear", "moe"):
            raise ConfigurationError(
                f"{where} has no weight format, and there is no scheme to take one from; an activation alone, for "
                "weights that are quantized already, stands under 'linear' or 'moe'"
            )
        return Slot(KEPT, None if activation is None else _activation_format(where, activation).name)
    named = sides.get("weight", base and base.weight)
    name = _side(where, "weight", named)
    if name is None:
        if activation is not None:
            raise ConfigurationError(
                f"{where}: activation {shown(activation)} with weight None; "
                "activations are quantized only where the weight is, so name a weight format"
            )
        return None
    weight = _weight_format(where, name)
    if "activation" not in sides:
        return Slot(weight.name, _default_activation(weight, per_token))
    return Slot(weight.name, None if activation is None else _activation_format(where, activation).name)


def _check_side(where: str, key: object) -> None:
    sides = ("weight", "activation")
    if key not in sides:
        raise ConfigurationError(f"{where}: unknown key {shown(key)}; {nearest(str(key), sides)}")


def _side(where: str, side: str, value: object) -> str | None:
    """The name on one side of a slot as it was written; None for null and `none`."""
    if value is None or isinstance(value, str):
        return None if value is None or canonical(value) == NONE else value
    raise wrong_type(f"{where}: {side} is a format name or None", value)


def _weight_format(where: str, value: str) -> Format:
    return _format(where, value, "weight", [f for f in FORMATS.values() if f.weight])


def _activation_format(where: str, value: str) -> Format:
    return _format(where, value, "activation", [f for f in FORMATS.values() if f.activation])


def _format(where: str, value: str, side: str, usable: Sequence[Format]) -> Format:
    """The format called `value` for one side of a slot."""
    name = canonical(value)
    names = [format.name for format in usable]
    if name in names:
        return FORMATS[name]
    valid = f"valid {side} formats: {', '.join(names)}"
    if name in FORMATS:
        raise ConfigurationError(f"{where}: {shown(value)} is no format of {side}s; {valid}")
    if name in SCHEMES:
        raise ConfigurationError(f"{where}: {shown(value)} is a scheme, which stands for both formats at once; {valid}")
    raise ConfigurationError(f"{where}: unknown {side} format {shown(value)}; {nearest(name, names)}")


def parse_targets(value: object, per_token: bool) -> tuple[tuple[str, Slot], ...]:
    """The patterns of `targets` and the slot that each asks for, sorted by pattern."""
    if value is None:
        return ()
    if isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) for p in value):
        value = dict(value)  # the form that the configuration itself has
    if not isinstance(value, Mapping):
        raise wrong_type("targets is a dictionary of patterns", value)
    found = {_pattern("targets", pattern): _target(pattern, asked, per_token) for pattern, asked in value.items()}
    return tuple(sorted(found.items(), key=lambda item: item[0]))


def _target(pattern: str, value: object, per_token: bool) -> Slot:
    """The slot that one target asks for. It serves both kinds of layers: no scheme has two different ones."""
    where = f"targets[{shown(pattern)}]"
    slot = _slot(where, "linear", value, None, per_token)
    if slot is None:
        raise ConfigurationError(f"{where} names no format; a layer that no target matches is left alone already")
    return slot


def check_only_targets(scheme: str | None, linear: object, moe: object) -> None:
    """Reject `targets` beside what they exclude."""
    given = [key for key, value in (("linear", linear), ("moe", moe)) if value is not INHERIT and value is not None]
    if scheme is not None:
        given.insert(0, f"the scheme {scheme}")
    if given:
        raise ConfigurationError(
            f"targets and {' and '.join(given)} exclude each other: a layer that no target matches is left alone; "
            "add a target for it, or drop 'targets' and use 'ignore'"
        )


def parse_patterns(key: str, value: object) -> tuple[str, ...]:
    """The patterns of `ignore` or `include`: None, one string, or a list; repeated ones once."""
    if value is None:
        return ()
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        raise wrong_type(f"{key} is a pattern or a list of them", value)
    return tuple(dict.fromkeys(_pattern(key, one) for one in listed))


def _pattern(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(f"a pattern in {key} is a string", value)
    try:
        return compile_pattern(value).text
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}: {error}") from None


def parse_flag(key: str, value: object) -> bool:
    """The value of an option that is on or off; 0 and 1 are numbers."""
    if not isinstance(value, bool):
        raise wrong_type(f"{key} is true or false", value)
    return value


def parse_scale_rules(value: object) -> ScaleRules:
    """The rules of `mxfp4_scale`: one for both sides, or `{weight, activation}`; an absent side keeps its default."""
    if isinstance(value, ScaleRules):
        value = dataclasses.asdict(value)
    if isinstance(value, str):
        value = {"weight": value, "activation": value}
    if not isinstance(value, Mapping):
        raise wrong_type("mxfp4_scale is a rule or {weight, activation}", value)
    rules = FORMATS["mxfp4"].rules
    for side, rule in value.items():
        _check_side("mxfp4_scale", side)
        if not isinstance(rule, str):
            raise wrong_type("mxfp4_scale: a rule is a string", rule)
        if canonical(rule) not in rules:
            raise ConfigurationError(f"mxfp4_scale: unknown rule {shown(rule)} of {side}s; {nearest(rule, rules)}")
    return ScaleRules(**{side: canonical(rule) for side, rule in value.items()})


def slot_to_dict(slot: Slot | None) -> dict[str, str | None]:
    """The `{weight, activation}` of a slot, both None for a kind that is left alone."""
    if slot is None:
        return {"weight": None, "activation": None}
    sides = {} if slot.keeps_weight else {"weight": slot.weight}
    return {**sides, "activation": slot.activation}
