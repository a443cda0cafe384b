"""What is said of each weight by the configuration that it belongs to, and what of it is impossible.

API:
    Judge(config, candidates, ignored, included, targeted, forecaster)
        .verdict(number, candidate) -> Verdict       what becomes of it
        .refuse_impossible()                         raises for all that is asked for and cannot be
        .without_effect(candidates, verdicts)        what to say of requests that quantize nothing
    served(verdict), listed(items)                   whether a request led to something; a few items of a message
    overridden_rules(config, candidate, slot)        the scale rules of a weight that gets other activations
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from olq_fx.candidates import DTYPES, Candidate
from olq_fx.configuration import QuantizationConfig
from olq_fx.declared import Declaration
from olq_fx.errors import ConversionError, PlanError
from olq_fx.forecast import Forecast, Forecaster
from olq_fx.leading_blocks import LISTS, Block, block_of, kept, may_keep
from olq_fx.matching import SHOWN, Matches, unmarked
from olq_fx.module_uses import ALREADY_QUANTIZED
from olq_fx.patterns import Pattern
from olq_fx.schemes import Slot

_ONLY_ACTIVATIONS = "only an activation format is given, and its weight is not quantized"

Decision = Literal["quantize", "leave", "already", "override"]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one candidate.

    Attributes:
        decision: `quantize`; `leave` in original precision; `already` converted, and kept so; `override` the
            activations of a weight that is converted already and stays as it is.
        slot: the formats, of a layer that is or will be quantized.
        reason: why it is left, or kept; "" for a layer that will be quantized.
        asked: whether the configuration asks for it (an `already` layer may also be just left as it is).
        config: the configuration that decided: that of its component.
        forecast: what is expected of it in these formats; None for a layer that is left.
        settled: whether the checkpoint was quantized as is asked for, and so decides what is left.
    """

    decision: Decision
    slot: Slot | None
    reason: str
    asked: bool
    config: QuantizationConfig
    forecast: Forecast | None = None
    settled: bool = False


_Judged: TypeAlias = "tuple[Verdict, list[str] | None, str]"
"""A verdict; the refusals that the layer belongs to, if any, and what is said of it there after its path."""


