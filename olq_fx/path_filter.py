r"""Which paths can match a pattern at all: those that have the literal words of the pattern in them.

API:
    PathFilter(paths).candidates(words) -> positions of the paths that have all of them
    glob_words(text), regex_words(text) -> tuple[Word, ...]

A word of a pattern is found among the parts of paths, of which there are few (numbers and names of layers), and each
part knows the paths that it is in, as bits of one integer. So a thousand patterns on ten thousand paths are tried on
a few paths each. Where a word cannot be told for certain (alternatives, flags, groups) there is none: then all paths
are tried.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

_TOKEN = re.compile(
    r"(?P<class>\\[dwsDWSbBAZ]|\[\^?\]?(?:\\.|[^\]\\])*\]|[.^$+])|(?P<unknown>\\[^\W_])|(?P<quoted>\\.)"
    r"|(?P<bracket>[()])|(?P<bar>\|)|(?P<quantifier>[*?]|\{[^}]*\}?)|(?P<plain>.)",
    re.DOTALL,
)
"""The tokens of a regular expression. `+` needs what is before it once; the quantifiers do without it."""

_OPAQUE = re.compile(r"\(\?(?![:=!<])|\(\*|\[\[")
"""Flags, verbs and nested sets: they change what the rest of an expression means."""


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A word that every match has within one part of its path, or as a whole part."""

    text: str
    whole: bool


class PathFilter:
    """The parts of some paths, each with the paths that it is in."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Index `paths`; positions are those in this sequence."""
        self._size = len(paths)
        self._positions: dict[str, list[int]] = {}
        for position, path in enumerate(paths):
            for part in path.split("."):
                self._positions.setdefault(part, []).append(position)
        self._masks: dict[Word, int] = {}

    def candidates(self, words: Sequence[Word]) -> Iterator[int]:
        """The positions of the paths that have all these words, in order."""
        mask = (1 << self._size) - 1
        for word in words:
            mask &= self._mask(word)
        while mask:
            lowest = mask & -mask
            yield lowest.bit_length() - 1
            mask ^= lowest

    def _mask(self, word: Word) -> int:
        if word not in self._masks:
            if word.whole:
                parts = [word.text] if word.text in self._positions else []
            else:
                parts = [part for part in self._positions if word.text in part]
            bits = bytearray(self._size // 8 + 1)
            for part in parts:
                for position in self._positions[part]:
                    bits[position >> 3] |= 1 << (position & 7)
            self._masks[word] = int.from_bytes(bits, "little")
        return self._masks[word]


def glob_words(text: str) -> tuple[Word, ...]:
    """The words of an `fnmatch` pattern; what is between the first `[` and the last `]` is not looked at."""
    opened = text.find("[")
    closed = text.rfind("]")
    outer = [text] if opened < 0 else [text[:opened]] + ([text[closed + 1 :]] if closed > opened else [])
    found: list[Word] = []
    for number, piece in enumerate(outer):
        runs = re.split(r"[*?]", piece.partition("[")[0] if number else piece)
        for index, run in enumerate(runs):
            starts = number == 0 and index == 0
            ends = index == len(runs) - 1 and number == len(outer) - 1 and piece.endswith(run) and _closes(text, run)
            found += _pieces(run, starts, ends)
    return tuple(dict.fromkeys(found))


def _closes(text: str, run: str) -> bool:
    """Whether a run without special characters is the end of a pattern."""
    return text.endswith(run) and (text == run or text[: len(text) - len(run)][-1:] in ("*", "?", "]"))


def regex_words(body: str) -> tuple[Word, ...]:
    """The words that a regular expression, anchored at the start, cannot do without; none where that is not plain."""
    if _OPAQUE.search(body):
        return ()
    runs: list[str] = [""]
    depth = 0
    for token in _TOKEN.finditer(body):
        kind, text = str(token.lastgroup), token[0]
        if (kind == "bar" and depth == 0) or (kind == "unknown"):
            return ()
        if kind in ("quoted", "plain"):
            if depth == 0:
                runs[-1] += text[-1]
                continue
        elif kind == "bracket":
            depth += 1 if text == "(" else -1
        elif kind == "quantifier":
            runs[-1] = runs[-1][:-1]
        if runs[-1] or len(runs) == 1:
            runs.append("")
    found = [word for index, run in enumerate(runs) for word in _pieces(run, index == 0, False)]
    return tuple(dict.fromkeys(found))


def _pieces(run: str, starts: bool, ends: bool) -> list[Word]:
    """The words of literal text: between dots whole parts of a path, at its ends perhaps pieces of one."""
    pieces = run.split(".")
    last = len(pieces) - 1
    return [
        Word(piece, (index > 0 or starts) and (index < last or ends)) for index, piece in enumerate(pieces) if piece
    ]
