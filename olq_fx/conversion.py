"""Executing a plan: every refusal first, then weight by weight, each original freed before the next is read.

    preflight(model, rows, allow_nonfinite=False)      raises ConversionError; changes nothing
    execute(model, plan, report, device=None, progress=False)   converts what the plan says, marks the report
    convert_row(model, row, device=None)               one weight, in every module that holds it
    override_row(model, row)                           other activations for a weight that is converted
    dequantize_(model)                                 original precision back

A weight on meta (or fake) becomes pending. Peak memory above what was there: the converted form of one weight and
bounded temporaries.
"""

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx import panels, sharded, state, torch_distributed, torch_private
from olq_fx.errors import ConversionError, InterruptedConversionError
from olq_fx.formats import Format, get_format
from olq_fx.plan import Plan, PlanRow
from olq_fx.report import Report
from olq_fx.weights import FLOATING, Pending, QuantizedWeight, WeightSpec, pending_weight, quantize_weight
from olq_fx.weights_encoding import count_nonfinite
from olq_fx.weights_views import rows as rows_of_weight

_WHOLE_BLOCKS = 128

_ONE_AT_A_TIME = threading.RLock()
"""Two threads that convert one model convert each weight once."""


def weight_spec(row: PlanRow) -> WeightSpec:
    """How the weight of a planned row is stored and used."""
    assert row.slot is not None
    return WeightSpec(
        weight=row.slot.weight,
        activation=row.slot.activation or "",
        weight_rule=row.weight_rule,
        activation_rule=row.activation_rule,
        transposed=row.transposed,
        kernel=row.requested_kernel,
        **shards_of(get_format(row.slot.weight), row.shape[-2], row.shards, row.interleaved),
    )


