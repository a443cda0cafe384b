"""Which patterns of a configuration match which candidates, fused layers included.

API:
    Matcher(candidates, prefix, all_paths, fused).match(key, patterns) -> Matches
    Matcher.unmatched                  what to say of the patterns that match nothing
    Matches.of(number), .of_pattern    the patterns of a candidate, the candidates of a pattern

A fused layer is one matrix for several layers (`fused_layers`). Whether a model has it fused or has its shards, a
pattern may name the fused layer, or all of its shards:

| the model has | a pattern names | then it matches |
| --- | --- | --- |
| `qkv_proj` | `qkv_proj` | that layer; what names its shards is not asked |
| `qkv_proj` | `q_proj`, `k_proj` and `v_proj`, by one pattern or by several | that layer; some of them only: an error |
| `q_proj`, `k_proj`, `v_proj` | `qkv_proj` | all three |
| `q_proj`, `k_proj`, `v_proj` | `q_proj` | that one: layers that are apart may differ |
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from olq_fx.candidates import Candidate
from olq_fx.errors import PlanError
from olq_fx.fused_layers import Shards
from olq_fx.left_alone import COMPILED
from olq_fx.patterns import PathIndex, Pattern, compile_pattern

SHOWN = 5
"""How many layers or problems an error message lists."""


class Matches:
    """Which patterns of one key match which candidates."""

    def __init__(self, key: str) -> None:
        """Nothing matches yet."""
        self.key = key
        self.of_pattern: dict[str, list[int]] = {}
        self._of_candidate: dict[int, list[Pattern]] = {}

    def add(self, pattern: Pattern, numbers: Iterable[int]) -> None:
        """Say that a pattern matches the candidates with these numbers."""
        new = sorted(set(numbers) - set(self.of_pattern.get(pattern.text, ())))
        self.of_pattern[pattern.text] = sorted([*self.of_pattern.get(pattern.text, ()), *new])
        for number in new:
            self._of_candidate.setdefault(number, []).append(pattern)

    def of(self, number: int) -> list[Pattern]:
        """The patterns that match a candidate."""
        return self._of_candidate.get(number, [])


class Matcher:
    """The paths of the candidates of one configuration, and the patterns that match none of them."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        prefix: str = "",
        all_paths: Collection[str] = (),
        fused: Mapping[str, tuple[Shards, ...]] | None = None,
        owner: Callable[[str], str] = lambda path: "",
    ) -> None:
        """Paths are made when the first pattern asks for them.

        Args:
            candidates: in their order, which numbers them.
            prefix: of the component that they are in; patterns may leave it out.
            all_paths: all module and parameter paths, to tell a norm's name from one that does not exist.
            fused: the table of fused layers.
            owner: the component that a path lies in, if it is another one.
        """
        self._candidates = candidates
        self._prefix = prefix
        self._all_paths = all_paths
        self._table = fused or {}
        self._owner = owner
        self.unmatched: list[str] = []

    @functools.cached_property
    def _numbers(self) -> dict[str, tuple[int, ...]]:
        numbers: dict[str, tuple[int, ...]] = {}
        for number, paths in enumerate(self._spoken):
            alone = (number,)
            for path in paths:
                numbers[path] = numbers[path] + alone if path in numbers else alone
        return numbers

    @functools.cached_property
    def _spoken(self) -> list[Sequence[str]]:
        """For each candidate the paths by which a pattern may name it."""
        return [self._without_prefix((*c.names, *c.module_names)) for c in self._candidates]

    @functools.cached_property
    def _index(self) -> PathIndex:
        return PathIndex(self._numbers)

    @functools.cached_property
    def _fused(self) -> "_Fused":
        modules = (self._without_prefix(candidate.module_names) for candidate in self._candidates)
        spoken = list(zip(modules, self._spoken, strict=True))
        return _Fused(self._candidates, spoken, self._numbers, self._table)

    def _without_prefix(self, paths: Sequence[str]) -> Sequence[str]:
        """The paths with and without the mark of `torch.compile`, with and without the prefix of the component."""
        if not self._prefix and not any(COMPILED in path for path in paths):
            return paths
        found = dict.fromkeys(paths)
        for path in paths:
            if COMPILED in path:
                found[unmarked(path)] = None
        if self._prefix:
            start = self._prefix + "."
            found.update(dict.fromkeys([path.removeprefix(start) for path in found if path.startswith(start)]))
        return [path for path in found if path]

    def match(self, key: str, patterns: Iterable[str]) -> Matches:
        """The candidates that each pattern of a key matches; those that match none become `unmatched`.

        Raises:
            PlanError: a container is named, or some of the shards of a fused layer.
        """
        matches = Matches(key)
        shards: dict[int, list[tuple[str, Pattern]]] = {}
        for text in patterns:
            pattern = compile_pattern(text)
            numbers = [number for path in self._index.find(pattern) for number in self._numbers[path]]
            if pattern.form == "exact":
                self._refuse_container(key, text, numbers)
                if key == "include" and not numbers:
                    numbers = self._by_name(text)
            joined, found = self._fused.find(pattern)
            numbers += joined
            for number, shard in found:
                shards.setdefault(number, []).append((shard, pattern))
            if not numbers and not found:
                self.unmatched.append(self._why_unmatched(key, pattern))
            matches.add(pattern, numbers)
        for number, named in shards.items():
            if not matches.of(number):
                self._refuse_some_shards(key, number, [shard for shard, _ in named])
                for _, pattern in named:
                    matches.add(pattern, [number])
        return matches

    def _refuse_some_shards(self, key: str, number: int, named: Sequence[str]) -> None:
        """A fused layer is one matrix: patterns that name its shards have to name them all."""
        path = self._candidates[number].module_path
        alternatives = self._table[path.rpartition(".")[2]]
        nearest = max(alternatives, key=lambda shards: len(set(shards) & set(named)))
        missing = [shard for shard in nearest if shard not in named]
        if missing:
            raise PlanError(
                f"{key}: {path} is one layer for {', '.join(nearest)}, and the patterns match "
                f"{', '.join(shard for shard in nearest if shard in named)} but not {', '.join(missing)}; "
                f"name all of them or {path!r}"
            )

    def _by_name(self, name: str) -> list[int]:
        """The layers left alone by default whose own name it is: `include: [embed_tokens]`."""
        return [
            number
            for number, candidate in enumerate(self._candidates)
            if candidate.left_alone and any(path.rpartition(".")[2] == name for path in self._spoken[number])
        ]

    def _refuse_container(self, key: str, path: str, numbers: Collection[int]) -> None:
        """An exact path must not name a module with layers inside that the pattern would not mean."""
        inside = [p for p in self._index.below(path) if not set(self._numbers[p]) <= set(numbers)]
        if not inside:
            return
        beside = f" beside weights of its own ({self._candidates[next(iter(numbers))].path})" if numbers else ""
        raise PlanError(
            f"{key}: {path!r} is a container with {inside[0]!r} and others inside{beside}; "
            f"write {path + '.*'!r} for all that is in it"
        )

    def _why_unmatched(self, key: str, pattern: Pattern) -> str:
        if pattern.form == "exact" and pattern.text in self._all_paths and not self._owner(pattern.text):
            return (
                f"{key}: {pattern.text!r} is no linear, expert or embedding weight, and nothing else is "
                "ever quantized; drop it"
            )
        owner = self._owner(pattern.text) if pattern.form == "exact" else ""
        if owner:
            return (
                f"{key}: the pattern {pattern.text!r} matches nothing; it lies in the component {owner!r}, whose own "
                "configuration speaks of it"
            )
        shown = f"; {self._index.nearest(pattern)}" if len(self.unmatched) < SHOWN else ""
        return f"{key}: the pattern {pattern.text!r} matches nothing{shown}"


