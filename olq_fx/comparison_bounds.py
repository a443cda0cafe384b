"""Bounds on a comparison: `psnr_db=20,cosine=0.98`.

API:
    HIGHER, LOWER                  the metrics of which more is better, of which less is
    parse_bounds(value, only=None) -> dict[str, float]     from a mapping or a text
    Failure: metric, where, bound, value; str() is a sentence
    failures_of(bounds, where, values) -> list[Failure]
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from olq_fx.comparison_metrics import finite_or_none
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, nearest, shown

HIGHER = ("cosine", "psnr_db", "sqnr_db", "top1")
"""Metrics of which more is better: a bound says how low they may be."""

ERRORS = ("mae", "mse", "rmse", "max_abs", "relative_l2", "kl")
LOGITS = ("kl", "top1")
WHOLE = ("perplexity", "perplexity_ratio", "latency_ratio", "memory_ratio")
"""Metrics of the whole comparison, not of one output. A ratio is the candidate's value over the reference's."""

LOWER = (*ERRORS, *WHOLE)
"""Metrics of which less is better: a bound says how high they may be."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A bound that does not hold: `where` is an output, one of its steps, or the whole comparison."""

    metric: str
    where: str
    bound: float
    value: float

    def __str__(self) -> str:
        """What is wrong, with both numbers."""
        if math.isnan(self.value):
            return f"{self.metric} of {self.where} is undefined; its bound is {self.bound:g}"
        side = "under" if self.metric in HIGHER else "over"
        return f"{self.metric} of {self.where} is {self.value:.6g}, {side} {self.bound:g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"metric": self.metric, "where": self.where, "bound": self.bound, "value": finite_or_none(self.value)}


def parse_bounds(value: object, only: Collection[str] | None = None) -> dict[str, float]:
    """The bounds by metric.

    Args:
        value: a mapping of metrics to numbers, a text `metric=number,...`, or None for no bounds.
        only: the metrics that may be named here (`HIGHER` or `LOWER`); by default all.

    Raises:
        ConfigurationError: an unknown metric, one of the other kind, one named twice, or no finite number.
        ConfigurationTypeError: `value` is of another type.
    """
    found: dict[str, float] = {}
    for name, number in _pairs(value):
        metric = name.strip().lower().replace("-", "_")
        if metric not in (*HIGHER, *LOWER):
            raise ConfigurationError(f"unknown metric {shown(name)} in a bound; {nearest(metric, [*HIGHER, *LOWER])}")
        if only is not None and metric not in only:
            less = "less" if metric in LOWER else "more"
            other = "--fail-over" if metric in LOWER else "--fail-under"
            raise ConfigurationError(f"of {metric} {less} is better; its bound belongs to {other}")
        if metric in found:
            raise ConfigurationError(f"the bound of {metric} is given twice")
        found[metric] = _number(metric, number)
    return found


def _pairs(value: object) -> list[tuple[str, object]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [_pair(part) for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return list(value.items())
    raise ConfigurationTypeError(
        f"bounds are a mapping of metrics to numbers or a text `metric=number,...`, not {shown(value)}"
    )


def _pair(text: str) -> tuple[str, object]:
    name, equals, number = text.partition("=")
    if not equals:
        raise ConfigurationError(f"a bound is written metric=number, not {shown(text)}")
    return name, number


def _number(metric: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"the bound of {metric} is a finite number, not {shown(value)}")
    return number


def failures_of(bounds: Mapping[str, float], where: str, values: Mapping[str, float | None]) -> list[Failure]:
    """The bounds that do not hold; metrics that `values` lacks are not judged here. Undefined values hold no bound."""
    failed = []
    for metric, bound in bounds.items():
        value = values.get(metric)
        if value is not None and not (value >= bound if metric in HIGHER else value <= bound):
            failed.append(Failure(metric, where, bound, value))
    return failed
