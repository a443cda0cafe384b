"""What Inductor emits for blocks of real models on a GPU: how many kernels, their values, their machine code."""

import dataclasses
import re

import fused_models
import pytest
import torch

import olq_fx
from olq_fx.passes.fuse_quantize import longest_row
from olq_fx.schemes import SCHEMES as SCHEMES_OF
from olq_fx.testing import Compiler, EmittedCode, Emitter, Interpreter, assert_same_bits, sqnr

BLOCKS = tuple(fused_models.BLOCKS)
SCHEMES = ("fp8_per_block", "mxfp8", "mxfp4", "int8", "fp8_per_channel", "nvfp4_per_token")
TILED = ("fp8_per_block", "mxfp8", "mxfp4")
"""Schemes whose activations have scales of pieces of rows, which a tile of a product holds."""

ON_LOAD = ("int8", "fp8_per_channel")
"""Schemes with scales of rows: the second product of these small MLPs quantizes what it loads."""

DEFAULT = {*((block, "fp8_per_block") for block in BLOCKS), *(("llama", scheme) for scheme in SCHEMES)}


def cases(default: set[tuple[str, str]]) -> list[object]:
    return [
        pytest.param(
            block, scheme, marks=() if (block, scheme) in default else pytest.mark.slow, id=f"{block}-{scheme}"
        )
        for block in BLOCKS
        for scheme in SCHEMES
    ]


_EMITTED: dict[tuple[str, str | None, int], EmittedCode] = {}


def emitted(emitter: Emitter, block: str, scheme: str | None, capability: int = 90) -> EmittedCode:
    key = block, scheme, capability
    if key not in _EMITTED:
        _EMITTED[key] = emitter.emit(fused_models.build, scheme, block, capability=capability)
    return _EMITTED[key]


def having(code: EmittedCode, function: str) -> list[str]:
    """Launches of templates that call a device function, by a pattern."""
    found = {kernel.name for kernel in code.kernels if kernel.is_template and re.search(function, kernel.source)}
    return [name for name in code.launches if name in found]


def quantizing(code: EmittedCode) -> list[str]:
    """Launches of templates that quantize what they have computed otherwise."""
    return [name for name in having(code, r"write_(row_)?tile\(") if "triton_tem_fused_quantize" in name]


def multiplying(code: EmittedCode) -> list[str]:
    """Launches of templates of layers of which nothing is quantized."""
    return [name for name in having(code, r"sum_over\(") if name not in having(code, r"write_tile\(")]


def standalone(code: EmittedCode) -> list[str]:
    """Kernels that quantize and are none of our templates, or do nothing but quantize."""
    ours = {*quantizing(code), *multiplying(code)}
    return [name for name in code.launches if "quantize" in name and name not in ours]


# What is left of a block beside its templates: rotation of queries and keys, softmax, copies for the products of
# attention, the quantization after it.
FUSED = {"llama": 2, "qwen3": 2, "gpt2": 2, "bert": 1, "dit": 2, "t5": 2}
"""Norms of a block that are followed by a quantized layer of the same block."""

LAYERS = {"llama": 7, "qwen3": 7, "gpt2": 6, "bert": 6, "dit": 6, "t5": 7}
"""Quantized layers of a block."""


