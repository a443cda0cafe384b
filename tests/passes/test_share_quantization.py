"""Layers that read one value quantize it once, unless it is written to in between or they differ."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from olq_fx.passes import pipeline
from olq_fx.passes.base import Reject
from olq_fx.passes.canonicalize import Canonicalize
from olq_fx.passes.share_quantization import ShareQuantization
from olq_fx.passes.swap import Swap

QUANTIZE = torch.ops.olq_fx.quantize.default


class Three(nn.Module):
    """q, k and v, and what is done with them."""

    def __init__(self, use: Callable[["Three", Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.use = use

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.use(self, x)


def shared(capture, use: Callable[[Three, Tensor], tuple[Tensor, ...]], x: Tensor | None = None):
    captured = capture(Three(use), torch.randn(2, 3, 16) if x is None else x)
    context = captured.context("mxfp8", "mxfp8")
    captured.apply(Canonicalize(context))
    captured.apply(Swap(context))
    before = captured(context)
    record = captured.apply(ShareQuantization(context))
    for found, expected in zip(captured(context), before, strict=True):
        assert torch.equal(found, expected)
    assert captured.apply(ShareQuantization(context)).changed == 0
    return captured, record


def test_three_layers_share(capture):
    captured, record = shared(capture, lambda m, x: (m.q(x), m.k(x), m.v(x)))
    assert (record.changed, record.rejects) == (2, ())
    assert captured.count(QUANTIZE) == 1
    assert captured.count("flatten") == 1
    assert record.operators["olq_fx.quantize.default"] == -2


def test_equal_reshapes_of_the_user_are_not_merged_but_looked_at(capture):
    captured, record = shared(capture, lambda m, x: (m.q(x + 1), m.k(x + 1), m.v(x)))
    assert record.changed == 0
    assert captured.count(QUANTIZE) == 3


def test_casts_of_autocast_are_shared(capture):
    def use(m: Three, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return m.q(x), m.k(x), m.v(x)

    captured, record = shared(capture, use)
    assert record.changed == 2
    assert captured.count(QUANTIZE) == 1


def test_input_written_to_in_between_is_quantized_again(capture):
    def use(m: Three, x: Tensor) -> tuple[Tensor, ...]:
        x = x + 0
        q = m.q(x)
        x.add_(1)
        return q, m.k(x), m.v(x)

    captured, record = shared(capture, use)
    assert record.changed == 1
    assert captured.count(QUANTIZE) == 2
    assert record.rejects == (Reject("k", "its input is written to after another layer has read it"),)


def test_write_through_a_view_counts(capture):
    def use(m: Three, x: Tensor) -> tuple[Tensor, ...]:
        x = x + 0
        q = m.q(x)
        x[:, 0].zero_()
        return q, m.k(x)

    captured, _ = shared(capture, use)
    assert captured.count(QUANTIZE) == 2


def test_write_elsewhere_does_not_count(capture):
    def use(m: Three, x: Tensor) -> tuple[Tensor, ...]:
        q = m.q(x)
        q.mul_(2)
        return q, m.k(x), torch.nn.functional.relu(m.v(x), inplace=True)

    captured, _ = shared(capture, use)
    assert captured.count(QUANTIZE) == 1


def test_other_formats_are_apart(capture):
    captured = capture(Three(lambda m, x: (m.q(x), m.k(x), m.v(x))), torch.randn(3, 16))
    first = captured.context("mxfp8", "mxfp8", only=["q.weight"])
    other = captured.context("int8_per_channel_static", "int8_per_token", only=["k.weight", "v.weight"])
    both = type(first)((*first.weights, *other.weights))
    pipeline.run(captured.gm, both)
    assert captured.count(QUANTIZE) == 2
