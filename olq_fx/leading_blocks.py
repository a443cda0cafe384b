"""Leading blocks in original precision: `num_bf16_fallback_layers`.

API:
    block_of(paths) -> list[Block | None]      the block of a numbered list that each path lies in
    kept(block, count, weight_format)          why a weight there keeps its original precision, or ""

A numbered list of blocks is found by its path: `blocks.N`, `layers.N`, `transformer_blocks.N` or `h.N`, the outermost
where they are nested. Its length is its largest number plus one. Without a number of the user's, weights in
`mxfp4_dualscale` keep their original precision in the first 5 blocks of `blocks` and `transformer_blocks` with more
than 10 blocks: the first blocks of diffusion transformers are the most sensitive ones.
"""

import dataclasses
import itertools
from collections.abc import Sequence

LISTS = frozenset({"blocks", "transformer_blocks", "layers", "h"})

_DUALSCALE = "mxfp4_dualscale"
_DUALSCALE_LISTS = frozenset({"blocks", "transformer_blocks"})
_DUALSCALE_KEPT = 5
_DUALSCALE_LONGER_THAN = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One block of a numbered list: the path of the list, its number there, how many blocks there are."""

    path: str
    number: int
    length: int


def block_of(paths: Sequence[str]) -> list[Block | None]:
    """The block that each path lies in, or None."""
    found = [_position(path) for path in paths]
    lengths: dict[str, int] = {}
    for position in found:
        if position is not None:
            lengths[position[0]] = max(lengths.get(position[0], 0), position[1] + 1)
    return [None if position is None else Block(*position, lengths[position[0]]) for position in found]


def _position(path: str) -> tuple[str, int] | None:
    """The path of the outermost list and the number of the block in it."""
    parts = path.split(".")
    for end, (name, number) in enumerate(itertools.pairwise(parts), 1):
        if name in LISTS and number.isdecimal():
            return ".".join(parts[:end]), int(number)
    return None


def may_keep(count: int | None, weight_format: str) -> bool:
    """Whether any block could keep its precision: nobody needs to know the blocks otherwise."""
    return count is not None or weight_format == _DUALSCALE


def kept(block: Block | None, count: int | None, weight_format: str) -> str:
    """Why a weight in a block keeps its original precision, or "".

    Args:
        block: of `block_of`.
        count: how many leading blocks the configuration keeps; None for the default.
        weight_format: what the weight would become.
    """
    if block is None:
        return ""
    why = "num_bf16_fallback_layers"
    if count is None:
        name = block.path.rpartition(".")[2]
        if weight_format != _DUALSCALE or name not in _DUALSCALE_LISTS or block.length <= _DUALSCALE_LONGER_THAN:
            return ""
        count, why = _DUALSCALE_KEPT, f"the default of {_DUALSCALE}; num_bf16_fallback_layers changes it"
    if block.number >= count:
        return ""
    return f"one of the first {count} of {block.length} blocks in {block.path}, which keep their precision ({why})"