def shards_of(format: Format, n: int, shards: int, interleaved: bool) -> dict[str, Any]:
    """The shards of a weight with N rows, where they matter: rows that are quantized each for itself know none."""
    heights = [extent[0] for extent in (format.group, format.coarse) if extent is not None]
    alone = all(height is not None and n // shards % height == 0 for height in heights)
    if shards == 1 or (alone and not interleaved):
        return {}
    return {"shards": shards, "interleaved": interleaved}


def preflight(model: nn.Module, rows: Iterable[PlanRow], *, allow_nonfinite: bool = False) -> None:
    """Read every weight that is to be converted, keep nothing, change nothing.

    Args:
        model: what the paths of the rows are relative to.
        rows: of a plan; only those with the decision "quantize" are looked at.
        allow_nonfinite: do not look for NaN and Inf, also where the row does not allow them.

    Raises:
        ConversionError: one or more weights cannot be converted; the message names each with its reason.
    """
    planned = [row for row in rows if row.decision == "quantize"]
    shared = _sharing(model, planned)
    problems = []
    for row in planned:
        reason = _obstacle(model, row) or shared.get(row.path, "")
        if not reason and not (allow_nonfinite or row.allow_nonfinite):
            reason = _nonfinite(_parameter(model, row.path))
        if reason:
            problems.append(f"{row.path}: {reason}")
    if problems:
        raise ConversionError("; ".join(problems) + ". Nothing was converted")


def execute(
    model: nn.Module,
    plan: Plan,
    report: Report,
    *,
    device: torch.device | None = None,
    progress: bool = False,
) -> None:
    """Convert what a plan says, weight by weight.

    Args:
        model: what the plan was made for.
        plan: already preflighted.
        report: gets the status of every row.
        device: where converted weights go, and then the rest of the model.
        progress: show a bar.

    Raises:
        InterruptedConversionError: an error on the way. Every weight is either original or converted; calling again
            goes on from there. Exceptions that stop a program (KeyboardInterrupt) are raised as they are, with a note.
    """
    planned = [row for row in plan.rows if row.decision == "quantize"]
    done: list[str] = []
    try:
        for row in _shown(planned) if progress else planned:
            weight = convert_row(model, row, device=device)
            report.mark(row.path, "pending" if weight.pending is not None else "converted")
            done.append(row.path)
            del weight
        for row in plan.rows:
            if row.decision == "override":
                override_row(model, row)
                report.mark(row.path, "overridden")
        if device is not None:
            _move_rest(model, device)
        state.leave_out_of_ddp(model)
    except BaseException as error:
        text = _how_far(done, [row.path for row in planned[len(done) :]])
        if isinstance(error, Exception):
            raise InterruptedConversionError(f"{type(error).__name__}: {error}. {text}") from error
        note(error, text)
        raise


def convert_row(model: nn.Module, row: PlanRow, *, device: torch.device | None = None) -> QuantizedWeight:
    """Convert one weight, once, in every module that holds it; the original is not referred to any more.

    Args:
        model: what the row's paths are relative to.
        row: with the decision "quantize".
        device: where the converted weight goes; by default where the original is.

    Returns:
        The parameter that now stands there; if another thread has converted it meanwhile, that one's.
    """
    with _ONE_AT_A_TIME:
        original = _parameter(model, row.path)
        known = sharded.weight_of(original)
        if known is not None:
            return known
        # Out of inference mode, or the parts could not be refreshed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            parameter = _converted(original, row, device)
        del original
        sites = {(id(module), leaf): (module, leaf) for module, leaf in map(_site(model), row.names)}
        _install(list(sites.values()), parameter)
    weight = sharded.weight_of(parameter)
    assert weight is not None
    return weight


def override_row(model: nn.Module, row: PlanRow) -> None:
    """Give a converted weight, which stays what and where it is, the activations of a row.

    Raises:
        ConversionError: it is not converted any more.
    """
    weight = sharded.weight_of(_parameter(model, row.path))
    if weight is None or row.slot is None:
        raise ConversionError(f"{row.path}: it is not quantized any more, so that its activations cannot be changed")
    weight.spec = dataclasses.replace(
        weight.spec,
        activation=row.slot.activation or "",
        activation_rule=row.activation_rule,
        kernel=row.requested_kernel,
    )


def dequantize_(model: nn.Module) -> None:
    """Give every converted weight its original precision back, in place, weight by weight.

    Values are the dequantized ones; what was trainable before is again. A pending weight becomes an ordinary one
    without data.
    """
    for owners in _holders(model):
        with torch.inference_mode(False), torch.no_grad():
            plain = _dequantized(*owners[0])
        for module, leaf in owners:
            module._parameters[leaf] = plain
            if not state.converted_weights(module):
                state.detach(module)
    state.leave_out_of_ddp(model)


def converted_weights_of(model: nn.Module) -> dict[str, QuantizedWeight]:
    """The converted and pending weights of a model, each once, by the first of its paths."""
    found: dict[int, tuple[str, QuantizedWeight]] = {}
    for path, module in model.named_modules():
        for leaf, weight in state.converted_weights(module).items():
            found.setdefault(id(weight), (f"{path}.{leaf}" if path else leaf, weight))
    return dict(found.values())


def _holders(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For each converted weight, the modules that hold it and its name there."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, weight in state.converted_weights(module).items():
            found.setdefault(id(weight), []).append((module, leaf))
    return list(found.values())


def _dequantized(module: nn.Module, leaf: str) -> nn.Parameter:
    weight = state.converted_weights(module)[leaf]
    placement = torch_distributed.placement_of(module._parameters[leaf])
    values: Any = _values(weight)
    plain = values if placement is None else torch_distributed.distributed(values, placement)
    return nn.Parameter(plain, requires_grad=weight.was_trainable)


def _converted(original: Tensor, row: PlanRow, device: torch.device | None) -> nn.Parameter:
    spec = weight_spec(row)
    if torch_distributed.is_distributed(original):
        return nn.Parameter(sharded.converted_piece(original, spec, row.path), requires_grad=False)
    if _without_data(original):
        pending = Pending(row.path, original.device if device is None else device)
        weight = pending_weight(original, spec, pending)
    else:
        weight = quantize_weight(original, spec, device)
    parameter = nn.Parameter(weight, requires_grad=False)
    assert isinstance(parameter, QuantizedWeight)
    parameter.path, parameter.was_trainable = row.path, original.requires_grad
    return parameter


def _install(sites: Sequence[tuple[nn.Module, str]], parameter: Any) -> None:
    """Put a parameter in all its places; an interruption on the way is answered by finishing first."""
    try:
        _put(sites, parameter)
    except BaseException:
        _put(sites, parameter)
        raise


def _put(sites: Sequence[tuple[nn.Module, str]], parameter: Any) -> None:
    for module, leaf in sites:
        state.attach(module)
        module._parameters[leaf] = parameter


def _values(weight: QuantizedWeight) -> Tensor:
    """The dequantized values with the nominal shape and strides, decoded expert by expert or panel by panel."""
    values = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
    if weight.pending is not None:
        return values
    if weight.dim() == 3:
        for index in range(weight.shape[0]):
            one: Any = weight.select(0, index)
            values[index].copy_(one.dequantize())
        return values
    axis = 1 if weight.spec.transposed else 0
    step = max(_WHOLE_BLOCKS, panels.PANEL_ELEMENTS // max(1, weight.reduction_size) // _WHOLE_BLOCKS * _WHOLE_BLOCKS)
    for start in range(0, weight.shape[axis], step):
        stop = min(start + step, weight.shape[axis])
        values.narrow(axis, start, stop - start).copy_(rows_of_weight(weight, start, stop).dequantize())
    return values


def _site(model: nn.Module) -> Any:
    def find(path: str) -> tuple[nn.Module, str]:
        module_path, _, leaf = path.rpartition(".")
        return model.get_submodule(module_path), leaf

    return find


def _parameter(model: nn.Module, path: str) -> Tensor:
    module, leaf = _site(model)(path)
    parameter: Tensor | None = module._parameters.get(leaf)
    if parameter is None:
        raise ConversionError(f"{path}: the model has no such parameter any more")
    return parameter


def _without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or torch_private.is_fake(tensor)


def _obstacle(model: nn.Module, row: PlanRow) -> str:
    """Why a weight cannot be converted, whatever its values; "" if nothing speaks against it."""
    module, leaf = _site(model)(row.path)
    tensor = module._parameters.get(leaf)
    if tensor is None:
        return "it is no parameter of the model (computed by a parametrization?)"
    if sharded.weight_of(tensor) is not None:
        return ""
    if not tensor.is_leaf:
        return "it is computed from other tensors (no leaf), so that converting it would cut it off from them"
    return _made_of_others(model, row, tensor) or _unfit(row, tensor)


def _made_of_others(model: nn.Module, row: PlanRow, tensor: Tensor) -> str:
    """Why a tensor around other tensors cannot be converted: a piece of a distributed one can."""
    if torch_distributed.is_distributed(tensor):
        if any(map(torch_distributed.managed_by_fsdp, _around(model, row.path))):
            return "fully_shard has cut it and keeps its own references to it: call quantize_ before fully_shard"
        return sharded.obstacle(tensor, weight_spec(row))
    if torch_private.is_traceable_wrapper_subclass(tensor) and not torch_private.is_fake(tensor):
        return f"it is a {type(tensor).__name__}, whose parts this version cannot convert"
    return ""


def _unfit(row: PlanRow, tensor: Tensor) -> str:
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.dtype not in FLOATING:
        return f"its dtype {tensor.dtype} cannot be quantized; valid: {', '.join(map(str, FLOATING))}"
    *experts, n, k = row.shape
    expected = (*experts, k, n) if row.transposed else row.shape
    if tuple(tensor.shape) != expected:
        return f"its shape is {tuple(tensor.shape)}, planned was {expected}"
    return ""


def _around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules that a parameter stands in, the model first."""
    yield model
    parts = path.split(".")[:-1]
    for end in range(1, len(parts) + 1):
        yield model.get_submodule(".".join(parts[:end]))


def _nonfinite(tensor: Tensor) -> str:
    if sharded.weight_of(tensor) is not None or _without_data(tensor):
        return ""
    distributed = torch_distributed.is_distributed(tensor)
    bad = sharded.nonfinite(tensor) if distributed else count_nonfinite(tensor.detach())
    return f"{bad} of {tensor.numel()} values are NaN or Inf (allow_nonfinite=True lets them through)" if bad else ""


def _sharing(model: nn.Module, planned: Sequence[PlanRow]) -> dict[str, str]:
    """Of planned weights whose memory overlaps other tensors' (not ties, which are one row): path -> reason."""
    row_of = {name: row.path for row in planned for name in row.names}
    areas = sorted(_areas(model))
    found: dict[str, str] = {}
    for i, (storage, _, end, name) in enumerate(areas):
        for other_storage, other_start, _, other in areas[i + 1 :]:
            if other_storage != storage or other_start >= end:
                break
            if row_of.get(name) == row_of.get(other):
                continue
            for path, partner in ((name, other), (other, name)):
                if path in row_of:
                    reason = f"it shares memory with {partner}, which would not follow it; ignore it or untie the two"
                    found.setdefault(row_of[path], reason)
    return found


def _areas(model: nn.Module) -> Iterator[tuple[int, int, int, str]]:
    """(storage, first byte, end, path) of every parameter and buffer that has memory."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor) or _without_data(tensor) or torch_private.is_traceable_wrapper_subclass(tensor):
            continue
        if tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((int(length) - 1) * stride for length, stride in strides)
        yield tensor.untyped_storage().data_ptr(), int(start), int(start + extent * size), name


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move what this run has not converted (biases, norms, embeddings, buffers), except what has no data."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or _without_data(parameter):
                continue
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and not _without_data(buffer):
                module._buffers[name] = buffer.to(device)


def _shown(rows: Sequence[PlanRow]) -> Iterable[PlanRow]:
    from rich.progress import track

    return track(rows, description="quantizing")


def _how_far(done: Sequence[str], left: Sequence[str]) -> str:
    listed = ", ".join(done) or "none"
    return (
        f"Every weight is whole: {len(done)} converted ({listed}), {len(left)} in original precision "
        f"({', '.join(left) or 'none'}); call quantize_ again with the same configuration to go on"
    )


def note(error: BaseException, text: str) -> None:
    """`add_note`, also where Python (3.10) has none."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = (*error.args, text)
