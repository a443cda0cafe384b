"""Formats whose groups are wider than a tile: which products quantize on load what others compute, and which do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_graphs import BLOCK, PRODUCT, graph_of, product, quantized, random, weight
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional

from olq_fx import torch_private
from olq_fx.formats import FORMATS
from olq_fx.kernels.fused_quantize import fused_quantize
from olq_fx.kernels.on_load import LINEAR_ON_LOAD, fused_maxima, maxima_of
from olq_fx.passes.fuse_quantize import FuseQuantize
from olq_fx.testing import assert_same_bits

M, K, N = 6, 256, 128
PASS = FuseQuantize(devices=("cpu",))
WIDE = [name for name, format in FORMATS.items() if format.activation and maxima_of(format) is not None]
WEIGHTS = {
    "fp8_per_token": "fp8_per_channel_static",
    "mxfp4_dualscale": "mxfp4_dualscale",
    "nvfp4_per_token": "nvfp4",
    "int8_per_token": "int8_per_channel_static",
}


def linear(x: Tensor | list[Tensor], w: list[Tensor], format: str, **given: Any) -> Tensor:
    """The product of values or of parts in a format with its weight."""
    parts = quantized(x, format) if isinstance(x, Tensor) else x
    k = w[0].shape[1] * (2 if FORMATS[format].packed else 1)
    values = {"bias": None, "residual": None, "kernel": ""} | given
    args = (parts, format, w, WEIGHTS[format], k, torch.bfloat16, values["bias"], values["residual"])
    return PRODUCT(*args, values["kernel"]) if values["kernel"] else PRODUCT(*args)


def calls(gm: GraphModule, target: Any) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def fused(function: Callable[..., Any], *inputs: Any, on_load: int) -> GraphModule:
    """The graph after the pass, which computes the same bits, and in which a second run changes nothing."""
    gm = graph_of(function, *inputs)
    expected = gm(*inputs)
    result = PASS(gm)
    gm.recompile()
    gm.graph.lint()
    assert len(calls(gm, LINEAR_ON_LOAD)) == on_load, result
    for found, wanted in zip(_leaves(gm(*inputs)), _leaves(expected), strict=True):
        assert_same_bits(found, wanted)
    again = PASS(gm)
    assert again.changed == 0
    assert not again.notes
    assert all("val" in node.meta or node.op == "output" for node in gm.graph.nodes)
    return gm


def _leaves(values: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(values)


def declined(function: Callable[..., Any], *inputs: Any) -> str:
    """The reason for which the products before a quantization are kernels of their own."""
    gm = graph_of(function, *inputs)
    result = PASS(gm)
    assert not calls(gm, LINEAR_ON_LOAD)
    assert not calls(gm, fused_maxima)
    assert not result.notes
    [reject] = result.rejects
    return reject.reason


def mlp(format: str) -> Callable[..., Any]:
    """A norm, a gated product and a last one."""

    def layer(x: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor]) -> Tensor:
        parts = quantized(functional.layer_norm(x, (K,)), format)
        y, z = linear(parts, gate, format), linear(parts, up, format)
        return linear(functional.silu(y) * z, down, format, residual=x)

    return layer


def weights(format: str, *shapes: tuple[int, int]) -> list[list[Tensor]]:
    return [weight(n, k, WEIGHTS[format], seed=i) for i, (n, k) in enumerate(shapes)]


@pytest.mark.parametrize("format", WIDE)
def test_an_mlp_is_two_calls_after_the_norm_which_sets_maxima_to_zero(format: str):
    gm = fused(mlp(format), random(M, K), *weights(format, (N, K), (N, K), (K, N)), on_load=1)
    [norm], [gated], [down] = (calls(gm, target) for target in (fused_quantize, fused_maxima, LINEAR_ON_LOAD))
    assert norm.args[5] == (1,)
    [zeros] = gated.args[5]
    assert zeros.args == (norm, len(norm.meta["val"]) - 1)
    assert list(zeros.users) == [gated]
    assert down.args[7] is not None
    assert not calls(gm, PRODUCT)


def test_without_such_a_norm_maxima_are_set_to_zero_by_a_kernel_of_their_own():
    def layer(parts: list[Tensor], gate: list[Tensor], up: list[Tensor], down: list[Tensor]) -> Tensor:
        y, z = linear(parts, gate, "int8_per_token"), linear(parts, up, "int8_per_token")
        return linear(functional.silu(y) * z, down, "int8_per_token")

    parts = quantized(random(M, K), "int8_per_token")
    gm = fused(layer, parts, *weights("int8_per_token", (N, K), (N, K), (K, N)), on_load=1)
    assert calls(gm, fused_maxima)[0].args[5] == []


def test_the_choice_is_told_with_its_reason():
    gm = graph_of(mlp("fp8_per_token"), random(M, K), *weights("fp8_per_token", (N, K), (N, K), (K, N)))
    result = PASS(gm)
    assert not result.rejects
    [note] = result.notes
    assert "quantized by what reads it: quantizing on load, in 4 tiles of what reads it, takes " in note
    assert note.endswith(" us (cost model, 6 rows)")


def test_products_in_a_row_quantize_what_they_load_and_take_maxima_of_what_they_make():
    def layers(x: Tensor, *each: list[Tensor]) -> Tensor:
        x = functional.layer_norm(x, (K,))
        for w in each:
            x = functional.relu(linear(x, w, "int8_per_token", bias=w[1].flatten().bfloat16()))
        return x

    gm = fused(layers, random(M, K), *weights("int8_per_token", (N, K), (K, N), (N, K)), on_load=1)
    first, second = calls(gm, fused_maxima)
    assert [each[9] for each in (*first.args[1], *second.args[1])] == ["", "amax"]
    assert calls(gm, fused_quantize)[0].args[5] == (1, 1)


def test_a_product_goes_straight_into_a_quantization():
    def layers(x: Tensor, first: list[Tensor], second: list[Tensor]) -> Tensor:
        x = functional.layer_norm(x, (K,))
        return linear(linear(x, first, "int8_per_token"), second, "int8_per_token")

    fused(layers, random(M, K), *weights("int8_per_token", (N, K), (K, N)), on_load=1)

    def group(x: Tensor, first: list[Tensor], second: list[Tensor]) -> Tensor:
        return product(quantized(product(quantized(x), first), BLOCK), second, N)

    gm = fused(group, random(M, K), weight(N, K), weight(K, N, seed=2), on_load=0)
    [call] = calls(gm, fused_quantize)
    assert len(call.args[1]) == 1


def test_what_the_products_make_may_be_read_elsewhere_too():
    def layer(x: Tensor, *w: list[Tensor]) -> tuple[Tensor, Tensor]:
        y = functional.silu(linear(functional.layer_norm(x, (K,)), w[0], "int8_per_token"))
        return linear(y * 2, w[1], "int8_per_token"), y

    gm = fused(layer, random(M, K), *weights("int8_per_token", (K, K), (N, K)), on_load=1)
    assert len(calls(gm, fused_maxima)[0].meta["val"]) == 3


def test_several_products_quantize_what_they_read():
    def layer(x: Tensor, *w: list[Tensor]) -> list[Tensor]:
        parts = quantized(functional.layer_norm(x, (K,)), "int8_per_token")
        y = linear(parts, w[0], "int8_per_token") * linear(parts, w[1], "int8_per_token")
        read = quantized(y, "int8_per_token")
        return [linear(read, each, "int8_per_token") for each in w[2:]]

    fused(layer, random(M, K), *weights("int8_per_token", (N, K), (N, K), *[(64, N)] * 3), on_load=3)


def test_halves_of_one_product_are_one_kernel_in_the_comparison():
    """What is saved is the quantization and one way through memory; two products would be a kernel more."""

    def layer(x: Tensor, both: list[Tensor], down: list[Tensor]) -> Tensor:
        y, z = linear(functional.layer_norm(x, (K,)), both, "int8_per_token").chunk(2, -1)
        return linear(functional.silu(y) * z, down, "int8_per_token")

    inputs = random(M, K), *weights("int8_per_token", (2 * N, K), (K, N))
    fused(layer, *inputs, on_load=1)
    [note] = PASS(graph_of(layer, *inputs)).notes
    assert "saves 2.5 us" in note


# Near misses


def with_readers(read: Callable[[list[Tensor], list[Tensor]], Any], format: str = "int8_per_token") -> str:
    """The reason for which something that reads the parts of a quantization after a product prevents it."""

    def layer(x: Tensor, up: list[Tensor], down: list[Tensor]) -> Any:
        y = functional.silu(linear(functional.layer_norm(x, (K,)), up, format))
        return read(quantized(y, format), down)

    return declined(layer, random(M, K), *weights(format, (N, K), (K, N)))


def test_whoever_reads_parts_and_is_no_product_needs_them_in_memory():
    format = "int8_per_token"
    reason = with_readers(lambda parts, w: (linear(parts, w, format), parts[1] * 2))
    assert reason.startswith(
        "the product before its quantization is a kernel of its own: int8_per_token has a statistic of more than a "
        "piece of a row, which no tile of a product holds, and mul"
    )
    assert reason.endswith("reads its parts and is no product of them")
    assert "output reads its parts and is no product of them" in with_readers(
        lambda parts, w: (linear(parts, w, format), parts[0])
    )


def test_a_product_with_another_kernel_needs_them_in_memory():
    def read(parts: list[Tensor], w: list[Tensor]) -> Any:
        return linear(parts, w, "int8_per_token"), linear(parts, w, "int8_per_token", kernel="reference")

    assert "another kernel must run quantized_linear" in with_readers(read)
    assert with_readers(read).endswith(", which reads its parts")


def test_parts_that_are_read_as_another_format_are_no_operand():
    def read(parts: list[Tensor], w: list[Tensor]) -> Any:
        swapped = [parts[0], parts[1] * 2]
        return linear(swapped, w, "int8_per_token")

    assert "reads its parts and is no product of them" in with_readers(read)


def test_many_wide_readers_would_quantize_more_than_a_kernel_does():
    def layer(x: Tensor, up: list[Tensor], *others: list[Tensor]) -> Any:
        parts = quantized(
            functional.silu(linear(functional.layer_norm(x, (K,)), up, "int8_per_token")), "int8_per_token"
        )
        return [linear(parts, w, "int8_per_token") for w in others]

    reason = declined(layer, random(M, K), *weights("int8_per_token", (N, K), *[(K, N)] * 6))
    assert "and quantizing on load, in 24 tiles of what reads it, takes " in reason
    assert reason.endswith(" us (cost model, 6 rows)")


def test_the_maximum_of_a_tensor_is_taken_elsewhere():
    def layer(x: Tensor, up: list[Tensor]) -> Any:
        y = functional.silu(linear(functional.layer_norm(x, (K,)), up, "int8_per_token"))
        return quantized(y, "fp8_per_tensor_dynamic")

    reason = declined(layer, random(M, K), *weights("int8_per_token", (N, K)))
    assert reason.endswith("the maximum of the whole tensor is taken by a kernel of its own")


def test_a_reduction_between_is_no_chain():
    def layer(x: Tensor, up: list[Tensor], down: list[Tensor]) -> Tensor:
        y = linear(functional.layer_norm(x, (K,)), up, "int8_per_token")
        return linear(torch.softmax(y.float(), -1).to(y.dtype), down, "int8_per_token")

    fused(layer, random(M, K), *weights("int8_per_token", (N, K), (K, N)), on_load=0)


def test_a_transposed_view_between_is_no_chain():
    def layer(x: Tensor, up: list[Tensor], down: list[Tensor]) -> Tensor:
        y = linear(functional.layer_norm(x, (K,)), up, "int8_per_token")
        return linear(functional.silu(y.t()), down, "int8_per_token")

    fused(layer, random(N, K), *weights("int8_per_token", (N, K), (K, N)), on_load=0)


def with_any_rows(function: Callable[..., Any], x: Tensor, *others: Any) -> GraphModule:
    """The graph for any number of rows of `x`."""
    free = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(x, symbolic_context=free)
        fixed = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * 2)
        rest = torch.utils._pytree.tree_map(lambda each: mode.from_tensor(each, symbolic_context=fixed), others)
        with torch.no_grad():
            gm = make_fx(function, torch_private.inductor_decompositions())(fake, *rest)
    torch_private.drop_dead_code(gm)
    return gm


def test_rows_whose_number_may_change_are_compared_for_many():
    """Six rows are quantized on load; with many there are too many tiles."""

    def layer(x: Tensor, *w: list[Tensor]) -> Tensor:
        y = functional.silu(linear(functional.layer_norm(x, (K,)), w[0], "int8_per_token"))
        return linear(y, w[1], "int8_per_token")

    inputs = random(M, K), *weights("int8_per_token", (N, K), (2048, N))
    fused(layer, *inputs, on_load=1)
    gm = with_any_rows(layer, *inputs)
    result = PASS(gm)
    assert not calls(gm, LINEAR_ON_LOAD)
    [reject] = result.rejects
    assert reject.reason.endswith(" us (cost model, 4096 rows)")
    gm = with_any_rows(layer, inputs[0], *weights("int8_per_token", (N, K), (64, N)))
    PASS(gm)
    gm.recompile()
    assert len(calls(gm, LINEAR_ON_LOAD)) == 1
