"""The values of options that are numbers, names of kernels or tables: what each may be.

One function a key, as in `configuration_values`.
"""

from collections.abc import Mapping

from olq_fx.configuration_sources import wrong_type
from olq_fx.errors import ConfigurationError, nearest, shown
from olq_fx.formats import BLOCK_COLUMNS, BLOCK_ROWS
from olq_fx.kernels import registry
from olq_fx.schemes import canonical

AUTO = "auto"
"""The backend that leaves the choice of kernels to the registry."""

BLOCK_SIZE = (128, 128)
"""The block of `fp8_per_block_static` where no other is asked for."""


def parse_block_size(value: object) -> tuple[int, int]:
    """`weight_block_size`: the extents (N, K) of a block."""
    if not isinstance(value, (list, tuple)):
        raise wrong_type("weight_block_size is a pair of numbers [N, K]", value)
    if len(value) != 2:
        raise ConfigurationError(f"weight_block_size is a pair of numbers [N, K], not {len(value)}: {shown(value)}")
    for axis, extent, valid in (("N", value[0], BLOCK_ROWS), ("K", value[1], BLOCK_COLUMNS)):
        if not isinstance(extent, int) or isinstance(extent, bool):
            raise wrong_type(f"weight_block_size: {axis} is a whole number", extent)
        if extent not in valid:
            listed = ", ".join(map(str, valid))
            raise ConfigurationError(f"weight_block_size: {axis} cannot be {shown(extent)}; valid: {listed}")
    return (value[0], value[1])


def parse_layer_count(key: str, value: object) -> int | None:
    """A number of layers from 0; None for the default."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(f"{key} is a whole number or None", value)
    if value < 0:
        raise ConfigurationError(f"{key} is a number of layers from 0, not {shown(value)}")
    return value


def parse_backend(key: str, value: object) -> str:
    """The name of a kernel of the registry, or `auto`."""
    if not isinstance(value, str):
        raise wrong_type(f"{key} is the name of a kernel", value)
    names = [AUTO, *(kernel.name for kernel in registry.KERNELS)]
    name = canonical(value)
    if name not in names:
        raise ConfigurationError(f"{key}: no kernel is called {shown(value)}; {nearest(name, names)}")
    return name


def parse_dynamic(value: object) -> None:
    """`activation_scheme`: only `dynamic`, which is what happens anyway."""
    if not isinstance(value, str):
        raise wrong_type("activation_scheme is a string", value)
    if canonical(value) == "static":
        raise ConfigurationError(
            "activation_scheme 'static': there is no calibration here, activations are quantized dynamically; "
            "for static scales load a checkpoint that is already quantized"
        )
    if canonical(value) != "dynamic":
        raise ConfigurationError(f"unknown activation_scheme {shown(value)}; valid: dynamic")


def parse_fused(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """`packed_modules_mapping`: fused names and the shards that each stands for, sorted by name."""
    if value is None:
        return ()
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)  # the form that the configuration itself has
    if not isinstance(value, Mapping):
        raise wrong_type("packed_modules_mapping is a dictionary of fused names to lists of shards", value)
    return tuple(sorted((_name(name), _shards(name, shards)) for name, shards in value.items()))


def _shards(fused: object, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise wrong_type(f"packed_modules_mapping[{shown(fused)}] is a list of names", value)
    shards = tuple(dict.fromkeys(_name(one) for one in value))
    if len(shards) == 1 or fused in shards:
        raise ConfigurationError(
            f"packed_modules_mapping[{shown(fused)}] names {shown(list(shards))}; a fused layer has two shards or more "
            "(none at all takes the name out of the table), and is none of them"
        )
    return shards


def _name(value: object) -> str:
    """The last part of a module's path."""
    if not isinstance(value, str):
        raise wrong_type("a name in packed_modules_mapping is a string", value)
    if not value.strip() or "." in value:
        raise ConfigurationError(
            f"packed_modules_mapping: {shown(value)} is not the last part of a path, such as 'qkv_proj'"
        )
    return value
