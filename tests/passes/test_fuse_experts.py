"""One call of the first product of experts and of the activation after it: which graphs it takes, and what it keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_graphs import graph_of
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F  # noqa: N812

from olq_fx import numerics
from olq_fx.formats import get_format
from olq_fx.passes.fuse_experts import FuseExperts
from olq_fx.passes.pipeline import LATE_PASSES
from olq_fx.testing import assert_same_bits

E, M, K, INNER = 4, 24, 64, 32
PASS = FuseExperts(devices=("cpu",))
OPS = torch.ops.olq_fx


def weights(n: int, k: int, format: str, shards: int = 1, seed: int = 0) -> list[Tensor]:
    """The parts of (E, n, k)."""
    generator = torch.Generator().manual_seed(seed)
    found = get_format(format)
    size = n // shards
    each = []
    for _ in range(E):
        matrices = [torch.randn((size, k), generator=generator) / 8 for _ in range(shards)]
        parts = zip(*(numerics.quantize(m, found, found.weight_rule) for m in matrices), strict=True)
        each.append([torch.cat([p.view(torch.uint8) for p in one]) for one in parts])
    dtypes = [part.dtype for part in numerics.quantize(torch.zeros(size, k), found, found.weight_rule)]
    return [torch.stack(parts).view(dtype) for parts, dtype in zip(zip(*each, strict=True), dtypes, strict=True)]


def quantized(x: Tensor, format: str) -> list[Tensor]:
    parts: list[Tensor] = OPS.quantize.default(x, format, get_format(format).activation_rule)
    return parts


def layer(
    between: Callable[[Tensor], Tensor], weight: str = "mxfp8", activation: str = "mxfp8", shards: int = 1
) -> Callable[..., Any]:
    """Both products of experts, and what is between them."""

    def run(x: Tensor, offs: Tensor, first: list[Tensor], second: list[Tensor]) -> Any:
        if not activation:
            hidden = OPS.grouped_linear.default(x, offs, first, weight, "", "", None, shards)
            return OPS.grouped_linear.default(between(hidden), offs, second, weight, "", "", None)
        product = OPS.quantized_grouped_linear.default
        hidden = product(quantized(x, activation), activation, offs, first, weight, K, x.dtype, None, shards)
        inner = between(hidden)
        return product(quantized(inner, activation), activation, offs, second, weight, inner.shape[1], x.dtype, None)

    return run


def inputs(weight: str, n: int, dtype: torch.dtype = torch.bfloat16, shards: int = 1) -> tuple[Any, ...]:
    x = torch.randn((M, K), generator=torch.Generator().manual_seed(1)).to(dtype)
    offs = torch.tensor([5, 5, 17, M], dtype=torch.int32)
    return x, offs, weights(n, K, weight, shards), weights(K, INNER, weight, seed=7)


def clamped(h: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = h.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def by_turns(h: Tensor) -> Tensor:
    """What a weight whose rows take turns gives: sorted into the order of the tensor, and apart again."""
    ordered = h.view(h.shape[0], 2, -1).transpose(1, 2).reshape(h.shape)
    return F.silu(ordered[:, ::2]) * ordered[:, 1::2]


GATED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], "silu"),
    "up first": (lambda h: h[:, INNER:] * F.silu(h[:, :INNER]), "silu"),
    "gelu": (lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], "gelu"),
    "gelu_tanh": (lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh") * h.chunk(2, -1)[1], "gelu_tanh"),
    "clamped": (clamped, "clamped"),
    "clamped otherwise": (lambda h: clamped(h, 1.25, 3.0), "clamped"),
    "by turns": (by_turns, "silu"),
}


def calls(gm: GraphModule) -> list[Any]:
    return list(gm.graph.find_nodes(op="call_function", target=OPS.grouped_gated.default))


def fused(function: Callable[..., Any], *given: Any) -> Any:
    """The call that the pass makes; the graph computes the same bits as before, and a second run finds nothing."""
    gm = graph_of(function, *given)
    expected = gm(*given)
    assert PASS(gm).changed == 1, PASS(gm).rejects
    gm.recompile()
    gm.graph.lint()
    [call] = calls(gm)
    assert_same_bits(gm(*given), expected)
    assert PASS(gm).changed == 0
    assert all("val" in node.meta for node in gm.graph.nodes if node.op != "output")
    return call


@pytest.mark.parametrize("between", GATED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_between_is_recognised(between: str, dtype: torch.dtype):
    function, kind = GATED[between]
    call = fused(layer(function), *inputs("mxfp8", 2 * INNER, dtype))
    assert call.args[8:10] == (2, kind)
    if kind == "clamped":
        assert call.args[10:12] == ((1.25, 3.0) if "otherwise" in between else (1.702, 7.0))


@pytest.mark.parametrize(
    ("weight", "activation"),
    [("fp8_per_block_static", "fp8_per_block_dynamic"), ("int8_per_channel_static", "int8_per_token"), ("mxfp4", "")],
)
def test_every_kind_of_formats_is_taken(weight: str, activation: str):
    function = GATED["silu"][0]
    call = fused(layer(function, weight, activation, shards=2), *inputs(weight, 2 * INNER, shards=2))
    assert call.args[12] == activation


def test_a_format_that_no_tile_holds_is_said_to_take_a_kernel_more():
    for weight, activation, said in (
        ("int8_per_channel_static", "int8_per_token", 1),
        ("mxfp4", "mxfp4", 0),
        ("nvfp4", "nvfp4_per_token", 1),
    ):
        gm = graph_of(layer(GATED["silu"][0], weight, activation, shards=2), *inputs(weight, 2 * INNER, shards=2))
        notes = PASS(gm).notes
        assert len(notes) == said
        assert all("a kernel beside the first product" in note for note in notes)


def test_scales_of_shards_are_kept():
    function = GATED["silu"][0]
    given = inputs("fp8_per_tensor_static", 2 * INNER, shards=2)
    call = fused(layer(function, "fp8_per_tensor_static", "fp8_per_token", shards=2), *given)
    assert call.args[8] == 2


@pytest.mark.parametrize("act", [F.silu, F.gelu, lambda h: F.relu(h).square()])
def test_experts_without_a_gate(act: Callable[[Tensor], Tensor]):
    call = fused(layer(act), *inputs("mxfp8", INNER))
    assert call.args[8] == 1


def declined(function: Callable[..., Any], *given: Any) -> str:
    gm = graph_of(function, *given)
    before = str(gm.graph)
    result = PASS(gm)
    assert result.changed == 0
    assert str(gm.graph) == before
    [reject] = result.rejects
    return reject.reason


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda h: F.softplus(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], "it is none of silu, gelu"),
        (lambda h: F.silu(h.chunk(2, -1)[1]) * h.chunk(2, -1)[0], "it is none of"),
        (lambda h: 1.01 * F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], "it is none of"),
        (lambda h: F.silu(h[:, :INNER]) * h[:, INNER:] / h.float().sum(), "depends on"),
        (lambda h: torch.ones_like(h[:, :INNER]).cumsum(0) * F.silu(h[:, :INNER]) * h[:, INNER:], "depends on"),
    ],
)
def test_what_is_something_else_stays_with_the_reason(between: Callable[[Tensor], Tensor], reason: str):
    assert reason in declined(layer(between), *inputs("mxfp8", 2 * INNER))


def test_a_weight_whose_scales_are_of_gate_and_up_together_stays():
    function = layer(GATED["silu"][0], "fp8_per_block_static", "fp8_per_block_dynamic")
    assert declined(function, *inputs("fp8_per_block_static", 2 * INNER)) == (
        "its activation is a kernel of its own: gate and up share scales in its weight"
    )


def test_what_others_read_too_stays():
    kept: list[Tensor] = []

    def between(h: Tensor) -> Tensor:
        kept.append(h)
        return F.silu(h[:, :INNER]) * h[:, INNER:]

    def run(*given: Any) -> Any:
        kept.clear()
        return layer(between)(*given), kept[0] + 1

    assert "is read by" in declined(run, *inputs("mxfp8", 2 * INNER))


def test_it_runs_first_of_the_late_passes_and_on_gpus_only():
    made = LATE_PASSES[0]()
    assert isinstance(made, FuseExperts)
    gm = graph_of(layer(GATED["silu"][0]), *inputs("mxfp8", 2 * INNER))
    assert made(gm).changed == 0
    assert not calls(gm)
