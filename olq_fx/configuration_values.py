"""The values of a configuration's keys: what each may be, and what it resolves to.

One function a key. Names are compared in their canonical spelling; a value of a type that its key never takes is a
`ConfigurationTypeError`, any other mistake a `ConfigurationError` that says where it was and what is nearest.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from olq_fx.errors import ConfigurationError, ConfigurationTypeError, nearest
from olq_fx.formats import FORMATS, Format
from olq_fx.patterns import compile_pattern
from olq_fx.schemes import ALIASES, ONLINE, SCHEMES, Slot, canonical, get_scheme

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
class Target:
    """What a target pattern asks for: the slots of the two kinds of layers."""

    linear: Slot
    moe: Slot


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
        raise ConfigurationTypeError(f"'quantization' is a scheme name or None, not {type(value).__name__}: {value!r}")
    name = canonical(value)
    if name in (NONE, ONLINE):
        return None
    if name not in SCHEMES:
        raise ConfigurationError(f"unknown scheme {value!r}; {nearest(name, [*SCHEMES, *ALIASES, ONLINE, NONE])}")
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
    """The slot in force for `kind`, of what the configuration gives under that key and of the scheme."""
    base = None if scheme is None else _scheme_slot(scheme, kind, per_token)
    if value is INHERIT:
        return base
    if value is None or (isinstance(value, str) and canonical(value) == NONE):
        return None
    if isinstance(value, Slot):
        value = slot_to_dict(value)
    if isinstance(value, str):
        return _named_slot(kind, value, per_token)
    if isinstance(value, Mapping):
        return _slot_of_sides(kind, value, base, per_token)
    raise ConfigurationTypeError(
        f"{kind!r} is a scheme name, a weight format or {{weight, activation}}, not {type(value).__name__}: {value!r}"
    )


def _named_slot(where: str, value: str, per_token: bool) -> Slot:
    """The slot of a bare string: of a scheme first, else of a weight format."""
    name = canonical(value)
    if name in SCHEMES:
        return _scheme_slot(name, where, per_token)
    if name == ONLINE:
        raise ConfigurationError(f"{where!r}: 'online' is no scheme of its own; name a scheme or a weight format")
    if name in FORMATS:
        weight = _weight_format(where, value)
        return Slot(weight.name, _default_activation(weight, per_token))
    valid = [*SCHEMES, *ALIASES, *(f.name for f in FORMATS.values() if f.weight)]
    raise ConfigurationError(f"{where!r}: unknown scheme or weight format {value!r}; {nearest(name, valid)}")


def _slot_of_sides(where: str, sides: Mapping[object, object], base: Slot | None, per_token: bool) -> Slot | None:
    """The slot of `{weight, activation}`, either of which may be absent."""
    for key in sides:
        if key not in ("weight", "activation"):
            raise ConfigurationError(f"{where!r}: unknown key {key!r}; {nearest(str(key), ['weight', 'activation'])}")
    if not sides:
        raise ConfigurationError(f"{where!r} is empty; name its weight format, its activation format or both")
    if "weight" not in sides and base is None:
        raise ConfigurationError(f"{where!r} has no weight format, and there is no scheme to take one from")
    named = sides.get("weight", base and base.weight)
    activation = _side(where, "activation", sides.get("activation"))
    name = _side(where, "weight", named)
    if name is None:
        if activation is not None:
            raise ConfigurationError(
                f"{where!r}: activation {activation!r} with weight None; "
                "activations are quantized only where the weight is, so name a weight format"
            )
        return None
    weight = _weight_format(where, name)
    if "activation" not in sides:
        return Slot(weight.name, _default_activation(weight, per_token))
    return Slot(weight.name, None if activation is None else _activation_format(where, activation).name)


def _side(where: str, side: str, value: object) -> str | None:
    """The name on one side of a slot as it was written; None for null and `none`."""
    if value is None or isinstance(value, str):
        return None if value is None or canonical(value) == NONE else value
    raise ConfigurationTypeError(f"{where!r}: {side} is a format name or None, not {type(value).__name__}: {value!r}")


def _weight_format(where: str, value: str) -> Format:
    return _format(where, value, "weight", [f for f in FORMATS.values() if f.weight])


def _activation_format(where: str, value: str) -> Format:
    return _format(where, value, "activation", [f for f in FORMATS.values() if f.activation])


def _format(where: str, value: str, side: str, usable: Sequence[Format]) -> Format:
    """The format called `value` for one side of a slot."""
    name = canonical(value) if value not in ALIASES else value
    names = [format.name for format in usable]
    if name in names:
        return FORMATS[name]
    if name in FORMATS:
        other = "activation" if side == "weight" else "weight"
        raise ConfigurationError(f"{where!r}: {value!r} is {other} format only; {side}s: {', '.join(names)}")
    if canonical(value) in SCHEMES:
        raise ConfigurationError(
            f"{where!r}: {value!r} is a scheme, not a {side} format; write it instead of the dictionary, or one of: "
            + ", ".join(names)
        )
    raise ConfigurationError(f"{where!r}: unknown {side} format {value!r}; {nearest(name, names)}")


def parse_targets(value: object, per_token: bool) -> tuple[tuple[str, Target], ...]:
    """The patterns of `targets` and what each asks for, sorted by pattern."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        pairs: Iterable[Any] = value.items()
    elif isinstance(value, (list, tuple)) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        pairs = value
    else:
        raise ConfigurationTypeError(f"'targets' is a dictionary of patterns, not {type(value).__name__}: {value!r}")
    return tuple(sorted((_pattern("targets", p), _target(p, v, per_token)) for p, v in pairs))


