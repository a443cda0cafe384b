"""On a GPU: codes, scales and values of every format have the bits that the reference has on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import olq_fx
from olq_fx import numerics
from olq_fx.formats import FORMATS, block_formats, get_format
from olq_fx.kernels import reference, triton_quantize
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits, tensors

pytestmark = pytest.mark.gpu

PAIRS = [(name, rule) for name, found in FORMATS.items() for rule in found.rules]
BLOCKS = [(name, "amax") for name in (*block_formats(32, 32), *block_formats(256, 64), *block_formats(128, 32))]
SHAPES = tensors(rows=(0, 300), columns=(1, 1200), nonfinite=True) | tensors(rows=(0, 300), columns=(1, 1200))


def on_cpu(parts):
    return [part.cpu() for part in parts]


@pytest.mark.parametrize(("format", "rule"), PAIRS + BLOCKS)
@given(x=SHAPES, cast=st.booleans())
@settings(max_examples=40)
def test_codes_and_scales(native, format, rule, x, cast):
    found = triton_quantize.quantize(x.cuda(), format, rule, native and cast)
    assert_same_bits(on_cpu(found), list(reference.quantize(x, format, rule)), any_nan=True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(x=SHAPES, cast=st.booleans())
@settings(max_examples=20)
def test_values(native, format, dtype, x, cast):
    chosen = get_format(format)
    parts = numerics.quantize(x, chosen, chosen.rules[-1])
    found = triton_quantize.dequantize([part.cuda() for part in parts], format, x.shape[1], dtype, native and cast)
    assert_same_bits(found.cpu(), reference.dequantize(parts, format, x.shape[1], dtype), any_nan=True)


@pytest.mark.parametrize(("format", "rule"), PAIRS)
def test_the_shapes_of_models(native, format, rule):
    x = torch.randn(512, 11008, dtype=torch.bfloat16)
    found = triton_quantize.quantize(x.cuda(), format, rule, native)
    assert_same_bits(on_cpu(found), list(reference.quantize(x, format, rule)))


@pytest.mark.parametrize("format", [name for name, found in FORMATS.items() if found.group[0] == 1])
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(native, format, element):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(element)
    x = x[x.isfinite()]
    x = x[: len(x) // 128 * 128].reshape(-1, 128)
    for rule in get_format(format).rules:
        found = triton_quantize.quantize(x.cuda(), format, rule, native)
        assert_same_bits(on_cpu(found), list(reference.quantize(x, format, rule)))


@pytest.mark.parametrize("format", ["fp8_per_tensor_dynamic", "nvfp4"])
def test_two_runs_give_the_same_bits(native, format):
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    first = triton_quantize.quantize(x, format, "amax", native)
    for _ in range(5):
        assert_same_bits(on_cpu(triton_quantize.quantize(x, format, "amax", native)), on_cpu(first))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_converted_model_has_the_state_of_one_converted_on_the_cpu(scheme, dtype):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(520, 300, dtype=dtype), nn.SiLU(), nn.Linear(300, 129, dtype=dtype)).eval()

    here, there = model(), model().cuda()
    olq_fx.quantize_(here, scheme)
    olq_fx.quantize_(there, scheme)
    expected, found = here.state_dict(), there.state_dict()
    assert list(expected) == list(found)
    assert_same_bits([value.cpu() for value in found.values()], list(expected.values()))
