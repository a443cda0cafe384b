"""`olq-fx compare`: a model against what a configuration makes of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from olq_fx.cli_answers import BOUND, DONE, Answer, ModelError, paragraph
from olq_fx.cli_inputs import InputOptions, calls_from
from olq_fx.cli_models import named, source_of
from olq_fx.comparison import compare
from olq_fx.comparison_bounds import HIGHER, LOWER, parse_bounds
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, OlqFxError
from olq_fx.optional_packages import optional_package


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How to compare: see the options of the command of the same names."""

    inputs: InputOptions
    loop: str | None
    trace: bool
    fail_under: str | None
    fail_over: str | None
    suggest_ignore: bool
    layers: bool
    repeat: int
    compiled: bool
    plot: str | None
    metric: str
    strict: bool
    progress: bool
    dtype: torch.dtype | None
    device: torch.device | None


def bounds_of(under: str | None, over: str | None) -> Mapping[str, float]:
    """The bounds of both options."""
    return parse_bounds(under, HIGHER) | parse_bounds(over, LOWER)


def compare_model(model: str, config: QuantizationConfig, options: CompareOptions) -> Answer:
    """Load, quantize a copy, run both, and judge.

    Raises:
        OlqFxError: of what was asked for.
        ModelError: the model failed.
    """
    bounds = bounds_of(options.fail_under, options.fail_over)
    if options.plot is not None:
        optional_package("matplotlib.figure", "plot", "--plot")
    source = source_of(model)
    loop = None if options.loop is None else named(options.loop, "--loop")
    if loop is not None and not callable(loop):
        raise ConfigurationError(f"--loop {options.loop!r} is no function")
    loaded = source.load(options.dtype, options.device)
    given = calls_from(source, loaded, options.inputs)
    try:
        found = compare(
            loaded,
            config,
            given.calls,
            loop=loop,
            seed=options.inputs.seed,
            layers=options.layers,
            perplexity=given.perplexity,
            bounds=bounds,
            suggest_ignore=options.suggest_ignore,
            repeat=options.repeat,
            compiled=options.compiled,
            example_inputs=_example(given.calls[0]) if options.trace else None,
            strict=options.strict,
            progress=options.progress,
        )
    except OlqFxError:
        raise
    except Exception as error:
        raise ModelError(f"cannot run {model!r}: {paragraph(error)}") from error
    found = dataclasses.replace(found, notes=(*([given.note] if given.note else ()), *found.notes))
    if options.plot is not None:
        found.plot(options.plot, options.metric)
    return Answer(found.to_dict(), str(found), BOUND if found.failures else DONE)


def _example(call: Any) -> Any:
    return (call,) if isinstance(call, torch.Tensor) else call