@pytest.mark.parametrize(("block", "scheme"), cases(DEFAULT))
def test_norms_and_the_mlp_are_templates_and_nothing_else_is_added(emitter: Emitter, block: str, scheme: str):
    code, plain = emitted(emitter, block, scheme), emitted(emitter, block, None)
    mlp = 1 if scheme in (*TILED, *ON_LOAD) else 0
    # Of BERT its input too, which no norm of the same block makes.
    rows = (3 if block == "bert" else 1) if scheme == "nvfp4_per_token" else 0
    maxima = having(code, r"raise_maxima\(")
    assert len(quantizing(code)) + len(maxima) == FUSED[block] + mlp + rows, code.launches
    # q, k and v are one kernel, and so are gate and up where their results are not quantized in it.
    pair = block in ("llama", "qwen3", "t5")
    fused = mlp or (scheme == "nvfp4_per_token" and pair)
    products = LAYERS[block] - 2 - ((2 if pair else 1) if fused else pair)
    on_load = [name for name in code.launches if "linear_on_load" in name]
    assert len({*multiplying(code)} - {*maxima, *on_load}) == products - len(on_load), code.launches
    assert "torch.ops.olq_fx.quantized_linear.default" not in code.external
    # After attention; and the input of BERT's block, which no norm of the same block makes.
    gated = scheme == "nvfp4_per_token" and block in ("llama", "qwen3", "t5")
    assert sum("linear_on_load" in name for name in code.launches) == (scheme in ON_LOAD or gated), code.reasons
    assert not any("zeros" in name for name in code.launches)
    assert len(standalone(code)) <= 1 + (block == "bert") + (scheme == "mxfp4"), code.launches
    total, before = (len(each.launches) + len(each.external) for each in (code, plain))
    merged = 2 + (gated and not mlp)
    assert total <= before + 1 + (block == "bert") - merged, (code.launches, plain.launches)


def test_the_mlp_of_llama_is_two_kernels_between_norm_and_norm(emitter: Emitter):
    """In two blocks: the norm of the second is one template with the residual before it."""
    code = emitter.emit(fused_models.build, "fp8_per_block", "llama", "bfloat16", 9, 2)
    names = re.findall(r"(triton_tem_\w+)\.run", code.source)
    norm, attention, out, _, gated, down = names[:6]
    assert names == [norm, attention, out, norm, gated, down] * 2
    assert len({norm, attention, out, gated, down}) == 5
    assert not any("quantized_linear" in name for name in code.external)


def test_no_kernel_moves_a_scale(emitter: Emitter):
    """known_failures 36: scales are written as the next product reads them."""
    for scheme in TILED:
        code = emitted(emitter, "llama", scheme)
        for kernel in code.kernels:
            scales = re.findall(r"'(?:in|out)_ptr\d+': '\*(fp32|u8)'", kernel.source)
            assert kernel.is_template or "quantize" in kernel.name or not scales, kernel.name


# Values


VALUES = {("llama", "fp8_per_block"), ("dit", "mxfp8")}


@pytest.mark.parametrize(("block", "scheme"), cases(VALUES))
def test_the_emitted_program_computes_what_the_eager_model_does(
    emitter: Emitter, interpreter: Interpreter, block: str, scheme: str
):
    """But for the order of sums in norms and softmax, which moves single codes by one step."""
    [found] = emitted(emitter, block, scheme).run(interpreter)
    model, inputs = fused_models.build(block)
    original, _ = fused_models.build(block)
    olq_fx.quantize_(model, scheme)
    with torch.no_grad():
        expected, plain = model(*inputs), original(*inputs)
    noise = sqnr(expected.float(), plain.float())
    assert sqnr(found.float(), expected.float()) >= noise + 6
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_tensors_of_every_layout_and_dtype_are_read_where_they_are(
    emitter: Emitter, interpreter: Interpreter, dtype: str
):
    """Integers, masks, one value a row or a batch, views that are transposed or begin within another tensor."""
    code = emitter.emit(fused_models.captured, "fp8_per_block", dtype)
    assert len(quantizing(code)) == 2, code.reasons
    model, inputs = fused_models.captured(dtype)
    olq_fx.quantize_(model, "fp8_per_block")
    with torch.no_grad():
        expected = model(*inputs)
    for found, wanted in zip(code.run(interpreter), expected, strict=True):
        assert sqnr(found.float(), wanted.float()) >= 45


def test_rows_may_be_a_symbol(emitter: Emitter, interpreter: Interpreter):
    """One program serves every batch; here it runs with another number of rows than it was compiled with."""
    code = emitter.emit(fused_models.feed_forward, "fp8_per_block", dynamic=True)
    found = [kernel for kernel in code.kernels if kernel.name in quantizing(code)]
    assert len(found) == 2
    assert all(re.search(r"def \w+\([^)]*\bks\d+", kernel.source) for kernel in found)
    rows = 5
    model, [x] = fused_models.feed_forward(rows)
    given = [
        rows if value == fused_models.ROWS else value for value in code.inputs if not isinstance(value, torch.Tensor)
    ]
    tensors = [x if value.dim() == 3 else value for value in code.inputs if isinstance(value, torch.Tensor)]
    assert given == [fused_models.BATCH, rows]
    olq_fx.quantize_(model, "fp8_per_block")
    [result] = dataclasses.replace(code, inputs=(*given, *tensors)).run(interpreter)
    with torch.no_grad():
        assert_same_bits(result, model(x))


