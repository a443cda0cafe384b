"""Products of one row: within the derived bound, exact of int8, codes read 16 bytes at a time."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_cases import ACTIVATIONS, KINDS, WEIGHTS, meta, quantized, values

from olq_fx.formats import get_format
from olq_fx.kernels import triton_product
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.triton_calls import run
from olq_fx.kernels.triton_product import (
    blocking_of,
    gemv_blocking_of,
    instruction_of,
    operand_of,
    product_calls,
)
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, assert_product_close, assert_same_bits, machine_code, tensors

BLOCK_K = 512


def multiply(a, activation, b, weight, k, n, dtype, blocking, capability=90, bias=None, residual=None):
    out = torch.full((1, n), torch.nan, dtype=dtype)
    named = {"bias": bias, "residual": residual, "capability": capability, "blocking": blocking}
    run(product_calls(a, activation, b, weight, k, out, **named))
    return out


def check(interpreter, x, w, activation, weight, blocking, capability=90, bias=None, residual=None):
    (_, k), n = x.shape, len(w)
    a, b = quantized(x, activation), quantized(w, weight, weight=True)
    args = (a, activation or "", b, weight, k, n, x.dtype, blocking, capability, bias, residual)
    y = interpreter.call(multiply, *args)
    assert_product_close(y, values(a, activation, k), values(b, weight, k), bias=bias, residual=residual)
    return y, args


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_pair_of_formats_is_within_the_derived_bound(interpreter, activation, weight):
    for n, k, dtype, capability in ((3, 1056, torch.bfloat16, 90), (5, 135, torch.float32, 80)):
        x, w = torch.randn(1, k).to(dtype), torch.randn(n, k)
        bias, residual = torch.randn(n), torch.randn(1, n).to(dtype)
        blocking = Blocking(1, 4, BLOCK_K, form="gemv")
        check(interpreter, x, w, activation, weight, blocking, capability, bias, residual)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
@settings(max_examples=4)
def test_shapes_blockings_and_rows_of_every_kind(interpreter, scheme, data):
    slot = SCHEMES[scheme].linear
    step = 8 if get_format(slot.weight).element == "e2m1" else 1  # codes that are packed are read as words
    k = step * data.draw(st.integers(1, 1200 // step))
    named = {"columns": (k, k), "dtypes": [data.draw(st.sampled_from(FLOAT_DTYPES))], "kinds": KINDS}
    x, w = (data.draw(tensors(rows=rows, **named)) for rows in ((1, 1), (1, 9)))
    block_n, split = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 3))
    blocking = Blocking(1, block_n, BLOCK_K, split_k=split, form="gemv")
    capability = data.draw(st.sampled_from([80, 90, 100]))
    check(interpreter, x.contiguous(), w, slot.activation, slot.weight, blocking, capability)


@pytest.mark.parametrize("scheme", ["fp8_per_block", "int8", "mxfp8", "mxfp4", "nvfp4_weight_only"])
def test_sums_that_are_shared_have_the_same_bits_each_time(interpreter, scheme):
    slot = SCHEMES[scheme].linear
    x, w, bias = torch.randn(1, 1600).half(), torch.randn(10, 1600), torch.randn(10)
    blocking = Blocking(1, 2, BLOCK_K, split_k=3, form="gemv")
    y, args = check(interpreter, x, w, slot.activation, slot.weight, blocking, bias=bias)
    assert_same_bits(interpreter.call(multiply, *args), y)


def test_products_of_int8_are_exact(interpreter):
    k = 1100
    a, b = torch.randint(100, 128, (1, k), dtype=torch.int8), torch.randint(-128, -90, (5, k), dtype=torch.int8)
    ones = torch.ones(5, 1)
    parts = [a, ones[:1]], "int8_per_token", [b, ones], "int8_per_channel_static"
    for split in (1, 2):
        y = interpreter.call(multiply, *parts, k, 5, torch.float32, Blocking(1, 4, BLOCK_K, split_k=split, form="gemv"))
        assert_same_bits(y, (a.long() @ b.long().T).float())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_stays_where_it_belongs(interpreter, scheme):
    slot = SCHEMES[scheme].linear
    if get_format(slot.weight).group == (None, None):
        return
    rows = get_format(slot.weight).group[0] + 3
    x, w = torch.randn(1, 192).bfloat16(), torch.randn(rows, 192)
    w[rows - 1, 50] = torch.nan
    blocking = Blocking(1, 4, BLOCK_K, form="gemv")
    y, _ = check(interpreter, x, w, slot.activation, slot.weight, blocking)
    if get_format(slot.weight).coarse != (None, None):
        assert y.isfinite()[0, : rows - 3].all()
        assert not y.isfinite()[0, rows - 1]
    x[0, 3] = torch.nan
    assert not check(interpreter, x, w, slot.activation, slot.weight, blocking)[0].isfinite().any()


@pytest.mark.parametrize("exponents", [(100, -100), (-100, 100), (60, 60), (-50, -50), (0, 126)])
@pytest.mark.parametrize("weight", ["mxfp4", "mxfp8"])
def test_large_scales_meet_small_activations(interpreter, weight, exponents):
    x, w = (torch.randn(rows, 96) * 2.0**exponent for rows, exponent in zip((1, 8), exponents, strict=True))
    check(interpreter, x.clamp(-3e38, 3e38) / 8, w.clamp(-3e38, 3e38), "", weight, Blocking(1, 4, BLOCK_K, form="gemv"))


def chosen(activation, weight, n, k, m=1):
    a, b = operand_of(meta(activation, m, k), activation), operand_of(meta(weight, n, k), weight)
    return blocking_of(m, n, k, a, b, instruction_of(a, b, k, 90), 90)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_one_row_has_a_form_of_its_own(weight):
    assert chosen("", weight, 4096, 4096).form == "gemv"
    assert chosen("", weight, 4096, 4096, m=2).form == "tiles"


def test_packed_codes_that_are_no_words_are_left_to_tiles(interpreter):
    assert chosen("", "mxfp4", 64, 4096 + 32).form == "gemv"
    assert chosen("", "mxfp4", 64, 4096 + 2).form == "tiles"
    x, w = torch.randn(1, 34), torch.randn(8, 34)
    b = quantized(w, "mxfp4", weight=True)
    y = interpreter.call(triton_product.quantized_linear, [x], "", b, "mxfp4", 34, x.dtype, None, None, 90)
    assert_product_close(y, x, values(b, "mxfp4", 34))


@pytest.mark.parametrize(
    ("weight", "n", "k", "blocking"),
    [
        ("mxfp4", 8192, 8192, Blocking(1, 4, 2048, num_warps=2, form="gemv")),
        ("mxfp4", 4096, 14336, Blocking(1, 4, 2048, num_warps=2, form="gemv")),
        ("nvfp4", 1024, 7168, Blocking(1, 1, 1024, num_warps=1, form="gemv")),
        ("nvfp4", 8192, 8192, Blocking(1, 4, 1024, num_warps=1, form="gemv")),
        ("fp8_per_block_static", 2112, 7168, Blocking(1, 4, 1024, num_warps=2, form="gemv")),
        ("fp8_per_block_static", 128, 8192, Blocking(1, 1, 2048, split_k=2, num_warps=4, form="gemv")),
        ("int8_per_channel_static", 16, 384, Blocking(1, 1, 512, num_warps=1, form="gemv")),
    ],
)
def test_the_programs_fill_a_large_gpu(weight, n, k, blocking):
    assert gemv_blocking_of(n, k, operand_of(meta(weight, n, k), weight), 90) == blocking


def assert_loads(activation, weight, k, capability, dtype=torch.bfloat16):
    """Codes of the weight are read by loads of 16 bytes, and nothing leaves the registers."""
    n = 4096
    out = torch.empty(1, n, dtype=torch.bfloat16, device="meta")
    [call] = product_calls(
        meta(activation, 1, k, dtype), activation, meta(weight, n, k), weight, k, out, capability=capability
    )
    code = machine_code(call.kernel, call.args, call.constants, capability, **call.options)
    code.assert_no_spills()
    assert not code.instructions
    loads = re.findall(r"\bLDG\.E\S*", code.sass)
    wide = [load for load in loads if load.startswith("LDG.E.128")]
    assert len(wide) >= call.constants["BLOCK_N"], loads
    # Scales: not more than one load for each of 16 codes that a row has; activations of e2m1 and theirs.
    assert len(loads) - len(wide) <= 2 * call.constants["BLOCK_N"] + 6, loads


PAIRS = [
    ("", "fp8_per_channel_static"),
    ("fp8_per_block_dynamic", "fp8_per_block_static"),
    ("int8_per_token", "int8_per_channel_static"),
    ("", "mxfp8"),
    ("mxfp8", "mxfp8"),
    ("", "mxfp4"),
    ("", "nvfp4"),
    ("nvfp4_per_token", "nvfp4"),
    ("mxfp4_dualscale", "mxfp4_dualscale"),
]


@pytest.mark.parametrize(("activation", "weight"), PAIRS)
def test_codes_are_read_by_16_bytes(activation, weight):
    assert_loads(activation, weight, 4096, 90)


@pytest.mark.slow
@pytest.mark.parametrize("k", [4096, 2880])
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("activation", "weight"), PAIRS)
def test_codes_are_read_by_16_bytes_on_every_gpu(activation, weight, k, capability, dtype):
    assert_loads(activation, weight, k, capability, dtype)
