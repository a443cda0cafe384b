"""Attention is opened for every combination of flags, and computes the same opened."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from olq_fx.passes.open_attention import OpenAttention

E, L, S, B = 8, 5, 6, 3


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    return nn.MultiheadAttention(E, 2, **options).eval()


def queries() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(L, B, E), torch.randn(S, B, E)


PADDING = torch.zeros(B, L, dtype=torch.bool)
PADDING[1, 3:] = True
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L)

# name -> (options of the module, options of the call)
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no weights": ({}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "padding": ({}, {"key_padding_mask": PADDING, "need_weights": False}),
    "mask of numbers": ({}, {"attn_mask": CAUSAL}),
    "mask of truths": ({}, {"attn_mask": CAUSAL.isinf(), "need_weights": False}),
    "mask of each head": ({}, {"attn_mask": CAUSAL.expand(2 * B, L, L), "need_weights": False}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "padding and mask": ({}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL.isinf()}),
    "no bias": ({"bias": False}, {}),
    "bias of keys": ({"add_bias_kv": True}, {"key_padding_mask": PADDING}),
    "zero attention": ({"add_zero_attn": True}, {"attn_mask": CAUSAL, "need_weights": False}),
    "batch first": ({"batch_first": True}, {"need_weights": False}),
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("gradients", [False, True])
def test_self_attention(capture, name: str, gradients: bool):
    module, call = FLAGS[name]
    layer, (x, _) = attention(**module), queries()
    x = x.transpose(0, 1) if module.get("batch_first") else x
    with torch.set_grad_enabled(gradients):
        captured = capture(lambda x: layer(x, x, x, **call), x, weights=dict(layer.named_parameters()))
    before = captured()
    assert captured.apply(OpenAttention()).changed == 1
    assert captured.count(F.linear) == 2
    assert captured.count(F.multi_head_attention_forward) == 0
    same(captured(), before)
    assert len(captured.weight("in_proj_weight").linear) == 1
    assert len(captured.weight("out_proj.weight").linear) == 1
    assert captured.apply(OpenAttention()).changed == 0


@pytest.mark.parametrize(("inputs", "slices"), [("cross", 2), ("three", 3)])
def test_in_projection_is_sliced(capture, inputs: str, slices: int):
    layer, (q, k) = attention(), queries()
    value = k if inputs == "cross" else k + 1
    captured = capture(lambda q, k, v: layer(q, k, v), q, k, value, weights=dict(layer.named_parameters()))
    before = captured()
    captured.apply(OpenAttention())
    same(captured(), before)
    rows = [(use.matrix.start, use.matrix.stop) for use in captured.weight("in_proj_weight").linear]
    assert rows == ([(0, E), (E, 3 * E)] if slices == 2 else [(0, E), (E, 2 * E), (2 * E, 3 * E)])


def test_separate_projections(capture):
    layer, (q, k) = attention(kdim=4, vdim=6), queries()
    captured = capture(layer, q, k[..., :4], k[..., :6])
    before = captured()
    captured.apply(OpenAttention())
    same(captured(), before)
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"):
        assert len(captured.weight(name).linear) == 1


def test_unbatched(capture):
    layer, (q, _) = attention(), queries()
    captured = capture(lambda x: layer(x, x, x), q[:, 0], weights=dict(layer.named_parameters()))
    before = captured()
    captured.apply(OpenAttention())
    same(captured(), before)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("masks", ["none", "mask", "padding", "both"])
def test_encoder_layer(capture, norm_first: bool, activation: str, masks: str):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(E, 2, 16, batch_first=True, norm_first=norm_first, activation=activation).eval()
    x = torch.randn(B, L, E)
    options: dict[str, Any] = {}
    if masks in ("mask", "both"):
        options["src_mask"] = CAUSAL.isinf()
    if masks in ("padding", "both"):
        options["src_key_padding_mask"] = PADDING
    with torch.no_grad():
        captured = capture(lambda x: layer(x, **options), x, weights=dict(layer.named_parameters()))
    before = captured()
    assert captured.apply(OpenAttention()).changed == 1
    assert captured.count(F.linear) == 4
    same(captured(), before)


def test_sizes_may_be_symbolic(capture):
    layer, (x, _) = attention(), queries()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        captured = capture(lambda x: layer(x, x, x)[0], x, weights=dict(layer.named_parameters()))
    captured.apply(OpenAttention())
    numbers = {name: int(value) for name, value in captured.inputs.items() if isinstance(value, torch.SymInt)}
    assert numbers
    captured.inputs.update(numbers)
    with torch.no_grad():
        (opened,) = captured()
        same(opened, layer(x, x, x)[0])


def test_only_planned_attention_is_opened(capture):
    layers = nn.ModuleList([attention(), attention()])
    (x, _) = queries()

    def function(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x

    captured = capture(function, x, weights=dict(layers.named_parameters()))
    context = captured.context("mxfp8", "mxfp8", only=["1.in_proj_weight"])
    assert captured.apply(OpenAttention(context)).changed == 1
    assert captured.count(F.multi_head_attention_forward) == 1


def test_what_cannot_be_opened_is_refused(capture, monkeypatch: pytest.MonkeyPatch):
    from olq_fx.passes import open_attention

    def broken(*args: Any, **kwargs: Any) -> None:
        args[0].sin()
        raise ValueError("a flag that is not understood")

    layer, (x, _) = attention(), queries()
    captured = capture(lambda x: layer(x, x, x), x, weights=dict(layer.named_parameters()))
    before = str(captured.gm.graph)
    monkeypatch.setitem(open_attention._FUNCTIONS, F.multi_head_attention_forward, broken)
    record = captured.apply(OpenAttention())
    assert record.changed == 0
    assert "a flag that is not understood" in record.rejects[0].reason
    assert str(captured.gm.graph) == before


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