MODES = {
    "cudagraphs": {"triton.cudagraphs": True},
    "nothing after products": {"epilogue_fusion": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_settings_of_inductor(emitter: Emitter, mode: str):
    code = emitter.emit(fused_models.feed_forward, "fp8_per_block", options=MODES[mode])
    fused = 0 if mode == "nothing after products" else 2
    assert len(quantizing(code)) == fused
    assert not multiplying(code) or fused


# Machine code


INSTRUCTIONS = {
    ("fp8_per_block", 80): r"^mma\.sync.*bf16",
    ("fp8_per_block", 89): r"^mma\.sync.*e4m3",
    ("fp8_per_block", 90): r"^wgmma.*e4m3",
    ("fp8_per_block", 100): r"^tcgen05\.mma.*f8f6f4",
    ("fp8_per_block", 120): r"^mma\.sync.*e4m3",
    ("mxfp8", 80): r"^mma\.sync.*bf16",
    ("mxfp8", 89): r"^mma\.sync.*bf16",
    ("mxfp8", 90): r"^wgmma.*bf16",
    ("mxfp8", 100): r"^tcgen05\.mma.*mxf8f6f4",
    ("mxfp8", 120): r"^mma\.sync.*mxf8f6f4",
    ("mxfp4", 80): r"^mma\.sync.*bf16",
    ("mxfp4", 89): r"^mma\.sync.*bf16",
    ("mxfp4", 90): r"^wgmma.*bf16",
    ("mxfp4", 100): r"^tcgen05\.mma.*mxf4",
    ("mxfp4", 120): r"^mma\.sync.*mxf4",
}
SHOWN = {("fp8_per_block", 80), ("fp8_per_block", 90), ("mxfp8", 100)}


@pytest.mark.parametrize(
    ("scheme", "capability"),
    [
        pytest.param(*case, marks=() if case in SHOWN else pytest.mark.slow, id=f"{case[0]}-sm_{case[1]}")
        for case in INSTRUCTIONS
    ],
)
@pytest.mark.parametrize("block", ["llama", pytest.param("dit", marks=pytest.mark.slow)])
def test_templates_become_machine_code_without_spills(
    emitter: Emitter, compiler: Compiler, block: str, scheme: str, capability: int
):
    multiplied = 0
    for kernel in emitted(emitter, block, scheme, capability).kernels:
        if kernel.is_template:
            code = kernel.machine_code(compiler)
            code.assert_no_spills()
            code.assert_fits()
            if code.instructions:
                code.assert_instruction(INSTRUCTIONS[scheme, capability])
                multiplied += 1
    assert multiplied == 4 if block == "llama" else multiplied > 2


def test_a_gpu_without_float8_gets_no_kernel_with_it(emitter: Emitter):
    code = emitted(emitter, "llama", "fp8_per_block", 80)
    assert all("fp8e4nv" not in kernel.source for kernel in code.kernels)
    assert "torch.ops.olq_fx.quantize.default" in code.external


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("scheme", [*TILED, "mxfp4_dualscale", "int8", "nvfp4_per_token"])
@pytest.mark.parametrize("part", [1, 128])
def test_rows_of_any_length_that_is_fused_stay_in_registers(
    emitter: Emitter, compiler: Compiler, scheme: str, capability: int, part: int
):
    """The longest ones, and short ones."""
    columns = longest_row(SCHEMES_OF[scheme].linear.activation) // part
    [kernel] = emitter.emit(fused_models.normed, scheme, columns, capability=capability).kernels
    assert kernel.is_template
    code = kernel.machine_code(compiler)
    code.assert_no_spills()
    code.assert_fits()
