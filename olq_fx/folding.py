"""Rows of repeated blocks folded into one: `model.layers.{0-79}.mlp.up_proj.weight`, 80 times.

API:
    fold(paths, keys) -> list[Folded(text, members)]     in the order of the first members

Two rows are folded if their paths differ in numbers only and their keys are equal. What is folded is exactly what the
text says: each number of a range with each of the others.
"""

import dataclasses
import re
from collections.abc import Hashable, Iterable, Sequence

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a path that is a number."""

_RANGES = 6
"""How many ranges of numbers are written out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Folded:
    """Rows that are shown as one: the path for people, and which they are."""

    text: str
    members: tuple[int, ...]


def fold(paths: Sequence[str], keys: Sequence[Hashable]) -> list[Folded]:
    """Fold rows with equal keys whose paths differ in numbers only."""
    kinds: dict[tuple[str, Hashable], dict[tuple[int, ...], int]] = {}
    for index, (path, key) in enumerate(zip(paths, keys, strict=True)):
        numbers = tuple(map(int, NUMBER.findall(path)))
        kinds.setdefault((NUMBER.sub("\0", path), key), {}).setdefault(numbers, index)
    found = []
    for (template, _), members in kinds.items():
        for axes in _products(list(members)):
            chosen = [index for numbers, index in members.items() if _is_in(numbers, axes)]
            found.append(Folded(_written(template, axes), tuple(sorted(chosen))))
    return sorted(found, key=lambda one: one.members[0])


def _products(tuples: Sequence[tuple[int, ...]]) -> list[list[frozenset[int]]]:
    """Sets of numbers whose products are the tuples, each once."""
    if not tuples or not tuples[0]:
        return [[]]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in tuples:
        rests.setdefault(first, []).append(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, ends in rests.items():
        alike.setdefault(frozenset(ends), []).append(first)
    return [[frozenset(firsts), *axes] for ends, firsts in alike.items() for axes in _products(sorted(ends))]


def _is_in(numbers: tuple[int, ...], axes: Iterable[frozenset[int]]) -> bool:
    return all(number in axis for number, axis in zip(numbers, axes, strict=True))


def _written(template: str, axes: Sequence[frozenset[int]]) -> str:
    text, *rest = template.split("\0")
    return text + "".join(_numbers(axis) + part for axis, part in zip(axes, rest, strict=True))


def _numbers(axis: frozenset[int]) -> str:
    """A set of numbers: `7`, or `{0-3,5}`."""
    if len(axis) == 1:
        return str(next(iter(axis)))
    ranges: list[list[int]] = []
    for number in sorted(axis):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    written = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a},{b}" for a, b in ranges]
    return "{" + ",".join(written[:_RANGES] + (["..."] if written[_RANGES:] else [])) + "}"
