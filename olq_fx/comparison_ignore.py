"""Which layers to leave in original precision so that bounds hold, for the fewest bytes.

    suggest(setup, plan, bounds, requantize, allowed, done) -> Suggestion

Each layer is first quantized alone: the error that the outputs then have is its noise. Layers are given back in the
order of noise per byte, and in that of noise, until the bounds hold; then whatever can be taken back again, or be
exchanged for something smaller, is. Every step is a run of the inputs, so nothing rests on noises adding up; but the
search is greedy: no single layer can be dropped from the list, while another combination may cost still less.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from olq_fx.comparison_bounds import WHOLE, Failure
from olq_fx.comparison_measure import Setup, measure
from olq_fx.comparison_result import Suggestion, quality_failures
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError
from olq_fx.plan import Plan, PlanRow


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """A weight that can be given back: its pattern, all its paths, and the bytes that it costs."""

    pattern: str
    names: tuple[str, ...]
    bytes: int


def suggest(
    setup: Setup,
    plan: Plan,
    bounds: Mapping[str, float],
    requantize: Callable[[QuantizationConfig], nn.Module],
    allowed: Callable[[QuantizationConfig], bool],
    done: Callable[[], None],
) -> Suggestion:
    """Search, then run once more what the configuration with the found list makes of the model.

    Args:
        setup: the reference, and a candidate that was quantized by `plan`; its weights are exchanged meanwhile.
        plan: of the candidate.
        bounds: on values; those on time and memory say nothing here.
        requantize: makes a candidate from a configuration.
        allowed: whether a configuration fits the model; what leaves a part of it without effect may not.
        done: called after each run.

    Raises:
        ConfigurationError: there is no bound on values, or the configuration has `targets`, which exclude `ignore`.
    """
    quality = {metric: bound for metric, bound in bounds.items() if metric not in WHOLE[2:]}
    if not quality:
        raise ConfigurationError("to suggest an ignore list, give a bound on a metric of values, such as sqnr_db=20")
    if plan.config.targets:
        raise ConfigurationError("an ignore list cannot stand beside `targets`: leave the layers out of `targets`")
    search = _Search(setup, _units(plan.rows), quality, lambda units: allowed(_config_with(plan.config, units)), done)
    chosen, failures = search.best()
    config = _config_with(plan.config, chosen)
    if not failures:
        failures = search.failures_of(dataclasses.replace(setup, candidate=requantize(config)))
    ignore = tuple(unit.pattern for unit in chosen)
    return Suggestion(ignore, sum(unit.bytes for unit in chosen), config, failures, search.runs)


def with_ignored(config: QuantizationConfig, patterns: Sequence[str]) -> QuantizationConfig:
    """A configuration that leaves these layers alone too."""
    keys = config.to_dict()
    for pattern in patterns:
        own = _part_of(keys, pattern)
        own["ignore"] = [*own.get("ignore", ()), pattern]
    return QuantizationConfig.parse(keys)


def _part_of(keys: dict[str, Any], path: str) -> dict[str, Any]:
    """The keys that speak of a layer: those of the component with the longest prefix of its path, or the outer ones."""
    components = keys.get("components", {})
    prefixes = [prefix for prefix in components if f"{path}.".startswith(f"{prefix}.")]
    part: dict[str, Any] = components[max(prefixes, key=len)] if prefixes else keys
    return part


def _config_with(config: QuantizationConfig, units: Iterable[_Unit]) -> QuantizationConfig:
    return with_ignored(config, sorted(unit.pattern for unit in units))


def _units(rows: Sequence[PlanRow]) -> list[_Unit]:
    quantized = [row for row in rows if row.decision == "quantize"]
    held = Counter(row.module_path for row in rows)
    return [
        _Unit(
            row.module_path if row.module_path and held[row.module_path] == 1 else row.path,
            row.names,
            row.bytes_before - row.bytes_after,
        )
        for row in quantized
    ]


class _Search:
    """The search, with a count of its runs."""

    def __init__(
        self,
        setup: Setup,
        units: Sequence[_Unit],
        bounds: Mapping[str, float],
        allowed: Callable[[frozenset[_Unit]], bool],
        done: Callable[[], None],
    ) -> None:
        self.setup, self.units, self.bounds, self.done = setup, list(units), bounds, done
        self._allowed = functools.cache(allowed)
        self.runs = 0
        self._known: dict[frozenset[_Unit], tuple[float, tuple[Failure, ...]]] = {}

    def failures_of(self, setup: Setup) -> tuple[Failure, ...]:
        """The bounds that do not hold for a pair of models."""
        return self._run(setup)[1]

    def best(self) -> tuple[list[_Unit], tuple[Failure, ...]]:
        """The units to give back, in the order of the model, and the bounds that even then do not hold."""
        if self._holds(frozenset()):
            return [], ()
        alone = {unit: self._tried(frozenset(self.units) - {unit}) for unit in self.units}
        noise = {unit: found[0] for unit, found in alone.items()}
        per_byte = sorted(self.units, key=lambda unit: noise[unit] / max(unit.bytes, 1), reverse=True)
        found = [self._pruned(self._prefix(order)) for order in (per_byte, sorted(per_byte, key=lambda u: -noise[u]))]
        found += [frozenset(self.units) - {unit} for unit in self.units if not alone[unit][1]]
        found = [chosen for chosen in found if len(chosen) < len(self.units) and self._holds(chosen)]
        if not found:
            return [], min((failures for _, failures in alone.values()), key=len)
        chosen = self._exchanged(min(found, key=_bytes))
        return [unit for unit in self.units if unit in chosen], ()

    def _prefix(self, order: Sequence[_Unit]) -> frozenset[_Unit]:
        """The fewest first units of an order that suffice, found by halving; all of them where none do."""
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(frozenset(order[:middle])) else (middle, high)
        return frozenset(order[:high])

    def _pruned(self, chosen: frozenset[_Unit]) -> frozenset[_Unit]:
        """Without what is not needed, the largest first."""
        if len(chosen) == len(self.units):
            return chosen
        for unit in sorted(chosen, key=lambda unit: unit.bytes, reverse=True):
            if len(chosen) > 1 and self._holds(chosen - {unit}):
                chosen -= {unit}
        return chosen

    def _exchanged(self, chosen: frozenset[_Unit]) -> frozenset[_Unit]:
        """With smaller units instead of large ones where that suffices, for at most as many runs as there are units."""
        left = len(self.units)
        for unit in sorted(chosen, key=lambda unit: unit.bytes, reverse=True):
            others = [other for other in self.units if other not in chosen and other.bytes < unit.bytes]
            for other in sorted(others, key=lambda other: other.bytes):
                left -= 1
                if left < 0:
                    return chosen
                if self._holds(chosen - {unit} | {other}):
                    chosen = chosen - {unit} | {other}
                    break
        return chosen

    def _holds(self, chosen: frozenset[_Unit]) -> bool:
        return self._allowed(chosen) and not self._tried(chosen)[1]

    def _tried(self, chosen: frozenset[_Unit]) -> tuple[float, tuple[Failure, ...]]:
        """The noise with these units in original precision, and the bounds that do not hold."""
        if chosen not in self._known:
            with _given_back(self.setup, chosen):
                self._known[chosen] = self._run(self.setup)
        return self._known[chosen]

    def _run(self, setup: Setup) -> tuple[float, tuple[Failure, ...]]:
        self.runs += 1
        measured = measure(setup)
        self.done()
        return measured.noise, quality_failures(self.bounds, measured.steps, measured.perplexity)


def _bytes(units: frozenset[_Unit]) -> int:
    return sum(unit.bytes for unit in units)


@contextlib.contextmanager
def _given_back(setup: Setup, units: frozenset[_Unit]) -> Iterator[None]:
    """Within the context the candidate has the reference's weights for these units."""
    places = [(setup.candidate.get_submodule(path.rpartition(".")[0]), path) for unit in units for path in unit.names]
    converted = [
        (module, path.rpartition(".")[2], module.get_parameter(path.rpartition(".")[2])) for module, path in places
    ]
    try:
        for module, path in places:
            module._parameters[path.rpartition(".")[2]] = setup.reference.get_parameter(path)
        yield
    finally:
        for module, leaf, parameter in converted:
            module._parameters[leaf] = parameter
