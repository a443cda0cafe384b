"""Dotted keys, as a command line has them: `--quantization-config.moe.activation mxfp8`.

API:
    from_dotted(pairs) -> dict     [("quantization_config.moe.activation", "mxfp8")] -> the nested dictionary

Values are JSON where they can be read as such (`true`, `5`, `[128, 128]`, `null`) and else text. Dots within a pattern
of `targets` or a prefix of `components` belong to it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from olq_fx.configuration_sources import KEY_ALIASES, NESTED
from olq_fx.errors import ConfigurationError, nearest, shown

_SIDES = frozenset({"weight", "activation"})
_WITH_SIDES = frozenset({"linear", "moe", "mxfp4_scale"})
_PATTERNS = frozenset({"ignore", "include", *(name for name, key in KEY_ALIASES.items() if key == "ignore")})
_NESTED_KEYS = (*_WITH_SIDES, "targets", "components", "packed_modules_mapping")
_KEYS = (
    *("quantization", "linear", "moe", "ignore", "targets", "components", "include", "per_token_activation"),
    *("weight_block_size", "num_bf16_fallback_layers", "mxfp4_scale", "four_over_six", "power_of_two_scales"),
    *("fast_accum", "allow_nonfinite", "skip_unprofitable", "linear_backend", "moe_backend", "activation_scheme"),
    *("packed_modules_mapping", *KEY_ALIASES),
)
"""The keys after which a component's prefix ends; a test holds them to those of `QuantizationConfig`."""


def from_dotted(pairs: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """The dictionary that dotted keys mean, for `QuantizationConfig.parse`.

    Args:
        pairs: (key, value) in order. A key may begin with dashes, and `-` equals `_` in the names of keys; a value that
            is no string is taken as it is.

    Raises:
        ConfigurationError: a key is malformed, or given twice, or both as a whole and in parts.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        way = _way(key)
        at = found
        for depth, part in enumerate(way[:-1], 1):
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise ConfigurationError(f"{key!r} is given beside {'.'.join(way[:depth])!r} as a whole; give one")
        _put(at, way[-1], _value(value, way[-1]), key)
    return found


def _put(at: dict[str, Any], name: str, value: object, key: str) -> None:
    """Set one key; dictionaries are joined where they give different keys."""
    if name not in at:
        at[name] = value
    elif isinstance(at[name], dict) and isinstance(value, dict):
        for inner, part in value.items():
            _put(at[name], inner, part, f"{key}.{inner}")
    else:
        raise ConfigurationError(f"{key!r} is given twice, or as a whole and in parts")


def _way(key: str) -> list[str]:
    """The keys on the way from the outermost dictionary to the value."""
    parts = key.lstrip("-").split(".")
    if not all(part.strip() for part in parts):
        raise ConfigurationError(f"{shown(key)} is no dotted key: a part of it is empty")
    way = []
    if _spelled(parts[0]) == NESTED:
        way, parts = [NESTED], parts[1:]
    return way + _below(parts)


def _below(parts: list[str]) -> list[str]:
    if not parts:
        return []
    first, rest = _spelled(parts[0]), parts[1:]
    if not rest:
        return [first]
    if first in ("targets", "packed_modules_mapping"):
        return [first, ".".join(rest)]
    if first == "components":
        return [first, *_component(rest)]
    if first not in _WITH_SIDES:
        raise ConfigurationError(
            f"{'.'.join(parts)!r}: {first!r} has no keys of its own; {nearest(first, _NESTED_KEYS)}"
        )
    if len(rest) > 1 or _spelled(rest[0]) not in _SIDES:
        raise ConfigurationError(
            f"{'.'.join(parts)!r}: unknown key {'.'.join(rest)!r} in {first!r}; {nearest(rest[0], _SIDES)}"
        )
    return [first, _spelled(rest[0])]


def _component(parts: list[str]) -> list[str]:
    """A prefix, which ends before the first part that is a key of a configuration, and what comes after it."""
    for end, part in enumerate(parts):
        if end and _spelled(part) in _KEYS:
            return [".".join(parts[:end]), *_below(parts[end:])]
    return [".".join(parts)]


def _spelled(part: str) -> str:
    return part.replace("-", "_")


def _value(value: object, key: str) -> object:
    """What a text on the command line means. A pattern may look like a number: layers of nn.Sequential are called 0."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return value
    return value if key in _PATTERNS and isinstance(read, (bool, int, float)) else read


def _no_number(name: str) -> Mapping[str, object]:
    """NaN and Infinity are no JSON: they stay text."""
    raise ValueError(name)
