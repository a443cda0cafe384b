"""`compare`: a model against what a configuration makes of it, on the same inputs and random numbers."""

import copy
import dataclasses
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from olq_fx.comparison_bounds import LOGITS, WHOLE, parse_bounds
from olq_fx.comparison_cost import latency_ms, peak_bytes
from olq_fx.comparison_ignore import suggest
from olq_fx.comparison_measure import Measured, Setup, measure
from olq_fx.comparison_result import Comparison, LayerComparison, Pair
from olq_fx.comparison_runs import Loop, calls_of, random_states, run_once
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ComparisonError, ConfigurationError, ConfigurationTypeError, OlqFxWarning, PlanError
from olq_fx.plan import Plan, PlanRow, plan_for
from olq_fx.progress import Bar, progress_bar
from olq_fx.quantize import quantize_


def compare(
    model: nn.Module,
    config: object,
    inputs: object,
    *,
    loop: Loop | None = None,
    seed: int = 0,
    layers: bool = True,
    logits: Collection[str] = ("logits",),
    perplexity: str | None = None,
    bounds: Mapping[str, float] | str | None = None,
    suggest_ignore: bool = False,
    repeat: int = 3,
    compiled: bool = False,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    strict: bool = True,
    progress: bool = False,
) -> Comparison:
    """Compare a model with what a configuration makes of it.

    Both run in turn, step by step, on copies of the same inputs, with the same random numbers. The model is not
    changed: both are copies of its modules and buffers that share its parameters, but for the converted ones. So memory
    holds the model, its converted weights, and the outputs of the quantized layers for one step.

    Args:
        model: the reference.
        config: in any form that `quantize_` takes.
        inputs: one call (a tensor, a tuple of positional arguments, a dictionary of named ones), or a list of calls.
        loop: `loop(model, call)` yields what each step of a trajectory made, as the sampler of a diffusion model does;
            without it the model is called.
        seed: of the random numbers of the first call; the next calls take the numbers after it.
        layers: compare the outputs of every quantized layer too.
        logits: names of outputs that are logits, with classes as the last axis.
        perplexity: the named input whose (B, T) tokens the logits predict, shifted by one (`input_ids`).
        bounds: how low or high metrics may be: `{"psnr_db": 20}` or "psnr_db=20,kl=0.01". Each holds for every
            output of every step.
        suggest_ignore: where bounds do not hold, search the layers to leave alone for them to hold. That takes a few
            runs of all inputs for each layer.
        repeat: how often one call is timed; 0 to measure neither time nor memory.
        compiled: measure the time of both through `torch.compile`.
        example_inputs: as of `quantize_`, for weights that are used by functions.
        strict: as of `quantize_`.
        progress: show a bar.

    Returns:
        What was found. Bounds that do not hold are no error: see its `failures`.

    Raises:
        ConfigurationError, PlanError, ConversionError: as of `quantize_`; also for bounds that have no meaning here.
        ComparisonError: the outputs cannot be compared.
    """
    limits = parse_bounds(bounds)
    calls = calls_of(inputs)
    _check(model, limits, suggest_ignore, repeat)
    original = _original(model)

    def quantized(wanted: object) -> tuple[nn.Module, Plan]:
        candidate = _copy_of(original)
        return candidate, quantize_(candidate, wanted, example_inputs=example_inputs, strict=strict).plan

    with progress_bar(progress) as bar:
        bar.start("quantize", None)
        candidate, plan = quantized(config)
        names = frozenset(logits)
        setup = Setup(_copy_of(original), candidate, tuple(calls), loop, seed, names, perplexity)
        watched = _watched(candidate, plan) if layers else {}
        bar.start("compare", len(calls))
        measured = measure(setup, tuple(watched), bar.advance)
        _check_logits(limits, measured)
        costs = _costs(setup, repeat, compiled, bar)
        result = _comparison(plan.config, setup, measured, watched, limits, costs)
        if not suggest_ignore:
            return result
        bar.start("search an ignore list", None)
        found = suggest(
            setup,
            plan,
            limits,
            lambda wanted: quantized(wanted)[0],
            # What a traced call shows is not looked at again: there every list is tried.
            lambda wanted: example_inputs is not None or _fits(wanted, original, strict),
            bar.advance,
        )
        return dataclasses.replace(result, suggestion=found)


