"""Replaces canonical linear layers by the quantized operators, and their weights by plain tensors: codes and scales.

    %weight : "bf16[N, K]" = placeholder
    %y : "bf16[M, N]" = canonical.linear(%x, %weight, %bias)
->
    %weight_codes : "f8e4m3[N, K]", %weight_scale : "f32[N, 1]" = placeholders
    %q = olq_fx.quantize(%x, "fp8_per_token", "amax"); %codes = %q[0]; %scale = %q[1]
    %y : "bf16[M, N]" = olq_fx.quantized_linear([%codes, %scale], ..., [%weight_codes, %weight_scale], ..., %bias, None)

Where gradients flow, and where activations keep their precision, it is one operator instead: `olq_fx.linear`.
"""

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional

from olq_fx.formats import Format, get_format
from olq_fx.numerics import part_specs
from olq_fx.passes import canonical
from olq_fx.passes.base import Context, PassResult, PlannedWeight
from olq_fx.passes.fxtools import Emitter, replace, tensor_of
from olq_fx.passes.part_inputs import part_inputs


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """Puts the quantized operators in."""

    context: Context
    name: ClassVar[str] = "swap"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Swap every canonical linear layer of a planned weight."""
        parts: dict[Node, list[Node]] = {}
        nodes = gm.graph.find_nodes(op="call_function", target=canonical.linear)
        for node in nodes:
            weight = node.args[1]
            assert isinstance(weight, Node)
            planned = self.context.find(weight.name)
            assert planned is not None, f"{weight.name} is in no plan"
            if weight not in parts:
                specs = part_specs(get_format(planned.weight), *_extents(weight, planned))
                parts[weight] = part_inputs(weight, specs)
            self._swap(node, planned, parts[weight])
        return PassResult(len(nodes))

    def _swap(self, node: Node, planned: PlannedWeight, parts: list[Node]) -> None:
        emit = Emitter(node)
        x, weight, bias = node.args
        rows, k = _extents(weight, planned)
        start, stop = node.kwargs["start"], node.kwargs["stop"]
        assert isinstance(start, int)
        assert isinstance(stop, int)
        skip = 0
        if (start, stop) != (0, rows):
            format = get_format(planned.weight)
            skip = start % (format.group[0] or 1)
            parts = _rows(emit, parts, format, start - skip, stop)
            if skip and bias is not None:
                bias = emit.call(functional.pad, bias, (skip, 0))
        y = self._product(emit, planned, x, k, parts, bias)
        if skip:
            y = emit.call(operator.getitem, y, (slice(None), slice(skip, None)))
            y = emit.method("contiguous", y)
        replace(node, y)

    def _product(self, emit: Emitter, planned: PlannedWeight, x: Any, k: int, parts: list[Node], bias: Any) -> Node:
        ops = torch.ops.olq_fx
        asked = {"kernel": planned.kernel} if planned.kernel else {}
        if self.context.gradients or not planned.activation:
            formats = (planned.weight, planned.activation, planned.activation_rule)
            return emit.call(ops.linear.default, x, parts, *formats, bias, None, **asked)
        tensor = tensor_of(x)
        assert tensor is not None
        quantized = emit.call(ops.quantize.default, x, planned.activation, planned.activation_rule)
        count = get_format(planned.activation).levels + 1
        pieces = [emit.call(operator.getitem, quantized, index) for index in range(count)]
        sides = (pieces, planned.activation, parts, planned.weight)
        return emit.call(ops.quantized_linear.default, *sides, k, tensor.dtype, bias, None, **asked)


def _extents(weight: Any, planned: PlannedWeight) -> tuple[int, int]:
    """(N, K) of a weight."""
    tensor = tensor_of(weight)
    assert tensor is not None
    first, second = tensor.shape
    return (second, first) if planned.transposed else (first, second)


def _rows(emit: Emitter, parts: list[Node], format: Format, start: int, stop: int) -> list[Node]:
    """The parts of rows `start` to `stop`, where `start` begins a group."""
    heights = (1, format.group[0], format.coarse[0] if format.coarse else None)
    return [
        part if height is None else emit.call(operator.getitem, part, slice(start // height, -(-stop // height)))
        for part, height in zip(parts, heights, strict=False)
    ]