def _target(pattern: str, value: object, per_token: bool) -> Target:
    """What one target asks for; leaving a layer alone is what targets do not ask for."""
    if isinstance(value, Target):
        return value
    where = f"targets[{pattern!r}]"
    if isinstance(value, str) and canonical(value) in SCHEMES:
        return Target(_scheme_slot(value, "linear", per_token), _scheme_slot(value, "moe", per_token))
    slot = parse_slot(where, value, None, per_token)
    if slot is None:
        raise ConfigurationError(f"{where} names no format; a layer that no target matches is left alone already")
    return Target(slot, slot)


def check_only_targets(scheme: str | None, linear: object, moe: object) -> None:
    """Reject `targets` beside what they exclude."""
    given = [key for key, value in (("linear", linear), ("moe", moe)) if value is not INHERIT and value is not None]
    if scheme is not None:
        given.insert(0, f"the scheme {scheme}")
    if given:
        raise ConfigurationError(
            f"'targets' and {' and '.join(given)} exclude each other: a layer that no target matches is left alone; "
            "add a target for it, or drop 'targets' and use 'ignore'"
        )


def parse_patterns(key: str, value: object) -> tuple[str, ...]:
    """The patterns of `ignore` or `include`: None, one string, or a list; repeated ones once."""
    if value is None:
        return ()
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        raise ConfigurationTypeError(f"{key!r} is a pattern or a list of them, not {type(value).__name__}: {value!r}")
    return tuple(dict.fromkeys(_pattern(key, one) for one in listed))


def _pattern(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationTypeError(f"a pattern in {key!r} is a string, not {type(value).__name__}: {value!r}")
    try:
        return compile_pattern(value).text
    except ConfigurationError as error:
        raise ConfigurationError(f"{key!r}: {error}") from None


def parse_flag(key: str, value: object) -> bool:
    """The value of an option that is on or off; 0 and 1 are numbers."""
    if not isinstance(value, bool):
        raise ConfigurationTypeError(f"{key!r} is true or false, not {type(value).__name__}: {value!r}")
    return value


def parse_scale_rules(value: object) -> ScaleRules:
    """The rules of `mxfp4_scale`: one for both sides, or `{weight, activation}`; an absent side keeps its default."""
    if isinstance(value, ScaleRules):
        value = dataclasses.asdict(value)
    if isinstance(value, str):
        value = {"weight": value, "activation": value}
    if not isinstance(value, Mapping):
        raise ConfigurationTypeError(
            f"'mxfp4_scale' is a rule or {{weight, activation}}, not {type(value).__name__}: {value!r}"
        )
    rules = FORMATS["mxfp4"].rules
    for side, rule in value.items():
        if side not in ("weight", "activation"):
            raise ConfigurationError(
                f"'mxfp4_scale': unknown key {side!r}; {nearest(str(side), ['weight', 'activation'])}"
            )
        if not isinstance(rule, str):
            raise ConfigurationTypeError(f"'mxfp4_scale': a rule is a string, not {type(rule).__name__}: {rule!r}")
        if canonical(rule) not in rules:
            raise ConfigurationError(f"'mxfp4_scale': unknown rule {rule!r} of {side}s; {nearest(rule, rules)}")
    return ScaleRules(**{side: canonical(rule) for side, rule in value.items()})


def slot_to_dict(slot: Slot | None) -> dict[str, str | None]:
    """The `{weight, activation}` of a slot, both None for a kind that is left alone."""
    return (
        {"weight": None, "activation": None} if slot is None else {"weight": slot.weight, "activation": slot.activation}
    )
