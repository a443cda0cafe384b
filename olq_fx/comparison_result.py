"""What a comparison found: for people as tables, for programs as strict JSON, for the eye as a picture.

API:
    Comparison: config, seed, outputs, steps, layers, perplexity, cost, bounds, suggestion, notes
        .failures                      the bounds that do not hold
        .to_dict(), .to_json(), str(comparison)
        .plot(path)                    error by layer (matplotlib)
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Literal

import torch

from olq_fx.comparison_bounds import Failure, failures_of
from olq_fx.comparison_metrics import Metrics, finite_or_none
from olq_fx.configuration import QuantizationConfig
from olq_fx.tables import size_of, table_of

_SHOWN = ("cosine", "mae", "rmse", "max_abs", "relative_l2", "psnr_db", "sqnr_db", "kl", "top1")
"""The metrics in tables."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerComparison:
    """The output of one quantized layer in the candidate's run against the same in the reference's.

    Attributes:
        path: of the module.
        formats: `weight / activation` of its weights.
        bytes_before, bytes_after: size of its weights in original precision and converted.
        calls: how often it was called.
        metrics: of all its outputs; None where there was nothing to compare.
    """

    path: str
    formats: str
    bytes_before: int
    bytes_after: int
    calls: int
    metrics: Metrics | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"metrics": None if self.metrics is None else self.metrics.to_dict()}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One quantity of both models."""

    reference: float
    candidate: float

    @property
    def ratio(self) -> float | None:
        """The candidate's over the reference's, or None where that is 0."""
        return self.candidate / self.reference if self.reference else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = {"reference": self.reference, "candidate": self.candidate, "ratio": self.ratio}
        return {key: finite_or_none(value) for key, value in found.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """Layers to leave in original precision so that the bounds hold.

    Attributes:
        ignore: for the key `ignore`, beside what the configuration ignores already.
        bytes_given_back: how many bytes that costs.
        config: the configuration with them.
        failures: the bounds that do not hold with it, from a run; empty but where no list meets them.
        runs: how many runs of the inputs the search took.
    """

    ignore: tuple[str, ...]
    bytes_given_back: int
    config: QuantizationConfig
    failures: tuple[Failure, ...]
    runs: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "ignore": list(self.ignore),
            "bytes_given_back": self.bytes_given_back,
            "config": self.config.to_dict(),
            "failures": [failure.to_dict() for failure in self.failures],
            "runs": self.runs,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a candidate is from its reference, and what either costs.

    Attributes:
        config: what the candidate was quantized with; None for a candidate that was given.
        seed: of the random numbers.
        outputs: metrics of each output, over all calls and steps.
        steps: the same of each step of a trajectory; one step for a model that is simply called.
        layers: of each quantized layer, in the order of the model.
        perplexity: of the text, or None.
        latency_ms: of one call (all its steps), or None where it was not measured.
        peak_memory_bytes: parameters, buffers and what one call allocates, or None.
        bounds: what was asked for.
        suggestion: an `ignore` list that meets them, where it was asked for and they do not hold.
        notes: what else a user should know.
    """

    config: QuantizationConfig | None
    seed: int
    outputs: Mapping[str, Metrics]
    steps: tuple[Mapping[str, Metrics], ...]
    layers: tuple[LayerComparison, ...]
    perplexity: Pair | None
    latency_ms: Pair | None
    peak_memory_bytes: Pair | None
    bounds: Mapping[str, float]
    suggestion: Suggestion | None = None
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The bounds that do not hold, for each output of each step, and for the whole."""
        return quality_failures(self.bounds, self.steps, self.perplexity) + tuple(
            failures_of(self.bounds, "the candidate", {"latency_ratio": _ratio(self.latency_ms)})
            + failures_of(self.bounds, "the candidate", {"memory_ratio": _ratio(self.peak_memory_bytes)})
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "config": None if self.config is None else self.config.to_dict(),
            "seed": self.seed,
            "torch": torch.__version__,
            "outputs": _named(self.outputs),
            "steps": [_named(step) for step in self.steps],
            "layers": [layer.to_dict() for layer in self.layers],
            "perplexity": _pair(self.perplexity),
            "latency_ms": _pair(self.latency_ms),
            "peak_memory_bytes": _pair(self.peak_memory_bytes),
            "bounds": dict(self.bounds),
            "failures": [failure.to_dict() for failure in self.failures],
            "suggestion": None if self.suggestion is None else self.suggestion.to_dict(),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Strict JSON: no NaN or Infinity. An infinite or undefined number is null."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=2)

    def plot(self, path: str | PathLike[str], metric: str = "relative_l2") -> None:
        """Draw the error of each layer, or step by step where there are several, into a picture file.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        from olq_fx.comparison_plot import plot

        plot(self, path, metric)

    def __str__(self) -> str:
        """Tables of outputs, steps and layers, the cost, and what does not hold."""
        parts = [_table("output", self.outputs.items())]
        if len(self.steps) > 1:
            named = [(f"step {n}: {name}", m) for n, step in enumerate(self.steps) for name, m in step.items()]
            parts.append(_table("step", named))
        if self.layers:
            parts.append(_layer_table(self.layers))
        return "\n\n".join([part.strip("\n") for part in (*parts, "\n".join(self._lines()))])

    def _lines(self) -> list[str]:
        lines = []
        if self.perplexity is not None:
            lines.append(f"perplexity: {self.perplexity.reference:.3f} -> {self.perplexity.candidate:.3f}")
        if self.latency_ms is not None:
            lines.append(f"one call: {self.latency_ms.reference:.2f} ms -> {self.latency_ms.candidate:.2f} ms")
        if self.peak_memory_bytes is not None:
            memory = (self.peak_memory_bytes.reference, self.peak_memory_bytes.candidate)
            lines.append(f"peak memory: {size_of(int(memory[0]))} -> {size_of(int(memory[1]))}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"bound: {failure}" for failure in self.failures]
        if self.bounds and not self.failures:
            lines.append("all bounds hold")
        return lines + self._suggested()

    def _suggested(self) -> list[str]:
        if self.suggestion is None:
            return []
        if self.suggestion.failures:
            return ["no ignore list meets the bounds: " + "; ".join(map(str, self.suggestion.failures))]
        listed = json.dumps(list(self.suggestion.ignore))
        return [f"the bounds hold with `ignore`: {listed}, at {size_of(self.suggestion.bytes_given_back)} more"]


def quality_failures(
    bounds: Mapping[str, float], steps: Iterable[Mapping[str, Metrics]], perplexity: Pair | None
) -> tuple[Failure, ...]:
    """The bounds on values, not on cost, that do not hold."""
    failed: list[Failure] = []
    listed = list(steps)
    for number, step in enumerate(listed):
        for name, metrics in step.items():
            where = f"{name!r}, step {number}" if len(listed) > 1 else repr(name)
            failed += failures_of(bounds, where, {field: getattr(metrics, field) for field in _FIELDS})
    if perplexity is not None:
        values = {"perplexity": perplexity.candidate, "perplexity_ratio": perplexity.ratio}
        failed += failures_of(bounds, "the candidate", values)
    return tuple(failed)


_FIELDS = tuple(field.name for field in dataclasses.fields(Metrics))


def _ratio(pair: Pair | None) -> float | None:
    return None if pair is None else pair.ratio


def _pair(pair: Pair | None) -> dict[str, Any] | None:
    return None if pair is None else pair.to_dict()


def _named(outputs: Mapping[str, Metrics]) -> dict[str, Any]:
    return {name: metrics.to_dict() for name, metrics in outputs.items()}


def _cells(metrics: Metrics | None, columns: Iterable[str]) -> list[str]:
    values = [None if metrics is None else getattr(metrics, column) for column in columns]
    return ["" if value is None else f"{value:.5g}" for value in values]


Columns = dict[str, Literal["left", "right"]]


def _table(head: str, rows: Iterable[tuple[str, Metrics]]) -> str:
    listed = list(rows)
    columns = [name for name in _SHOWN if any(getattr(metrics, name) is not None for _, metrics in listed)]
    cells = [(name, *_cells(metrics, columns)) for name, metrics in listed]
    heads: Columns = {head: "left"}
    heads.update(dict.fromkeys(columns, "right"))
    return table_of(heads, cells)


def _layer_table(layers: Iterable[LayerComparison]) -> str:
    columns = _SHOWN[:7]
    cells = []
    for layer in layers:
        size = f"{size_of(layer.bytes_before)} -> {size_of(layer.bytes_after)}"
        cells.append((layer.path, layer.formats, *_cells(layer.metrics, columns), size))
    heads: Columns = {"layer": "left", "weight / activation": "left"}
    heads.update(dict.fromkeys((*columns, "bytes"), "right"))
    return table_of(heads, cells)
