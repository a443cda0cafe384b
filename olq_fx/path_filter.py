"""Which paths can match a pattern at all: those that fulfil what can be read off the pattern's text.

API:
    PathFilter(paths).positions(alternatives) -> positions of the paths that fulfil all conditions of one alternative

Conditions are those of `pattern_words`. They are looked up among the parts of paths, of which there are few (numbers
and names of layers), and each part knows the paths that it is in, as bits of one integer. So a thousand patterns on
ten thousand paths are tried on a few paths each.
"""

import bisect
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from olq_fx.pattern_words import Alternative, Condition, Piece, Whole

_SEPARATOR = "\n"
_FEW = 64


class PathFilter:
    """The parts of some paths, each with the paths that it is in."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Index `paths`; positions are those in this sequence."""
        self._size = len(paths)
        self._paths = paths
        self._everything = (1 << self._size) - 1
        self._usable = not any(_SEPARATOR in path for path in paths)
        self._windows: dict[int, _Windows] = {}
        self._masks: dict[Condition, int] = {}

    def positions(self, alternatives: Sequence[Alternative]) -> Sequence[int]:
        """The positions of the paths that fulfil all conditions of at least one alternative, in order."""
        found = 0
        for conditions in alternatives:
            mask = self._everything
            for condition in conditions if self._usable else ():
                mask &= self._mask(condition)
                if not mask:
                    break
            found |= mask
        return range(self._size) if found == self._everything else list(_bits(found))

    def _mask(self, condition: Condition) -> int:
        """The paths that fulfil a condition, as bits."""
        if condition not in self._masks:
            length = 1 if isinstance(condition, Whole) else len(condition.literals)
            if length not in self._windows:
                self._windows[length] = _Windows(self._paths, length)
            bits = bytearray(self._size // 8 + 1)
            for positions in self._windows[length].with_(condition):
                for position in positions:
                    bits[position >> 3] |= 1 << (position & 7)
            self._masks[condition] = int.from_bytes(bits, "little")
        return self._masks[condition]


class _Windows:
    """The different texts of some consecutive parts of paths, and the paths that each is in."""

    def __init__(self, paths: Sequence[str], length: int) -> None:
        """`length`: how many parts; a path with fewer is one text."""
        self._positions: dict[str, list[int]] = {}
        for position, path in enumerate(paths):
            parts = path.split(".")
            if length == 1:
                texts = parts
            else:
                count = max(1, len(parts) - length + 1)
                texts = [".".join(parts[start : start + length]) for start in range(count)]
            for text in texts:
                self._positions.setdefault(text, []).append(position)

    @functools.cached_property
    def _joined(self) -> str:
        return _SEPARATOR.join(self._positions)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((len(text) + 1 for text in self._positions), initial=0))

    @functools.cached_property
    def _lists(self) -> list[list[int]]:
        return list(self._positions.values())

    def with_(self, condition: Condition) -> Iterator[list[int]]:
        """The paths of each text that fulfils a condition."""
        if isinstance(condition, Whole):
            if condition.text in self._positions:
                yield self._positions[condition.text]
            return
        before = -1
        for start in _found(condition, self._joined):
            number = bisect.bisect_right(self._starts, start) - 1
            if number != before:
                yield self._lists[number]
            before = number


def _found(piece: Piece, text: str) -> Iterator[int]:
    """Where a piece is in a text; that any character is no separator keeps what is found within one part of it."""
    expression = re.compile(".".join(map(re.escape, piece.literals)))
    return (found.start() for found in expression.finditer(text))


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, in order."""
    if mask.bit_count() > _FEW:
        for byte, value in enumerate(mask.to_bytes(mask.bit_length() // 8 + 1, "little")):
            while value:
                lowest = value & -value
                yield (byte << 3) + lowest.bit_length() - 1
                value ^= lowest
        return
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
