"""Inductor's lowering of `fused_maxima` and `linear_on_load`: a Triton template for each."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from olq_fx import torch_templates
from olq_fx.formats import get_format
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.fused_quantize import Plain, Product, body_of
from olq_fx.kernels.on_load import Maxima, fused_maxima
from olq_fx.kernels.template_lowering import (
    NAMES,
    Kernel,
    Target,
    left_operand,
    on_load_blocking,
    product_text,
    tile_grid,
    with_products,
)
from olq_fx.kernels.template_operands import buffers_of, operand_like
from olq_fx.kernels.template_sources import ON_LOAD_IMPORTS, OnLoad, Sink, maxima_sink, on_load_source
from olq_fx.kernels.triton_product import constants_of, instruction_of

_ANY = get_format("fp8_per_token")
"""A format whose groups are wider than a tile: what a tile is chosen by."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Values(Target):
    """Values with their maxima, in the place of codes with their scales."""

    maxima: Maxima
    zeros: Sequence[Any]
    kernel: ClassVar[str] = "olq_fx_linear_maxima"

    @property
    def sink(self) -> Sink:
        columns = self.shape[1]
        return maxima_sink(self.maxima.wide or columns, self.maxima.parts(columns), self.maxima.finite)

    @property
    def like(self) -> Any:
        return torch_templates.layout(self.shape, self.body.dtype, self.device)

    def beside(self) -> list[Any]:
        if self.zeros:
            return list(self.zeros)
        shape = self.shape[0], self.maxima.parts(self.shape[1])
        return [torch_templates.new_zeros(shape, torch.int32, self.device)]


def register() -> None:
    """Tell Inductor."""
    torch_templates.register_lowering(fused_maxima, lower_maxima)
    torch_templates.register_lowering(torch.ops.olq_fx.linear_on_load.default, lower_linear)


def lower_maxima(
    body: str, products: Sequence[Plain], tensors: Sequence[Any], wide: int, finite: bool, zeros: Sequence[Any]
) -> list[Any]:
    """The values, their maxima and what is kept, as buffers of Inductor."""
    known, found = body_of(body), [Product(*each) for each in products]
    tall = found[0].x[0]
    target = _Values(
        body=known,
        tensors=[torch_templates.realized(tensor) for tensor in tensors],
        format=_ANY,
        rule=_ANY.activation_rule,
        shape=(tall.get_size()[0], known.columns),
        device=tall.get_device(),
        maxima=Maxima(wide, finite),
        zeros=zeros,
    )
    return with_products(target, found)


def lower_linear(
    x: Sequence[Any],
    activation_format: str,
    weight: Sequence[Any],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Any,
    residual: Any,
    rule: str,
) -> Any:
    """The product, as a buffer of Inductor."""
    n, device = torch_templates.static(weight[0].get_size()[0]), x[0].get_device()
    assert n is not None
    product = Product(x, activation_format, weight, weight_format, k, dtype, bias, 0, n, rule)
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    a, side, inputs = left_operand(product, capability)
    assert isinstance(side, OnLoad)
    b = operand_like(weight, weight_format)
    instruction = instruction_of(a, b, k, capability)
    m = x[0].get_size()[0]
    blocking = on_load_blocking(torch_templates.hint(m), n, k, (a, b), instruction, capability)
    constants = {**constants_of(a, b, instruction, blocking, k), "K": k, "DTYPE": NAMES[dtype]}
    source = on_load_source(side, product_text(0, product, b, blocking), constants, residual is not None)
    inputs += buffers_of(weight, weight_format)
    inputs += [torch_templates.contiguous(each) for each in (bias, residual) if each is not None]
    return _launched(source, blocking, inputs, (m, n), dtype, device)


def _launched(
    source: str, tile: Blocking, inputs: Sequence[Any], shape: tuple[Any, int], dtype: torch.dtype, device: torch.device
) -> Any:
    kernel = Kernel("olq_fx_linear_on_load", source, ON_LOAD_IMPORTS, tile_grid)
    template = torch_templates.make_template(kernel.name, kernel.source, kernel.grid, kernel.imports)
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    choice = torch_templates.Choice(template, constants, tile.num_warps, tile.num_stages)
    like = torch_templates.layout(shape, dtype, device)
    return torch_templates.launch(kernel.name, [choice], inputs, [], like, shape, [], [])
