"""Every kernel configuration that ships, as named calls on tensors without values: for tables of machine code.

API:
    catalog(capability) -> tuple[Entry, ...]
    SOURCES                             one function a family of kernels
    entries(name, formats, calls, instruction="") -> list[Entry]     for such a function

A family of kernels joins by a function from a compute capability to its entries and by one line in `SOURCES`. Nothing
is launched and nothing compiled here; shapes are large and multiples of 16, as those of models are.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import FORMATS, Format, block_formats, get_format
from olq_fx.kernels.triton_calls import Call
from olq_fx.kernels.triton_quantize import dequantize_calls, quantize_calls

CAPABILITIES = (80, 89, 90, 100, 120)
"""What kernels are compiled for."""

_ROWS = _COLUMNS = 4096
_OTHER_BLOCKS = (*block_formats(32, 32), *block_formats(256, 64))
"""The extremes of the blocks that `weight_block_size` may ask for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A launch as it ships.

    Attributes:
        name: says what it does, in which formats, by which kernel; no other entry has it.
        formats: the names of the formats that it reads or writes.
        call: on the meta device.
        instruction: a regular expression that its matrix instructions must match; "" where there is to be none.
    """

    name: str
    formats: tuple[str, ...]
    call: Call
    instruction: str = ""


def entries(name: str, formats: Sequence[str], calls: Sequence[Call], instruction: str = "") -> list[Entry]:
    """The launches of one operation, each under the name of the operation and of its kernel.

    `instruction` is that of those kernels that multiply matrices; of an operation with others beside them, make their
    entries apart.
    """
    return [Entry(f"{name}: {call.kernel.fn.__name__}", tuple(formats), call, instruction) for call in calls]


def catalog(capability: int) -> tuple[Entry, ...]:
    """All entries for GPUs of a compute capability (90: sm_90).

    Raises:
        ValueError: two entries have the same name.
    """
    found = tuple(entry for source in SOURCES for entry in source(capability))
    names = [entry.name for entry in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"entries of the catalogue with the same name: {', '.join(sorted(twice))}")
    return found


def quantize_entries(capability: int) -> list[Entry]:
    """Quantization of bfloat16 to every format, by every rule; the extremes of other blocks."""
    found: list[Entry] = []
    for format, rule in _formats_and_rules():
        x, native = _meta(_ROWS, _COLUMNS), _has_fp8(capability)
        calls = quantize_calls(x, meta_parts(format, _ROWS, _COLUMNS), format, rule, native)
        found += entries(f"quantize {format.name} {rule}", [format.name], calls)
    return found


def dequantize_entries(capability: int) -> list[Entry]:
    """The inverse, to bfloat16, for every format."""
    found: list[Entry] = []
    for format in dict.fromkeys(format for format, _ in _formats_and_rules()):
        parts = meta_parts(format, _ROWS, _COLUMNS)
        calls = dequantize_calls(parts, format, _meta(_ROWS, _COLUMNS), _has_fp8(capability))
        found += entries(f"dequantize {format.name}", [format.name], calls)
    return found


SOURCES: tuple[Callable[[int], list[Entry]], ...] = (
    quantize_entries,
    dequantize_entries,
)
"""The families of kernels."""


def meta_parts(format: Format, rows: int, k: int) -> list[Tensor]:
    """The parts of a quantized (rows, k) tensor, on the meta device."""
    return [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in numerics.part_specs(format, rows, k)]


def _meta(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")


def _has_fp8(capability: int) -> bool:
    """Whether such a GPU casts to float8."""
    return capability >= 89


def _formats_and_rules() -> Iterator[tuple[Format, str]]:
    for format in (*FORMATS.values(), *map(get_format, _OTHER_BLOCKS)):
        for rule in format.rules:
            yield format, rule
