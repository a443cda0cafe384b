"""The error of each layer as a picture, and of each step where there are several (matplotlib, on first use)."""

import math
from os import PathLike
from typing import TYPE_CHECKING, Any

from olq_fx.comparison_bounds import ERRORS, HIGHER, LOGITS
from olq_fx.errors import ConfigurationError, nearest
from olq_fx.optional_packages import optional_package

if TYPE_CHECKING:
    from olq_fx.comparison_result import Comparison


def plot(comparison: "Comparison", path: str | PathLike[str], metric: str = "relative_l2") -> None:
    """Draw a comparison into a picture file.

    Args:
        comparison: what to draw.
        path: where to write; its ending says which kind of picture (`.png`, `.svg`, `.pdf`).
        metric: a metric of tensors.

    Raises:
        ConfigurationError: no such metric or kind of picture, or the file cannot be written.
        MissingPackageError: matplotlib is not installed.
    """
    metrics = [name for name in (*HIGHER, *ERRORS) if name not in LOGITS]
    if metric not in metrics:
        raise ConfigurationError(f"cannot draw {metric!r}; {nearest(metric, metrics)}")
    optional_package("matplotlib", "plot", "drawing")
    figure_module = optional_package("matplotlib.figure", "plot", "drawing")
    layers = [layer for layer in comparison.layers if layer.metrics is not None]
    panels = (1 if layers else 0) + (1 if len(comparison.steps) > 1 or not layers else 0)
    figure = figure_module.Figure(figsize=(9, 1.5 + 2.5 * (panels - 1) + max(3.0, 0.17 * len(layers))))
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    if layers:
        _draw_layers(axes.pop(0), [(layer.path, getattr(layer.metrics, metric)) for layer in layers], metric)
    if axes:
        _draw_steps(axes.pop(0), comparison, metric)
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot draw into {str(path)!r}: {error}") from None


def _draw_layers(axes: Any, values: list[tuple[str, float | None]], metric: str) -> None:
    """A bar a layer, the first on top."""
    drawn = [(name, value if value is not None and math.isfinite(value) else 0.0) for name, value in values]
    axes.barh(range(len(drawn)), [value for _, value in drawn], color="tab:blue", height=0.7)
    axes.set_yticks(range(len(drawn)), [name for name, _ in drawn], fontsize="x-small")
    axes.invert_yaxis()
    axes.set(xlabel=metric, title="Error by layer, errors of earlier layers included")
    axes.grid(axis="x", alpha=0.3)


def _draw_steps(axes: Any, comparison: "Comparison", metric: str) -> None:
    """A line an output over the steps."""
    for name in comparison.outputs:
        axes.plot([_finite(getattr(step[name], metric)) for step in comparison.steps], "o-", label=name)
    axes.set(xlabel="step", ylabel=metric, title="Error by step")
    axes.legend()
    axes.grid(alpha=0.3)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan
