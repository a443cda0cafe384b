"""Canonical linear layers become quantized operators over plain parts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from olq_fx import numerics
from olq_fx.formats import FORMATS
from olq_fx.passes import canonical, pipeline
from olq_fx.passes.annotate import LABEL, Annotate, Label
from olq_fx.passes.canonicalize import Canonicalize
from olq_fx.passes.part_inputs import PART
from olq_fx.passes.swap import Swap

OPS = torch.ops.olq_fx
PAIRS = [
    ("fp8_per_tensor_static", "fp8_per_token"),
    ("fp8_per_block_static", "fp8_per_block_dynamic"),
    ("mxfp4_dualscale", "mxfp4_dualscale"),
    ("nvfp4", "nvfp4_per_token"),
    ("int8_per_channel_static", ""),
]


def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, weight: str, activation: str) -> torch.Tensor:
    """The product of dequantized operands."""
    k = x.shape[-1]
    flat = x.flatten(0, -2)
    if activation:
        format = FORMATS[activation]
        flat = numerics.dequantize(numerics.quantize(flat, format, format.activation_rule), format, k)
    format = FORMATS[weight]
    decoded = numerics.dequantize(numerics.quantize(w, format, format.weight_rule), format, k)
    return F.linear(flat, decoded, b).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("gradients", [False, True])
def test_layer_becomes_operators(capture, formats: tuple[str, str], gradients: bool):
    weight, activation = formats
    layer, x = nn.Linear(40, 24).requires_grad_(False), torch.randn(2, 3, 40)
    captured = capture(layer, x)
    context = captured.context(weight, activation, gradients=gradients)
    captured.apply(Canonicalize(context))
    assert captured.apply(Swap(context)).changed == 1
    assert captured.count(canonical.linear) == 0
    fused = gradients or not activation
    assert captured.count(OPS.linear.default) == int(fused)
    assert captured.count(OPS.quantized_linear.default) == captured.count(OPS.quantize.default) == int(not fused)
    expected = reference(x, layer.weight, layer.bias, weight, activation)
    torch.testing.assert_close(captured(context)[0], expected, rtol=1e-4, atol=1e-4)
    assert captured.apply(Swap(context)).changed == 0


def test_parts_come_in_after_their_weight(capture):
    captured = capture(nn.Linear(40, 24).bfloat16(), torch.randn(3, 40).bfloat16())
    context = captured.context("nvfp4", "nvfp4_per_token")
    captured.apply(Canonicalize(context))
    captured.apply(Swap(context))
    names = [node.name for node in captured.nodes("placeholder")]
    at = names.index(context.weights[0].placeholder)
    parts = captured.nodes("placeholder")[at + 1 : at + 4]
    assert [node.meta[PART] for node in parts] == [(names[at], 0), (names[at], 1), (names[at], 2)]
    specs = numerics.part_specs(FORMATS["nvfp4"], 24, 40)
    assert [(tuple(n.meta["example_value"].shape), n.meta["example_value"].dtype) for n in parts] == [
        (spec.shape, spec.dtype) for spec in specs
    ]


def test_tied_uses_share_their_parts(capture):
    layer = nn.Linear(32, 32)
    captured = capture(lambda x: layer(layer(x)), torch.randn(3, 32), weights=dict(layer.named_parameters()))
    context = captured.context("mxfp8", "mxfp8")
    captured.apply(Canonicalize(context))
    assert captured.apply(Swap(context)).changed == 2
    assert sum(PART in node.meta for node in captured.nodes("placeholder")) == 2


@pytest.mark.parametrize(("start", "stop"), [(0, 128), (128, 256), (96, 200)])
@pytest.mark.parametrize("formats", PAIRS)
def test_rows_use_slices_of_the_parts(capture, formats: tuple[str, str], start: int, stop: int):
    """Also where they begin within a block of 128 rows, whose scale they share with rows that are not used."""
    w, b = nn.Parameter(torch.randn(256, 64)), nn.Parameter(torch.randn(256))
    x = torch.randn(3, 64)
    captured = capture(lambda x: F.linear(x, w[start:stop], b[start:stop]), x, weights={"w": w})
    context = captured.context(*formats)
    captured.apply(Canonicalize(context))
    captured.apply(Swap(context))
    expected = reference(x, w, b, *formats)[:, start:stop]
    torch.testing.assert_close(captured(context)[0], expected.detach(), rtol=1e-4, atol=1e-4)


def test_transposed_storage(capture):
    w, x = nn.Parameter(torch.randn(40, 24)), torch.randn(3, 40)
    captured = capture(lambda x: x @ w, x, weights={"w": w})
    context = captured.context("mxfp8", "mxfp8")
    pipeline.run(captured.gm, context)
    expected = reference(x, w.t(), None, "mxfp8", "mxfp8")
    torch.testing.assert_close(captured(context)[0], expected.detach(), rtol=1e-4, atol=1e-4)


def test_labels_name_owner_and_caller_through_the_swap(capture):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    captured = capture(Tied(), torch.randn(3, 16))
    context = captured.context("mxfp8", "mxfp8")
    captured.apply(Canonicalize(context))
    assert captured.apply(Annotate(context)).changed == 2
    assert captured.apply(Annotate(context)).changed == 0
    captured.apply(Swap(context))
    products = [node for node in captured.gm.graph.nodes if node.target == OPS.quantized_linear.default]
    assert [node.meta[LABEL] for node in products] == [Label("a.weight", "a"), Label("a.weight", "b")]
