"""The addition of a residual becomes part of the product, where it is one and nothing else reads the product."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from olq_fx.passes.canonicalize import Canonicalize
from olq_fx.passes.fuse_residual import FuseResidual
from olq_fx.passes.swap import Swap

OPS = torch.ops.olq_fx


def fused(capture, use: Any, x: Tensor, gradients: bool = False):
    layer = nn.Linear(16, 16).to(x.dtype)
    captured = capture(lambda x: use(layer, x), x, weights=dict(layer.named_parameters()))
    context = captured.context("mxfp8", "mxfp8", gradients=gradients)
    captured.apply(Canonicalize(context))
    captured.apply(Swap(context))
    before = captured(context)
    record = captured.apply(FuseResidual(context))
    torch.testing.assert_close(captured(context), before, rtol=0, atol=0)
    assert captured.apply(FuseResidual(context)).changed == 0
    return captured, record


FUSED = {
    "residual first": lambda layer, x: x + layer(x),
    "product first": lambda layer, x: layer(x) + x,
    "torch.add": lambda layer, x: torch.add(x, layer(x)),
    "Tensor.add": lambda layer, x: layer(x).add(x),
    "computed later": lambda layer, x: layer(x) + x.sin(),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (2, 2, 3, 16)])
@pytest.mark.parametrize("gradients", [False, True])
def test_addition_is_fused_bit_for_bit(capture, name: str, shape: tuple[int, ...], gradients: bool):
    captured, record = fused(capture, FUSED[name], torch.randn(shape, dtype=torch.bfloat16), gradients)
    assert (record.changed, record.rejects) == (1, ())
    assert captured.count(torch.add) == captured.count("add") == 0
    (product,) = [n for n in captured.gm.graph.nodes if n.target in (OPS.linear.default, OPS.quantized_linear.default)]
    assert product.args[-1] is not None


KEPT = {
    "read twice": (lambda layer, x: (y := layer(x)) + x + y.sum(), "read by others"),
    "broadcast": (lambda layer, x: layer(x) + x[:1], "shape or dtype"),
    "another dtype": (lambda layer, x: layer(x) + x.double(), "shape or dtype"),
    "a number": (lambda layer, x: layer(x) + 1.0, "no sum of two tensors"),
    "with itself": (lambda layer, x: (y := layer(x)) + y, "no sum of two tensors"),
    "scaled": (lambda layer, x: torch.add(layer(x), x, alpha=2), "no sum of two tensors"),
}


@pytest.mark.parametrize("name", KEPT)
def test_near_miss_stays_with_its_reason(capture, name: str):
    use, reason = KEPT[name]
    _, record = fused(capture, use, torch.randn(2, 3, 16))
    assert record.changed == 0
    assert reason in record.rejects[0].reason


def test_other_operations_are_no_additions(capture):
    _, record = fused(capture, lambda layer, x: layer(x) * x, torch.randn(3, 16))
    assert (record.changed, record.rejects) == (0, ())


def test_addition_in_place_of_the_residual_stays(capture):
    """`x += y` writes to x, which others may read."""

    def use(layer: nn.Linear, x: Tensor) -> Tensor:
        x = x + 0
        x += layer(x)
        return x

    _, record = fused(capture, use, torch.randn(3, 16))
    assert record.changed == 0
