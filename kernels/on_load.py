"""Formats whose groups are wider than a tile of a product: the product that makes values takes their maxima, and the
product that reads them quantizes what it loads.

    fused_maxima(body, products, tensors, wide, finite, zeros) -> [values, maxima, *kept]
    linear_on_load([values, maxima], activation_format, weight, ..., rule) -> (M, N)

`fused_maxima` is `fused_quantize` without the quantization: `values` (M, K) is what the body computes of products and
tensors, and `maxima` (M, P) the bits, as int32, of the largest size of each group of `wide` columns (0: of the row);
where `finite` says so NaN and Inf are left out. `zeros` is empty, or the one int32 (M, P), all 0 and read by nobody
else, that the maxima may be raised in. `linear_on_load` is `quantized_linear` of what `quantize` makes of the
values by `rule`. So no kernel has a quantization for its only work. Compilers for GPUs make a kernel of each
(`on_load_lowering`); what is defined here says what they compute.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import torch_private
from olq_fx.formats import Format, get_format
from olq_fx.kernels.fused_quantize import Plain, Product, body_of


@dataclasses.dataclass(frozen=True, slots=True)
class Maxima:
    """Which maxima a format's scales are made of.

    Attributes:
        wide: columns of a group; 0 for the row.
        finite: whether NaN and Inf are left out (they mark a smaller group).
    """

    wide: int
    finite: bool

    def parts(self, columns: int) -> int:
        """Groups of a row."""
        return -(-columns // self.wide) if self.wide else 1


def maxima_of(format: Format) -> Maxima | None:
    """What a product that quantizes on load needs beside the values; None where it is not what decides."""
    if format.group == (1, None):
        return Maxima(0, False)
    if format.coarse is not None and format.coarse[0] == 1:
        return Maxima(format.coarse[1] or 0, True)
    return None


class FusedMaxima(torch_private.HigherOrderOperator):
    """The first operator; see the head of this file."""

    def __init__(self) -> None:
        """Register it."""
        super().__init__("olq_fx_fused_maxima", cacheable=True)  # type: ignore[no-untyped-call]

    def __call__(
        self,
        body: str,
        products: Sequence[Plain],
        tensors: Sequence[Tensor],
        wide: int,
        finite: bool,
        zeros: Sequence[Tensor],
    ) -> Any:
        """The values, their maxima, and what is kept."""
        return super().__call__(body, products, tensors, wide, finite, zeros)  # type: ignore[no-untyped-call]


def _computed(
    body: str, products: Sequence[Plain], tensors: Sequence[Tensor], wide: int, finite: bool, zeros: Sequence[Tensor]
) -> Any:
    whole, *kept = body_of(body).function(*(Product(*each).computed for each in products), *tensors)
    found = maxima(whole, wide, finite)
    for each in zeros:
        found = torch.maximum(found, each)
    return [whole, found, *kept]


def maxima(values: Tensor, wide: int, finite: bool) -> Tensor:
    """(M, K) to (M, P) int32: the bits of the largest size of each group of `wide` columns (0: of the row)."""
    bits = values.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
    if finite:
        bits = torch.where(bits < 0x7F800000, bits, 0)
    columns = values.shape[1]
    parts = Maxima(wide, finite).parts(columns)
    return torch.cat([part.amax(1, keepdim=True) for part in bits.tensor_split(_cuts(wide, parts), dim=1)], 1)


def _cuts(wide: int, parts: int) -> list[int]:
    return [wide * i for i in range(1, parts)]


def _shapes(
    body: str, products: Sequence[Plain], tensors: Sequence[Tensor], wide: int, finite: bool, zeros: Sequence[Tensor]
) -> Any:
    whole, *kept = body_of(body).function(*(Product(*each).computed for each in products), *tensors)
    parts = Maxima(wide, finite).parts(int(whole.shape[1]))
    return [whole, whole.new_empty((whole.shape[0], parts), dtype=torch.int32), *kept]


def linear_on_load(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    rule: str,
) -> Tensor:
    """The product of values and of a weight, (M, N) of `dtype`.

    Args:
        x: values (M, K), and their maxima as `fused_maxima` gives them, which follow from the values.
        activation_format: what the values are quantized to.
        weight: the parts of (N, K).
        weight_format: of them.
        k: K.
        dtype: of the result.
        bias: (N,) or None.
        residual: (M, N) or None, added after the rounding.
        rule: a scale rule of the activation format.
    """
    ops = torch.ops.olq_fx
    parts = ops.quantize.default(x[0], activation_format, rule)
    found: Tensor = ops.quantized_linear.default(
        parts, activation_format, weight, weight_format, k, dtype, bias, residual
    )
    return found


def _linear_shape(x: Sequence[Tensor], activation_format: str, weight: Sequence[Tensor], *rest: Any) -> Tensor:
    get_format(activation_format)
    return x[0].new_empty((x[0].shape[0], weight[0].shape[0]), dtype=rest[2])


_LIBRARY: Any = torch.library.Library("olq_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "linear_on_load(Tensor[] x, str activation_format, Tensor[] weight, str weight_format, int k, ScalarType dtype, "
    "Tensor? bias, Tensor? residual, str rule) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("linear_on_load", linear_on_load, "CompositeExplicitAutograd")
torch.library.register_fake("olq_fx::linear_on_load", _linear_shape, lib=_LIBRARY)

LINEAR_ON_LOAD = torch.ops.olq_fx.linear_on_load.default

fused_maxima = FusedMaxima()
torch_private.implement_higher_order(fused_maxima, _computed, _shapes)
