"""Random graphs before a quantization: whatever the pass takes, no bit moves; what it leaves has a reason."""

from typing import Any

import pytest
import torch
from fused_graphs import BLOCK, graph_of, product, quantized, random, weight
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from olq_fx.kernels.fused_quantize import Body, body_of, fused_quantize
from olq_fx.passes.body_stages import KINDS, REDUCTIONS, kind_of
from olq_fx.passes.fuse_quantize import FuseQuantize
from olq_fx.testing import assert_same_bits

BATCH, LENGTH, K, N = 2, 3, 128, 128
ROWS = BATCH * LENGTH

UNARY = {
    "neg": torch.neg,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "abs": torch.abs,
    "half": lambda x: x * 0.5,
    "wide": lambda x: torch.exp(-x.float().abs()).to(x.dtype),
    "flat": lambda x: x.view(ROWS, N).view(BATCH, LENGTH, N),
    "positive": lambda x: torch.where(x > 0, x, 0.25),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "reversed": lambda x: x.flip(-1),
    "norm": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 0.5).to(x.dtype),
    "centered": lambda x: x - x.mean(-1, keepdim=True),
    "column sums": lambda x: x / (1 + x.float().abs().sum(0, keepdim=True)).to(x.dtype),
}
BINARY = {"add": torch.add, "mul": torch.mul, "max": torch.maximum, "sub": torch.sub}
SHAPES = {
    "full": (BATCH, LENGTH, N),
    "row": (BATCH, LENGTH, 1),
    "column": (N,),
    "batch": (BATCH, 1, N),
    "batch row": (BATCH, 1, 1),
    "position": (LENGTH, N),
    "number": (),
    "one": (1, 1, 1),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

STEPS = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY))),
    st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), st.sampled_from(sorted(SHAPES))),
    st.tuples(st.just("product"), st.sampled_from(sorted(BINARY))),
    st.tuples(st.just("earlier"), st.sampled_from(sorted(BINARY)), st.integers(0, 5)),
    st.tuples(st.just("read")),
)


def program(steps: list[Any], dtype: torch.dtype, begins: str, format: str) -> tuple[Any, list[Any]]:
    """A function, and its inputs."""
    kinds = dtype, torch.float32, torch.int64
    captured = [
        (1000 * random(*SHAPES[step[2]], dtype=dtype, seed=i)).to(kinds[i % 3])
        for i, step in enumerate(steps)
        if step[0] == "binary"
    ]
    weights = [weight(N, K, seed=i) for i in range(4)]

    def layer(x: Tensor, captured: list[Tensor], weights: list[list[Tensor]]) -> Any:
        parts, rest, spare = quantized(x), list(captured), list(weights)

        def made() -> Tensor:
            return product(parts, spare.pop(), K, dtype=dtype).view(BATCH, LENGTH, N)

        y = made() if begins == "product" else x[:, :N].contiguous().view(BATCH, LENGTH, N)
        seen, read = [y], []
        for step in steps:
            if step[0] == "unary":
                y = UNARY[step[1]](y)
            elif step[0] == "binary":
                y = BINARY[step[1]](y, rest.pop(0))
            elif step[0] == "product" and spare:
                y = BINARY[step[1]](y, made())
            elif step[0] == "earlier":
                y = BINARY[step[1]](y, seen[step[2] % len(seen)])
            elif step[0] == "read":
                read.append(y.float().sum(-1))
            y = y.to(dtype)
            seen.append(y)
        return quantized(y.reshape(ROWS, N), format), read

    return layer, [random(ROWS, K, dtype=dtype), captured, weights]


@given(
    steps=st.lists(STEPS, max_size=7),
    dtype=st.sampled_from(sorted(DTYPES)),
    begins=st.sampled_from(["product", "input"]),
    format=st.sampled_from([BLOCK, "mxfp8", "nvfp4_per_token", "int8_per_token"]),
)
def test_no_bit_moves(steps: list[Any], dtype: str, begins: str, format: str):
    layer, inputs = program(steps, DTYPES[dtype], begins, format)
    gm = graph_of(layer, *inputs)
    before, expected = str(gm.graph), gm(*inputs)
    result = FuseQuantize(devices=("cpu",))(gm)
    gm.recompile()
    gm.graph.lint()
    for found, wanted in zip(tree_leaves(gm(*inputs)), tree_leaves(expected), strict=True):
        assert_same_bits(found, wanted)
    if not result.changed:
        assert str(gm.graph) == before
    for reject in result.rejects:
        assert len(reject.reason) > 40, reject
    again = FuseQuantize(devices=("cpu",))(gm)
    assert again.changed == 0
    for call in gm.graph.find_nodes(op="call_function", target=fused_quantize):
        _check_stages(call)


