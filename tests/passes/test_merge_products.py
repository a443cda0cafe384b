"""One call of the products of layers on one input: which graphs it takes, and that no bit moves."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_graphs import BLOCK, PRODUCT, QUANTIZE, graph_of, product, quantized, random, weight
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.linear_products import linear_products
from olq_fx.kernels.tuned_problem import Problem
from olq_fx.kernels.tuned_tables import Choice, TunedTable, use_tuned
from olq_fx.passes.base import PassResult
from olq_fx.passes.merge_products import MOST, MergeProducts
from olq_fx.passes.pipeline import LATE_PASSES
from olq_fx.testing import assert_same_bits

M, K, N = 6, 256, 128
PASS = MergeProducts(devices=("cpu",), capability=90)


def calls(gm: GraphModule) -> list[Any]:
    return list(gm.graph.find_nodes(op="call_function", target=linear_products))


def apply(gm: GraphModule) -> PassResult:
    result = PASS(gm)
    gm.recompile()
    gm.graph.lint()
    return result


def merged(function: Callable[..., Any], *inputs: Any, sizes: list[int]) -> GraphModule:
    """The graph after the pass, which computes the same bits as before, and in which a second run finds nothing."""
    gm = graph_of(function, *inputs)
    expected = gm(*inputs)
    result = apply(gm)
    assert [len(call.args[2]) for call in calls(gm)] == sizes, result
    assert result.changed == len(sizes)
    for found, wanted in zip(tree_leaves(gm(*inputs)), tree_leaves(expected), strict=True):
        assert_same_bits(found, wanted)
    again = PASS(gm)
    assert (again.changed, again.notes) == (0, ())
    for node in gm.graph.nodes:
        assert "val" in node.meta or node.op == "output", node
    return gm


def reasons(function: Callable[..., Any], *inputs: Any) -> list[str]:
    return [reject.reason for reject in apply(graph_of(function, *inputs)).rejects]


def test_siblings_of_several_widths_are_one_call_and_keep_their_weights():
    """Queries have more heads than keys and values."""

    def attention(x: Tensor, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> Any:
        parts = quantized(x)
        return product(parts, q), product(parts, k), product(parts, v)

    weights = weight(2 * N, K), weight(N, K, seed=2), weight(72, K, seed=3)
    gm = merged(attention, random(M, K), *weights, sizes=[3])
    [call] = calls(gm)
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    assert [layer[0] for layer in call.args[2]] == [given[1:3], given[3:5], given[5:7]]
    assert {each.target for each in call.users} == {operator.getitem}
    assert [tuple(value.shape) for value in call.meta["val"]] == [(M, 2 * N), (M, N), (M, 72)]


def test_results_keep_the_meta_of_their_layers():
    gm = graph_of(lambda x, a, b: [product(quantized(x), w) for w in (a, b)], random(M, K), weight(N, K), weight(N, K))
    share(gm)
    for i, node in enumerate(gm.graph.find_nodes(op="call_function", target=PRODUCT)):
        node.meta["nn_module_stack"] = {"root": (f"L['self'].layer{i}", torch.nn.Linear)}
        node.meta["stack_trace"] = f"line {i}"
    result = apply(gm)
    [call] = calls(gm)
    assert call.meta["stack_trace"] == "line 0"
    assert sorted(user.meta["stack_trace"] for user in call.users) == ["line 0", "line 1"]
    assert result.notes == ("layer0, layer1 are one kernel",)


def share(gm: GraphModule) -> None:
    """Let all quantizations of a graph be the first, as `share_quantization` does."""
    first, *rest = gm.graph.find_nodes(op="call_function", target=QUANTIZE)
    for node in rest:
        for part in list(node.users):
            [same] = [each for each in first.users if each.args[1] == part.args[1]]
            part.replace_all_uses_with(same)
            gm.graph.erase_node(part)
        gm.graph.erase_node(node)


def test_a_layer_alone_is_a_call_with_one_result():
    merged(lambda x, w, b: product(quantized(x), w, bias=b), random(M, K), weight(N, K), random(N), sizes=[1])


def test_original_precision_has_siblings_too():
    def layers(x: Tensor, a: list[Tensor], b: list[Tensor]) -> Any:
        return [PRODUCT([x], "", w, "fp8_per_block_static", K, x.dtype, None, None) for w in (a, b)]

    merged(layers, random(M, K), weight(N, K), weight(N, K, seed=2), sizes=[2])


def test_biases_are_of_each():
    def layers(x: Tensor, w: list[Tensor], a: Tensor, b: Tensor) -> Any:
        parts = quantized(x)
        # The second bias is computed after the first product.
        first = product(parts, w, bias=a)
        return first, product(parts, w, bias=b * 2)

    merged(layers, random(M, K), weight(N, K), random(N), random(N, seed=2), sizes=[2])


def test_what_is_quantized_apart_is_not_merged():
    def layers(x: Tensor, y: Tensor, w: list[Tensor]) -> Any:
        return product(quantized(x), w), product(quantized(y), w)

    merged(layers, random(M, K), random(M, K, seed=2), weight(N, K), sizes=[1, 1])


def test_a_device_whose_compiler_has_no_such_kernel():
    gm = graph_of(lambda x, w: product(quantized(x), w), random(M, K), weight(N, K))
    before = str(gm.graph)
    assert MergeProducts()(gm) == PassResult(0)
    assert str(gm.graph) == before
    assert MergeProducts in LATE_PASSES


# Reasons


def pair(first: dict[str, Any], second: dict[str, Any], x: Tensor | None = None, n: int = N) -> tuple[Any, ...]:
    """Two layers on one input, each with arguments of its own, and the inputs."""
    formats = [each.pop("weight_format", "fp8_per_block_static") for each in (first, second)]
    kernels = [each.pop("kernel", "") for each in (first, second)]

    def layers(x: Tensor, weights: list[list[Tensor]], bias: Tensor, residual: Tensor) -> Any:
        parts = quantized(x)
        return [
            PRODUCT(
                *(parts, BLOCK, w, format, x.shape[1], given.get("dtype", torch.bfloat16)),
                *(bias if given.get("bias") else None, residual if given.get("residual") else None, kernel),
            )
            for w, format, given, kernel in zip(weights, formats, (first, second), kernels, strict=True)
        ]

    x = random(M, K) if x is None else x
    weights = [weight(n, x.shape[1], format, seed=i) for i, format in enumerate(formats)]
    return layers, x, weights, random(n), random(x.shape[0], n)


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"weight_format": "mxfp8"}, "weights in mxfp8, there fp8_per_block_static"),
    "dtype": ({"dtype": torch.float16}, "results in float16, there bfloat16"),
    "bias": ({"bias": True}, "bias: yes, there no"),
    "residual": ({"residual": True}, "residual: yes, there no"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_siblings_differ_in(name: str):
    given, reason = DIFFERENT[name]
    layers, *inputs = pair({}, dict(given))
    gm = graph_of(layers, *inputs)
    result = apply(gm)
    assert [len(call.args[2]) for call in calls(gm)] == [1, 1]
    [reject] = result.rejects
    assert reject.reason == f"its product is not merged with that of {'quantized_linear'}: {reason}"


@pytest.mark.parametrize("kernel", ["reference", "triton_fast_accum"])
def test_another_kernel_must_run_one(kernel: str):
    layers, *inputs = pair({}, {"kernel": kernel})
    gm = graph_of(layers, *inputs)
    [reject] = apply(gm).rejects
    assert reject.reason == "its product is a kernel of its own: another kernel must run it"
    assert [len(call.args[2]) for call in calls(gm)] == [1]


FORMS = {
    "one row": ((1, 256, 128), "one row is multiplied without a matrix instruction"),
    "few rows": ((6, 2048, 128), "6 rows are so few that 4 programs share each of its sums"),
    "many rows": ((2048, 256, 1280), "2048 rows are enough for programs that take one tile after the other"),
    "nothing": ((0, 256, 128), "there is nothing to multiply"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_the_operator_chooses_when_it_runs(name: str):
    (m, k, n), reason = FORMS[name]
    layers, *inputs = pair({}, {}, random(m, k), n)
    gm = graph_of(layers, *inputs)
    before = str(gm.graph)
    result = apply(gm)
    assert [each.reason for each in result.rejects] == [f"its product is a kernel of its own: {reason}"] * 2
    assert str(gm.graph) == before


def test_the_form_of_a_layer_alone_is_no_refusal():
    gm = graph_of(lambda x, w: product(quantized(x), w), random(1, K), weight(N, K))
    assert apply(gm) == PassResult(0)


def test_rows_that_are_a_symbol():
    layers, *inputs = pair({}, {})
    gm = make_fx(layers, tracing_mode="symbolic")(*inputs)
    result = apply(gm)
    assert result.changed == 0
    reason = "its number of rows is a symbol, and which form is best is known when it runs"
    assert {each.reason for each in result.rejects} == {f"its product is a kernel of its own: {reason}"}


def test_a_dtype_that_the_kernels_do_not_compute_in():
    layers, *inputs = pair({"dtype": torch.float64}, {"dtype": torch.float64})
    assert set(reasons(layers, *inputs)) == {
        "its product is a kernel of its own: computes in float32, bfloat16 and float16, not float64"
    }


def test_a_tuned_table_that_knows_one():
    problem = Problem(
        family="product", activation=BLOCK, weight="fp8_per_block_static", dtype="bfloat16", m=8, n=N, k=K
    )
    first = Blocking(16, 128, 128, swap=True)
    layers, *inputs = pair({}, {})
    with use_tuned(TunedTable.of({problem: Choice(blocking=first, first=first)}, 90)):
        found = reasons(layers, *inputs)
    reason = "a tuned table says how it is cut, which its operator follows"
    assert found == [f"its product is a kernel of its own: {reason}"] * 2
    assert reasons(layers, *inputs) == []


def test_a_sibling_that_needs_the_result_of_another():
    def layers(x: Tensor, a: list[Tensor], b: list[Tensor], start: Tensor) -> Any:
        parts = quantized(x)
        first = product(parts, a, residual=start)
        return product(parts, b, residual=torch.relu(first)), product(parts, a, residual=start * 2)

    inputs = random(M, K), weight(N, K), weight(N, K, seed=2), random(M, N)
    merged(layers, *inputs, sizes=[2, 1])
    assert reasons(layers, *inputs) == ["its product is not merged with siblings that it needs the results of"]


def test_more_siblings_than_a_kernel_has_arguments_for():
    def layers(x: Tensor, w: list[Tensor]) -> Any:
        parts = quantized(x)
        return [product(parts, w) for _ in range(MOST + 2)]

    inputs = random(M, K), weight(N, K)
    merged(layers, *inputs, sizes=[MOST, 2])
    [reason] = reasons(layers, *inputs)
    assert reason == (
        "its product is not merged with siblings of which there are 8, as many as one kernel has arguments for"
    )


def test_two_pairs_that_need_each_other_are_not_both_merged():
    """The first of either needs nothing, the second what the first of the other computes."""

    def layers(x: Tensor, y: Tensor, w: list[Tensor], start: Tensor) -> Any:
        here, there = quantized(x), quantized(y)
        a, b = product(here, w, residual=start), product(there, w, residual=start)
        return product(here, w, residual=b * 2), product(there, w, residual=a * 2)

    inputs = random(M, K), random(M, K, seed=2), weight(N, K), random(M, N)
    merged(layers, *inputs, sizes=[1, 2, 1])


def test_two_pairs_of_one_input_that_need_each_other():
    def layers(x: Tensor, w: list[Tensor], start: Tensor) -> Any:
        parts = quantized(x)
        a, b = product(parts, w), product(parts, w, residual=start)
        return product(parts, w, bias=None, residual=a * 2), product(parts, w, bias=b[0] * 2), product(parts, w)

    inputs = random(M, K), weight(N, K), random(M, N)
    merged(layers, *inputs, sizes=[2, 2, 1])


# Random graphs

LAYERS = st.tuples(
    st.sampled_from(["fp8_per_block_static", "mxfp8"]),
    st.booleans(),
    st.sampled_from(["", "start", "before"]),
    st.sampled_from([64, N]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)


@given(steps=st.lists(LAYERS, min_size=1, max_size=10))
def test_no_bit_moves(steps: list[Any]):
    formats = [each[0] for each in steps]

    def layers(x: Tensor, weights: list[list[Tensor]], start: dict[int, Tensor]) -> Any:
        parts = quantized(x)
        last: dict[int, Tensor] = {}
        results = []
        for w, (format, bias, residual, n, dtype) in zip(weights, steps, strict=True):
            added = {"": None, "start": start[n], "before": last.get(n)}[residual]
            given = start[n][0].neg() if bias else None
            y = PRODUCT(parts, BLOCK, w, format, K, dtype, given, added)
            last[n] = y * 0.5
            results.append(y)
        return results

    weights = [weight(each[3], K, format, seed=i) for i, (format, each) in enumerate(zip(formats, steps, strict=True))]
    inputs = random(M, K), weights, {n: random(M, n) for n in (64, N)}
    gm = graph_of(layers, *inputs)
    expected = gm(*inputs)
    result = apply(gm)
    assert sum(len(call.args[2]) for call in calls(gm)) == len(steps)
    assert result.changed == len(calls(gm))
    assert len(result.rejects) == len(calls(gm)) - 1
    for found, wanted in zip(tree_leaves(gm(*inputs)), tree_leaves(expected), strict=True):
        assert_same_bits(found, wanted)
    assert PASS(gm).changed == 0
