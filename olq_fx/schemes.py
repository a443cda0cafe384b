"""The schemes: a weight format and an activation format under one name, for dense layers and for experts."""

import dataclasses
from types import MappingProxyType

from olq_fx.errors import ConfigurationError, nearest
from olq_fx.formats import FORMATS

KEPT = ""
"""What stands for the weight format in a slot that gives an activation format only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """What one kind of layer becomes: the name of a weight format and of an activation format.

    `activation=None` keeps activations in their original precision (weight-only). `weight=KEPT` is for weights that are
    quantized already: they stay as they are, and only their activations change.
    """

    weight: str
    activation: str | None

    @property
    def keeps_weight(self) -> bool:
        """Whether it speaks of activations only."""
        return self.weight == KEPT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A named pair of slots, for dense linear layers and for mixture-of-experts layers."""

    name: str
    linear: Slot
    moe: Slot


def _scheme(name: str, weight: str, activation: str | None) -> Scheme:
    slot = Slot(weight, activation)
    return Scheme(name=name, linear=slot, moe=slot)


_ALL = (
    _scheme("fp8_per_tensor", "fp8_per_tensor_static", "fp8_per_token"),
    _scheme("fp8_per_channel", "fp8_per_channel_static", "fp8_per_token"),
    _scheme("fp8_per_block", "fp8_per_block_static", "fp8_per_block_dynamic"),
    _scheme("mxfp8", "mxfp8", "mxfp8"),
    _scheme("mxfp4", "mxfp4", "mxfp4"),
    _scheme("mxfp4_dualscale", "mxfp4_dualscale", "mxfp4_dualscale"),
    _scheme("nvfp4_per_token", "nvfp4", "nvfp4_per_token"),
    _scheme("int8", "int8_per_channel_static", "int8_per_token"),
    _scheme("int8_per_channel_weight_only", "int8_per_channel_static", None),
    _scheme("fp8_weight_only", "fp8_per_channel_static", None),
    _scheme("mxfp8_weight_only", "mxfp8", None),
    _scheme("mxfp4_weight_only", "mxfp4", None),
    _scheme("nvfp4_weight_only", "nvfp4", None),
)

SCHEMES: MappingProxyType[str, Scheme] = MappingProxyType({s.name: s for s in _ALL})
"""Every scheme by its name, in the order of the README's table."""

ALIASES: MappingProxyType[str, str] = MappingProxyType({"fp8": "fp8_per_tensor"})
"""Other names of schemes."""

ONLINE = "online"
"""Not a scheme: says that the configuration names everything itself."""


def canonical(name: str) -> str:
    """The one spelling of a name: lower case, `_` for `-`, aliases resolved."""
    spelled = name.lower().replace("-", "_")
    return ALIASES.get(spelled, spelled)


def get_scheme(name: str) -> Scheme:
    """The scheme called `name` (or by an alias); case does not matter and `-` equals `_`.

    Raises:
        ConfigurationError: no scheme has that name; the message offers the nearest ones.
    """
    found = SCHEMES.get(canonical(name))
    if found is None:
        raise ConfigurationError(f"unknown scheme {name!r}; {nearest(name, [*SCHEMES, *ALIASES])}")
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A weight format beside an activation format.

    Attributes:
        slot: the two; an activation of None keeps activations in original precision.
        default: whether the weight format alone means this pair.
        schemes: the schemes that mean it.
    """

    slot: Slot
    default: bool
    schemes: tuple[str, ...]


def pairs() -> tuple[Pair, ...]:
    """Every weight format with every activation format and without one, in the order of `FORMATS`.

    All of them have a reference and work in both routes, so a configuration that names one is never refused for it.
    """
    activations = [None, *(name for name, format in FORMATS.items() if format.activation)]
    return tuple(
        Pair(
            slot=Slot(weight, activation),
            default=activation is not None and FORMATS[weight].default_activation == activation,
            schemes=tuple(s.name for s in SCHEMES.values() if Slot(weight, activation) in (s.linear, s.moe)),
        )
        for weight, format in FORMATS.items()
        if format.weight
        for activation in activations
    )
