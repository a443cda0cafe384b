"""Take the measure of a pair of models on calls: outputs, steps, layers, perplexity.

API:
    Setup(reference, candidate, calls, loop, seed, logits, tokens)
    measure(setup, layers=(), done=...) -> Measured
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx.comparison_metrics import Difference, Metrics
from olq_fx.comparison_result import Pair
from olq_fx.comparison_runs import Loop, side_by_side, watch
from olq_fx.errors import ComparisonError, ConfigurationError, nearest


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What is run.

    Attributes:
        reference, candidate: models with modules of the same paths.
        calls: the inputs.
        loop: what makes the steps of a call, or None to call the model once.
        seed: of the first call; the next ones take the numbers after it.
        logits: names of outputs that are logits.
        tokens: the named input whose tokens the logits predict, shifted by one, for the perplexity; or None.
    """

    reference: nn.Module
    candidate: nn.Module
    calls: tuple[Any, ...]
    loop: Loop | None
    seed: int
    logits: frozenset[str]
    tokens: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What one run over all calls shows.

    Attributes:
        outputs, steps: metrics of each output, over all and step by step.
        layers: how often each watched module was called, and its metrics.
        perplexity: of the tokens, or None.
        notes: what could not be compared.
    """

    outputs: Mapping[str, Metrics]
    steps: tuple[Mapping[str, Metrics], ...]
    layers: Mapping[str, tuple[int, Metrics | None]]
    perplexity: Pair | None
    notes: tuple[str, ...]

    @property
    def noise(self) -> float:
        """The energy of the error relative to that of the reference, summed over the outputs."""
        return sum(metrics.relative_l2**2 for metrics in self.outputs.values())


def _nothing() -> None:
    return None


def measure(setup: Setup, layers: Sequence[str] = (), done: Callable[[], None] = _nothing) -> Measured:
    """Run all calls through both models.

    Args:
        setup: what to run.
        layers: paths of modules to compare as well; their outputs of one step are kept.
        done: called after each call.

    Raises:
        ComparisonError: the outputs cannot be compared.
        ConfigurationError: there is no output of that name, or no such input.
    """
    steps: list[dict[str, Difference]] = []
    seen, likelihood = _Layers(), _Likelihood()
    with (
        watch(setup.reference, layers, seen.of_reference),
        watch(setup.candidate, layers, seen.of_candidate),
    ):
        for number, call in enumerate(setup.calls):
            for step, there, here in side_by_side(
                setup.reference, setup.candidate, call, setup.seed + number, setup.loop
            ):
                if step == len(steps):
                    steps.append({})
                _add(steps[step], there, here, setup.logits)
                if setup.tokens is not None:
                    likelihood.add(_tokens(call, setup.tokens), _logits(there, setup), _logits(here, setup))
                seen.end_step()
            done()
    return _result(steps, seen, layers, likelihood)


def _add(
    sums: dict[str, Difference], there: Mapping[str, Tensor], here: Mapping[str, Tensor], logits: frozenset[str]
) -> None:
    for name in there:
        try:
            sums.setdefault(name, Difference()).add(there[name], here[name], name in logits)
        except ComparisonError as error:
            raise ComparisonError(f"output {name!r}: {error}") from None


def _result(
    steps: Sequence[Mapping[str, Difference]], seen: "_Layers", layers: Sequence[str], likelihood: "_Likelihood"
) -> Measured:
    whole: dict[str, Difference] = {}
    for sums in steps:
        for name, difference in sums.items():
            whole.setdefault(name, Difference()).merge(difference)
    if not any(difference.count for difference in whole.values()):
        raise ComparisonError(f"nothing was compared: what was returned has no elements ({', '.join(whole)})")
    by_step = tuple({name: difference.metrics() for name, difference in sums.items()} for sums in steps)
    outputs = {name: difference.metrics() for name, difference in whole.items()}
    notes = tuple(
        f"{metrics.nonfinite} of {metrics.count} elements of {name!r} are NaN or infinite in one model or in both"
        for name, metrics in outputs.items()
        if metrics.nonfinite
    )
    compared = {path: seen.of(path) for path in layers}
    return Measured(outputs, by_step, compared, likelihood.pair(), notes + seen.notes())


class _Layers:
    """The outputs of modules: kept from the reference, compared as soon as the candidate has them."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[dict[str, Tensor]]] = {}
        self._sums: dict[str, Difference] = {}
        self._calls: dict[str, int] = {}
        self._odd: dict[str, None] = {}

    def of_reference(self, path: str, outputs: dict[str, Tensor]) -> None:
        self._waiting.setdefault(path, []).append(outputs)

    def of_candidate(self, path: str, outputs: dict[str, Tensor]) -> None:
        self._calls[path] = self._calls.get(path, 0) + 1
        waiting = self._waiting.get(path)
        there = waiting.pop(0) if waiting else {}
        shapes = [{name: tensor.shape for name, tensor in given.items()} for given in (there, outputs)]
        if shapes[0] != shapes[1]:
            self._odd[path] = None
            return
        for name, tensor in outputs.items():
            self._sums.setdefault(path, Difference()).add(there[name], tensor)

    def end_step(self) -> None:
        """Drop what the candidate did not call."""
        self._odd.update(dict.fromkeys(path for path, left in self._waiting.items() if left))
        self._waiting.clear()

    def of(self, path: str) -> tuple[int, Metrics | None]:
        sums = self._sums.get(path)
        return self._calls.get(path, 0), None if sums is None else sums.metrics()

    def notes(self) -> tuple[str, ...]:
        if not self._odd:
            return ()
        some = ", ".join(list(self._odd)[:5])
        return (f"called with other shapes or another number of times, and left out there: {some}",)


class _Likelihood:
    """The log likelihood of tokens under the logits of both models."""

    def __init__(self) -> None:
        self._loss = [0.0, 0.0]
        self._count = 0

    def add(self, given: tuple[Tensor, Tensor | None], there: Tensor, here: Tensor) -> None:
        """Add (B, T) tokens, their mask, and (B, T, classes) logits of both models."""
        tokens, mask = given
        if there.ndim != 3 or there.shape[:2] != tokens.shape:
            raise ComparisonError(
                f"perplexity: tokens are (B, T) and logits (B, T, classes), not {tuple(tokens.shape)} "
                f"and {tuple(there.shape)}"
            )
        for row in range(tokens.shape[0]):
            following = tokens[row, 1:, None]
            counted = torch.ones_like(following[:, 0]) if mask is None else mask[row, 1:]
            self._count += int(counted.sum())
            for lane, logits in enumerate((there, here)):
                scores = logits[row, :-1].double().log_softmax(-1).gather(-1, following.to(logits.device))[:, 0]
                self._loss[lane] -= float((scores * counted.to(scores)).sum())

    def pair(self) -> Pair | None:
        if not self._count:
            return None
        return Pair(*(_exp(loss / self._count) for loss in self._loss))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _tokens(call: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """The tokens among the named inputs, and the mask that says which of them count."""
    if not isinstance(call, Mapping) or name not in call:
        known = call if isinstance(call, Mapping) else ()
        raise ConfigurationError(f"perplexity: no input is called {name!r}; {nearest(name, known)}")
    return call[name], call.get("attention_mask")


def _logits(outputs: Mapping[str, Tensor], setup: Setup) -> Tensor:
    for name in outputs:
        if name in setup.logits:
            return outputs[name]
    raise ConfigurationError(f"perplexity: no output is called {' or '.join(sorted(setup.logits))}: {list(outputs)}")
