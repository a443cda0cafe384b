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
from typing import Literal, TypeAlias

import torch

from olq_fx.candidates import DTYPES, Candidate
from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_components import longest_prefix
from olq_fx.errors import ConversionError, OlqFxWarning, PlanError, nearest
from olq_fx.forecast import Forecast, Forecaster
from olq_fx.fused_layers import fused_table
from olq_fx.leading_blocks import LISTS, Block, block_of, kept, may_keep
from olq_fx.matching import SHOWN, Matcher, Matches, unmarked
from olq_fx.patterns import Pattern
from olq_fx.schemes import Slot

Decision = Literal["quantize", "leave", "already"]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one candidate.

    Attributes:
        decision: `quantize`; `leave` in original precision; `already` converted, and kept so.
        slot: the formats, of a layer that is or will be quantized.
        reason: why it is left, or kept; "" for a layer that will be quantized.
        asked: whether the configuration asks for it (an `already` layer may also be just left as it is).
        config: the configuration that decided: that of its component.
        forecast: what is expected of it in these formats; None for a layer that is left.
    """

    decision: Decision
    slot: Slot | None
    reason: str
    asked: bool
    config: QuantizationConfig
    forecast: Forecast | None = None


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
        raise PlanError(_listed(problems))
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
    judge = _Judge(config, candidates, ignored, included, targeted, forecaster)
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
    served = {
        longest_prefix(unmarked(name), asked)
        for candidate, verdict in zip(candidates, verdicts, strict=True)
        if _served(verdict)
        for name in candidate.names
    }
    around = {unmarked(name).rpartition(".")[0] for candidate in candidates for name in candidate.names}
    known = {prefix for path in {path.rpartition(".")[0] for path in around} for prefix in _prefixes(path)} | around
    for prefix, own in config.components:
        if prefix not in known and prefix not in all_paths:
            problems.append(f"components: {prefix!r} is no part of the model; {nearest(prefix, known)}")
        elif not own.nothing and prefix not in served:
            reasons = dict.fromkeys(v.reason for n in groups.get(prefix, ()) if (v := verdicts[n]) is not None)
            why = "; ".join(list(reasons)[:SHOWN]) or "no linear, expert or embedding weight lies in it alone"
            problems.append(f"components: nothing would be quantized in {prefix!r}; {why}")
    return problems


def _prefixes(path: str) -> list[str]:
    """The path of a module and those of the modules around it."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


_Judged: TypeAlias = "tuple[Verdict, list[str] | None, str]"
"""A verdict; the refusals that the layer belongs to, if any, and what is said of it there after its path."""


