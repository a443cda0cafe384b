"""`olq-fx plan`: what a configuration will do with a model, without its weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from olq_fx.candidates import Candidate, candidates_of, combine
from olq_fx.cli_answers import Answer
from olq_fx.cli_models import call_named, source_of
from olq_fx.comparison_runs import calls_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.passes.capture import linear_uses
from olq_fx.plan import plan_for
from olq_fx.plan_diff import diff_plans


def plan(
    model: str,
    config: QuantizationConfig,
    *,
    strict: bool,
    inputs: str | None,
    device: str,
    dtype: torch.dtype | None,
    meta: bool,
    against: QuantizationConfig | None = None,
) -> Answer:
    """The plan of a model.

    Args:
        model: a folder or `module:callable`.
        config: what is asked for.
        strict: whether a pattern that matches nothing is an error.
        inputs: `module:callable` of the arguments of a call, to find weights that are used by functions; or None.
        device: the kind of device whose kernels the plan predicts; it need not be there.
        dtype: of the model; None for its own.
        meta: build it without memory.
        against: another configuration, to show only what the plan has otherwise than its; or None.
    """
    source = source_of(model)
    built = source.on_meta(dtype) if meta else source.load(dtype, None)
    candidates = candidates_of(built) if inputs is None else _traced(built, call_named(inputs, "--inputs"), meta)
    placed = [dataclasses.replace(candidate, device=torch.device(device)) for candidate in candidates]
    found = plan_for(config, built, strict=strict, candidates=placed)
    if against is not None:
        difference = diff_plans(plan_for(against, built, strict=strict, candidates=placed), found)
        return Answer(difference.to_dict(), str(difference))
    return Answer(found.to_dict(), str(found))


def _traced(model: nn.Module, inputs: object, meta: bool) -> tuple[Candidate, ...]:
    """The candidates of the module tree with what the first call shows when it is traced."""
    call: Any = calls_of(inputs)[0]
    if meta:
        call = map_aggregate(call, lambda value: value.to("meta") if isinstance(value, Tensor) else value)
    if isinstance(call, Mapping):
        used = linear_uses(model, (), call)
    else:
        used = linear_uses(model, (call,) if isinstance(call, Tensor) else call)
    return combine(candidates_of(model), used, whole=True)
