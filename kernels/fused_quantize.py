"""`fused_quantize`: what the passes make of a quantization and all that leads up to it, as one call.

    fused_quantize(body, products, tensors, format, rule) -> [*parts, *kept]

`body` names a graph (`remember`): of the results of `products`, (M, N) each, and of `tensors`, to the (M, K) that is quantized to
`format` by `rule`, and after it what others read too (`kept`), each (M, K). A compiler for GPUs makes one kernel of it
(`template_lowering`); what is defined here says what that computes.
"""

import dataclasses
import hashlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from olq_fx import numerics, torch_private
from olq_fx.formats import get_format
from olq_fx.kernels import reference

Plain = tuple[Sequence[Tensor], str, Sequence[Tensor], str, int, torch.dtype, Tensor | None, int, int]
"""A `Product` as the arguments of a graph's node can hold it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Some columns of a quantized linear layer.

    Attributes:
        x: the parts of its input (M, K), or a list of one tensor.
        activation_format: of them, "" for one in original precision.
        weight: the parts of the weight (N, K).
        weight_format: of them.
        k: K.
        dtype: of the result.
        bias: (N,) or None.
        first, columns: which of its columns are wanted.
    """

    x: Any
    activation_format: str
    weight: Any
    weight_format: str
    k: int
    dtype: torch.dtype
    bias: Any
    first: int
    columns: int

    @property
    def plain(self) -> Plain:
        """As the arguments of a graph's node can hold it."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(values)  # type: ignore[return-value]

    @property
    def computed(self) -> Tensor:
        """(M, columns), of tensors."""
        whole = torch.ops.olq_fx.quantized_linear.default(
            *(self.x, self.activation_format, self.weight, self.weight_format, self.k, self.dtype, self.bias, None)
        )
        # The operator itself: Python's brackets ask for the device, which need not be there while code is made for it.
        found: Tensor = torch.ops.aten.slice.Tensor(whole, 1, self.first, self.first + self.columns)
        return found


_BODIES: dict[str, GraphModule] = {}
"""Bodies by name. The name is made of what is in the graph: equal layers share one, in every process the same."""


def remember(body: GraphModule) -> str:
    """The name of a body, by which the operator is called."""
    lines = [
        f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {_dtypes(node)}" for node in body.graph.nodes
    ]
    name = f"body_{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:24]}"
    return _BODIES.setdefault(name, body) and name


def body_of(name: str) -> GraphModule:
    """The body of that name."""
    return _BODIES[name]


def _dtypes(node: Node) -> list[str]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [f"{each.dtype}{tuple(each.shape[1:])}" for each in values if isinstance(each, Tensor)]


class FusedQuantize(torch_private.HigherOrderOperator):
    """The operator; see the head of this file."""

    def __init__(self) -> None:
        """Register it."""
        super().__init__("olq_fx_fused_quantize", cacheable=True)

    def __call__(self, body: str, products: Sequence[Plain], tensors: Sequence[Tensor], format: str, rule: str) -> Any:
        """The parts, and what is kept."""
        return super().__call__(body, products, tensors, format, rule)


def _computed(body: str, products: Sequence[Plain], tensors: Sequence[Tensor], format: str, rule: str) -> Any:
    values = [Product(*each).computed for each in products]
    whole, *kept = body_of(body)(*values, *tensors)
    return [*reference.quantize(whole, format, rule), *kept]


def _shapes(body: str, products: Sequence[Plain], tensors: Sequence[Tensor], format: str, rule: str) -> Any:
    values = [Product(*each).computed for each in products]
    whole, *kept = body_of(body)(*values, *tensors)
    specs = numerics.part_specs(get_format(format), *whole.shape)
    return [*(whole.new_empty(spec.shape, dtype=spec.dtype) for spec in specs), *kept]


fused_quantize = FusedQuantize()
torch_private.implement_higher_order(fused_quantize, _computed, _shapes)


def prepare() -> None:
    """Tell Inductor how the operator is lowered, where Triton is there to compile it."""
    if importlib.util.find_spec("triton") is not None:
        from olq_fx.kernels import template_lowering

        template_lowering.register()
