r"""Patterns: how a configuration names layers.

API:
    compile_pattern(text) -> Pattern        validates; the same text gives the same object
    forget()                                drops what is remembered of patterns, to measure without it
    Pattern.matches(path) -> bool           one path
    PathIndex(paths).find(pattern)          all paths that match, quickly for exact names and for globs
    PathIndex(paths).nearest(pattern)       the end of an error message: the paths that were perhaps meant

Three forms, never a substring match:

| form | rule |
| --- | --- |
| `model.layers.1.self_attn.o_proj` | the exact path of a module or of a parameter |
| `re:model\.layers\.\d+\.mlp` | a regular expression, anchored at the start; over 100 ms a path, 10 s in all: error |
| `*.mlp.*` (anything with `*`, `?` or `[`) | `fnmatch` on the whole path, case-sensitive; `*` crosses dots |
"""

import bisect
import dataclasses
import fnmatch
import functools
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from olq_fx.errors import ConfigurationError, nearest
from olq_fx.path_filter import PathFilter
from olq_fx.pattern_words import Alternative, glob_words, is_bounded, regex_words

if TYPE_CHECKING:
    import regex

TIMEOUT = 0.1
"""Seconds that a regular expression may take for one path."""

TOTAL_TIMEOUT = 10.0
"""Seconds that a regular expression may take for all paths of a model together."""

ALL_TIMEOUT = 60.0
"""Seconds that all regular expressions together may take for all paths of a model."""

BOUNDED_LENGTH = 1000
"""Characters of a path on which an expression with few repetitions needs no timeout."""

REGEX_PREFIX = "re:"

_UNINDEXED = 4
"""How many patterns are tried on every path before it pays to index what is in the paths."""

