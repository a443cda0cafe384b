"""The formats: how one tensor is stored in few bits. One row a format, nothing else knows their names.

A tensor of shape (R, K) is stored as below; R rows are output features N of a weight or tokens M of an activation, K is
the reduction axis.

- codes, one element each: (R, K), or (R, ceil(K/2)) bytes where two elements share a byte,
- a scale for each group of `group` = (rows, columns) elements, laid out as a 2-D grid (ceil(R/rows), ceil(K/columns)),
- for two-level formats, a coarse float32 scale for each `coarse` group, as a 2-D grid too.

`None` for an extent of a group means the whole axis. Source: the OCP MX 1.0 specification for the `mx` formats.
"""

import dataclasses
from types import MappingProxyType
from typing import Literal

from olq_fx.errors import ConfigurationError, nearest

Element = Literal["e4m3", "e2m1", "int8"]
ScaleKind = Literal["float32", "e8m0", "e4m3"]
Group = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a tensor is stored: element type, groups, scales, and the rules by which a scale may be chosen.

    Attributes:
        name: the name in configurations.
        element: `e4m3` (float8_e4m3fn), `e2m1` (two a byte, element 2i in the low nibble) or `int8` (-127..127).
        group: (rows, columns) that share a scale; `None` is the whole axis.
        scale: stored type of the group scale: `float32`, `e8m0` (a power of two as a biased exponent byte), `e4m3`.
        coarse: group of the second-level float32 scale, or `None` where there is one level only.
        rules: the scale rules that the format knows, the first being the plain one.
        weight_rule, activation_rule: the default rule of each use.
        weight, activation: whether the format may be used as a weight or as an activation.
        default_activation: of a weight format, the activation format that goes with it when none is named.
    """

    name: str
    element: Element
    group: Group
    scale: ScaleKind
    coarse: Group | None = None
    rules: tuple[str, ...] = ("amax",)
    weight_rule: str = "amax"
    activation_rule: str = "amax"
    weight: bool = False
    activation: bool = False
    default_activation: str | None = None

    @property
    def packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.element == "e2m1"

    @property
    def levels(self) -> int:
        """How many tensors of scales there are (1 or 2); a quantized tensor has one part more: its codes."""
        return 1 if self.coarse is None else 2


_MXFP4_RULES = ("floor", "even", "ceil", "mse")

_ALL = (
    Format(
        name="fp8_per_tensor_static",
        element="e4m3",
        group=(None, None),
        scale="float32",
        weight=True,
        default_activation="fp8_per_token",
    ),
    Format(name="fp8_per_tensor_dynamic", element="e4m3", group=(None, None), scale="float32", activation=True),
    Format(
        name="fp8_per_channel_static",
        element="e4m3",
        group=(1, None),
        scale="float32",
        weight=True,
        default_activation="fp8_per_token",
    ),
    Format(name="fp8_per_token", element="e4m3", group=(1, None), scale="float32", activation=True),
    Format(
        name="fp8_per_block_static",
        element="e4m3",
        group=(128, 128),
        scale="float32",
        weight=True,
        default_activation="fp8_per_block_dynamic",
    ),
    Format(
        name="fp8_per_block_dynamic",
        element="e4m3",
        group=(1, 128),
        scale="float32",
        rules=("amax", "power_of_two"),
        activation=True,
    ),
    Format(
        name="mxfp8",
        element="e4m3",
        group=(1, 32),
        scale="e8m0",
        rules=("ceil",),
        weight_rule="ceil",
        activation_rule="ceil",
        weight=True,
        activation=True,
        default_activation="mxfp8",
    ),
    Format(
        name="mxfp4",
        element="e2m1",
        group=(1, 32),
        scale="e8m0",
        rules=_MXFP4_RULES,
        weight_rule="mse",
        activation_rule="even",
        weight=True,
        activation=True,
        default_activation="mxfp4",
    ),
    Format(
        name="mxfp4_dualscale",
        element="e2m1",
        group=(1, 32),
        scale="e8m0",
        coarse=(1, 512),
        rules=_MXFP4_RULES,
        weight_rule="mse",
        activation_rule="even",
        weight=True,
        activation=True,
        default_activation="mxfp4_dualscale",
    ),
    Format(
        name="nvfp4",
        element="e2m1",
        group=(1, 16),
        scale="e4m3",
        coarse=(None, None),
        rules=("amax", "four_over_six"),
        weight_rule="four_over_six",
        weight=True,
        default_activation="nvfp4_per_token",
    ),
    Format(
        name="nvfp4_per_token",
        element="e2m1",
        group=(1, 16),
        scale="e4m3",
        coarse=(1, None),
        activation=True,
    ),
    Format(
        name="int8_per_channel_static",
        element="int8",
        group=(1, None),
        scale="float32",
        weight=True,
        default_activation="int8_per_token",
    ),
    Format(name="int8_per_token", element="int8", group=(1, None), scale="float32", activation=True),
)

FORMATS: MappingProxyType[str, Format] = MappingProxyType({f.name: f for f in _ALL})
"""Every format by its name."""

BLOCK_ROWS = (32, 64, 128, 256)
BLOCK_COLUMNS = (32, 64, 128)
"""The extents that a block of `fp8_per_block_static` may have along N and along K (`weight_block_size`)."""

_DEFAULT_BLOCK = (128, 128)


def block_formats(rows: int, columns: int) -> tuple[str, str]:
    """The names of the weight and of the activation format for blocks of (rows, columns).

    >>> block_formats(128, 128), block_formats(64, 32)
    (('fp8_per_block_static', 'fp8_per_block_dynamic'), ('fp8_per_block_static_64x32', 'fp8_per_block_dynamic_1x32'))
    """
    weight = "" if (rows, columns) == _DEFAULT_BLOCK else f"_{rows}x{columns}"
    activation = "" if columns == _DEFAULT_BLOCK[1] else f"_1x{columns}"
    return f"fp8_per_block_static{weight}", f"fp8_per_block_dynamic{activation}"


def _other_blocks() -> dict[str, Format]:
    """The formats of `fp8_per_block` with other blocks: reached by an option, so they are no names of `FORMATS`."""
    found: dict[str, Format] = {}
    for rows in BLOCK_ROWS:
        for columns in BLOCK_COLUMNS:
            weight, activation = block_formats(rows, columns)
            static = dataclasses.replace(
                FORMATS["fp8_per_block_static"], name=weight, group=(rows, columns), default_activation=activation
            )
            dynamic = dataclasses.replace(FORMATS["fp8_per_block_dynamic"], name=activation, group=(1, columns))
            found |= {weight: static, activation: dynamic}
    return {name: format for name, format in found.items() if name not in FORMATS}


_OTHER_BLOCKS = _other_blocks()


def get_format(name: str) -> Format:
    """The format called `name`, in which case does not matter and `-` equals `_`; those of other blocks too.

    Raises:
        ConfigurationError: no format has that name; the message offers the nearest ones.
    """
    found = FORMATS.get(name) or _OTHER_BLOCKS.get(name)
    if found is None:
        spelled = name.lower().replace("-", "_")
        found = FORMATS.get(spelled) or _OTHER_BLOCKS.get(spelled)
    if found is None:
        raise ConfigurationError(f"unknown format {name!r}; {nearest(name, FORMATS)}")
    return found
