"""Which layers a configuration speaks of, and what it says of each; contradictions are refused.

API:
    select(config, candidates, strict=True, all_paths=()) -> Selection(verdicts, problems)

Everything a user can have meant wrongly is found here: a pattern without a match, a container's path, a layer claimed
twice, a request that quantizes nothing. With `strict` those are errors; without it, what may be harmless is a warning.
"""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch

from olq_fx.candidates import DTYPES, Candidate
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConversionError, OlqFxWarning, PlanError
from olq_fx.left_alone import COMPILED
from olq_fx.patterns import PathIndex, Pattern, compile_pattern
from olq_fx.schemes import Slot

Decision = Literal["quantize", "leave", "already"]

_SHOWN = 5
"""How many layers or problems an error message lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one candidate.

    Attributes:
        decision: `quantize`; `leave` in original precision; `already` converted, and kept so.
        slot: the formats, of a layer that is or will be quantized.
        reason: why it is left, or kept; "" for a layer that will be quantized.
        asked: whether the configuration asks for it (an `already` layer may also be just left as it is).
    """

    decision: Decision
    slot: Slot | None
    reason: str
    asked: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """A verdict for each candidate, in their order, and the problems that `strict=False` let pass."""

    verdicts: tuple[Verdict, ...]
    problems: tuple[str, ...]


def select(
    config: QuantizationConfig,
    candidates: Sequence[Candidate],
    *,
    strict: bool = True,
    all_paths: Collection[str] = (),
) -> Selection:
    """A verdict for each candidate.

    Args:
        config: what is asked for.
        candidates: the weights that it may speak of.
        strict: whether a pattern or request without effect is an error; otherwise it is an `OlqFxWarning`.
        all_paths: all module and parameter paths, to tell a norm's name from one that does not exist.

    Raises:
        PlanError: a layer is claimed twice, a container is named, a layer that cannot be quantized is asked for by its
            name, other formats are asked for a converted layer, nothing at all would be quantized; with `strict`, also
            a pattern or request without effect.
        ConversionError: a weight to be quantized has a dtype that cannot be.
    """
    matcher = _Matcher(candidates, all_paths)
    ignored = matcher.match("ignore", config.ignore)
    included = matcher.match("include", config.include)
    targeted = matcher.match("targets", [pattern for pattern, _ in config.targets])
    judge = _Judge(config, ignored, included, targeted)
    verdicts = tuple(judge.verdict(number, candidate) for number, candidate in enumerate(candidates))
    judge.refuse_impossible()
    problems = [*matcher.unmatched, *judge.without_effect(candidates, verdicts)]
    if problems and strict:
        raise PlanError(_listed(problems))
    _refuse_nothing(config, candidates, verdicts)
    for problem in problems:
        warnings.warn(problem, OlqFxWarning, stacklevel=3)
    return Selection(verdicts, tuple(problems))


