"""`quantize_`: convert the weights of a model in place, `finalize`, which asks whether all have their data, and
`dequantize_`, which undoes it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from olq_fx import conversion
from olq_fx.candidates import Candidate, candidates_of, combine
from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_values import INHERIT
from olq_fx.conversion import dequantize_ as _dequantize
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, PendingWeightError, shown
from olq_fx.foreign_torchao import take_over
from olq_fx.plan import plan_for
from olq_fx.report import Report
from olq_fx.weights import QuantizedWeight, missing, settle


def quantize_(
    model: nn.Module,
    config: object = INHERIT,
    device: torch.device | str | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    strict: bool = True,
    progress: bool = False,
    **keys: object,
) -> Report:
    """Quantize the linear weights of `model` in place; `torch.compile(model)` works before and after.

    Weights that torchao has quantized in a format of ours are taken over with the codes and scales that they have.
    Every planned weight is read once before anything is changed. Then each is converted and its original freed before
    the next is read: memory never exceeds what was there plus one converted weight and 64 MiB. A weight on meta is
    converted when its data are loaded.

    Args:
        model: any module, also one that torch.compile has returned.
        config: a scheme name, dictionary, JSON text, path of a file, or QuantizationConfig; None leaves all alone. It
            may be left out where keys are given.
        device: where the model goes; each weight is converted there.
        example_inputs: arguments of one call (a tuple or list of positional ones, a dictionary of named ones). With
            them the model is traced on fake tensors, and weights that are used by functions are found too.
        strict: whether a pattern that matches nothing is an error, or a warning.
        progress: show a progress bar.
        **keys: further keys of the configuration.

    Returns:
        What was done with every weight.

    Raises:
        ConfigurationError, PlanError: what was asked for has no meaning, or none for this model.
        ConversionError: a weight cannot be converted (NaN, dtype, shared memory); nothing was changed.
        InterruptedConversionError: an error on the way; it lists what is converted. Calling again goes on.
    """
    parsed = QuantizationConfig.parse(config, **keys)
    if not isinstance(model, nn.Module):
        raise ConfigurationTypeError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    root = _original_module(model)
    target = _target(device)
    taken = take_over(root)
    try:
        candidates = None if example_inputs is None else _traced(root, example_inputs)
        plan = plan_for(parsed, root, strict=strict, candidates=candidates, device=target)
        report = Report(plan)
        conversion.preflight(root, plan.rows)
    except BaseException:
        taken.undo()
        raise
    del taken
    conversion.execute(root, plan, report, device=target, progress=progress)
    return report


def dequantize_(model: nn.Module) -> None:
    """Give every converted weight of `model` its original precision back, in place.

    The values are the dequantized ones; what was trainable before is trainable again.

    Raises:
        ConfigurationTypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationTypeError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    _dequantize(_original_module(model))


def finalize(model: nn.Module) -> None:
    """Say that loading is over: every planned weight must have its data by now.

    Raises:
        PendingWeightError: some have not; all are listed, each with how many of its values are missing. They stay as
            they are: what is missing may be loaded later.
        ConfigurationTypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationTypeError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    waiting = conversion.converted_weights_of(_original_module(model))
    for weight in waiting.values():
        settle(weight)
    listed = [f"{path} ({_missing(weight)})" for path, weight in waiting.items() if weight.pending is not None]
    if listed:
        raise PendingWeightError(
            f"{len(listed)} of {len(waiting)} planned weights have no data yet: {', '.join(listed)}; load them with "
            "load_, load_state_dict or copy_"
        )


def _missing(weight: QuantizedWeight) -> str:
    count = missing(weight)
    return "all" if count == weight.numel() else f"{count} of {weight.numel()} values"


def _original_module(model: nn.Module) -> nn.Module:
    """What torch.compile has wrapped, or the model itself: paths are the same before and after."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model


def _target(device: torch.device | str | None) -> torch.device | None:
    """The device that weights go to, once a tensor has been there: before anything is changed.

    Raises:
        ConfigurationError: there is none of that name here, or it keeps no data.
    """
    if device is None:
        return None
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"device: nothing can be put on {shown(device)}: {reason}") from error
    if target.type == "meta":
        raise ConfigurationError("device: what is put on 'meta' loses its data; plan_for plans a model without any")
    return target


def _traced(model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[Candidate, ...]:
    """The candidates of the module tree with what a traced call shows."""
    from olq_fx.passes.capture import linear_uses

    if isinstance(example_inputs, Mapping):
        found = linear_uses(model, (), example_inputs)
    else:
        one = isinstance(example_inputs, torch.Tensor)
        found = linear_uses(model, (example_inputs,) if one else tuple(example_inputs))
    return combine(candidates_of(model), found, whole=True)
