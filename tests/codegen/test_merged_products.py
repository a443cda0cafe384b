"""What Inductor emits for quantized layers on one input: one kernel, with the bits of each alone."""

import re
from typing import Any

import fused_models
import pytest
import torch
from product_cases import quantized
from torch import Tensor, nn

from olq_fx.kernels import triton_product
from olq_fx.schemes import SCHEMES
from olq_fx.testing import Compiler, EmittedCode, Emitter, Interpreter, assert_same_bits

LAYERS = ("q", "k", "v", "o")
OPERATOR = "torch.ops.olq_fx.quantized_linear.default"


def products(code: EmittedCode) -> list[Any]:
    """The kernels that multiply and do nothing else of ours."""
    return [kernel for kernel in code.kernels if "sum_over(" in kernel.source]


def alone(interpreter: Interpreter, scheme: str, model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """What the kernel of its operator computes of each layer."""
    slot = SCHEMES[scheme].linear
    activation, results = slot.activation or "", []
    for name in LAYERS:
        x, layer = inputs[name == "o"], getattr(model, name)
        a, b = quantized(x, activation), quantized(layer.weight.detach(), slot.weight, weight=True)
        given = b, slot.weight, x.shape[1], x.dtype, layer.bias.detach(), inputs[2] if name == "o" else None, 90
        results.append(interpreter.call(triton_product.quantized_linear, a, activation, *given))
    return results


SHOWN = {("fp8_per_block", 18, "bfloat16"), ("int8", 66, "float32"), ("nvfp4_weight_only", 18, "float16")}
CASES = {
    *SHOWN,
    *((scheme, rows, "bfloat16") for scheme in SCHEMES for rows in (18, 66)),
    *((scheme, 66, dtype) for scheme in ("mxfp8", "int8_per_channel_weight_only") for dtype in ("float16", "float32")),
}


def names(values: Any) -> Any:
    return [
        pytest.param(*each, marks=() if each in SHOWN else pytest.mark.slow, id="-".join(map(str, each)))
        for each in sorted(values)
    ]


@pytest.mark.parametrize(("scheme", "rows", "dtype"), names(CASES))
def test_every_layer_has_the_bits_that_it_has_alone(
    emitter: Emitter, interpreter: Interpreter, scheme: str, rows: int, dtype: str
):
    """Of other widths, of which not all are whole tiles; with biases, and one with a residual."""
    code = emitter.emit(fused_models.projections, scheme, rows, dtype, True)
    assert len(products(code)) == 2, code.reasons
    assert OPERATOR not in code.external
    assert code.notes == ("q, k, v are one kernel",)
    model, inputs = fused_models.projections(rows, dtype, True)
    for found, wanted in zip(code.run(interpreter), alone(interpreter, scheme, model, inputs), strict=True):
        assert_same_bits(found, wanted)


def test_what_is_computed_of_a_result_is_part_of_its_kernel(emitter: Emitter, interpreter: Interpreter):
    """Rounded in each step, as eager mode does it."""
    code = emitter.emit(fused_models.activated, "fp8_per_block")
    assert len(code.launches) == 2
    assert "relu" in code.launches[1]
    model, [x, row] = fused_models.activated()
    slot = SCHEMES["fp8_per_block"].linear
    a, b = quantized(x, slot.activation), quantized(model.o.weight.detach(), slot.weight, weight=True)
    given = a, slot.activation, b, slot.weight, x.shape[1], x.dtype, model.o.bias.detach(), None, 90
    y = interpreter.call(triton_product.quantized_linear, *given)
    [found] = code.run(interpreter)
    assert_same_bits(found, torch.relu(y) * row - 0.25)


def test_nothing_is_computed_in_a_kernel_of_several_layers(emitter: Emitter):
    """Its results are of several layers; rotation of queries and keys is a kernel of its own."""
    code = emitter.emit(fused_models.build, "fp8_per_block", "llama")
    [merged] = [kernel for kernel in products(code) if "tl.where(tile_n" in kernel.source]
    assert "finish(" in merged.source
    assert not re.search("cos|sin|neg", merged.name)


def test_rows_that_are_a_symbol_are_left_to_the_operator(emitter: Emitter):
    code = emitter.emit(fused_models.projections, "fp8_per_block", dynamic=True)
    assert code.external.count(OPERATOR) == 4
    assert any("its number of rows is a symbol" in reason for reason in code.reasons)


@pytest.mark.parametrize(("rows", "count"), [(1, 4), (2048, 0)])
def test_other_forms_are_left_to_the_operator(emitter: Emitter, rows: int, count: int):
    """One row; of many rows these layers are too narrow to have more tiles than there are multiprocessors."""
    code = emitter.emit(fused_models.projections, "fp8_per_block", rows)
    assert code.external.count(OPERATOR) == count


# Machine code


INSTRUCTIONS = {
    ("fp8_per_block", 80): r"^mma\.sync.*bf16",
    ("fp8_per_block", 89): r"^mma\.sync.*e4m3",
    ("fp8_per_block", 90): r"^wgmma.*e4m3",
    ("fp8_per_block", 100): r"^tcgen05\.mma.*f8f6f4",
    ("fp8_per_block", 120): r"^mma\.sync.*e4m3",
    ("int8", 80): r"^mma\.sync.*s8",
    ("int8", 90): r"^wgmma.*s8",
    ("mxfp8", 90): r"^wgmma.*bf16",
    ("mxfp8", 100): r"^tcgen05\.mma.*mxf8f6f4",
    ("mxfp8", 120): r"^mma\.sync.*mxf8f6f4",
    ("mxfp4_weight_only", 80): r"^mma\.sync.*bf16",
    ("mxfp4_weight_only", 89): r"^mma\.sync.*bf16",
    ("mxfp4_weight_only", 90): r"^wgmma.*bf16",
    ("mxfp4_weight_only", 100): r"^tcgen05\.mma.*f16",
    ("mxfp4_weight_only", 120): r"^mma\.sync.*bf16",
}
COMPILED = {("fp8_per_block", 80), ("fp8_per_block", 90), ("mxfp8", 100)}


@pytest.mark.parametrize(
    ("scheme", "capability"),
    [
        pytest.param(*case, marks=() if case in COMPILED else pytest.mark.slow, id=f"{case[0]}-sm_{case[1]}")
        for case in INSTRUCTIONS
    ],
)
@pytest.mark.parametrize("rows", [18, pytest.param(100, marks=pytest.mark.slow)])
def test_machine_code_has_the_instruction_and_does_not_spill(
    emitter: Emitter, compiler: Compiler, scheme: str, capability: int, rows: int
):
    code = emitter.emit(fused_models.projections, scheme, rows, "bfloat16", True, capability=capability)
    found = products(code)
    assert len(found) == 2
    for kernel in found:
        machine = kernel.machine_code(compiler)
        machine.assert_no_spills()
        machine.assert_fits()
        machine.assert_instruction(INSTRUCTIONS[scheme, capability])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [9, 18, 40, 100])
def test_every_scheme_stays_in_registers(emitter: Emitter, compiler: Compiler, scheme: str, capability: int, rows: int):
    code = emitter.emit(fused_models.projections, scheme, rows, "bfloat16", True, capability=capability)
    for kernel in products(code):
        kernel.machine_code(compiler).assert_no_spills()
