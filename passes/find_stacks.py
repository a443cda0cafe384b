"""What a graph does with stacks of experts' matrices: which products use them, and what else does.

    %t = %w.transpose(-2, -1)                    %w stored (E, N, K)
    %y = torch._grouped_mm(%x, %t, offs=%o)      a product, not transposed
    %s = %w.sum()                                another use, with its reason

    uses_of_stacks(inputs, transformed) -> list[StackUses]

A tensor of three dimensions that no product uses so (a table of positions) is no stack.
"""

import dataclasses
from collections.abc import Container, Iterable

from torch.fx import Node

from olq_fx.passes.base import Reject
from olq_fx.passes.fxtools import caller, target_name
from olq_fx.passes.linear_forms import Contraction
from olq_fx.passes.stack_forms import orientation, product_of
from olq_fx.passes.stack_views import stored_stack, uses_of_stack
from olq_fx.passes.weight_views import WeightView

TRANSFORMED = "used within torch.vmap or torch.func, whose tensors a quantized product does not take in a graph"
MULTIPLIED = "it is multiplied with another weight"


@dataclasses.dataclass(frozen=True, slots=True)
class StackUse:
    """A product that uses a stack as the weights of experts.

    Attributes:
        node: the call.
        contraction: its operands and their axes.
        view: how the weight's operand lies in the stack.
        transposed: whether the stack is stored as (E, K, N).
    """

    node: Node
    contraction: Contraction
    view: WeightView
    transposed: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K) of the whole stack."""
        experts, first, second = self.view.stored
        return (experts, second, first) if self.transposed else (experts, first, second)


@dataclasses.dataclass(frozen=True, slots=True)
class StackUses:
    """What a graph does with one stack.

    Attributes:
        weight: the graph input.
        operands: the views of it that something computes with.
        products: its uses as the weights of experts.
        others: its other uses, each with the reason why it is none.
    """

    weight: Node
    operands: tuple[Node, ...]
    products: tuple[StackUse, ...]
    others: tuple[Reject, ...]

    def without_products_of(self, weights: Container[Node]) -> "StackUses":
        """The same, where a product of two weights is a use of neither as a weight."""
        refused = [use for use in self.products if use.contraction.x in weights]
        if not refused:
            return self
        products = tuple(use for use in self.products if use not in refused)
        others = tuple(Reject(where(use.node), MULTIPLIED) for use in refused)
        return dataclasses.replace(self, products=products, others=self.others + others)


def uses_of_stacks(inputs: Iterable[Node], transformed: Container[Node] = ()) -> list[StackUses]:
    """The uses of those of some graph inputs that are dense and have three dimensions of static extent.

    Args:
        inputs: of one graph.
        transformed: nodes that run within torch.vmap or torch.func.
    """
    views = [view for node in inputs if (view := stored_stack(node)) is not None]
    return [_uses(view, transformed) for view in views]


def _uses(stack: WeightView, transformed: Container[Node]) -> StackUses:
    products: list[StackUse] = []
    others: list[Reject] = []
    operands: list[Node] = []
    for user, operand, seen in uses_of_stack(stack):
        operands.append(operand)
        use = TRANSFORMED if user in transformed else _use(user, operand, seen)
        if isinstance(use, StackUse):
            products.append(use)
        else:
            others.append(Reject(where(user), use))
    return StackUses(stack.weight, tuple(operands), tuple(products), tuple(others))


def _use(user: Node, operand: Node, seen: WeightView) -> StackUse | str:
    """A use as a product of experts, or why it is none."""
    product = product_of(user, operand)
    if product is None:
        return f"also used by {target_name(user)}, which is no product of experts"
    if isinstance(product, str):
        return f"{product} ({target_name(user)})"
    transposed = orientation(product, seen)
    if isinstance(transposed, str):
        return f"{transposed} ({target_name(user)})"
    return StackUse(user, product, seen, transposed)


def where(node: Node) -> str:
    """A call for reports: the module that makes it, or the node's name."""
    return caller(node) or node.name
