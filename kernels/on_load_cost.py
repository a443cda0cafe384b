"""How a product that quantizes on load is cut into programs, and whether that is cheaper than a quantization apart.

    on_load_tile(...) -> Blocking
    Handover(...).decide(m, capability, fixed) -> Comparison

The model. Each tile of the next product quantizes all of its rows anew, before it multiplies: `_OPERATIONS` an element,
counted in the machine code, at the float32 rate of its multiprocessor, one wave of programs after the other. What that
saves is a kernel, and the bytes of codes and of products that need not be written and read. A kernel that waits for the
one before it takes `KERNEL` seconds at least. Not counted: that quantization may hide behind loads, and the tails.
"""

import dataclasses

from olq_fx import cost_model
from olq_fx.formats import Format
from olq_fx.kernels.blocking import TENSOR_MEMORY, Blocking, multiprocessors

KERNEL = 2.5e-6
"""Seconds between two kernels of a CUDA graph of which one waits for the other: between 2 and 3 microseconds."""

_FLOAT32 = {80: 19.5e12, 86: 38.7e12, 89: 91.6e12, 90: 67e12, 100: 80e12, 120: 104.8e12}
"""Operations a second of the large GPU of each compute capability, by its datasheet; a fused one counts as two."""

_OPERATIONS = {"e4m3": 13, "int8": 16, "e2m1": 36}
"""Machine instructions that quantize an element, by its type, beside those of its product; of e2m1 with the scale of
its group."""

_MANY = 4096
"""Rows of a prompt, which a program for any number of rows will see too."""


def on_load_tile(m: int, n: int, dot: str, capability: int, block_k: int = 1) -> Blocking:
    """A tile of the product, of which each warp quantizes rows that no other does, as far as registers allow.

    Small ones where there are few, so that more programs share the product; else wide ones, since each quantizes its
    rows anew, and high ones where accumulators leave room for them: wgmma and tensor memory.
    """
    processors = multiprocessors(None, capability)
    if dot == "scaled" and capability in TENSOR_MEMORY:
        return Blocking(128, 128, block_k, num_warps=8)  # scales in tensor memory are those of 128 rows
    if -(-m // 64) * -(-n // 64) <= processors:
        return Blocking(64, 64, block_k, num_warps=4)
    if _is_wide(dot, capability):
        return Blocking(128, 128, block_k, num_warps=8)
    return Blocking(64, 128, block_k, num_warps=8)


def _is_wide(dot: str, capability: int) -> bool:
    """Whether an instruction takes codes of 64 rows and more from a group of warps."""
    return (capability == 90 and dot in ("fp8", "int8")) or (capability in TENSOR_MEMORY and dot == "fp8")


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
        tiles = f"{self.tiles} tile{'' if self.tiles == 1 else 's'}"
        return (
            f"quantizing on load, in {tiles} of what reads it, takes {self.more * 1e6:.1f} us and saves "
            f"{self.less * 1e6:.1f} us (cost model, {self.rows} rows)"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A quantization between products.

    Attributes:
        format: of its codes.
        products: that are computed before it, which become one kernel with what follows them.
        pieces: how many results of theirs, or parts of results, it is computed of.
        columns: N of each product that reads it.
        k: columns of what is quantized.
        size: bytes of an element of its dtype.
        zeroed: whether a kernel that is there anyway sets the maxima to zero.
    """

    format: Format
    products: int
    pieces: int
    columns: tuple[int, ...]
    k: int
    size: int
    zeroed: bool

    def compare(self, m: int, capability: int) -> Comparison:
        """On load against a kernel of its own, for m rows on a GPU of this capability."""
        chip = cost_model.of_capability(capability) or cost_model.architecture("sm_90")
        processors = multiprocessors(None, capability)
        lanes = _FLOAT32.get(capability, _FLOAT32[90]) / 2 / processors
        dot = {"e4m3": "fp8", "int8": "int8", "e2m1": "bf16"}[self.format.element]
        tiles, more = 0, 0.0
        for n in self.columns:
            tile = on_load_tile(m, n, dot, capability)
            count = -(-m // tile.block_m) * -(-n // tile.block_n)
            # Warps side by side hold the same rows.
            twice = 2 if not _is_wide(dot, capability) and not self.format.packed else 1
            operations = tile.block_m * self.k * _OPERATIONS[self.format.element] * twice
            tiles, more = tiles + count, more + -(-count // processors) * operations / lanes
        return Comparison(more, self._saved(m, chip.bandwidth), tiles, m)

    def _saved(self, m: int, bandwidth: float) -> float:
        readers, codes = len(self.columns), 0.5 if self.format.packed else 1
        apart = 2 * self.pieces * self.size + (1 + readers) * codes
        on_load = self.size * (1 + readers)
        # Apart: each piece, and the quantization. Else: one for all pieces, and one that sets maxima to zero.
        kernels = self.products + 1 - (1 if self.zeroed else 2)
        return kernels * KERNEL + m * self.k * (apart - on_load) / bandwidth

    def decide(self, m: int, capability: int, *, fixed: bool) -> Comparison:
        """`compare` for the number of rows that decides: unless it is fixed, it must pay for many rows too."""
        found = self.compare(m, capability)
        return found if fixed or not found.on_load else self.compare(max(m, _MANY), capability)
