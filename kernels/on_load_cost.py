"""How a product that quantizes on load is cut into programs, and whether that is cheaper than a quantization apart.

    on_load_blocking(...) -> Blocking
    compare(format, pieces, readers, m, k, size, capability) -> Comparison

The model. Each tile of the next product quantizes all of its rows anew, before it multiplies: `_OPERATIONS` an element,
counted in the machine code, at the float32 rate of its multiprocessor, one wave of programs after the other. What that
saves is a kernel, and the bytes of codes and of products that need not be written and read. A kernel that waits for the
one before it takes `KERNEL` seconds at least. Not counted: that quantization may hide behind loads, and the tails.
"""

import dataclasses
from collections.abc import Sequence

from olq_fx import cost_model
from olq_fx.formats import Format
from olq_fx.kernels.blocking import Blocking, multiprocessors
from olq_fx.kernels.triton_product import TENSOR_MEMORY, Instruction, Operand, tile_blocking_of

KERNEL = 2.5e-6
"""Seconds between two kernels of a CUDA graph of which one waits for the other: between 2 and 3 microseconds."""

_FLOAT32 = {80: 19.5e12, 86: 38.7e12, 89: 91.6e12, 90: 67e12, 100: 80e12, 120: 104.8e12}
"""Operations a second of the large GPU of each compute capability, by its datasheet; a fused one counts as two."""

_OPERATIONS = {"e4m3": 13, "int8": 16, "e2m1": 70}
"""Machine instructions that quantize an element, by its type; for e2m1 with the scale of its group."""

_ROWS_LATER = 4096
"""Rows of a prompt, which a program for any number of rows will see too."""

_HIGH = 128
_LOW = 64
_WIDE = 128


def on_load_blocking(
    m: int, n: int, k: int, a: Operand, b: Operand, instruction: Instruction, capability: int
) -> Blocking:
    """An analytic choice: wide tiles, of which each quantizes its rows; what stays in registers.

    High tiles, where each half of the warps quantizes rows of its own, need accumulators beside the registers of the
    operands: those of wgmma and of tensor memory.
    """
    block_k = tile_blocking_of(m, n, k, a, b, instruction, capability).block_k
    high = is_high(m, instruction.dot, capability)
    return Blocking(_HIGH if high else _LOW, _WIDE, block_k, num_warps=8)


def is_high(m: int, dot: str, capability: int) -> bool:
    """Whether tiles are 128 high."""
    if dot == "scaled" and capability in TENSOR_MEMORY:
        return True  # scales in tensor memory are those of 128 rows
    in_bytes = dot == "fp8" and capability in (90, *TENSOR_MEMORY) or dot == "int8" and capability == 90
    return in_bytes and m > _LOW


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of the two ways, as far as they differ.

    Attributes:
        more: that the next products take longer where they quantize on load.
        less: that is saved by it.
        tiles: of these products, of which each quantizes its rows.
        rows: that it was computed for.
    """

    more: float
    less: float
    tiles: int
    rows: int

    @property
    def on_load(self) -> bool:
        """Whether quantizing on load is cheaper."""
        return self.more < self.less

    def __str__(self) -> str:
        """For people."""
        return (
            f"on load in {self.tiles} tiles it takes {self.more * 1e6:.1f} us, and saves {self.less * 1e6:.1f} us "
            f"(cost model, {self.rows} rows)"
        )


def compare(
    format: Format, pieces: int, columns: Sequence[int], m: int, k: int, size: int, capability: int
) -> Comparison:
    """Quantization of (m, k) to `format` in the products that read it, against a kernel of its own.

    Args:
        format: of the activations.
        pieces: products that are computed before the quantization, which become one kernel with what follows them.
        columns: N of each product that reads.
        m, k: rows and columns of what is quantized.
        size: bytes of an element of its dtype.
        capability: of the GPU.
    """
    chip = cost_model.of_capability(capability) or cost_model.architecture("sm_90")
    processors = multiprocessors(None, capability)
    lanes = _FLOAT32.get(capability, _FLOAT32[90]) / 2 / processors
    dot = {"e4m3": "fp8", "int8": "int8"}.get(format.element, "")
    high = is_high(m, dot, capability)
    block_m = _HIGH if high else _LOW
    # Both halves of the warps of a low tile hold all of its rows.
    operations = _OPERATIONS[format.element] * (1 if high or format.packed else 2)
    tiles = [-(-m // block_m) * -(-n // _WIDE) for n in columns]
    waves = sum(-(-each // processors) for each in tiles)
    codes = 0.5 if format.packed else 1
    apart = m * k * (2 * pieces * size + (1 + len(columns)) * codes)
    fused = m * k * size * (1 + len(columns))
    # Apart: the pieces and the quantization. Else: the pieces in one kernel, and one that sets maxima to zero.
    less = (pieces - 1) * KERNEL + (apart - fused) / chip.bandwidth
    return Comparison(waves * block_m * k * operations / lanes, less, sum(tiles), m)


def chosen(
    format: Format, pieces: int, columns: Sequence[int], m: int, k: int, size: int, capability: int, *, fixed: bool
) -> Comparison:
    """`compare` for the number of rows that decides: where it may change, quantizing on load must pay for many too."""
    found = compare(format, pieces, columns, m, k, size, capability)
    if fixed or not found.on_load:
        return found
    return compare(format, pieces, columns, max(m, _ROWS_LATER), k, size, capability)
