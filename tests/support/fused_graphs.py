"""Graphs of aten operators with quantizations and quantized products, for the tests of fusion."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from olq_fx import torch_private
from olq_fx.formats import FORMATS

QUANTIZE = torch.ops.olq_fx.quantize.default
PRODUCT = torch.ops.olq_fx.quantized_linear.default
BLOCK = "fp8_per_block_dynamic"


def quantized(x: Tensor, format: str = BLOCK) -> list[Tensor]:
    return QUANTIZE(x, format, FORMATS[format].activation_rule)


def weight(n: int, k: int, format: str = "fp8_per_block_static", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator)
    return QUANTIZE(values, format, FORMATS[format].weight_rule)


def product(
    x: list[Tensor],
    w: list[Tensor],
    k: int = 256,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    return PRODUCT(x, BLOCK, w, "fp8_per_block_static", k, dtype, bias, residual)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def graph_of(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """As AOTAutograd hands it on: operators of aten, decomposed by Inductor's table."""
    with torch.no_grad():
        gm = make_fx(function, torch_private.inductor_decompositions(), tracing_mode="fake")(*inputs)
    torch_private.drop_dead_code(gm)
    return gm