_SPECIAL = re.compile(r"[*?\[]")
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Form = Literal["exact", "regex", "glob"]


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern, known to be well-formed. Made by `compile_pattern`."""

    text: str
    form: Form

    def matches(self, path: str) -> bool:
        """Whether `path`, of a module or of a parameter, is named by the pattern.

        Raises:
            ConfigurationError: the regular expression took more than 100 ms for this path.
        """
        if self.form == "exact":
            return path == self.text
        if self.form == "glob" or (self.bounded and len(path) <= BOUNDED_LENGTH):
            return self.unclocked(path) is not None
        try:
            return _expression(self.text).match(path, timeout=TIMEOUT) is not None
        except TimeoutError:
            raise ConfigurationError(
                f"the pattern {self.text!r} took more than {TIMEOUT * 1000:.0f} ms for the path {path!r}; "
                "write it without nested repetitions"
            ) from None

    @property
    def bounded(self) -> bool:
        """Whether it is quick on any path of at most `BOUNDED_LENGTH` characters, so that no clock is needed."""
        return self.form != "regex" or _bounded(self.text)

    @property
    def unclocked(self) -> Callable[[str], object]:
        """Says of a path whether it matches (None: no), without a timeout. Only for what is not exact."""
        return _glob(self.text) if self.form == "glob" else _expression(self.text).match

    @property
    def words(self) -> tuple[Alternative, ...]:
        """What every matching path has in it: all conditions of one of these."""
        if self.form == "regex":
            return regex_words(self.text.removeprefix(REGEX_PREFIX))
        return glob_words(self.text)


@functools.lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """The pattern written as `text`.

    Raises:
        ConfigurationError: it is empty, or a malformed regular expression.
    """
    if text.startswith(REGEX_PREFIX):
        _expression(text)
        return Pattern(text, "regex")
    if not text.strip():
        raise ConfigurationError(f"{text!r} is no pattern: it names nothing")
    return Pattern(text, "glob" if _SPECIAL.search(text) else "exact")


@functools.lru_cache(maxsize=4096)
def _expression(text: str) -> "regex.Pattern[str]":
    """The compiled expression of a `re:` pattern (the `regex` package: it has a timeout, `re` has none)."""
    import regex

    body = text.removeprefix(REGEX_PREFIX)
    if not body:
        raise ConfigurationError(f"{text!r} is no pattern: an empty regular expression would match every path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on future syntax, which would name a line of ours
            return regex.compile(body)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise ConfigurationError(f"malformed regular expression in the pattern {text!r}: {error}") from None


def forget() -> None:
    """Drop the compiled patterns that are remembered, as a new process has none."""
    for remembered in (compile_pattern, _expression, _glob, _bounded):
        remembered.cache_clear()


@functools.lru_cache(maxsize=4096)
def _glob(text: str) -> Callable[[str], object]:
    """What says of a path whether an `fnmatch` pattern matches it."""
    return re.compile(fnmatch.translate(text)).match


@functools.lru_cache(maxsize=4096)
def _bounded(text: str) -> bool:
    return is_bounded(text.removeprefix(REGEX_PREFIX))


class PathIndex:
    """The paths of a model, arranged so that patterns find theirs without trying every one.

    Exact names are looked up; globs and regular expressions are tried on the paths that have their words in them.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        """Index `paths`; duplicates count once."""
        self._paths = list(dict.fromkeys(paths))
        self._known = frozenset(self._paths)
        self._searches = 0
        self._spent = 0.0

    def find(self, pattern: Pattern) -> list[str]:
        """The paths that `pattern` matches, sorted.

        Raises:
            ConfigurationError: the regular expression took more than 100 ms for one path, or 10 s for all; or all those
                before it and this one took more than 60 s.
        """
        if pattern.form == "exact":
            return [pattern.text] if pattern.text in self._known else []
        paths = self._possible(pattern)
        if pattern.bounded and self._short:
            matches = pattern.unclocked
            return sorted([path for path in paths if matches(path) is not None])
        return self._clocked(pattern, paths)

    def _possible(self, pattern: Pattern) -> Sequence[str]:
        """The paths that have what the pattern needs. The first patterns are tried on all: an index costs more."""
        self._searches += 1
        if self._searches <= _UNINDEXED:
            return self._paths
        positions = self._filter.positions(pattern.words)
        return self._paths if len(positions) == len(self._paths) else [self._paths[at] for at in positions]

    def _clocked(self, pattern: Pattern, paths: Sequence[str]) -> list[str]:
        """The paths that match, found within the time that a pattern has."""
        found = []
        start = time.monotonic()
        for tried, path in enumerate(paths, 1):
            if pattern.matches(path):
                found.append(path)
            spent = time.monotonic() - start
            if spent > TOTAL_TIMEOUT:
                raise ConfigurationError(
                    f"the pattern {pattern.text!r} took more than {TOTAL_TIMEOUT:.0f} s for {tried} of "
                    f"{len(self._paths)} paths; write it without nested repetitions"
                )
            if self._spent + spent > ALL_TIMEOUT:
                raise ConfigurationError(
                    f"the patterns up to {pattern.text!r} took more than {ALL_TIMEOUT:.0f} s together for "
                    f"{len(self._paths)} paths; write them without nested repetitions"
                )
        self._spent += time.monotonic() - start
        return sorted(found)

    @functools.cached_property
    def _short(self) -> bool:
        return all(len(path) <= BOUNDED_LENGTH for path in self._paths)

    @functools.cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._paths)

    @functools.cached_property
    def _filter(self) -> PathFilter:
        return PathFilter(self._paths)

    def below(self, path: str) -> list[str]:
        """The paths inside the container `path`, sorted."""
        prefix = path + "."
        start = bisect.bisect_left(self._sorted, prefix)
        following = itertools.islice(self._sorted, start, None)
        return list(itertools.takewhile(lambda path: path.startswith(prefix), following))

    def nearest(self, pattern: Pattern) -> str:
        """Words that end an error message about a pattern without a match: what was perhaps meant."""
        if not self._paths:
            return "the model has no linear, expert or embedding weight"
        if pattern.form == "exact":
            return self._nearest_path(pattern.text)
        return self._nearest_word(pattern.text.removeprefix(REGEX_PREFIX))

    def _nearest_path(self, text: str) -> str:
        """Paths like `text`. Layers of one kind differ by their numbers only and are compared once."""
        kinds: dict[str, list[str]] = {}
        for path in self._sorted:
            kinds.setdefault(_NUMBER.sub("0", path), []).append(path)
        numbers = _NUMBER.findall(text)
        close = nearest(_NUMBER.sub("0", text), kinds)
        if not close.startswith("did you mean"):
            return _some(self._sorted)
        chosen = [name for name in re.findall(r"'([^']*)'", close) if name in kinds]
        return "did you mean " + " or ".join(repr(_same_numbers(kinds[name], numbers)) for name in chosen) + "?"

    def _nearest_word(self, body: str) -> str:
        """A part of a path like the longest word of a glob or of a regular expression."""
        word = max(_WORD.findall(body), key=len, default="")
        parts = {part for path in self._sorted for part in path.split(".") if not part.isdigit()}
        if word in parts:
            with_word = [path for path in self._sorted if word in path.split(".")]
            return f"{word!r} is in paths, but not so; {_some(with_word)}"
        close = nearest(word, parts) if word else ""
        return f"no path has {word!r} in it; {close}" if close.startswith("did") else _some(self._sorted)


def _same_numbers(paths: list[str], numbers: list[str]) -> str:
    """Of paths of one kind the one with these layer numbers, else the first."""
    return next((path for path in paths if _NUMBER.findall(path) == numbers), paths[0])


def _some(paths: list[str]) -> str:
    """A few of the paths, when none is similar."""
    if len(paths) <= 6:
        return "valid: " + ", ".join(paths)
    return f"valid: {', '.join(paths[:3])} and {len(paths) - 3} more"
