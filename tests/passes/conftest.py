"""Graphs for the tests of the passes: captured by Dynamo, run before and after a pass on the same inputs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from olq_fx import numerics, torch_private
from olq_fx.formats import FORMATS
from olq_fx.passes import find_uses
from olq_fx.passes.base import Context, Pass, PlannedExperts, PlannedWeight
from olq_fx.passes.open_attention import OpenAttention
from olq_fx.passes.part_inputs import PART
from olq_fx.passes.pipeline import PassRecord, run_one
from olq_fx.weights import WeightSpec, quantize_weight


@dataclasses.dataclass
class Captured:
    """A graph and the inputs with which it was captured; weights are named by what held them."""

    gm: GraphModule
    inputs: dict[str, Any]
    owners: dict[str, find_uses.Owner]

    def context(self, weight: str, activation: str, *, gradients: bool = False, only: Sequence[str] = ()) -> Context:
        """Every linear weight (or those whose path is in `only`) in these formats."""
        scratch = torch_private.copy_graph(self.gm)
        OpenAttention()(scratch)
        rule = FORMATS[activation].activation_rule if activation else ""
        planned = tuple(
            PlannedWeight(
                placeholder=uses.weight.name,
                path=self.owners[uses.weight.name].names[0],
                weight=weight,
                activation=activation,
                activation_rule=rule,
                transposed=uses.linear[0].matrix.transposed,
            )
            for uses in find_uses.weight_uses(scratch)
            if uses.linear and (not only or self.owners[uses.weight.name].names[0] in only)
        )
        return Context(planned, gradients, () if only else self._experts(weight, activation))

    def _experts(self, weight: str, activation: str) -> tuple[PlannedExperts, ...]:
        """Every parameter of three dimensions, read as (E, N, K)."""
        rules = FORMATS[weight].weight_rule, FORMATS[activation].activation_rule if activation else ""
        spec = WeightSpec(weight=weight, activation=activation, weight_rule=rules[0], activation_rule=rules[1])
        return tuple(PlannedExperts(name, spec) for name in self.owners if self.inputs[name].dim() == 3)

    def apply(self, step: Pass) -> PassRecord:
        """Run a pass, verified by the runner."""
        record = run_one(self.gm, step)
        self.gm.recompile()
        return record

    def __call__(self, context: Context | None = None) -> Any:
        """Run the graph; parts of planned weights are quantized from the weights that were captured."""
        plans = {} if context is None else {weight.placeholder: weight for weight in context.weights}
        experts = {} if context is None else {one.placeholder: one.spec for one in context.experts}
        arguments = []
        for node in self.nodes("placeholder"):
            if PART in node.meta:
                name, part = node.meta[PART]
                weight = self.inputs[name].detach()
                parts = quantize_weight(weight, experts[name]).parts if name in experts else _parts(weight, plans[name])
                arguments.append(parts[part])
            else:
                arguments.append(self.inputs[node.name])
        with torch.no_grad():
            return self.gm(*arguments)

    def nodes(self, op: str) -> list[Node]:
        """The nodes of a kind."""
        return [node for node in self.gm.graph.nodes if node.op == op]

    def count(self, target: Any) -> int:
        """How often a function or method is called."""
        return sum(node.target == target for node in self.gm.graph.nodes if node.op.startswith("call_"))

    def weight(self, path: str) -> find_uses.WeightUses:
        """What the graph does with one weight."""
        (found,) = [u for u in find_uses.weight_uses(self.gm) if self.owners[u.weight.name].names[0] == path]
        return found


def _parts(weight: Tensor, planned: PlannedWeight) -> tuple[Tensor, ...]:
    matrix = weight.detach().t() if planned.transposed else weight.detach()
    format = FORMATS[planned.weight]
    return numerics.quantize(matrix, format, format.weight_rule)


Capture = Callable[..., Captured]


@pytest.fixture
def capture() -> Capture:
    """Capture the one graph of a call; a parameter's path is its name in the module, or in `weights`."""

    def run(
        function: Callable[..., Any], *args: Any, weights: dict[str, Tensor] | None = None, **options: Any
    ) -> Captured:
        found: list[Captured] = []
        named = dict(function.named_parameters()) if isinstance(function, nn.Module) else {}
        names = {id(tensor): name for name, tensor in (named | (weights or {})).items()}

        def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            copied = torch_private.copy_graph(gm)
            inputs = [node.name for node in copied.graph.nodes if node.op == "placeholder"]
            values = dict(zip(inputs, example_inputs, strict=True))
            owners = {
                name: find_uses.owner_of_parameter((names[id(value)],), value)
                for name, value in values.items()
                if id(value) in names
            }
            find_uses.annotate_owners(copied, owners)
            found.append(Captured(copied, values, owners))
            return gm.forward

        torch.compiler.reset()
        torch.compile(function, backend=backend, fullgraph=True, **options)(*args)
        (captured,) = found
        return captured

    return run