def _comparison(
    config: QuantizationConfig,
    setup: Setup,
    measured: Measured,
    watched: Mapping[str, list[PlanRow]],
    bounds: Mapping[str, float],
    costs: tuple[Pair, Pair] | None,
) -> Comparison:
    layers = tuple(_layer(path, rows, *measured.layers[path]) for path, rows in watched.items())
    silent = [layer.path for layer in layers if not layer.calls]
    if layers and len(silent) == len(layers):
        raise ComparisonError(
            "no quantized layer was called, so nothing was compared: does the model's `forward`, or the loop, refer to "
            f"modules of its own instead of those that it is given? ({', '.join(silent[:3])})"
        )
    notes = [f"never called as modules, so not compared: {', '.join(silent[:5])}"] if silent else []
    latency, memory = costs or (None, None)
    return Comparison(
        config=config,
        seed=setup.seed,
        outputs=measured.outputs,
        steps=measured.steps,
        layers=layers,
        perplexity=measured.perplexity,
        latency_ms=latency,
        peak_memory_bytes=memory,
        bounds=bounds,
        notes=(*measured.notes, *notes),
    )


def _layer(path: str, rows: Sequence[PlanRow], calls: int, metrics: Any) -> LayerComparison:
    return LayerComparison(
        path=path,
        formats=", ".join(dict.fromkeys(row.formats for row in rows)),
        bytes_before=sum(row.bytes_before for row in rows),
        bytes_after=sum(row.bytes_after for row in rows),
        calls=calls,
        metrics=metrics,
    )


def _fits(config: QuantizationConfig, model: nn.Module, strict: bool) -> bool:
    """Whether a configuration has a plan for the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OlqFxWarning)
        try:
            plan_for(config, model, strict=strict)
        except PlanError:
            return False
    return True


def _check(model: object, bounds: Mapping[str, float], suggest_ignore: bool, repeat: int) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationTypeError(f"compare takes a torch.nn.Module, not {type(model).__name__}")
    if repeat < 0:
        raise ConfigurationError(f"repeat is 0 or more, not {repeat}")
    if not repeat and any(metric in bounds for metric in WHOLE[2:]):
        raise ConfigurationError("a bound on latency_ratio or memory_ratio needs repeat to be at least 1")
    if suggest_ignore and not bounds:
        raise ConfigurationError("to suggest an ignore list, give the bounds that it is to meet")


def _check_logits(bounds: Mapping[str, float], measured: Measured) -> None:
    """A bound that no number can break is an error."""
    missing = [metric for metric in LOGITS if metric in bounds]
    if missing and all(metrics.kl is None for metrics in measured.outputs.values()):
        raise ConfigurationError(
            f"a bound on {missing[0]} needs an output that is logits; the outputs are {', '.join(measured.outputs)} "
            "(name it with `logits`)"
        )
    if measured.perplexity is None and any(metric in bounds for metric in WHOLE[:2]):
        raise ConfigurationError("a bound on the perplexity needs a text")


def _original(model: nn.Module) -> nn.Module:
    """What torch.compile has wrapped, or the model itself."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy of all modules and buffers that shares the parameters."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise ComparisonError(f"the model cannot be copied ({type(error).__name__}: {error})") from error


def _watched(candidate: nn.Module, plan: Plan) -> dict[str, list[PlanRow]]:
    """The modules whose outputs tell of quantized weights, each with its rows; the root is an output already."""
    found: dict[str, list[PlanRow]] = {}
    for row in plan.quantized:
        path = row.module_path
        around = path.rpartition(".")[0]
        # nn.MultiheadAttention does not call its output projection, it reads its weight.
        if around and isinstance(candidate.get_submodule(around), nn.MultiheadAttention):
            path = around
        if path:
            found.setdefault(path, []).append(row)
    return found


def _costs(setup: Setup, repeat: int, compiled: bool, bar: Bar) -> tuple[Pair, Pair] | None:
    """Time and peak memory of one call of both."""
    if not repeat:
        return None
    first = next(setup.reference.parameters(), torch.empty(0))
    call = setup.calls[0]
    times, peaks = [], []
    bar.start("measure time and memory", 2)
    with random_states(), torch.no_grad():
        for model in (setup.reference, setup.candidate):
            run: Any = torch.compile(model) if compiled else model
            times.append(latency_ms(lambda run=run: run_once(run, call, setup.loop), first.device, repeat))  # type: ignore[misc]
            peaks.append(peak_bytes(model, lambda model=model: run_once(model, call, setup.loop), first.device))  # type: ignore[misc]
            bar.advance()
    return Pair(*times), Pair(*peaks)
