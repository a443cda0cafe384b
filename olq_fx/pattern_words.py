r"""What every path that matches a pattern must have in it, read off the pattern's text.

API:
    glob_words(text), regex_words(body) -> tuple[Alternative, ...]     a match has all conditions of one of them
    is_bounded(body) -> bool                                           whether a regular expression needs no timeout
    Whole(text), Piece(literals)                                       the conditions

An expression is read into sequences of characters, of places where any one character stands, and of gaps where
anything may stand: `.*layers.(3|4)\.` is a gap, `layers`, any character, `3` or `4`, and a dot. Parts of sequences
between gaps are the conditions. What is not understood (flags, recursion, nested sets) gives one alternative without
conditions, which every path fulfils: conditions only ever leave paths out that cannot match.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import TypeAlias

_TOKEN = re.compile(
    r"(?P<one>\\[dwsDWS]|\[\^?\]?(?:\\.|[^\]\\])*\]|\.)|(?P<start>\^|\\[AbB])|(?P<end>\$|\\Z)|(?P<unknown>\\[^\W_])"
    r"|(?P<char>\\.)|(?P<look>\(\?<?[=!])|(?P<open>\((?:\?(?::|P?<[A-Za-z_]\w*>))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<times>[*+?]|\{\d*,?\d*\})|(?P<brace>\{)|(?P<plain>.)",
    re.DOTALL,
)
"""The tokens of a regular expression."""

_OPAQUE = re.compile(r"\(\?(?!:|<?[=!]|P?<[A-Za-z_]\w*>)|\(\*|\[\^?\[|\[:")
"""Flags, verbs, recursion, conditions, nested sets and classes by name: they change what the rest means."""

_ANY, _GAP, _END = "any", "gap", "end"
_VARIANTS, _DEPTH = 16, 40
_REPETITIONS, _CHOICES = 2, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A whole part of the path."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Literal texts with exactly one character between neighbours, somewhere in the path; no text has a dot in it."""

    literals: tuple[str, ...]


Condition: TypeAlias = Whole | Piece
Alternative: TypeAlias = tuple[Condition, ...]
ANYTHING: tuple[Alternative, ...] = ((),)
"""What is known of a pattern that is not understood."""


def glob_words(text: str) -> tuple[Alternative, ...]:
    """The conditions of an `fnmatch` pattern: one alternative. A set of characters is any one character."""
    sequence: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "[":
            closing = text.find("]", at + 1 + (text[at : at + 1] == "!"))
            sequence.append(_ANY if closing >= 0 else char)
            at = closing + 1 if closing >= 0 else at
        else:
            sequence.append({"*": _GAP, "?": _ANY}.get(char, char))
    return (_conditions([*sequence, _END]),)


def regex_words(body: str) -> tuple[Alternative, ...]:
    """The conditions of a regular expression that is anchored at the start."""
    if _OPAQUE.search(body):
        return ANYTHING
    try:
        sequences = _Reader(body).read()
    except _NotUnderstoodError:
        return ANYTHING
    found = tuple(dict.fromkeys(map(_conditions, sequences)))
    return ANYTHING if () in found else found


def is_bounded(body: str) -> bool:
    """Whether an expression takes at most some 10^6 steps for a path of 1000 characters.

    That is so with two repetitions of single characters, four choices, and nothing that is repeated or looked around.
    """
    if _OPAQUE.search(body):
        return False
    repetitions = choices = 0
    before = ""
    for token in _TOKEN.finditer(body):
        kind = str(token.lastgroup)
        if kind in ("unknown", "brace", "look") or (kind == "times" and (before == "close" or token[0][0] == "{")):
            return False
        repetitions += token[0] in ("*", "+") and kind == "times"
        choices += kind == "bar" or (token[0] == "?" and kind == "times")
        before = kind
    return repetitions <= _REPETITIONS and choices <= _CHOICES


