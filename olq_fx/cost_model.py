"""What a linear layer can cost at best on a GPU: bytes moved, operations, and the time of a roofline. No GPU is needed.

API:
    ARCHITECTURES, architecture(name) -> Architecture
    SHARED_MEMORY       of a block of threads, by compute capability
    instruction(weight, activation, capability) -> Instruction
    original_cost(m, n, k, architecture) -> Cost
    quantized_cost(slot, m, n, k, architecture, fused=False) -> Cost
    input_reads(format) -> how often quantizing reads its input
    rows_lost(slot, n, k, architectures, rows=ROWS) -> the numbers of rows at which a layer is expected to be slower

The model. A kernel takes the longer of bytes / bandwidth and operations / rate, both being published ceilings that no
kernel reaches; kernels follow each other. A product of (M, K) with (N, K) has 2 M N K operations. It reads each operand
once and writes (M, N) once. Activations and outputs in original precision, and the layer compared with, are bfloat16.

Activations are quantized by a kernel of their own, which reads them once (twice for one scale of a whole tensor; a row
that is read twice comes from cache the second time) and writes codes and scales. `fused=True` leaves that kernel out:
the producer of the activations writes codes instead of values, and neither is counted.

Not counted: launches, decoding, scaling, promotion to float32, tails of waves. So times are lower bounds, and a ratio
of two of them says what is to be gained and not what was measured.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from olq_fx.errors import ConfigurationError, nearest
from olq_fx.formats import Format, get_format
from olq_fx.numerics import quantized_bytes
from olq_fx.schemes import Slot

Rate = Literal["bf16", "fp8", "int8", "fp4"]

ROWS = (1, 64, 4096)
"""Rows of activations that a layer is looked at with: a decoded token, a batch of them, a prompt."""

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that one block of threads may have, by compute capability (CUDA programming guide)."""
_MIXED = (100, 103)
"""Compute capabilities whose block-scaled instruction takes e4m3 with e2m1, as the compiler reaches it."""

_ORIGINAL = 2
"""Bytes of an element in original precision."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A GPU by its published ceilings.

    Attributes:
        name: as it is asked for: `sm_90` or the name of a device.
        capability: 90 is sm_90.
        device: the device that the figures belong to.
        bandwidth: of its memory, in bytes a second.
        rates: dense operations a second of its matrix instructions, with float32 (int32) accumulation, by operand.
        source: where the figures are published.
    """

    name: str
    capability: int
    device: str
    bandwidth: float
    rates: Mapping[Rate, float]
    source: str

    @property
    def ceilings(self) -> str:
        """The figures for people."""
        rates = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in self.rates.items())
        return f"{self.device} (sm_{self.capability}): {self.bandwidth / 1e12:g} TB/s; {rates} TFLOP/s (TOP/s) dense"


def _architecture(
    name: str, capability: int, device: str, terabytes: float, tera: Mapping[Rate, float], source: str
) -> Architecture:
    rates: Mapping[Rate, float] = MappingProxyType({operand: rate * 1e12 for operand, rate in tera.items()})
    return Architecture(
        name=name, capability=capability, device=device, bandwidth=terabytes * 1e12, rates=rates, source=source
    )


_HOPPER: Mapping[Rate, float] = {"bf16": 989.5, "fp8": 1979, "int8": 1979}  # the datasheets name twice that, sparse
_ADA = "NVIDIA Ada GPU Architecture whitepaper v2, appendix A (tensor rates with FP32 accumulation)"