class Judge:
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
        """Nothing is asked of it yet.

        Args:
            config: what is asked for.
            candidates: the weights that it speaks of, in their order, which numbers them.
            ignored, included, targeted: which of its patterns match which of them.
            forecaster: says what becomes of a weight in given formats.
        """
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
        self._other_method: Declaration | None = None

    def verdict(self, number: int, candidate: Candidate) -> Verdict:
        """What becomes of a candidate; those that are alike and that no pattern names are judged once."""
        named = self._ignored.of(number) or self._included.of(number) or self._targeted.of(number)
        if named or self._keeps_blocks:
            found = self._judged(number, candidate)
        else:
            kind = (
                *(candidate.kind, candidate.shape, candidate.dtype, candidate.device, candidate.left_alone),
                *(candidate.blocked, candidate.use_known, candidate.current, candidate.current_rules),
                *(candidate.checkpoint, candidate.shards),
            )
            found = self._alike.get(kind) or self._alike.setdefault(kind, self._judged(number, candidate))
        verdict, refusals, why = found
        if refusals is not None:
            refusals.append(f"{candidate.path}{why}")
        return verdict

    def _judged(self, number: int, candidate: Candidate) -> "_Judged":
        slot, reason = self._request(number, candidate)
        if slot is not None and slot.keeps_weight:
            return self._override(number, candidate, slot)
        if candidate.current is not None:
            return self._keep(candidate, slot, reason)
        if slot is None:
            return Verdict("leave", None, reason, False, self._config), None, ""
        scheme = "" if self._config.asks(candidate.kind) else self._config.quantization
        if candidate.checkpoint is not None and scheme and not self._included.of(number):
            return self._as_declared(candidate, candidate.checkpoint, scheme), None, ""
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

    def _as_declared(self, candidate: Candidate, declaration: Declaration, scheme: str) -> Verdict:
        """A scheme is for a whole model: a checkpoint that has it decides; one that has another cannot be given it."""
        if not declaration.agrees(scheme):
            self._other_method = self._other_method or declaration
        reason = candidate.obstacle or f"kept in original precision by the checkpoint, which decides: {declaration}"
        return Verdict("leave", None, reason, False, self._config, settled=True)

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

    def _override(self, number: int, candidate: Candidate, slot: Slot) -> "_Judged":
        """Other activations for a weight that is quantized already; all others have no formats."""
        current = candidate.current
        if current is None:
            foreign = candidate.obstacle.startswith(ALREADY_QUANTIZED)
            if foreign:
                self._refuse_if_named(number, candidate)
            reason = f"{candidate.obstacle}, which takes its activations as it does" if foreign else _ONLY_ACTIVATIONS
            return Verdict("leave", None, reason, foreign, self._config), None, ""
        if candidate.kind == "embedding":
            return self._already(candidate, "converted before; a lookup has no activations", asked=False), None, ""
        wanted = Slot(current.weight, slot.activation)
        rules = overridden_rules(self._config, candidate, wanted)
        if wanted == current and candidate.current_rules in (None, rules):
            return self._already(candidate, "converted before, with these formats", asked=True), None, ""
        forecast = self._forecaster.of(candidate, wanted, self._config)
        reason = f"its weight stays as it is; activations are {current.activation or 'in original precision'} so far"
        verdict = Verdict("override", wanted, reason, True, self._config, forecast)
        if forecast.refusal:
            return verdict, self._not_by_kernel, f": {forecast.kernel}: {forecast.refusal}"
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
                f"weights of these dtypes cannot be quantized: {listed(self._unsupported)}; valid: "
                f"{', '.join(sorted(map(_name, DTYPES)))}; put the layers into 'ignore' to leave them as they are"
            )
        if self._other_method:
            raise PlanError(
                f"{self._config.quantization!r} is asked for, but {self._other_method}; to quantize the weights that "
                "it has in original precision, give formats for layers instead of a scheme for the model: "
                f"{{'linear': {self._config.quantization!r}}}"
            )
        if self._other_formats:
            raise PlanError(
                "layers are already quantized with other formats; call olq_fx.dequantize_(model) first, leave them out "
                f"of the configuration, or give an activation alone to change no weight: {listed(self._other_formats)}"
            )
        if self._not_by_kernel:
            raise PlanError(
                "linear_backend and moe_backend name kernels that cannot run these layers; name another or 'auto': "
                f"{listed(self._not_by_kernel)}"
            )

    def without_effect(self, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]) -> list[str]:
        """The requests that match something and quantize none of it."""
        found = []
        for matches in (self._targeted, self._included):
            for text, numbers in matches.of_pattern.items():
                if numbers and not any(served(verdicts[n]) for n in numbers):
                    first = numbers[0]
                    found.append(
                        f"{matches.key}: the pattern {text!r} quantizes nothing; "
                        f"{candidates[first].path}: {verdicts[first].reason}"
                    )
        found += self._overriding_nothing(candidates, verdicts)
        if self._config.num_bf16_fallback_layers and candidates and not any(self._blocks):
            found.append(
                f"num_bf16_fallback_layers: there is no numbered list of blocks ({', '.join(sorted(LISTS))}) whose "
                "first ones it could keep"
            )
        experts = [n for n, candidate in enumerate(candidates) if candidate.kind == "moe"]
        refused = [n for n in experts if verdicts[n].asked and verdicts[n].decision == "leave"]
        formats = self._config.asks("moe") and self._config.moe is not None and not self._config.moe.keeps_weight
        if formats and refused and not any(served(verdicts[n]) for n in experts):
            first = refused[0]
            found.append(
                f"moe: formats are given for experts, but none is quantized; {candidates[first].path}: "
                f"{verdicts[first].reason}; leave 'moe' out to keep them in original precision"
            )
        return found

    def _overriding_nothing(self, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]) -> list[str]:
        """The activations that are given for weights of which none is quantized already."""
        found = []
        for key, slot, kinds in (
            ("linear", self._config.linear, ("linear", "embedding")),
            ("moe", self._config.moe, ("moe",)),
        ):
            own = [v for c, v in zip(candidates, verdicts, strict=True) if c.kind in kinds]
            if slot is not None and slot.keeps_weight and own and not any(map(served, own)):
                foreign = next((f"; {v.reason}" for v in own if v.asked), "")
                found.append(
                    f"{key}: an activation format without a weight format is for weights that are quantized already, "
                    f"and none of these is{foreign or '; name a weight format too'}"
                )
        return found


def overridden_rules(config: QuantizationConfig, candidate: Candidate, slot: Slot) -> tuple[str, str]:
    """The scale rules of a converted weight, which stays as it is, and of the activations that it gets."""
    weight_rule = candidate.current_rules[0] if candidate.current_rules else ""
    return weight_rule, config.activation_rule(slot.activation) if slot.activation else ""


def _slots(config: QuantizationConfig) -> list[Slot]:
    """All formats that a configuration gives outside of its components."""
    return [slot for slot in (config.linear, config.moe, *(slot for _, slot in config.targets)) if slot is not None]


def served(verdict: Verdict | None) -> bool:
    """Whether a request for the layer led to something, or was met before."""
    return verdict is not None and (verdict.settled or (verdict.asked and verdict.decision != "leave"))


def _described(slot: Slot | None, rules: tuple[str, str] | None) -> str:
    if slot is None:
        return "nothing"
    return f"{slot.weight} / {slot.activation}" + (f" (scales {rules[0]} / {rules[1]})" if rules else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _texts(patterns: Sequence[Pattern]) -> str:
    return ", ".join(repr(pattern.text) for pattern in patterns)


def listed(items: Sequence[str]) -> str:
    """The first of some items, and how many there are beside them."""
    more = f"; and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more
