"""Quantization by Triton kernels: bits equal to the reference, machine code without spills."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olq_fx import numerics
from olq_fx.formats import FORMATS, block_formats, get_format
from olq_fx.kernels import reference, triton_quantize
from olq_fx.testing import assert_kernel_code, assert_kernel_values, tensors

PAIRS = [(name, rule) for name, found in FORMATS.items() for rule in found.rules]
BLOCKS = [(name, "amax") for name in (*block_formats(32, 32), *block_formats(256, 64))]
NATIVE = st.booleans()


def reference_quantize(x, format, rule, native):
    return reference.quantize(x, format, rule)


def reference_dequantize(parts, format, k, dtype, native):
    return reference.dequantize(parts, format, k, dtype)


@pytest.mark.parametrize(("format", "rule"), PAIRS + BLOCKS)
@given(
    x=tensors(rows=(0, 40), columns=(1, 600), nonfinite=True) | tensors(rows=(0, 40), columns=(1, 600)), native=NATIVE
)
@settings(max_examples=12)
def test_codes_and_scales_have_the_bits_of_the_reference(interpreter, format, rule, x, native):
    assert_kernel_values(interpreter, triton_quantize.quantize, reference_quantize, x, format, rule, native)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(x=tensors(rows=(0, 24), columns=(1, 300), nonfinite=True), native=NATIVE)
@settings(max_examples=6)
def test_values_have_the_bits_of_the_reference(interpreter, format, dtype, x, native):
    found = get_format(format)
    parts = list(numerics.quantize(x, found, found.rules[-1]))
    args = (parts, format, x.shape[1], dtype, native)
    assert_kernel_values(interpreter, triton_quantize.dequantize, reference_dequantize, *args)


@pytest.mark.parametrize("format", ["fp8_per_token", "nvfp4_per_token", "int8_per_channel_static"])
def test_rows_longer_than_a_tile(interpreter, format):
    x = torch.randn(3, 5001).bfloat16()
    x[1, 4999] = 1e4
    x[2, 3000] = torch.nan
    assert_kernel_values(interpreter, triton_quantize.quantize, reference_quantize, x, format, "amax", True)


@pytest.mark.slow
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("native", [True, False])
def test_every_16_bit_value(interpreter, element, native):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(element)
    x = x[x.isfinite()]
    x = x[: len(x) // 16 * 16].reshape(16, -1)  # neighbours in one group; few programs, which are interpreted slowly
    for format, rule in PAIRS:
        if get_format(format).group[0] == 1:
            assert_kernel_values(interpreter, triton_quantize.quantize, reference_quantize, x, format, rule, native)


@pytest.mark.parametrize("format", ["fp8_per_block_dynamic", "mxfp8"])
def test_scales_may_be_laid_out_by_columns(interpreter, format):
    x = torch.randn(40, 512).bfloat16()
    found = interpreter.call(columns_first, x, format)
    expected = reference.quantize(x, format, get_format(format).activation_rule)
    for part, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(part.contiguous().view(torch.uint8), wanted.view(torch.uint8), rtol=0, atol=0)
    assert found[1].stride(0) == 1


def columns_first(x, format):
    from olq_fx.kernels.triton_calls import run

    chosen = get_format(format)
    codes, scale = numerics.part_specs(chosen, *x.shape)
    parts = [torch.empty(codes.shape, dtype=codes.dtype), torch.empty(scale.shape[::-1], dtype=scale.dtype).T]
    run(triton_quantize.quantize_calls(x, parts, chosen, chosen.activation_rule, True))
    return parts


def meta_parts(format, rows, k):
    return [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in numerics.part_specs(format, rows, k)]


@pytest.mark.parametrize(("format", "rule"), PAIRS + BLOCKS)
def test_the_code_divides_exactly_and_contracts_nothing(format, rule):
    """For one GPU; the golden table has the registers of all kernels on all of them."""
    found, native, capability = get_format(format), True, 90
    x, parts = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), meta_parts(get_format(format), 4096, 4096)
    calls = triton_quantize.quantize_calls(x, parts, found, rule, native)
    calls += triton_quantize.dequantize_calls(parts, found, x, native)
    for call in calls:
        [code] = assert_kernel_code(call.kernel, call.args, call.constants, {capability: ""}, **call.options)
        if call.kernel is not triton_quantize.triton_encode.dequantize_tiles:
            assert "fma" not in code.ptx, "a contracted product has other bits"
        assert "div.full" not in code.ptx, "a division that is not rounded correctly"
