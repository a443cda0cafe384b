"""What the catalogue of kernels is made of: launches on tensors without values, and what their machine code must have.

API:
    Entry, entries(name, formats, calls, instruction="") -> list[Entry]
    instruction_pattern(call, capability) -> str        of a kernel that multiplies
    meta(*shape), meta_parts(format, rows, k)           tensors without values
    has_fp8(capability) -> bool
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import Format
from olq_fx.kernels.triton_calls import Call

CAPABILITIES = (80, 89, 90, 100, 120)
"""What kernels are compiled for."""


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


_INSTRUCTIONS = {
    "fp8": {89: r"^mma\.sync.*e4m3", 90: r"^wgmma.*e4m3\.e4m3", 100: r"^tcgen05.*f8f6f4", 120: r"^mma\.sync.*e4m3"},
    "scaled": {100: r"^tcgen05.*block_scale", 120: r"^mma\.sync.*block_scale"},
    "bf16": {90: r"^wgmma.*bf16\.bf16", 100: r"^tcgen05.*kind::f16"},
    "fp16": {90: r"^wgmma.*f16\.f16", 100: r"^tcgen05.*kind::f16"},
    "int8": {90: r"^wgmma.*s8\.s8", 100: r"^(mma\.sync.*s8|tcgen05.*kind::i8)"},
}
"""By what enters a matrix instruction, the instruction for it; where none is named, that of `mma.sync`."""


def instruction_pattern(call: Call, capability: int) -> str:
    """A regular expression for the matrix instructions of a kernel; "" of one that is to have none."""
    dot = call.constants.get("DOT")
    if dot is None:
        return ""
    return _INSTRUCTIONS[dot].get(capability, rf"^mma\.sync.*{ {'int8': 's8', 'fp16': 'f16'}.get(dot, dot) }")


def meta_parts(format: Format, rows: int, k: int) -> list[Tensor]:
    """The parts of a quantized (rows, k) tensor, on the meta device."""
    return [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in numerics.part_specs(format, rows, k)]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def has_fp8(capability: int) -> bool:
    """Whether such a GPU casts to float8."""
    return capability >= 89
