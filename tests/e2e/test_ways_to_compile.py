"""Blocks with siblings and a gated MLP in the ways in which models are compiled, in float32 on the CPU.

Training of adapters beside frozen weights, autocast, blocks compiled one by one, marked numbers of rows.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import olq_fx
from olq_fx.testing import sqnr

D, HIDDEN, RANK = 128, 256, 4
ADAPTERS = ["re:.*[.][ab]$"]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Each test counts its own graphs of the same code."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.base = nn.Linear(k, n, bias=False)
        self.a, self.b = nn.Parameter(torch.randn(RANK, k) / 16), nn.Parameter(torch.randn(n, RANK) / 16)
        self.base.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Block(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q, self.k, self.v, self.o = (make(D, D) for _ in range(4))
        self.gate, self.up, self.down = make(D, HIDDEN), make(D, HIDDEN), make(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        x = x + self.o(torch.softmax(q @ k.transpose(-1, -2) / D**0.5, -1) @ v)
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def plain(k: int, n: int) -> nn.Module:
    return nn.Linear(k, n, bias=False)


def stack(make: Any = plain, blocks: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(make) for _ in range(blocks))), torch.randn(2, 12, D)


def quantized(scheme: str, make: Any = plain) -> nn.Module:
    model, _ = stack(make)
    olq_fx.quantize_(model, scheme)
    return model


@pytest.mark.parametrize("scheme", ["fp8_per_block", "int8", "mxfp4"])
@pytest.mark.parametrize("compiled_backward", [False, True], ids=["", "compiled autograd"])
def test_adapters_have_the_gradients_of_eager_mode(scheme: str, compiled_backward: bool):
    eager = quantized(scheme, Adapted)
    model, x = stack(Adapted)
    eager(x).square().mean().backward()
    fast = torch.compile(model, backend=olq_fx.backend(scheme, ignore=ADAPTERS), fullgraph=True)
    with torch._dynamo.config.patch(compiled_autograd=compiled_backward):
        fast(x).square().mean().backward()
    wanted = {name: parameter.grad for name, parameter in eager.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == wanted.keys()
    assert sum(name.endswith((".a", ".b")) for name in found) == 28
    for name, gradient in found.items():
        assert gradient is not None
        # Sums in another order move single codes of activations by a step.
        assert sqnr(gradient, wanted[name]) > 25, name


@pytest.mark.parametrize("scheme", ["fp8_per_block", "int8"])
def test_autocast(scheme: str):
    model, x = stack()
    eager = quantized(scheme)
    fast = torch.compile(model, backend=olq_fx.backend(scheme), fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert sqnr(fast(x), eager(x)) > 25


def test_equal_blocks_that_are_compiled_one_by_one_share_a_graph():
    model, x = stack(blocks=4)
    eager, _ = stack(blocks=4)
    olq_fx.quantize_(eager, "fp8_per_block")
    olq_fx.quantize_(model, "fp8_per_block")
    backend = olq_fx.backend("fp8_per_block")
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    with torch.no_grad():
        assert sqnr(model(x), eager(x)) > 25
    assert counters["stats"]["unique_graphs"] == 1


def test_marked_rows_are_one_graph():
    model, _ = stack()
    eager = quantized("fp8_per_block")
    fast = torch.compile(model, backend=olq_fx.backend("fp8_per_block"), fullgraph=True)
    with torch.no_grad():
        for rows in (12, 7, 30):
            given = torch.randn(2, rows, D)
            torch._dynamo.mark_dynamic(given, 1)
            assert sqnr(fast(given), eager(given)) > 25
    assert counters["stats"]["unique_graphs"] == 1
