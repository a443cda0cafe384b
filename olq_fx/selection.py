"""Which layers a configuration speaks of, and what it says of each; contradictions are refused.

API:
    select(config, candidates, strict=True, all_paths=(), device=None) -> Selection(verdicts, problems)

Everything a user can have meant wrongly is found here: a pattern without a match, a container's path, a layer claimed
twice, a request that quantizes nothing. With `strict` those are errors; without it, what may be harmless is a warning.

The layers of each component are judged by its own configuration; a layer with names in two of them must mean the same
in both.
"""

import dataclasses
import functools
import warnings
from collections.abc import Collection, Sequence

from olq_fx.candidates import Candidate
from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_components import longest_prefix
from olq_fx.errors import OlqFxWarning, PlanError, nearest
from olq_fx.forecast import Forecaster
from olq_fx.fused_layers import fused_table
from olq_fx.matching import SHOWN, Matcher, unmarked
from olq_fx.verdicts import Judge, Verdict, listed, served


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
    device: str | None = None,
) -> Selection:
    """A verdict for each candidate.

    Args:
        config: what is asked for.
        candidates: the weights that it may speak of.
        strict: whether a pattern or request without effect is an error; otherwise it is an `OlqFxWarning`.
        all_paths: all module and parameter paths, to tell a norm's name from one that does not exist.
        device: the type of the device where the model will run; by default where each weight is.

    Raises:
        PlanError: a layer is claimed twice, a container is named, a layer that cannot be quantized is asked for by its
            name, other formats are asked for a converted layer, a kernel is asked for that cannot run a layer, nothing
            at all would be quantized; with `strict`, also a pattern or request without effect.
        ConversionError: a weight to be quantized has a dtype that cannot be.
    """
    forecaster = Forecaster(device)
    verdicts: list[Verdict | None] = [None] * len(candidates)
    problems: list[str] = []
    groups = _groups(config, candidates)
    for prefix, numbers in groups.items():
        own = config if not prefix else dict(config.components)[prefix]
        group = [candidates[number] for number in numbers]
        owner = functools.partial(_other_component, config, prefix)
        matcher = Matcher(group, prefix, all_paths, fused_table(own.packed_modules_mapping), owner)
        found, unfit = _select(own, group, matcher, forecaster)
        where = f"components[{prefix!r}]: " if prefix else ""
        problems += [where + problem for problem in unfit]
        for number, verdict in zip(numbers, found, strict=True):
            verdicts[number] = verdict
    problems += _empty_components(config, groups, candidates, verdicts, all_paths)
    judged = tuple(verdict for verdict in verdicts if verdict is not None)
    if problems and strict:
        raise PlanError(listed(problems))
    _refuse_nothing(config, candidates, judged)
    for problem in problems:
        warnings.warn(problem, OlqFxWarning, stacklevel=3)
    return Selection(judged, tuple(problems))


def _select(
    config: QuantizationConfig, candidates: Sequence[Candidate], matcher: Matcher, forecaster: Forecaster
) -> tuple[list[Verdict], list[str]]:
    """The verdicts on the layers of one component, or of what lies in none, and the problems."""
    ignored = matcher.match("ignore", config.ignore)
    included = matcher.match("include", config.include)
    targeted = matcher.match("targets", [pattern for pattern, _ in config.targets])
    judge = Judge(config, candidates, ignored, included, targeted, forecaster)
    verdicts = [judge.verdict(number, candidate) for number, candidate in enumerate(candidates)]
    judge.refuse_impossible()
    return verdicts, [*matcher.unmatched, *judge.without_effect(candidates, verdicts)]


def _other_component(config: QuantizationConfig, prefix: str, path: str) -> str:
    """The component that a path lies in, if it is not the one with this prefix."""
    found, _ = config.of(unmarked(path))
    return "" if found == prefix else found


def _groups(config: QuantizationConfig, candidates: Sequence[Candidate]) -> dict[str, list[int]]:
    """The numbers of the candidates in each component; "" is what lies in none."""
    groups: dict[str, list[int]] = {"": []}
    if not config.components:
        groups[""] = list(range(len(candidates)))
        return groups
    asked = {"": config, **dict(config.components)}
    for number, candidate in enumerate(candidates):
        first = longest_prefix(unmarked(candidate.path), asked)
        for name in candidate.names[1:]:
            prefix = longest_prefix(unmarked(name), asked)
            if asked[prefix] != asked[first]:
                raise PlanError(
                    f"{candidate.path} and {name} are one weight, in the components {first or 'default'!r} and "
                    f"{prefix or 'default'!r}, which ask for different things"
                )
        groups.setdefault(first, []).append(number)
    return groups


def _empty_components(
    config: QuantizationConfig,
    groups: dict[str, list[int]],
    candidates: Sequence[Candidate],
    verdicts: Sequence[Verdict | None],
    all_paths: Collection[str],
) -> list[str]:
    """What to say of prefixes that name no part of the model, and of components in which nothing is quantized."""
    problems: list[str] = []
    if not config.components:
        return problems
    asked = dict(config.components)
    with_effect = {
        longest_prefix(unmarked(name), asked)
        for candidate, verdict in zip(candidates, verdicts, strict=True)
        if served(verdict)
        for name in candidate.names
    }
    around = {unmarked(name).rpartition(".")[0] for candidate in candidates for name in candidate.names}
    known = {prefix for path in {path.rpartition(".")[0] for path in around} for prefix in _prefixes(path)} | around
    for prefix, own in config.components:
        if prefix not in known and prefix not in all_paths:
            problems.append(f"components: {prefix!r} is no part of the model; {nearest(prefix, known - {''})}")
        elif not own.nothing and prefix not in with_effect:
            reasons = dict.fromkeys(v.reason for n in groups.get(prefix, ()) if (v := verdicts[n]) is not None)
            why = "; ".join(list(reasons)[:SHOWN]) or "no linear, expert or embedding weight lies in it alone"
            problems.append(f"components: nothing would be quantized in {prefix!r}; {why}")
    return problems


def _prefixes(path: str) -> list[str]:
    """The path of a module and those of the modules around it."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _refuse_nothing(config: QuantizationConfig, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]) -> None:
    """A run that quantizes nothing is an error, unless nothing is asked for or everything is done already."""
    if config.nothing or any(served(verdict) for verdict in verdicts):
        return
    if not candidates:
        raise PlanError("nothing to quantize: the model has no linear, expert or embedding weights")
    counts: dict[str, list[str]] = {}
    for candidate, verdict in zip(candidates, verdicts, strict=True):
        counts.setdefault(verdict.reason, []).append(candidate.path)
    reasons = sorted(counts.items(), key=lambda item: -len(item[1]))
    described = [f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: {why}" for why, paths in reasons]
    protected = any(
        c.left_alone and not c.obstacle and v.reason.startswith(c.left_alone)
        for c, v in zip(candidates, verdicts, strict=True)
    )
    hint = "; 'include' opts in what is left alone by default" if protected else ""
    raise PlanError(f"nothing would be quantized; {listed(described)}{hint}")
