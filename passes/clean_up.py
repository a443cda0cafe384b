"""Drops what nothing reads any more: views and inputs of weights that were replaced, and nodes that passes left over.

    %weight = placeholder;  %t = %weight.t()                  # read by a product that is gone
->
    (nothing)

Nodes of the user's own graph stay, read or not: they may write, or draw random numbers.
"""

import dataclasses
from typing import ClassVar

from torch.fx import GraphModule, Node

from olq_fx.passes.base import Context, PassResult
from olq_fx.passes.fxtools import MADE, placeholders, written


@dataclasses.dataclass(frozen=True, slots=True)
class CleanUp:
    """Erases unread views of the planned weights, their inputs, and unread nodes of our own."""

    context: Context
    name: ClassVar[str] = "clean_up"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Erase from the end to the beginning, so that what only unread nodes read goes too."""
        inputs = placeholders(gm)
        planned = [one.placeholder for one in self.context.weights]
        planned += [one.placeholder for one in self.context.experts]
        ours = {inputs[name] for name in planned if name in inputs}
        for node in gm.graph.nodes:
            from_weights = bool(node.all_input_nodes) and all(source in ours for source in node.all_input_nodes)
            if node.op.startswith("call_") and not written(node) and (node.meta.get(MADE) or from_weights):
                ours.add(node)
        unread: list[Node] = [node for node in reversed(gm.graph.nodes) if node in ours]
        erased = 0
        for node in unread:
            if not node.users:
                gm.graph.erase_node(node)
                erased += 1
        return PassResult(erased)