_ALL = (
    _architecture(
        "a100", 80, "A100 80GB SXM", 2.039, {"bf16": 312, "int8": 624}, "NVIDIA A100 Tensor Core GPU datasheet"
    ),
    _architecture(
        "l40s", 89, "L40S", 0.864, {"bf16": 362.05, "fp8": 733, "int8": 733}, "NVIDIA L40S datasheet (without sparsity)"
    ),
    _architecture("rtx4090", 89, "GeForce RTX 4090", 1.008, {"bf16": 165.2, "fp8": 330.3, "int8": 660.6}, _ADA),
    _architecture("h200", 90, "H200 SXM", 4.8, _HOPPER, "NVIDIA H200 datasheet (half of its figures, with sparsity)"),
    _architecture("h100", 90, "H100 SXM", 3.35, _HOPPER, "NVIDIA H100 datasheet (half of its figures, with sparsity)"),
    _architecture(
        "b200",
        100,
        "B200 (HGX)",
        8.0,
        {"bf16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000},
        "NVIDIA Blackwell Architecture Technical Brief, HGX B200 per GPU (half of its figures, with sparsity)",
    ),
    _architecture(
        "rtx5090",
        120,
        "GeForce RTX 5090",
        1.792,
        {"bf16": 209.5, "fp8": 419, "int8": 838, "fp4": 1676},
        "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix (tensor rates with FP32 accumulation)",
    ),
)


def _by_name() -> dict[str, Architecture]:
    found: dict[str, Architecture] = {}
    for one in _ALL:
        found.setdefault(f"sm_{one.capability}", dataclasses.replace(one, name=f"sm_{one.capability}"))
    return found | {one.name: one for one in _ALL}


ARCHITECTURES: MappingProxyType[str, Architecture] = MappingProxyType(_by_name())
"""By name: `sm_90` is that of H200, and each device has a name of its own."""


def architecture(name: str) -> Architecture:
    """The architecture called `name`, in which case does not matter and `sm90` equals `sm_90`.

    Raises:
        ConfigurationError: there is none; the message offers the nearest names.
    """
    spelled = name.lower().replace("-", "_")
    spelled = f"sm_{spelled[2:]}" if spelled[:2] == "sm" and spelled[2:].isdigit() else spelled
    if spelled not in ARCHITECTURES:
        raise ConfigurationError(f"unknown architecture {name!r}; {nearest(name, ARCHITECTURES)}")
    return ARCHITECTURES[spelled]


def of_capability(capability: int) -> Architecture | None:
    """The first architecture of a compute capability; None of one that is not in the table."""
    return ARCHITECTURES.get(f"sm_{capability}")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """The matrix instruction of a product.

    Attributes:
        rate: the operand whose rate counts.
        name: for people. `w8a16` and `w4a16` name the instruction only: activations keep their format, its codes enter
            in bfloat16, which holds them exactly.
    """

    rate: Rate
    name: str


_ORIGINAL_PRODUCT = Instruction("bf16", "bf16")


def instruction(weight: Format, activation: Format | None, capability: int) -> Instruction:
    """What multiplies codes of `weight` with those of `activation` (None: original precision).

    This is what the kernels do (`kernels/triton_product.py`; a test compares the two). int8 by int8 is everywhere. From
    89 on e4m3 by e4m3 is where both have float32 scales. From 100 on operands of the same element under block scales of
    one kind have block-scaled instructions, on 100 and 103 those of e4m3 and e2m1 too, at the rate of e4m3. All else
    goes through bfloat16, which holds the operands exactly.
    """
    decoded = Instruction("bf16", f"bf16 (w{4 if weight.packed else 8}a16)")
    if activation is None:
        return decoded
    mixed = weight.element != activation.element
    if mixed and (capability not in _MIXED or "float32" in (weight.scale, activation.scale)):
        return decoded
    if weight.element == "int8":
        return Instruction("int8", "int8")
    if weight.scale == activation.scale == "float32":
        return Instruction("fp8", "fp8") if capability >= 89 else decoded
    pieces = {(each.scale, each.group[1]) for each in (weight, activation)}
    of_pieces = any(each.coarse is not None and each.coarse[1] is not None for each in (weight, activation))
    if capability < 100 or len(pieces) > 1 or of_pieces:
        return decoded
    if mixed or weight.element == "e4m3":
        return Instruction("fp8", "mxf8f6f4")
    return Instruction("fp4", "mxf4" if weight.scale == "e8m0" else "mxf4nvf4")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a layer costs with M rows of activations.

    Attributes:
        instruction: of its product.
        product_bytes: that the product moves.
        quantization_bytes: that quantizing its activations moves; 0 where nothing is, or it is fused.
        operations: of the product.
        seconds: of the product and of the quantization, one after the other.
        bound: what holds the product up: `memory` or `compute`.
    """

    instruction: Instruction
    product_bytes: int
    quantization_bytes: int
    operations: int
    seconds: float
    bound: Literal["memory", "compute"]

    @property
    def bytes(self) -> int:
        """All that is moved."""
        return self.product_bytes + self.quantization_bytes


def original_cost(m: int, n: int, k: int, architecture: Architecture) -> Cost:
    """The cost of the layer in bfloat16."""
    return _cost(_ORIGINAL_PRODUCT, _ORIGINAL * (m * k + n * k + m * n), 0, m, n, k, architecture)


def quantized_cost(slot: Slot, m: int, n: int, k: int, architecture: Architecture, *, fused: bool = False) -> Cost:
    """The cost of the layer in the formats of `slot`.

    Args:
        slot: names of formats.
        m: rows of activations.
        n: output features.
        k: input features.
        architecture: where.
        fused: whether the producer of the activations writes their codes.
    """
    weight = get_format(slot.weight)
    activation = None if slot.activation is None else get_format(slot.activation)
    read = _ORIGINAL * m * k if activation is None else quantized_bytes(activation, m, k)
    quantization = 0
    if activation is not None and not fused:
        quantization = input_reads(activation) * _ORIGINAL * m * k + read
    found = instruction(weight, activation, architecture.capability)
    moved = read + quantized_bytes(weight, n, k) + _ORIGINAL * m * n
    return _cost(found, moved, quantization, m, n, k, architecture)


def input_reads(format: Format) -> int:
    """How often quantizing to `format` reads its input from memory."""
    return 2 if (None, None) in (format.group, format.coarse) else 1


def _cost(
    found: Instruction, moved: int, quantization: int, m: int, n: int, k: int, architecture: Architecture
) -> Cost:
    operations = 2 * m * n * k
    memory, compute = moved / architecture.bandwidth, operations / architecture.rates[found.rate]
    return Cost(
        instruction=found,
        product_bytes=moved,
        quantization_bytes=quantization,
        operations=operations,
        seconds=max(memory, compute) + quantization / architecture.bandwidth,
        bound="memory" if memory >= compute else "compute",
    )


def rows_lost(
    slot: Slot, n: int, k: int, architectures: Iterable[Architecture], rows: Iterable[int] = ROWS
) -> tuple[int, ...]:
    """The numbers of rows, of `rows`, at which the layer is slower than in bfloat16 on each of `architectures`.

    Quantization is taken for a kernel of its own.
    """
    listed = tuple(architectures)
    return tuple(
        m
        for m in rows
        if all(quantized_cost(slot, m, n, k, one).seconds > original_cost(m, n, k, one).seconds for one in listed)
    )