class _NotUnderstoodError(Exception):
    """An expression has something in it of which nothing is known."""


class _Reader:
    """Reads an expression into the sequences that it stands for."""

    def __init__(self, body: str) -> None:
        self._tokens = [(str(token.lastgroup), token[0]) for token in _TOKEN.finditer(body)]
        self._at = 0

    def read(self) -> list[list[str]]:
        """The sequences of the whole expression."""
        found = self._alternatives(0)
        if self._at < len(self._tokens):
            raise _NotUnderstoodError
        return found

    def _alternatives(self, depth: int) -> list[list[str]]:
        """The sequences up to the end of the group, or of the expression."""
        if depth > _DEPTH:
            raise _NotUnderstoodError
        done: list[list[str]] = []
        current: list[list[str]] = [[]]
        while self._at < len(self._tokens) and self._tokens[self._at][0] != "close":
            kind, text = self._tokens[self._at]
            self._at += 1
            if kind == "bar":
                done, current = done + current, [[]]
                continue
            atom = self._repeated(self._atom(kind, text, depth))
            if len(atom) * len(current) > _VARIANTS:
                atom = [[_GAP]]
            current = [[*first, *second] for first in current for second in atom]
        found = done + current
        return found if len(found) <= _VARIANTS else [[_GAP]]

    def _atom(self, kind: str, text: str, depth: int) -> list[list[str]]:
        """The sequences of one token, or of the group that it opens."""
        if kind in ("open", "look"):
            inner = self._alternatives(depth + 1)
            if self._at >= len(self._tokens):
                raise _NotUnderstoodError
            self._at += 1
            return inner if kind == "open" else [[]]
        if kind in ("unknown", "brace", "times"):
            raise _NotUnderstoodError
        if kind == "start":
            return [[]]
        return [[{"one": _ANY, "end": _END}.get(kind, text[-1])]]

    def _repeated(self, atom: list[list[str]]) -> list[list[str]]:
        """An atom with the repetition after it; `+` needs it once."""
        times = []
        while self._at < len(self._tokens) and self._tokens[self._at][0] == "times":
            times.append(self._tokens[self._at][1])
            self._at += 1
        if not times:
            return atom
        needed = times[0] == "+" and all(one in "+?" for one in times[1:])
        return [[*one, _GAP] for one in atom] if needed else [[_GAP]]


def _conditions(sequence: list[str]) -> Alternative:
    """What a path that matches a sequence has in it."""
    found: list[Condition] = []
    run: list[str] = []
    starts = True
    for item in (*sequence, _GAP):
        if item not in (_GAP, _END):
            run.append(item)
            continue
        found += _of_run(run, starts, item == _END)
        run, starts = [], False
    return tuple(dict.fromkeys(found))


def _of_run(run: list[str], starts: bool, ends: bool) -> Iterator[Condition]:
    """The conditions of a run without gaps: between dots whole parts of the path, at its ends perhaps not."""
    pieces: list[list[str]] = [[]]
    for item in run:
        if item == ".":
            pieces.append([])
        else:
            pieces[-1].append(item)
    last = len(pieces) - 1
    for index, piece in enumerate(pieces):
        if _ANY in piece:
            yield from _of_piece(piece)
        elif piece:
            text = "".join(piece)
            whole = (index > 0 or starts) and (index < last or ends)
            yield Whole(text) if whole else Piece((text,))


def _of_piece(piece: list[str]) -> Iterator[Piece]:
    """A piece with places for any character, as overlapping ones of two such places: they span few parts of paths."""
    literals = [""]
    for item in piece:
        if item == _ANY:
            literals.append("")
        else:
            literals[-1] += item
    while literals and not literals[0]:
        del literals[0]
    while literals and not literals[-1]:
        del literals[-1]
    for start in range(max(1, len(literals) - 2)):
        if any(literals[start : start + 3]):
            yield Piece(tuple(literals[start : start + 3]))
