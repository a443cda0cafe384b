"""Products by Triton kernels: every pair of formats within the derived bound, the matrix instruction that is due."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_cases import ACTIVATIONS, KINDS, WEIGHTS, meta, quantized, values

from olq_fx import cost_model
from olq_fx.formats import get_format
from olq_fx.kernels import triton_product
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.triton_product import instruction_of, operand_of, product_calls
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, assert_kernel_code, assert_product_close, assert_same_bits, tensors

CAPABILITIES = (80, 90, 100)


def check(interpreter, x, w, activation, weight, capability, bias=None, residual=None, **options):
    """Multiply in the interpreter, and hold the result to the dequantized operands."""
    k = x.shape[1]
    a, b = quantized(x, activation), quantized(w, weight, weight=True)
    args = (a, activation, b, weight, k, x.dtype, bias, residual, capability)
    y = interpreter.call(triton_product.quantized_linear, *args, **options)
    assert_product_close(y, values(a, activation, k), values(b, weight, k), bias=bias, residual=residual)
    return y


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_pair_of_formats_is_within_the_derived_bound(interpreter, activation, weight):
    for m, n, k, dtype, capability in (
        (5, 70, 131, torch.bfloat16, 90),
        (70, 140, 256, torch.float32, 80),
        (3, 33, 65, torch.float16, 100),
    ):
        x, w, bias, residual = torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m, n)
        check(interpreter, x.to(dtype), w, activation, weight, capability, bias, residual.to(dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
@settings(max_examples=8)
def test_shapes_layouts_and_rows_of_every_kind(interpreter, scheme, data):
    slot = SCHEMES[scheme].linear
    dtype = data.draw(st.sampled_from(FLOAT_DTYPES))
    x = data.draw(tensors(rows=(1, 20), columns=(3, 300), dtypes=[dtype], kinds=KINDS))
    w = data.draw(tensors(rows=(1, 90), columns=(x.shape[1], x.shape[1]), dtypes=[dtype], kinds=KINDS))
    check(interpreter, x, w, slot.activation or "", slot.weight, data.draw(st.sampled_from(CAPABILITIES)))


VIEWS = {
    "strided": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2],
    "reversed in memory": lambda x: x.flip(-1).contiguous().flip(-1),
    "expanded": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("m", [3, 70])
def test_operands_may_be_views(interpreter, m, view):
    """Also with split-K, whose second kernel reads bias and residual."""
    x, w, bias, residual = (torch.randn(*shape).bfloat16() for shape in ((m, 512), (64, 512), (64,), (m, 64)))
    laid = VIEWS[view]
    check(interpreter, laid(x), laid(w), "", "mxfp8", 90, laid(bias), laid(residual))
    check(interpreter, laid(x), laid(w), "fp8_per_token", "fp8_per_channel_static", 90, laid(bias), laid(residual))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_with_nan_is_nan_and_no_other_one(interpreter, scheme):
    slot = SCHEMES[scheme].linear
    x, w = torch.randn(20, 96).bfloat16(), torch.randn(40, 96)
    x[3, 50], x[17, 95] = torch.nan, torch.inf
    y = check(interpreter, x, w, slot.activation or "", slot.weight, 90)
    finite = y.isfinite().all(1)
    if slot.activation and get_format(slot.activation).group != (None, None):
        assert y[3].isnan().all()
        assert y[17].isnan().all()
        assert finite.sum() == 18


BLOCKINGS = [
    Blocking(16, 32, 32, swap=True, split_k=3),
    Blocking(32, 16, 32, split_k=2),
    Blocking(16, 64, 32, swap=True),
    Blocking(64, 32, 32, group=1),
]


@pytest.mark.parametrize("blocking", BLOCKINGS, ids=str)
@pytest.mark.parametrize("scheme", ["fp8_per_block", "int8", "mxfp4", "nvfp4_per_token", "fp8_weight_only"])
def test_every_way_to_cut_the_work(interpreter, scheme, blocking):
    slot = SCHEMES[scheme].linear
    x, w = torch.randn(45, 200).bfloat16(), torch.randn(150, 200)
    bias, residual = torch.randn(150), torch.randn(45, 150).bfloat16()
    a, b = quantized(x, slot.activation), quantized(w, slot.weight, weight=True)
    out = torch.empty(45, 150, dtype=torch.bfloat16)
    args = (a, slot.activation or "", b, slot.weight, 200, out)
    y = interpreter.call(multiply, *args, bias=bias, residual=residual, capability=90, blocking=blocking)
    assert_product_close(y, values(a, slot.activation, 200), values(b, slot.weight, 200), bias=bias, residual=residual)


def multiply(*args, **kwargs):
    from olq_fx.kernels.triton_calls import run

    args[5].fill_(torch.nan)
    run(product_calls(*args, **kwargs))
    return args[5]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_do_not_depend_on_the_batch(interpreter, scheme):
    """Among all M that one configuration serves."""
    slot = SCHEMES[scheme].linear
    if slot.activation and get_format(slot.activation).group == (None, None):
        return
    x, w = torch.randn(16, 128).bfloat16(), torch.randn(40, 128)
    whole = check(interpreter, x, w, slot.activation or "", slot.weight, 90)
    part = check(interpreter, x[5:9], w, slot.activation or "", slot.weight, 90)
    assert_same_bits(part, whole[5:9])


@pytest.mark.parametrize("exponents", [(120, -120), (-120, 120), (60, -100), (-100, 60), (90, 20), (-70, -70)])
@pytest.mark.parametrize("scheme", ["fp8_per_channel", "int8", "nvfp4_per_token"])
def test_scales_that_are_the_same_along_k_never_leave_float32_on_the_way(interpreter, scheme, exponents):
    slot = SCHEMES[scheme].linear
    x, w = (torch.randn(rows, 64) * 2.0**exponent for rows, exponent in zip((4, 8), exponents, strict=True))
    check(interpreter, x, w, slot.activation, slot.weight, 90)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weight", ["mxfp4", "fp8_per_channel_static", "int8_per_channel_static"])
def test_activations_in_original_precision_lose_no_bit(interpreter, weight, dtype):
    """One column at a time: the product of the value and the code is exact."""
    x = torch.zeros(64, 64, dtype=dtype)
    x.diagonal().copy_(torch.randn(64).to(dtype))
    w = torch.full((16, 64), 1.0)
    b = quantized(w, weight, weight=True)
    args = ([x], "", b, weight, 64, torch.float32, None, None, 90)
    y = interpreter.call(triton_product.quantized_linear, *args)
    expected = x.double() @ values(b, weight, 64).double().T
    torch.testing.assert_close(y.double(), expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize(
    ("activation", "weight", "capability", "dot", "promote"),
    [
        ("fp8_per_token", "fp8_per_channel_static", 90, "fp8", True),
        ("fp8_per_token", "fp8_per_channel_static", 100, "fp8", False),
        ("fp8_per_token", "fp8_per_channel_static", 80, "bf16", False),
        ("fp8_per_block_dynamic", "fp8_per_block_static", 120, "fp8", True),
        ("int8_per_token", "int8_per_channel_static", 80, "int8", False),
        ("mxfp8", "mxfp8", 90, "bf16", False),
        ("mxfp4", "mxfp4", 90, "bf16", False),
        ("", "nvfp4", 90, "bf16", False),
        ("mxfp8", "mxfp8", 100, "scaled", False),
        ("mxfp4", "mxfp4", 120, "scaled", False),
        ("mxfp8", "mxfp4", 90, "bf16", False),
        ("mxfp8", "mxfp4", 100, "scaled", False),
        ("mxfp4", "mxfp8", 100, "scaled", False),
        ("mxfp8", "mxfp4", 120, "bf16", False),
        ("nvfp4_per_token", "mxfp8", 100, "bf16", False),
        ("mxfp8", "mxfp4_dualscale", 100, "bf16", True),
        ("nvfp4_per_token", "nvfp4", 120, "scaled", False),
        ("mxfp4_dualscale", "mxfp4_dualscale", 100, "bf16", True),
    ],
)
def test_the_instruction_for_a_pair(activation, weight, capability, dot, promote):
    a, b = operand_of(meta(activation, 32, 256), activation), operand_of(meta(weight, 64, 256), weight)
    found = instruction_of(a, b, 256, capability)
    assert (found.dot, found.promote) == (dot, promote)
    assert not dataclasses.replace(found, promote=False).promote


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_cost_model_counts_the_instruction_that_is_used(activation, weight, capability):
    a, b = operand_of(meta(activation, 32, 256), activation), operand_of(meta(weight, 64, 256), weight)
    used = instruction_of(a, b, 256, capability).dot
    fp4 = a.side == b.side == "e2m1"
    rate = {"scaled": "fp4" if fp4 else "fp8", "fp16": "bf16"}.get(used, used)
    counted = cost_model.instruction(get_format(weight), get_format(activation) if activation else None, capability)
    assert counted.rate == rate


def test_fast_accumulation_is_asked_for():
    a, b = (
        operand_of(meta("fp8_per_token", 4, 256), "fp8_per_token"),
        operand_of(meta("fp8_per_channel_static", 4, 256), "fp8_per_channel_static"),
    )
    assert instruction_of(a, b, 256, 90).promote
    assert not instruction_of(a, b, 256, 90, fast_accum=True).promote


def test_sums_of_int8_that_could_overflow_are_taken_in_float32():
    a = operand_of(meta("int8_per_token", 4, 256), "int8_per_token")
    b = operand_of(meta("int8_per_channel_static", 4, 256), "int8_per_channel_static")
    assert instruction_of(a, b, 133_144, 90).dot == "int8"
    assert instruction_of(a, b, 133_145, 90).dot == "bf16"


INSTRUCTIONS = {
    ("fp8", 89): r"^mma\.sync.*e4m3",
    ("fp8", 90): r"^wgmma.*e4m3\.e4m3",
    ("fp8", 100): r"^tcgen05.*f8f6f4",
    ("fp8", 120): r"^mma\.sync.*e4m3",
    ("int8", 80): r"^mma\.sync.*s8",
    ("int8", 90): r"^wgmma.*s8",
    ("bf16", 80): r"^mma\.sync.*bf16",
    ("bf16", 90): r"^wgmma.*bf16",
    ("bf16", 100): r"^tcgen05.*f16",
    ("scaled", 100): r"^tcgen05.*mxf(8f6f4|4|4nvf4)\.block_scale",
    ("scaled", 120): r"^mma\.sync.*mxf(8f6f4|4nvf4)\.block_scale",
}


@pytest.mark.parametrize(("scheme", "capability", "m"), [
    ("fp8_per_block", 90, 4096), ("fp8_per_block", 90, 16), ("fp8_per_channel", 89, 64), ("fp8_per_channel", 100, 4096),
    ("fp8_per_block", 120, 4096), ("int8", 80, 4096), ("int8", 90, 16), ("mxfp4", 90, 4096), ("mxfp8", 80, 64),
    ("nvfp4_per_token", 90, 64), ("nvfp4_weight_only", 100, 16), ("mxfp4_dualscale", 90, 4096),
])  # fmt: skip
def test_the_code_has_the_instruction_and_stays_in_registers(scheme, capability, m):
    slot, k = SCHEMES[scheme].linear, 4096
    a, b = meta(slot.activation, m, k), meta(slot.weight, k, k)
    out = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    calls = product_calls(a, slot.activation or "", b, slot.weight, k, out, capability=capability)
    wanted = INSTRUCTIONS[calls[0].constants["DOT"], capability]
    for call, instruction in zip(calls, (wanted, ""), strict=False):
        assert_kernel_code(call.kernel, call.args, call.constants, {capability: instruction}, **call.options)


@pytest.mark.parametrize("pair", [("mxfp8", "mxfp4"), ("mxfp4", "mxfp8")], ids=str)
def test_e4m3_with_e2m1_has_an_instruction_on_sm_100(pair):
    """Also of few rows, that lie on the narrow side."""
    for m in (16, 4096):
        out = torch.empty(m, 4096, dtype=torch.bfloat16, device="meta")
        call = product_calls(
            meta(pair[0], m, 4096), pair[0], meta(pair[1], 4096, 4096), pair[1], 4096, out, capability=100
        )[0]
        wanted = {100: r"^tcgen05.*mxf8f6f4\.block_scale"}
        assert_kernel_code(call.kernel, call.args, call.constants, wanted, **call.options)
