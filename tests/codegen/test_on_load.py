"""Programs in which a product quantizes what it loads: their values, and the machine code of their kernels."""

import dataclasses

import fused_models
import pytest
import torch
from torch import Tensor, nn

import olq_fx
from olq_fx.testing import Compiler, EmittedCode, Emitter, Interpreter, assert_same_bits, sqnr

SCHEMES = ("int8", "fp8_per_channel", "nvfp4_per_token", "mxfp4_dualscale")


def slow_but(*quick: object) -> list[object]:
    return [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in SCHEMES]


def eager(model: nn.Module, scheme: str, *inputs: Tensor) -> Tensor:
    olq_fx.quantize_(model, scheme)
    with torch.no_grad():
        found: Tensor = model(*inputs)
    return found


def with_inputs(code: EmittedCode, x: Tensor, *symbols: int) -> EmittedCode:
    """The program on another activation."""
    given = [x if isinstance(each, Tensor) and each.dim() == x.dim() else each for each in code.inputs]
    left = iter(symbols)
    return dataclasses.replace(code, inputs=tuple(each if isinstance(each, Tensor) else next(left) for each in given))


@pytest.mark.parametrize("scheme", slow_but("int8", "fp8_per_channel"))
def test_an_mlp_is_two_kernels_after_the_norm_with_the_values_of_eager_mode(
    emitter: Emitter, interpreter: Interpreter, scheme: str
):
    """But for the order of sums in float32, which moves single values by a step; rows with NaN and Inf are NaN."""
    code = emitter.emit(fused_models.feed_forward, scheme)
    assert len(code.launches) == 3
    assert "linear_on_load" in code.launches[2]
    assert not code.external
    assert "ZERO0" in code.kernels[0].source  # in every run
    model, [x] = fused_models.feed_forward()
    x[0, 2, 5], x[1, 0, 7], x[1, 8, 255] = torch.nan, torch.inf, -torch.inf
    expected = eager(model, scheme, x)
    [found] = with_inputs(code, x).run(interpreter)
    lost = expected.isnan().all(-1)
    assert lost.sum() == 3
    assert_same_bits(found.isnan(), expected.isnan())
    if scheme == "int8":
        assert_same_bits(found[~lost], expected[~lost])
    assert (found[~lost] != expected[~lost]).float().mean() < 0.01
    assert sqnr(found[~lost].float(), expected[~lost].float()) > 50


def test_nothing_is_left_of_an_earlier_run(emitter: Emitter, interpreter: Interpreter):
    """Large values raise maxima that those of a later call with small ones must not see."""
    code = emitter.emit(fused_models.feed_forward, "int8")
    model, [x] = fused_models.feed_forward()
    expected = eager(model, "int8", x / 1024)
    code.run(interpreter)
    [found] = with_inputs(code, x / 1024).run(interpreter)
    assert_same_bits(found, expected)


def test_rows_may_be_a_symbol(emitter: Emitter, interpreter: Interpreter):
    code = emitter.emit(fused_models.feed_forward, "int8", dynamic=True)
    assert any("linear_on_load" in name for name in code.launches), code.reasons
    model, [x] = fused_models.feed_forward(37)
    [found] = with_inputs(code, x, fused_models.BATCH, 37).run(interpreter)
    assert_same_bits(found, eager(model, "int8", x))


def test_what_follows_is_computed_of_the_rounded_product(emitter: Emitter, interpreter: Interpreter):
    """Layers one after the other: each but the first quantizes what it loads, and takes maxima of what it makes."""
    code = emitter.emit(fused_models.layers, "int8")
    assert len(code.launches) == 4, code.launches
    assert not code.external
    assert sum("sum_on_load(" in kernel.source for kernel in code.kernels) == 2
    model, [x] = fused_models.layers()
    [found] = code.run(interpreter)
    assert_same_bits(found, eager(model, "int8", x))


def test_the_setting_that_leaves_products_alone_does(emitter: Emitter):
    code = emitter.emit(fused_models.feed_forward, "int8", options={"epilogue_fusion": False})
    assert not any("linear_on_load" in name or "triton_tem_fused_quantize" in name for name in code.launches)


@pytest.mark.slow
def test_cuda_graphs_have_the_same_kernels(emitter: Emitter):
    code = emitter.emit(fused_models.feed_forward, "int8", options={"triton.cudagraphs": True})
    assert sum("linear_on_load" in name for name in code.launches) == 1


# Machine code


INSTRUCTIONS = {
    ("int8", 80): r"^mma\.sync.*s8",
    ("int8", 89): r"^mma\.sync.*s8",
    ("int8", 90): r"^wgmma.*s8",
    ("int8", 100): r"^mma\.sync.*s8",
    ("int8", 120): r"^mma\.sync.*s8",
    ("fp8_per_channel", 80): r"^mma\.sync.*bf16",
    ("fp8_per_channel", 89): r"^mma\.sync.*e4m3",
    ("fp8_per_channel", 90): r"^wgmma.*e4m3",
    ("fp8_per_channel", 100): r"^tcgen05\.mma.*f8f6f4",
    ("fp8_per_channel", 120): r"^mma\.sync.*e4m3",
    ("nvfp4_per_token", 80): r"^mma\.sync.*bf16",
    ("nvfp4_per_token", 89): r"^mma\.sync.*bf16",
    ("nvfp4_per_token", 90): r"^wgmma.*bf16",
    ("nvfp4_per_token", 100): r"^tcgen05\.mma.*mxf4nvf4",
    ("nvfp4_per_token", 120): r"^mma\.sync.*mxf4nvf4",
    ("mxfp4_dualscale", 80): r"^mma\.sync.*bf16",
    ("mxfp4_dualscale", 89): r"^mma\.sync.*bf16",
    ("mxfp4_dualscale", 90): r"^wgmma.*bf16",
    ("mxfp4_dualscale", 100): r"^tcgen05\.mma.*f16",
    ("mxfp4_dualscale", 120): r"^mma\.sync.*bf16",
}
SHOWN = {("fp8_per_channel", 90), ("int8", 89), ("nvfp4_per_token", 100)}


@pytest.mark.parametrize(
    ("scheme", "capability"),
    [
        pytest.param(*case, marks=() if case in SHOWN else pytest.mark.slow, id=f"{case[0]}-sm_{case[1]}")
        for case in INSTRUCTIONS
    ],
)
@pytest.mark.parametrize("rows", [9, pytest.param(4096, marks=pytest.mark.slow)])
def test_kernels_become_machine_code_without_spills(
    emitter: Emitter, compiler: Compiler, scheme: str, capability: int, rows: int
):
    """With the matrix instruction of stored codes, on every GPU, for few tiles and for many."""
    code = emitter.emit(fused_models.feed_forward_on_load, scheme, rows, capability=capability)
    kernels = [kernel for kernel in code.kernels if "sum_on_load(" in kernel.source or "raise_maxima(" in kernel.source]
    assert len(kernels) == 2, code.reasons
    for kernel in kernels:
        found = kernel.machine_code(compiler)
        found.assert_instruction(INSTRUCTIONS[scheme, capability])
        found.assert_no_spills()
        found.assert_fits()
