"""`linear_products`: what the passes make of quantized linear layers on one input, as one call.

    linear_products(x, activation_format, layers, weight_format, k, dtype) -> [y, ...]

Each layer has a weight of its own in `weight_format`, and bias and residual of its own; the results are (M, N) each, as
`quantized_linear` gives them. A compiler for GPUs makes one kernel of it (`product_lowering`): a tile belongs to one
layer, and has the bits that it has in a kernel of that layer alone.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import torch_private

Plain = tuple[Sequence[Tensor], Tensor | None, Tensor | None]
"""A `Layer` as the arguments of a graph's node can hold it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """What a layer does not share with the others.

    Attributes:
        weight: the parts of (N, K).
        bias: (N,) or None.
        residual: (M, N) or None, added after the rounding.
    """

    weight: Any
    bias: Any
    residual: Any

    @property
    def plain(self) -> Plain:
        """As the arguments of a graph's node can hold it."""
        return self.weight, self.bias, self.residual


class LinearProducts(torch_private.HigherOrderOperator):
    """The operator; see the head of this file."""

    def __init__(self) -> None:
        """Register it."""
        super().__init__("olq_fx_linear_products", cacheable=True)  # type: ignore[no-untyped-call]

    def __call__(
        self,
        x: Sequence[Tensor],
        activation_format: str,
        layers: Sequence[Plain],
        weight_format: str,
        k: int,
        dtype: torch.dtype,
    ) -> Any:
        """The results, one for each layer."""
        return super().__call__(x, activation_format, layers, weight_format, k, dtype)  # type: ignore[no-untyped-call]


def _computed(
    x: Sequence[Tensor],
    activation_format: str,
    layers: Sequence[Plain],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
) -> Any:
    multiply = torch.ops.olq_fx.quantized_linear.default
    return [
        multiply(x, activation_format, weight, weight_format, k, dtype, bias, residual)
        for weight, bias, residual in layers
    ]


linear_products = LinearProducts()
torch_private.implement_higher_order(linear_products, _computed, _computed)


def prepare() -> None:
    """Tell Inductor how the operator is lowered, where Triton is there to compile it."""
    if importlib.util.find_spec("triton") is not None:
        from olq_fx.kernels import product_lowering

        product_lowering.register()