class _Fused:
    """Paths that no layer has: those of the shards of fused layers, and of what shards would be fused to."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        spoken: Sequence[tuple[Sequence[str], Sequence[str]]],
        real: Collection[str],
        table: Mapping[str, tuple[Shards, ...]],
    ) -> None:
        """`spoken`: for each candidate its module paths, and all its paths; `real`: those of all candidates."""
        self._joined: dict[str, list[int]] = {}
        self._split: dict[str, list[tuple[int, str]]] = {}
        shards_of = {name: tuple(dict.fromkeys(itertools.chain(*shards))) for name, shards in table.items()}
        siblings: dict[tuple[str, str], dict[str, int]] = {}
        for number, candidate in enumerate(candidates):
            if candidate.kind == "embedding" or len(candidate.shape) != 2:
                continue
            for path, end in _ends(*spoken[number]):
                parent, dot, name = path.rpartition(".")
                siblings.setdefault((parent + dot, end), {})[name] = number
                for shard in shards_of.get(name, ()):
                    if (virtual := f"{parent}{dot}{shard}{end}") not in real:
                        self._split.setdefault(virtual, []).append((number, shard))
        fusible = functools.cache(functools.partial(_fusible, table))
        for (parent, end), named in siblings.items():
            for name, shards in fusible(tuple(named)):
                if (virtual := f"{parent}{name}{end}") not in real:
                    self._joined[virtual] = [named[shard] for shard in shards]
        self._index = PathIndex([*self._joined, *self._split])

    def find(self, pattern: Pattern) -> tuple[list[int], list[tuple[int, str]]]:
        """The shards of the fused layers that a pattern names; the fused layers whose shards it names, with those."""
        paths = self._index.find(pattern)
        joined = [number for path in paths for number in self._joined.get(path, ())]
        return joined, [found for path in paths for found in self._split.get(path, ())]


def _fusible(table: Mapping[str, tuple[Shards, ...]], names: tuple[str, ...]) -> list[tuple[str, Shards]]:
    """The fused layers all of whose shards are among siblings of these names."""
    known = frozenset(names)
    every = ((name, shards) for name, alternatives in table.items() for shards in alternatives)
    return [(name, shards) for name, shards in every if known.issuperset(shards)] if len(known) > 1 else []


def _ends(modules: Sequence[str], paths: Sequence[str]) -> list[tuple[str, str]]:
    """(module path, what follows it) of every way to name a candidate: nothing, or its parameter."""
    known = set(modules)
    weights = [path.rpartition(".") for path in paths if path not in known]
    return [(path, "") for path in modules] + [(path, f".{leaf}") for path, _, leaf in weights if path in known]


def unmarked(path: str) -> str:
    """A path without the mark of `torch.compile`.

    >>> unmarked("block._orig_mod.up")
    'block.up'
    """
    return ".".join(part for part in path.split(".") if part != COMPILED) if COMPILED in path else path
