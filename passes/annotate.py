"""Says on every linear layer whose weight it uses and which module calls it.

    %z = canonical.linear(%flat, %l_self_modules_a_parameters_weight_, None)
    meta["olq_fx"] = Label(path="a.weight", caller="b")

The owner and the caller differ where weights are tied: the input tells the one, `nn_module_stack` the other. Later
passes hand the label on to what they make of the node, so that dumps and refusals can name a layer.
"""

import dataclasses
from typing import ClassVar

from torch.fx import GraphModule, Node

from olq_fx.passes import canonical
from olq_fx.passes.base import Context, PassResult
from olq_fx.passes.fxtools import caller

LABEL = "olq_fx"


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """Which layer a node belongs to: the path of its weight, and of the module that calls it ("" if unknown)."""

    path: str
    caller: str


@dataclasses.dataclass(frozen=True, slots=True)
class Annotate:
    """Labels the canonical linear layers of the planned weights."""

    context: Context
    name: ClassVar[str] = "annotate"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Label what has no label yet."""
        labelled = 0
        for node in gm.graph.find_nodes(op="call_function", target=canonical.linear):
            weight = node.args[1]
            planned = self.context.find(weight.name) if isinstance(weight, Node) else None
            if planned is not None and LABEL not in node.meta:
                node.meta[LABEL] = Label(planned.path, caller(node))
                labelled += 1
        return PassResult(labelled)


def label_of(node: Node) -> str:
    """The layer of a node for messages: the path of its weight, or the node's name."""
    label = node.meta.get(LABEL)
    return label.path if isinstance(label, Label) else node.name
