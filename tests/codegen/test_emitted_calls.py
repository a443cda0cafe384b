"""What is read from an emitted program: its calls, the bytes that they move, what is fused in them."""

from typing import Any

import fused_models
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from olq_fx.schemes import SCHEMES
from olq_fx.testing_emitted import EmittedCode, Emitter, emitted
from olq_fx.testing_emitted_calls import EmittedCall, calls_made
from olq_fx.testing_machine_code import Compiler

ROWS, D, WORDS = 6, 64, 1000


def embedded(ids: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A table that is read by rows, a product, a vector that is read by all rows."""
    return torch.relu(functional.embedding(ids, table) @ weight + bias)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).contiguous()


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x + 1


def total(x: Tensor) -> Tensor:
    """A kernel that takes the extent 1 for a constant."""
    return (x.float() * 2).sum(-1)


def inputs_of(name: str, device: str) -> list[Any]:
    def made(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device)

    if name == "embedded":
        return [torch.zeros(ROWS, dtype=torch.long, device=device), made(WORDS, D), made(D, D), made(D)]
    if name in ("broken", "total"):
        return [made(1, D)]
    mask = made(1, 1, ROWS, ROWS) if name == "masked" else None
    return [*(made(2, 4, ROWS, D) for _ in range(3)), mask]


FUNCTIONS = {"embedded": embedded, "attention": attention, "masked": attention, "broken": broken, "total": total}


def look(name: str, device: str) -> tuple[EmittedCode, tuple[EmittedCall, ...]]:
    code = emitted(FUNCTIONS[name], inputs_of(name, device), None, 90)
    return code, calls_made(code)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_are_those_of_the_tensors_and_no_more_than_is_reached(emitter: Emitter, device: str):
    code, calls = emitter.call(look, "embedded", device)
    assert [call.kind for call in calls] == ["loops", "operator", "loops"]
    assert tuple(call.name for call in calls if call.kind == "loops") == code.launches
    gather, product, rest = calls
    assert gather.computed == ("aten.embedding",)
    assert gather.moved == 8 * ROWS + 2 * 2 * ROWS * D  # numbers, rows of the table, rows
    assert product.moved == 2 * (ROWS * D + D * D + ROWS * D)
    assert rest.moved == 2 * (2 * ROWS * D + D)
    assert rest.computed == ("aten.add", "aten.relu")
    assert not any(call.only_quantizes for call in calls)


def test_ways_to_launch_a_kernel_of_loops_are_known(emitter: Emitter):
    code, _ = emitter.call(look, "embedded", "meta")
    for kernel in code.kernels:
        assert kernel.ways[0].constants["XBLOCK"] > 1
        assert kernel.ways[0].num_warps > 0


@pytest.mark.parametrize("name", ["embedded", "total"])
def test_kernels_of_loops_become_machine_code(emitter: Emitter, name: str):
    code, _ = emitter.call(look, name, "meta")
    with Compiler() as compiler:
        for kernel in code.kernels:
            found = kernel.machine_code(compiler)
            assert found.registers > 4
            assert not found.instructions
            assert found.capability == 90


@pytest.mark.parametrize(("name", "operator"), [("attention", "flash"), ("masked", "efficient")])
def test_attention_is_the_operator_that_a_gpu_has(emitter: Emitter, name: str, operator: str):
    _, calls = emitter.call(look, name, "meta")
    [found] = [call for call in calls if call.kind == "operator"]
    assert found.name == f"torch.ops.aten._scaled_dot_product_{operator}_attention.default"
    assert found.moved >= 2 * 4 * 2 * 4 * ROWS * D


def test_what_is_no_single_graph_is_refused(emitter: Emitter):
    with pytest.raises(Exception, match="graph_break"):
        emitter.call(look, "broken", "cpu")


def look_at_block(scheme: str | None) -> tuple[EmittedCode, tuple[EmittedCall, ...]]:
    module, inputs = fused_models.build("llama")
    code = emitted(module, inputs, scheme, 90)
    return code, calls_made(code)


@pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=() if name == "mxfp4" else pytest.mark.slow) for name in SCHEMES]
)
def test_every_call_of_a_block_is_seen(emitter: Emitter, scheme: str):
    code, calls = emitter.call(look_at_block, scheme)
    _, plain = emitter.call(look_at_block, None)
    assert [call.name for call in calls if call.kind != "operator"] == list(code.launches)
    assert [call.name for call in calls if call.kind == "operator"] == list(code.external)
    templates = {kernel.name for kernel in code.kernels if kernel.is_template}
    assert {call.name for call in calls if call.kind == "template"} == templates
    assert all(call.operators for call in calls if call.kind != "operator")
    layers = [call.operators.count("olq_fx.quantized_linear") for call in calls if call.kind == "template"]
    assert sum(layers) == 7
    assert 3 in layers
    assert sum(call.moved for call in calls) < sum(call.moved for call in plain)
    assert sum(call.only_quantizes for call in calls) == bool(SCHEMES[scheme].linear.activation)