def _check_stages(call: Any) -> None:
    """The stages that a template inlines compute what the body does, element by element."""
    body = body_of(call.args[0])
    module: Any = body.function
    placeholders = module.graph.find_nodes(op="placeholder")
    values = [(1000 * random(*node.meta["val"].shape, seed=9)).to(node.meta["val"].dtype) for node in placeholders]
    expected = module(*values)
    for found, wanted in zip(_staged(body, module, values), expected, strict=True):
        assert_same_bits(torch.broadcast_to(found, wanted.shape).to(wanted.dtype), wanted, any_nan=True)


def _staged(body: Body, module: Any, values: list[Tensor]) -> list[Tensor]:
    placeholders = module.graph.find_nodes(op="placeholder")
    products = [value for node, value in zip(placeholders, values, strict=True) if kind_of(node) == "product"]
    tensors = [value for node, value in zip(placeholders, values, strict=True) if kind_of(node) != "product"]
    rows = torch.arange(ROWS)[:, None]
    known: dict[str, Any] = {"m": rows, "n": torch.arange(N)[None, :]}
    known |= {name: rows // int(name[2:]) for name in body.inputs if name.startswith("m_")}
    known |= {f"y{i}": value.float() for i, value in enumerate(products)}
    known |= {f"t{i}": value for i, value in enumerate(tensors)}
    results = []
    for i, stage in enumerate(body.stages):
        found = stage.graph(*(known.get(name) for name in body.inputs))
        if stage.reduction:
            taken = _reduced(i, stage.reduction, torch.broadcast_to(found, (ROWS, N)))
            # As the template does it: in float32, rounded to the dtype that the reduction has.
            known |= {name: value.to(stage.dtype).float() for name, value in taken.items()}
        else:
            results.append(found)
    return results


def _reduced(i: int, reduction: str, value: Tensor) -> dict[str, Tensor]:
    if reduction == "moments":
        variance, mean = torch.ops.aten.var_mean.correction(value, [-1], correction=0, keepdim=True)
        return {f"r{i}": variance, f"r{i}_mean": mean}
    aten = torch.ops.aten
    functions = {"mean": aten.mean.dim, "sum": aten.sum.dim_IntList, "amax": aten.amax.default}
    return {f"r{i}": functions[reduction](value, [-1], True)}


def test_the_words_of_bodies():
    assert set(REDUCTIONS.values()) == {"mean", "sum", "amax", "moments"}
    assert KINDS == ("product", "full", "column", "row", "scalar")


@pytest.mark.parametrize("steps", [[("unary", "norm"), ("read",)], [("earlier", "add", 0), ("unary", "silu")]])
def test_examples_are_fused(steps: list[Any]):
    layer, inputs = program(steps, torch.bfloat16, "product", BLOCK)
    assert FuseQuantize(devices=("cpu",))(graph_of(layer, *inputs)).changed == 1


@pytest.mark.parametrize("shape", [(ROWS, N), (ROWS, 1), (N,), ()], ids=str)
def test_integers_are_rounded_first(shape: tuple[int, ...]):
    """Eager mode adds a tensor of integers to a bfloat16 one after it has made it bfloat16."""

    def layer(x: Tensor, w: list[Tensor], whole: Tensor) -> Any:
        return quantized(product(quantized(x), w, K) + whole)

    integers = torch.randint(0, 5000, shape, generator=torch.Generator().manual_seed(0))
    gm = graph_of(layer, random(ROWS, K), weight(N, K), integers)
    assert FuseQuantize(devices=("cpu",))(gm).changed == 1
    [call] = gm.graph.find_nodes(op="call_function", target=fused_quantize)
    module: Any = body_of(call.args[0]).function
    values = [integers if node.meta["val"].dtype == torch.int64 else random(ROWS, N) for node in module.graph.nodes
              if node.op == "placeholder"]  # fmt: skip
    [found], [expected] = _staged(body_of(call.args[0]), module, values), module(*values)
    assert_same_bits(found.to(expected.dtype), expected)
