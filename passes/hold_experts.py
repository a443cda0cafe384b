"""Puts the converted weights of experts together again within the graph, so that they do what they do in eager mode.

    %weight : "bf16[E, N, K]" = placeholder
    %y = torch.nn.functional.grouped_mm(%x, %weight.mT, offs=%offs)
->
    %weight_codes : "f8e4m3[E, N, K]", %weight_scale : "f32[E, N, 1]" = placeholders
    %held = held_experts((%weight_codes, %weight_scale), ...)
    %y = torch.nn.functional.grouped_mm(%x, %held.mT, offs=%offs)

Experts are used in many ways (loops, products of all or of chosen ones), which `olq_fx.weights` knows. AOTAutograd
traces the graph and finds the operators behind them; nothing of the tensor around the parts is left in what it makes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from olq_fx.kernels.experts import part_specs_of_stack
from olq_fx.passes.base import Context, PassResult, PlannedExperts
from olq_fx.passes.fxtools import MADE, VALUE, placeholders, tensor_of
from olq_fx.passes.part_inputs import part_inputs
from olq_fx.weights import QuantizedStack, WeightSpec


def held_experts(
    parts: Sequence[Tensor], dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], **spec: Any
) -> QuantizedStack:
    """The converted weight of these parts; `spec` are the fields of its `WeightSpec`."""
    return QuantizedStack(list(parts), WeightSpec(**spec), dtype, size, stride)


@dataclasses.dataclass(frozen=True, slots=True)
class HoldExperts:
    """Replaces the inputs of planned weights of experts by their parts, put together."""

    context: Context
    name: ClassVar[str] = "hold_experts"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Replace each input that is still read as it came in."""
        inputs = placeholders(gm)
        planned = [one for one in self.context.experts if one.placeholder in inputs]
        replaced = [one for one in planned if inputs[one.placeholder].users]
        for one in replaced:
            _hold(inputs[one.placeholder], one)
        return PassResult(len(replaced))


def _hold(weight: Node, planned: PlannedExperts) -> None:
    tensor = tensor_of(weight)
    assert tensor is not None
    spec = planned.spec
    first, second = tensor.shape[1:]
    n, k = (second, first) if spec.transposed else (first, second)
    users = list(weight.users)
    parts = part_inputs(
        weight, part_specs_of_stack(spec.format, int(tensor.shape[0]), int(n) // spec.shards, int(k), spec.shards)
    )
    last = next(node for node in reversed(weight.graph.nodes) if node.op == "placeholder")
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    size, stride = [int(extent) for extent in tensor.shape], [int(extent) for extent in tensor.stride()]
    with weight.graph.inserting_after(last):
        held = weight.graph.call_function(held_experts, (tuple(parts), tensor.dtype, size, stride), fields)
    inherited: dict[str, Any] = {
        key: users[0].meta[key] for key in ("stack_trace", "nn_module_stack") if key in users[0].meta
    }
    held.meta = {**inherited, VALUE: tensor, MADE: True}
    for user in users:
        user.replace_input_with(weight, held)