class _Matches:
    """Which patterns of one key match which candidates."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.of_pattern: dict[str, list[int]] = {}
        self._of_candidate: dict[int, list[Pattern]] = {}

    def add(self, pattern: Pattern, numbers: Iterable[int]) -> None:
        found = sorted(set(numbers))
        self.of_pattern[pattern.text] = found
        for number in found:
            self._of_candidate.setdefault(number, []).append(pattern)

    def of(self, number: int) -> list[Pattern]:
        return self._of_candidate.get(number, [])


class _Matcher:
    """The paths of all candidates, and the patterns that match none of them."""

    def __init__(self, candidates: Sequence[Candidate], all_paths: Collection[str]) -> None:
        self._candidates = candidates
        self._all_paths = frozenset(all_paths)
        self._numbers: dict[str, list[int]] = {}
        for number, candidate in enumerate(candidates):
            for path in _spoken(candidate):
                self._numbers.setdefault(path, []).append(number)
        self._index = PathIndex(self._numbers)
        self.unmatched: list[str] = []

    def match(self, key: str, patterns: Iterable[str]) -> _Matches:
        """The candidates that each pattern of a key matches; those that match none become `unmatched`."""
        matches = _Matches(key)
        for text in patterns:
            pattern = compile_pattern(text)
            numbers = [number for path in self._index.find(pattern) for number in self._numbers[path]]
            if pattern.form == "exact":
                self._refuse_container(key, text, numbers)
                if key == "include" and not numbers:
                    numbers = self._by_name(text)
            if not numbers:
                self.unmatched.append(self._why_unmatched(key, pattern))
            matches.add(pattern, numbers)
        return matches

    def _by_name(self, name: str) -> list[int]:
        """The layers left alone by default whose own name it is: `include: [embed_tokens]`."""
        return [
            number
            for number, candidate in enumerate(self._candidates)
            if candidate.left_alone and any(path.rpartition(".")[2] == name for path in _spoken(candidate))
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
        if pattern.form == "exact" and pattern.text in self._all_paths:
            return (
                f"{key}: {pattern.text!r} is no linear, expert or embedding weight, and nothing else is "
                "ever quantized; drop it"
            )
        shown = self._index.nearest(pattern) if len(self.unmatched) < _SHOWN else ""
        return f"{key}: the pattern {pattern.text!r} matches nothing; {shown}"


class _Judge:
    """Says what becomes of each candidate, and remembers what the requests led to."""

    def __init__(self, config: QuantizationConfig, ignored: _Matches, included: _Matches, targeted: _Matches) -> None:
        self._config = config
        self._targets = dict(config.targets)
        self._ignored, self._included, self._targeted = ignored, included, targeted
        self._other_formats: list[str] = []
        self._unsupported: list[str] = []

    def verdict(self, number: int, candidate: Candidate) -> Verdict:
        """What becomes of a candidate."""
        slot, reason = self._request(number, candidate)
        if candidate.current is not None:
            return self._keep(candidate, slot, reason)
        if slot is None:
            return Verdict("leave", None, reason, asked=False)
        if candidate.obstacle:
            self._refuse_if_named(number, candidate)
            return Verdict("leave", None, candidate.obstacle, asked=True)
        if candidate.dtype not in DTYPES:
            self._unsupported.append(f"{candidate.path} ({_name(candidate.dtype)})")
        return Verdict("quantize", slot, "", asked=True)

    def _request(self, number: int, candidate: Candidate) -> tuple[Slot | None, str]:
        """The formats that the configuration asks of a candidate, or None and the reason."""
        included = self._included.of(number)
        protected = candidate.left_alone if not included else ""
        targets = [p for p in self._targeted.of(number) if not protected or p.form == "exact"]
        self._refuse_contradiction(number, candidate, targets)
        ignored = self._ignored.of(number)
        if ignored:
            return None, f"ignored by {ignored[0].text!r}"
        if targets:
            return _of_kind(candidate, self._targets[targets[0].text]), ""
        if protected:
            skipped = [repr(p.text) for p in self._targeted.of(number)]
            return None, protected + (f"; only its exact path opts it in, not {', '.join(skipped)}" if skipped else "")
        if self._config.targets:
            return None, "no target matches"
        if self._config.nothing:
            return None, "nothing is asked for"
        slot = self._config.slot(candidate.kind)
        if slot is None:
            return None, f"no formats are given for {candidate.kind} layers"
        return _of_kind(candidate, slot), ""

    def _refuse_contradiction(self, number: int, candidate: Candidate, targets: Sequence[Pattern]) -> None:
        ignored = self._ignored.of(number)
        if ignored and targets:
            raise PlanError(
                f"{candidate.path} matches both ignore {_texts(ignored)} and targets {_texts(targets)}; "
                "a layer is named by one of the two"
            )
        if len({self._targets[p.text] for p in targets}) > 1:
            raise PlanError(f"{candidate.path} matches targets with different values: {_texts(targets)}")

    def _refuse_if_named(self, number: int, candidate: Candidate) -> None:
        """A layer that cannot be quantized may be skipped by a wildcard, but not when its name is written out."""
        for matches in (self._targeted, self._included):
            for pattern in matches.of(number):
                if pattern.form == "exact":
                    raise PlanError(
                        f"{matches.key}: {pattern.text!r} names {candidate.path}, which cannot be quantized: "
                        f"{candidate.obstacle}"
                    )

    def _keep(self, candidate: Candidate, slot: Slot | None, reason: str) -> Verdict:
        """A layer that is converted already keeps its formats; asking for others is an error."""
        if slot is None:
            return Verdict("already", candidate.current, f"converted before; {reason}", asked=False)
        rules = self._config.rules(slot)
        if slot != candidate.current or candidate.current_rules not in (None, rules):
            has = _described(candidate.current, candidate.current_rules)
            self._other_formats.append(f"{candidate.path} has {has}, asked for is {_described(slot, rules)}")
        return Verdict("already", candidate.current, "converted before, with these formats", asked=True)

    def refuse_impossible(self) -> None:
        """Raise for what is asked for and cannot be: weights of other dtypes, other formats of converted layers."""
        if self._unsupported:
            raise ConversionError(
                f"weights of these dtypes cannot be quantized: {_listed(self._unsupported)}; valid: "
                f"{', '.join(sorted(map(_name, DTYPES)))}; put the layers into 'ignore' to leave them as they are"
            )
        if self._other_formats:
            raise PlanError(
                "layers are already quantized with other formats; call olq_fx.dequantize_(model) first, or leave them "
                f"out of the configuration: {_listed(self._other_formats)}"
            )

    def without_effect(self, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]) -> list[str]:
        """The requests that match something and quantize none of it."""
        found = []
        for matches in (self._targeted, self._included):
            for text, numbers in matches.of_pattern.items():
                if numbers and not any(_served(verdicts[n]) for n in numbers):
                    first = numbers[0]
                    found.append(
                        f"{matches.key}: the pattern {text!r} quantizes nothing; "
                        f"{candidates[first].path}: {verdicts[first].reason}"
                    )
        experts = [n for n, candidate in enumerate(candidates) if candidate.kind == "moe"]
        refused = [n for n in experts if verdicts[n].asked and verdicts[n].decision == "leave"]
        if self._config.asks_moe and refused and not any(_served(verdicts[n]) for n in experts):
            first = refused[0]
            found.append(
                f"moe: formats are given for experts, but none is quantized; {candidates[first].path}: "
                f"{verdicts[first].reason}; leave 'moe' out to keep them in original precision"
            )
        return found


def _spoken(candidate: Candidate) -> list[str]:
    """The paths by which a pattern may name a candidate: with and without the mark of `torch.compile`."""
    found: dict[str, None] = {}
    for path in (*candidate.names, *candidate.module_names):
        found[path] = None
        found[".".join(part for part in path.split(".") if part != COMPILED)] = None
    return [path for path in found if path]


def _refuse_nothing(config: QuantizationConfig, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]) -> None:
    """A run that quantizes nothing is an error, unless nothing is asked for or everything is done already."""
    if config.nothing or any(_served(verdict) for verdict in verdicts):
        return
    if not candidates:
        raise PlanError("nothing to quantize: the model has no linear, expert or embedding weights")
    counts: dict[str, list[str]] = {}
    for candidate, verdict in zip(candidates, verdicts, strict=True):
        counts.setdefault(verdict.reason, []).append(candidate.path)
    reasons = sorted(counts.items(), key=lambda item: -len(item[1]))
    described = [f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: {why}" for why, paths in reasons]
    protected = any(
        c.left_alone and v.reason.startswith(c.left_alone) for c, v in zip(candidates, verdicts, strict=True)
    )
    hint = "; 'include' opts in what is left alone by default" if protected else ""
    raise PlanError(f"nothing would be quantized; {_listed(described)}{hint}")


def _of_kind(candidate: Candidate, slot: Slot) -> Slot:
    """What a slot means for a candidate: the lookup of an embedding has no activations."""
    return Slot(slot.weight, None) if candidate.kind == "embedding" else slot


def _served(verdict: Verdict) -> bool:
    """Whether a request for the layer led to something."""
    return verdict.asked and verdict.decision != "leave"


def _described(slot: Slot | None, rules: tuple[str, str] | None) -> str:
    if slot is None:
        return "nothing"
    return f"{slot.weight} / {slot.activation}" + (f" (scales {rules[0]} / {rules[1]})" if rules else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _texts(patterns: Sequence[Pattern]) -> str:
    return ", ".join(repr(pattern.text) for pattern in patterns)


def _listed(items: Sequence[str]) -> str:
    more = f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more