class _Judge:
    """Says what becomes of each candidate, and remembers what the requests led to."""

    def __init__(
        self,
        config: QuantizationConfig,
        candidates: Sequence[Candidate],
        ignored: Matches,
        included: Matches,
        targeted: Matches,
        forecaster: Forecaster,
    ) -> None:
        self._config = config
        self._candidates = candidates
        self._targets = dict(config.targets)
        self._ignored, self._included, self._targeted = ignored, included, targeted
        self._forecaster = forecaster
        self._alike: dict[tuple[object, ...], _Judged] = {}
        self._keeps_blocks = any(may_keep(config.num_bf16_fallback_layers, slot.weight) for slot in _slots(config))
        self._other_formats: list[str] = []
        self._unsupported: list[str] = []
        self._not_by_kernel: list[str] = []

    def verdict(self, number: int, candidate: Candidate) -> Verdict:
        """What becomes of a candidate; those that are alike and that no pattern names are judged once."""
        named = self._ignored.of(number) or self._included.of(number) or self._targeted.of(number)
        if named or self._keeps_blocks:
            found = self._judged(number, candidate)
        else:
            kind = (
                *(candidate.kind, candidate.shape, candidate.dtype, candidate.device, candidate.left_alone),
                *(candidate.blocked, candidate.use_known, candidate.current, candidate.current_rules),
            )
            found = self._alike.get(kind) or self._alike.setdefault(kind, self._judged(number, candidate))
        verdict, refusals, why = found
        if refusals is not None:
            refusals.append(f"{candidate.path}{why}")
        return verdict

    def _judged(self, number: int, candidate: Candidate) -> "_Judged":
        slot, reason = self._request(number, candidate)
        if candidate.current is not None:
            return self._keep(candidate, slot, reason)
        if slot is None:
            return Verdict("leave", None, reason, False, self._config), None, ""
        if candidate.obstacle:
            self._refuse_if_named(number, candidate)
            return Verdict("leave", None, candidate.obstacle, True, self._config), None, ""
        forecast = self._forecaster.of(candidate, slot, self._config)
        verdict = Verdict("quantize", slot, "", True, self._config, forecast)
        if candidate.dtype not in DTYPES:
            return verdict, self._unsupported, f" ({_name(candidate.dtype)})"
        if forecast.loss and self._config.skip_unprofitable:
            reason = f"unprofitable (skip_unprofitable): {forecast.loss}"
            return Verdict("leave", None, reason, True, self._config), None, ""
        if forecast.refusal:
            return verdict, self._not_by_kernel, f": {forecast.kernel}: {forecast.refusal}"
        return verdict, None, ""

    def _request(self, number: int, candidate: Candidate) -> tuple[Slot | None, str]:
        """The formats that the configuration asks of a candidate, or None and the reason."""
        included = self._included.of(number)
        protected = self._protected(number, candidate) if not included else ""
        targets = [p for p in self._targeted.of(number) if not protected or p.form == "exact"]
        self._refuse_contradiction(number, candidate, targets)
        ignored = self._ignored.of(number)
        if ignored:
            return None, f"ignored by {ignored[0].text!r}"
        if targets:
            return self._formats(candidate, self._targets[targets[0].text]), ""
        if protected:
            skipped = [repr(p.text) for p in self._targeted.of(number)]
            return None, protected + (f"; only its exact path opts it in, not {', '.join(skipped)}" if skipped else "")
        if self._config.targets:
            return None, "no target matches"
        if self._config.rest_nothing:
            return None, "no component has it" if self._config.components else "nothing is asked for"
        slot = self._config.slot(candidate.kind)
        if slot is None:
            return None, f"no formats are given for {candidate.kind} layers"
        return self._formats(candidate, slot), ""

    def _protected(self, number: int, candidate: Candidate) -> str:
        """Why a candidate is left alone unless it is opted in."""
        if candidate.left_alone or candidate.kind == "embedding":
            return candidate.left_alone
        matching = [self._targets[pattern.text] for pattern in self._targeted.of(number)]
        slot = matching[0] if matching else self._config.slot(candidate.kind)
        count = self._config.num_bf16_fallback_layers
        if slot is None or count == 0 or not may_keep(count, slot.weight):
            return ""
        return kept(self._blocks[number], count, slot.weight)

    @functools.cached_property
    def _blocks(self) -> list[Block | None]:
        return block_of([unmarked(candidate.path) for candidate in self._candidates])

    def _formats(self, candidate: Candidate, slot: Slot) -> Slot:
        """What a slot means for a candidate: in blocks as asked for; the lookup of an embedding has no activations."""
        found = self._config.with_blocks(slot)
        return Slot(found.weight, None) if candidate.kind == "embedding" else found

    def _refuse_contradiction(self, number: int, candidate: Candidate, targets: Sequence[Pattern]) -> None:
        ignored = self._ignored.of(number)
        if not targets:
            return
        if ignored:
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

    def _keep(self, candidate: Candidate, slot: Slot | None, reason: str) -> "_Judged":
        """A layer that is converted already keeps its formats; asking for others is an error."""
        if slot is None:
            return self._already(candidate, f"converted before; {reason}", asked=False), None, ""
        verdict = self._already(candidate, "converted before, with these formats", asked=True)
        rules = self._config.rules(slot)
        if slot != candidate.current or candidate.current_rules not in (None, rules):
            has = _described(candidate.current, candidate.current_rules)
            return verdict, self._other_formats, f" has {has}, asked for is {_described(slot, rules)}"
        return verdict, None, ""

    def _already(self, candidate: Candidate, reason: str, *, asked: bool) -> Verdict:
        assert candidate.current is not None
        forecast = self._forecaster.of(candidate, candidate.current, self._config)
        return Verdict("already", candidate.current, reason, asked, self._config, forecast)

    def refuse_impossible(self) -> None:
        """Raise for what is asked for and cannot be: weights of other dtypes, other formats of converted layers, and
        kernels that cannot run a layer.
        """
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
        if self._not_by_kernel:
            raise PlanError(
                "linear_backend and moe_backend name kernels that cannot run these layers; name another or 'auto': "
                f"{_listed(self._not_by_kernel)}"
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
        if self._config.num_bf16_fallback_layers and candidates and not any(self._blocks):
            found.append(
                f"num_bf16_fallback_layers: there is no numbered list of blocks ({', '.join(sorted(LISTS))}) whose "
                "first ones it could keep"
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


def _slots(config: QuantizationConfig) -> list[Slot]:
    """All formats that a configuration gives outside of its components."""
    return [slot for slot in (config.linear, config.moe, *(slot for _, slot in config.targets)) if slot is not None]


def _served(verdict: Verdict | None) -> bool:
    """Whether a request for the layer led to something."""
    return verdict is not None and verdict.asked and verdict.decision != "leave"


def _described(slot: Slot | None, rules: tuple[str, str] | None) -> str:
    if slot is None:
        return "nothing"
    return f"{slot.weight} / {slot.activation}" + (f" (scales {rules[0]} / {rules[1]})" if rules else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _texts(patterns: Sequence[Pattern]) -> str:
    return ", ".join(repr(pattern.text) for pattern in patterns)


def _listed(items: Sequence[str]) -> str:
    more = f"; and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more
