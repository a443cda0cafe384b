"""One call of a quantization and of what leads up to it: which graphs it takes, and that no bit moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_graphs import BLOCK, PRODUCT, QUANTIZE, graph_of, product, quantized, random, weight
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from olq_fx.formats import FORMATS
from olq_fx.kernels.fused_quantize import body_of, fused_quantize
from olq_fx.passes.base import PassResult
from olq_fx.passes.fuse_quantize import FuseQuantize
from olq_fx.testing import assert_same_bits

M, K, N = 6, 256, 128
PASS = FuseQuantize(devices=("cpu",))


def calls(gm: GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if node.target is fused_quantize]


def fused(function: Callable[..., Any], *inputs: Any, count: int = 1) -> GraphModule:
    """The graph after the pass, which computes the same bits as before, and in which a second run finds nothing."""
    gm = graph_of(function, *inputs)
    expected = gm(*inputs)
    result = PASS(gm)
    gm.recompile()
    gm.graph.lint()
    assert result.changed == count == len(calls(gm)), result
    flat, given = torch.utils._pytree.tree_leaves(gm(*inputs)), torch.utils._pytree.tree_leaves(expected)
    for found, wanted in zip(flat, given, strict=True):
        assert_same_bits(found, wanted)
    assert PASS(gm).changed == 0
    for node in gm.graph.nodes:
        assert "val" in node.meta or node.op == "output", node
    return gm


def declined(function: Callable[..., Any], *inputs: Any) -> str:
    """The reason for which the pass leaves the graph as it is."""
    gm = graph_of(function, *inputs)
    before = str(gm.graph)
    result: PassResult = PASS(gm)
    assert str(gm.graph) == before
    assert result.changed == 0
    [reject] = result.rejects
    return reject.reason


# Products


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "scaled": lambda x: x * 0.3 + 1.5,
    "float32": lambda x: torch.tanh(x.float()).to(x.dtype),
    "clamped": lambda x: x.clamp(-1.0, 1.0),
    "where": lambda x: torch.where(x > 0.5, x, -x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gated_product_is_one_call(name: str, dtype: torch.dtype):
    def mlp(x: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor]) -> Tensor:
        parts = quantized(x)
        y, z = product(parts, gate, dtype=dtype), product(parts, up, dtype=dtype)
        return product(quantized(ACTIVATIONS[name](y) * z), down, N, dtype=dtype)

    gm = fused(mlp, random(M, K, dtype=dtype), weight(N, K), weight(N, K, seed=2), weight(K, N, seed=3))
    [call] = calls(gm)
    assert len(call.args[1]) == 2
    assert sum(node.target is PRODUCT for node in gm.graph.nodes) == 1


@pytest.mark.parametrize("format", [name for name, found in FORMATS.items() if found.activation])
def test_every_format_is_fused_or_declined_with_a_reason(format: str):
    def layer(x: Tensor, w: list[Tensor]) -> list[Tensor]:
        return quantized(functional.silu(product(quantized(x), w)), format)

    inputs = random(M, K), weight(N, K)
    if format in ("fp8_per_block_dynamic", "mxfp8", "mxfp4"):
        assert calls(fused(layer, *inputs))[0].args[1]
    elif format in ("mxfp4_dualscale", "nvfp4_per_token"):
        # Rows of the product: one kernel where Inductor would make four.
        assert not calls(fused(layer, *inputs))[0].args[1]
    else:
        assert "statistic of more than a piece of a row" in declined(layer, *inputs)


@pytest.mark.parametrize("halves", ["chunk", "split", "slice", "from the end", "beyond the end"])
def test_halves_of_one_product_are_two_products(halves: str):
    def mlp(x: Tensor, w: list[Tensor]) -> list[Tensor]:
        both = product(quantized(x.flatten(0, 1)), w).view(2, 3, 2 * N)
        if halves == "chunk":
            gate, up = both.chunk(2, -1)
        elif halves == "split":
            gate, up = both.split([N, N], -1)
        elif halves == "from the end":
            gate, up = both[..., -1000:N], both[..., -N:]
        elif halves == "beyond the end":
            gate, up = both[..., :-N], both[..., N:1000]
        else:
            gate, up = both[..., :N], both[..., N:]
        return quantized((functional.gelu(gate) * up).flatten(0, 1))

    [call] = calls(fused(mlp, random(2, 3, K), weight(2 * N, K)))
    assert sorted(each[7:9] for each in call.args[1]) == [(0, N), (N, N)]


def test_thirds_of_a_product_are_no_kernel():
    """Two of them in the kernel, and the product once more for the sake of the third, would be more work."""

    def layer(x: Tensor, w: list[Tensor]) -> list[Tensor]:
        first, second, third = product(quantized(x), w).chunk(3, -1)
        return quantized(functional.silu(first) * second * third)

    assert "more than two parts of it are read" in declined(layer, random(M, K), weight(3 * N, K))


def test_what_is_not_read_in_two_parts_with_another_product_is_left_whole():
    def layer(x: Tensor, w: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        parts = quantized(x)
        both, more = product(parts, w), product(parts, other)
        return quantized(more * both[:, :N] * both[:, N:])

    gm = fused(layer, random(M, K), weight(2 * N, K), weight(N, K, seed=2))
    assert sum(node.target is PRODUCT for node in gm.graph.nodes) == 1


def test_bias_and_residual_are_part_of_it_and_the_stream_is_kept():
    def layer(x: Tensor, w: list[Tensor], bias: Tensor, stream: Tensor) -> tuple[list[Tensor], Tensor]:
        y = product(quantized(x), w, bias=bias)
        new = stream + y.view(2, 3, N)
        return quantized((new * 2).view(M, N)), new

    fused(layer, random(M, K), weight(N, K), random(N), random(2, 3, N, seed=3))


def test_a_residual_that_the_product_adds_is_an_input():
    def layer(x: Tensor, w: list[Tensor], stream: Tensor) -> list[Tensor]:
        return quantized(functional.silu(product(quantized(x), w, residual=stream)))

    fused(layer, random(M, K), weight(N, K), random(M, N, seed=3))


def test_captured_tensors_are_read_by_row_column_batch_and_element():
    def layer(x: Tensor, w: list[Tensor], row: Tensor, column: Tensor, batch: Tensor, full: Tensor, one: Tensor) -> Any:
        y = product(quantized(x), w).view(2, 3, N)
        return quantized(((y * row + column) * (1 + batch) + full.transpose(0, 1) / one).view(M, N))

    captured = random(2, 3, 1), random(N), random(2, 1, N), random(3, 2, N), random(1)
    fused(layer, random(M, K), weight(N, K), *captured)


def test_two_formats_that_read_one_product():
    """The first call keeps what the second quantizes."""

    def layer(x: Tensor, w: list[Tensor]) -> Any:
        y = functional.silu(product(quantized(x), w))
        return quantized(y), quantized(y, "mxfp8")

    gm = fused(layer, random(M, K), weight(N, K))
    assert sum(node.target is QUANTIZE for node in gm.graph.nodes) == 2


def test_a_product_that_others_read_is_left_alone():
    def layer(x: Tensor, w: list[Tensor]) -> Any:
        y = product(quantized(x), w)
        return quantized(functional.silu(y)), y.sum()

    assert declined(layer, random(M, K), weight(N, K)) == (
        "the product before its quantization is a kernel of its own: others read the product too"
    )


@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_a_product_that_another_kernel_must_run(kernel: str):
    def layer(x: Tensor, w: list[Tensor]) -> Any:
        return quantized(functional.silu(PRODUCT([x], "", w, "fp8_per_block_static", K, x.dtype, None, None, kernel)))

    inputs = random(M, K), weight(N, K)
    gm = graph_of(layer, *inputs)
    result = PASS(gm)
    assert result.changed == (kernel == "triton")
    if not result.changed:
        assert "another kernel must run the product" in result.rejects[0].reason


def test_a_transposed_view_is_no_row():
    def layer(x: Tensor, w: list[Tensor]) -> Any:
        return quantized(functional.silu(product(quantized(x), w).t().contiguous()))

    gm = graph_of(layer, random(128, K), weight(N, K))
    assert PASS(gm).changed == 0


def test_other_heads_are_no_columns():
    """(M, H, D) of a product is normed over D: no row of the region."""

    def layer(x: Tensor, w: list[Tensor]) -> Any:
        y = product(quantized(x), w).view(M, 2, N // 2)
        return quantized((y / y.float().pow(2).mean(-1, keepdim=True).sqrt().to(y.dtype)).flatten(1))

    gm = graph_of(layer, random(M, K), weight(N, K))
    assert PASS(gm).changed == 0


def test_products_of_different_inputs_are_not_one_kernel():
    def layer(x: Tensor, other: Tensor, w: list[Tensor]) -> Any:
        return quantized(product(quantized(x), w) * product(quantized(other), w))

    [call] = calls(fused(layer, random(M, K), random(M, K, seed=4), weight(N, K)))
    assert len(call.args[1]) == 1
    assert len(call.args[2]) == 1


def test_pointwise_operations_alone_are_left_to_inductor():
    gm = graph_of(lambda x: quantized(functional.silu(x)), random(M, K))
    assert PASS(gm) == PassResult(0)


# Norms


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS = {
    "rms_norm": lambda x, w: rms_norm(x, w),
    "F.rms_norm": lambda x, w: functional.rms_norm(x, (K,), w),
    "F.layer_norm": lambda x, w: functional.layer_norm(x, (K,), w, w),
    "layer_norm without affine": lambda x, w: functional.layer_norm(x, (K,)),
    "softmax": lambda x, w: torch.softmax(x.float(), -1).to(x.dtype),
    "l2": lambda x, w: x / x.float().pow(2).sum(-1, keepdim=True).sqrt().to(x.dtype),
}


@pytest.mark.parametrize("format", [BLOCK, "fp8_per_token", "int8_per_token", "mxfp8", "mxfp4", "nvfp4_per_token"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_call_in_every_format(name: str, format: str):
    def layer(x: Tensor, w: Tensor) -> Any:
        return quantized(NORMS[name](x, w).flatten(0, 1), format)

    fused(layer, random(2, 3, K), random(K))


def test_the_residual_before_a_norm_is_kept():
    def layer(x: Tensor, stream: Tensor, w: Tensor) -> Any:
        new = stream + x
        return quantized(rms_norm(new, w).flatten(0, 1)), new * 2, new

    [call] = calls(fused(layer, random(2, 3, K), random(2, 3, K, seed=2), random(K)))
    assert len(call.users) == 3


def test_modulation_by_batch_is_part_of_a_norm():
    """AdaLN: scale and shift come from one product of the conditioning."""

    def layer(x: Tensor, six: Tensor) -> Any:
        shift, scale, *_ = six.unsqueeze(1).chunk(6, -1)
        return quantized((functional.layer_norm(x, (K,)) * (1 + scale) + shift).flatten(0, 1))

    fused(layer, random(2, 3, K), random(2, 6 * K))


def test_what_the_norm_gives_to_others_is_kept():
    def layer(x: Tensor, w: Tensor, router: Tensor) -> Any:
        y = rms_norm(x, w)
        return quantized(y.flatten(0, 1)), y @ router

    fused(layer, random(2, 3, K), random(K), random(K, 4))


def test_a_way_around_the_region_ends_it():
    """What the gate of a router multiplies depends on the norm by a product that is not ours."""

    def layer(x: Tensor, w: Tensor, square: Tensor) -> Any:
        y = rms_norm(x, w)
        return quantized((y * (y @ square)).flatten(0, 1))

    gm = graph_of(layer, random(2, 3, K), random(K), random(K, K))
    assert PASS(gm).changed == 0


def test_rows_that_no_program_holds():
    def layer(x: Tensor) -> Any:
        return quantized(functional.layer_norm(x, (20480,)))

    assert declined(layer, random(2, 20480)) == (
        "its quantization is a kernel of its own: rows of 20480 columns are longer than 16384, which is what one "
        "program holds"
    )


def test_a_statistic_of_the_tensor_is_no_row():
    def layer(x: Tensor) -> Any:
        return quantized(functional.layer_norm(x, (K,)), "fp8_per_tensor_dynamic")

    assert "statistic of more than a row" in declined(layer, random(2, K))


def test_positions_are_repeated_in_another_way():
    def layer(x: Tensor, positions: Tensor) -> Any:
        return quantized(functional.layer_norm(x + positions, (K,)).flatten(0, 1))

    reason = declined(layer, random(2, 3, K), random(3, K))
    assert "is repeated along other rows than the last ones of (2, 3)" in reason


def test_one_tensor_is_repeated_in_two_ways():
    def layer(x: Tensor, b: Tensor) -> Any:
        y = functional.layer_norm(x.view(2, 2, K) + b, (K,))
        return quantized((y.view(2, 2, 1, K) * b).view(4, K))

    assert "is repeated along other rows than the last ones" in declined(layer, random(4, K), random(2, 1, K))

    def other(x: Tensor, b: Tensor) -> Any:
        y = functional.layer_norm(x.view(4, 2, K) + b, (K,))
        return quantized((y.view(2, 4, K) * b.view(4, 1, K)[:2]).view(8, K))

    fused(other, random(8, K), random(4, 1, K))


def test_a_number_in_the_memory_of_another_device():
    """Eager mode takes a tensor of one number from the CPU; a kernel of another device cannot read it there."""

    def layer(x: Tensor, factor: Tensor) -> Any:
        return quantized(functional.layer_norm(x, (K,)) * factor)

    gm = graph_of(layer, random(M, K).to("meta"), torch.tensor(0.5))
    result = FuseQuantize(devices=("meta",))(gm)
    assert result.changed == 0
    assert "is on cpu, where its kernel cannot read it" in result.rejects[0].reason


REDUCED = {
    "count": lambda x: (x > 0).sum(-1, keepdim=True),
    "float64": lambda x: x.double().sum(-1, keepdim=True),
    "sum in float64": lambda x: x.sum(-1, keepdim=True, dtype=torch.float64),
    "maximum of integers": lambda x: (x * 100).int().amax(-1, keepdim=True),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_row_is_reduced_in_float32_or_elsewhere(name: str):
    gm = graph_of(lambda x: quantized((x * REDUCED[name](x)).to(x.dtype)), random(M, K))
    assert PASS(gm).changed == 0


def test_a_long_way_back():
    def layer(x: Tensor) -> Any:
        for _ in range(1200):
            x = -x
        return quantized(functional.layer_norm(x, (K,)))

    fused(layer, random(M, K))


# Bodies


def test_equal_layers_share_a_body():
    def layer(x: Tensor, w: Tensor) -> Any:
        first, *rest = quantized(rms_norm(x, w))
        return first, rest, quantized(rms_norm(x + 1, w))

    gm = fused(layer, random(M, K), random(K), count=2)
    names = [call.args[0] for call in calls(gm)]
    assert len(set(names)) == 2
    assert fused(layer, random(9, K), random(K), count=2) is not gm
    assert all(body_of(name).columns == K for name in names)
