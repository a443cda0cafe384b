"""Products of many rows, one tile after the other: the bits of the same tiles by themselves; loads by descriptors."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_cases import KINDS, meta, quantized, values

from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.triton_calls import run
from olq_fx.kernels.triton_product import blocking_of, instruction_of, operand_of, product_calls
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_kernel_code, assert_product_close, assert_same_bits, tensors

AS_STORED = ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8"]
"""Schemes whose codes enter a matrix instruction as they are."""

PROGRAMS = 3


def multiply(a, activation, b, weight, k, out, capability, blocking, bias=None, residual=None):
    """By few programs; also whether descriptors were used."""
    out.fill_(torch.nan)
    named = {"bias": bias, "residual": residual, "capability": capability, "blocking": blocking}
    [call] = product_calls(a, activation, b, weight, k, out, **named)
    persistent = blocking.form == "persistent"
    run([dataclasses.replace(call, grid=(PROGRAMS,)) if persistent else call])
    return out, call.constants.get("TMA", False)


@pytest.mark.parametrize(("capability", "k"), [(80, 200), (90, 200), (90, 208), (100, 256)])
@pytest.mark.parametrize("scheme", AS_STORED)
def test_the_bits_are_those_of_the_same_tiles(interpreter, scheme, capability, k):
    slot, m, n = SCHEMES[scheme].linear, 75, 100
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k)
    bias, residual = torch.randn(n), torch.randn(m, n).bfloat16()
    a, b = quantized(x, slot.activation), quantized(w, slot.weight, weight=True)
    args = (a, slot.activation, b, slot.weight, k, torch.empty(m, n, dtype=torch.bfloat16), capability)
    tiles = Blocking(32, 32, 64, group=2)
    alone, _ = interpreter.call(multiply, *args, tiles, bias, residual)
    y, by_descriptors = interpreter.call(multiply, *args, dataclasses.replace(tiles, form="persistent"), bias, residual)
    assert by_descriptors == (capability >= 90 and k % 16 == 0)
    assert_same_bits(y, alone)
    assert_product_close(y, values(a, slot.activation, k), values(b, slot.weight, k), bias=bias, residual=residual)


@pytest.mark.parametrize("scheme", AS_STORED)
@given(data=st.data())
@settings(max_examples=5)
def test_shapes_tiles_and_rows_of_every_kind(interpreter, scheme, data):
    slot = SCHEMES[scheme].linear
    k = data.draw(st.integers(1, 300) | st.sampled_from([16, 64, 128, 256]))
    x, w = (data.draw(tensors(rows=(1, most), columns=(k, k), kinds=KINDS)) for most in (90, 110))
    block_m, block_n, block_k = (data.draw(st.sampled_from(sizes)) for sizes in ([16, 32], [32, 64], [32, 64, 128]))
    tiles = Blocking(block_m, block_n, block_k, group=data.draw(st.sampled_from([1, 2, 8])))
    a, b = quantized(x, slot.activation), quantized(w, slot.weight, weight=True)
    out, capability = torch.empty(len(x), len(w), dtype=x.dtype), data.draw(st.sampled_from([80, 89, 90, 100]))
    args = (a, slot.activation, b, slot.weight, k, out, capability)
    alone, _ = interpreter.call(multiply, *args, tiles)
    y, _ = interpreter.call(multiply, *args, dataclasses.replace(tiles, form="persistent"))
    assert_same_bits(y, alone)
    assert_product_close(y, values(a, slot.activation, k), values(b, slot.weight, k))


def test_codes_that_begin_elsewhere_are_read_by_pointers(interpreter):
    whole = torch.randint(-127, 128, (40 * 64 + 8,), dtype=torch.int8)
    ones = torch.ones(40, 1)
    for offset, by_descriptors in ((0, True), (8, False)):
        a = whole[offset : offset + 40 * 64].view(40, 64)
        args = ([a, ones], "int8_per_token", [a, ones], "int8_per_channel_static", 64)
        blocking = Blocking(32, 32, 64, form="persistent")
        y, used = interpreter.call(multiply, *args, torch.empty(40, 40), 90, blocking)
        assert used == by_descriptors
        assert_same_bits(y, (a.long() @ a.long().T).float())


@pytest.mark.parametrize(
    ("scheme", "m", "n", "capability", "form"),
    [
        ("fp8_per_channel", 4096, 7168, 90, "persistent"),
        ("fp8_per_block", 4096, 7168, 90, "persistent"),
        ("int8", 4096, 7168, 80, "persistent"),
        ("fp8_per_channel", 4096, 7168, 80, "tiles"),  # decoded
        ("mxfp8", 4096, 7168, 90, "tiles"),
        ("mxfp8", 4096, 7168, 100, "tiles"),
        ("fp8_per_block", 64, 65536, 90, "tiles"),
        ("fp8_per_block", 1536, 1408, 90, "tiles"),  # 132 tiles of 128 x 128
        ("fp8_per_block", 1537, 1408, 90, "persistent"),
    ],
)
def test_the_form_is_for_more_tiles_than_multiprocessors(scheme, m, n, capability, form):
    slot, k = SCHEMES[scheme].linear, 4096
    a, b = operand_of(meta(slot.activation, m, k), slot.activation), operand_of(meta(slot.weight, n, k), slot.weight)
    chosen = blocking_of(m, n, k, a, b, instruction_of(a, b, k, capability), capability)
    assert chosen.form == form


def test_there_are_as_many_programs_as_multiprocessors_and_no_more_than_tiles():
    slot, k = SCHEMES["fp8_per_block"].linear, 512
    for m, n, programs in ((4096, 4096, 132), (256, 256, 4)):
        a, b = meta(slot.activation, m, k), meta(slot.weight, n, k)
        out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
        blocking = Blocking(128, 128, 128, num_warps=8, form="persistent")
        [call] = product_calls(a, slot.activation, b, slot.weight, k, out, capability=90, blocking=blocking)
        assert call.grid == (programs,)


INSTRUCTIONS = {
    ("fp8", 89): r"^mma\.sync.*e4m3",
    ("fp8", 90): r"^wgmma.*e4m3\.e4m3",
    ("fp8", 100): r"^tcgen05.*f8f6f4",
    ("fp8", 120): r"^mma\.sync.*e4m3",
    ("int8", 90): r"^wgmma.*s8\.s8",
    ("int8", 100): r"^(mma\.sync.*s8|tcgen05.*kind::i8)",  # the latter from triton 3.8 on
}


def assert_code(scheme, capability, dtype=torch.bfloat16):
    """No spills, the instruction that is due; on sm_90 and sm_100 codes come by descriptors and by nothing else."""
    slot, m, n, k = SCHEMES[scheme].linear, 4096, 7168, 16384
    a, b = meta(slot.activation, m, k), meta(slot.weight, n, k)
    out, bias = torch.empty(m, n, dtype=dtype, device="meta"), torch.empty(n, dtype=dtype, device="meta")
    residual = (
        out if dtype == torch.bfloat16 else None
    )  # beside float32 triton 3.6 spills a few registers after the sums
    [call] = product_calls(
        *(a, slot.activation, b, slot.weight, k, out), bias=bias, residual=residual, capability=capability
    )
    assert call.kernel.fn.__name__ == "product_persistent"
    wanted = INSTRUCTIONS.get((call.constants["DOT"], capability), r"^mma\.sync.*s8")
    [code] = assert_kernel_code(call.kernel, call.args, call.constants, {capability: wanted}, **call.options)
    assert bool(re.search(r"\bUTMALDG\b", code.sass)) == (capability in (90, 100))
    assert ("cp.async.cg" in code.ptx) == (capability not in (90, 100))


@pytest.mark.parametrize(("scheme", "capability"), [("fp8_per_channel", 90), ("fp8_per_block", 90), ("int8", 80)])
def test_tiles_come_by_descriptors_and_stay_in_registers(scheme, capability):
    assert_code(scheme, capability)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("scheme", AS_STORED)
def test_tiles_come_by_descriptors_on_every_gpu(scheme, capability, dtype):
    if capability > 80 or scheme == "int8":
        assert_code(scheme, capability, dtype)
