"""What a pass is: a frozen dataclass with a name, called with a graph, that says what it did and what it refused.

    Context      what all passes of one compilation are told: the weights to quantize, whether gradients flow
    Reject       a refusal: where, and the reason in words
    PassResult   how many places were changed, and the refusals
    Pass         the protocol; a pass rewrites the graph in place, or leaves it as it was where it refuses

A pass knows neither timing nor dumps nor verification: `pipeline.run` does those. Run twice, it changes nothing the
second time.
"""

import dataclasses
from typing import ClassVar, Protocol

from torch.fx import GraphModule

from olq_fx.weights import WeightSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeight:
    """A graph input that is, or is about to be, a quantized weight.

    Attributes:
        placeholder: name of the graph's input.
        path: the parameter's path, for reports and messages.
        weight: name of the weight's format.
        activation: name of the format of its inputs, "" for inputs in original precision.
        activation_rule: the scale rule of its inputs.
        transposed: whether it reads (K, N) where it comes in.
        kernel: name of the kernel that must run its products, "" for the best.
    """

    placeholder: str
    path: str
    weight: str
    activation: str
    activation_rule: str
    transposed: bool = False
    kernel: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedExperts:
    """A graph input that is, or is about to be, the quantized weight of experts.

    Attributes:
        placeholder: name of the graph's input.
        spec: how it is stored and used.
    """

    placeholder: str
    spec: WeightSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What the passes of one compilation are told.

    Attributes:
        weights: the inputs to be replaced by quantized ones.
        gradients: whether gradients may flow through the graph, so that products must be differentiable.
        experts: the inputs that are weights of experts in one tensor.
    """

    weights: tuple[PlannedWeight, ...]
    gradients: bool = False
    experts: tuple[PlannedExperts, ...] = ()

    def find(self, placeholder: str) -> PlannedWeight | None:
        """The weight that comes in by this name, or None."""
        return next((weight for weight in self.weights if weight.placeholder == placeholder), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """Something that a pass did not do: where (a layer's path, or a node's name), and why."""

    where: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did: the number of places changed, what it refused, and lines for the user."""

    changed: int
    rejects: tuple[Reject, ...] = ()
    notes: tuple[str, ...] = ()


class Pass(Protocol):
    """A rewriting of a graph."""

    name: ClassVar[str]

    def __call__(self, gm: GraphModule) -> PassResult:
        """Rewrite `gm` in place."""
        ...
