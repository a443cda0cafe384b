"""The operators on a GPU's tensors: who runs them, without a GPU."""

import contextlib

import pytest
import torch

from olq_fx.errors import ConversionError, UnsupportedError
from olq_fx.formats import FORMATS
from olq_fx.kernels import reference, registry, triton_ops, triton_product, triton_quantize
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits


@pytest.fixture
def gpu(monkeypatch, interpreter):
    """CPU tensors are taken for those of a GPU, whose kernels are interpreted; returns what may be changed."""
    asked = {"capability": 90, "ran": []}

    def interpreted(module, name):
        function = getattr(module, name)

        def run(*args):
            asked["ran"].append((name, args[-1]))
            return interpreter.call(function, *args)

        monkeypatch.setattr(module, name, run)

    interpreted(triton_quantize, "quantize")
    interpreted(triton_quantize, "dequantize")
    interpreted(triton_product, "quantized_linear")
    monkeypatch.setattr(triton_ops, "capability_of", lambda device: asked["capability"])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return asked


def parts_of(scheme, n=24, k=64):
    slot = SCHEMES[scheme].linear
    return reference.quantize(torch.randn(n, k), slot.weight, FORMATS[slot.weight].weight_rule), slot


@pytest.mark.parametrize("scheme", ["fp8_per_block", "int8", "mxfp4_weight_only"])
def test_a_linear_runs_quantization_and_product(gpu, scheme):
    weight, slot = parts_of(scheme)
    x, bias = torch.randn(5, 64).bfloat16(), torch.randn(24)
    activation = slot.activation or ""
    rule = FORMATS[activation].activation_rule if activation else ""
    y = triton_ops.linear(x, weight, slot.weight, activation, rule, bias, None)
    expected = reference.linear(x, weight, slot.weight, activation, rule, bias, None)
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=1e-3)
    assert [name for name, _ in gpu["ran"]] == (["quantize"] if activation else []) + ["quantized_linear"]
    assert gpu["ran"][-1] == ("quantized_linear", False)


def test_a_fast_accumulation_is_asked_for_by_name(gpu):
    weight, slot = parts_of("fp8_per_channel")
    args = (torch.randn(3, 64), weight, slot.weight, slot.activation, "amax", None, None)
    triton_ops.linear(*args, kernel="triton_fast_accum")
    triton_ops.linear(*args, kernel="triton")
    assert [last for name, last in gpu["ran"] if name == "quantized_linear"] == [True, False]


def test_codes_may_be_transposed(gpu):
    weight, slot = parts_of("fp8_per_channel")
    turned = [weight[0].T.contiguous().T, weight[1]]
    x = torch.randn(3, 64)
    args = (slot.weight, slot.activation, "amax", None, None)
    assert_same_bits(triton_ops.linear(x, turned, *args), triton_ops.linear(x, weight, *args))


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_float8_casts_are_left_to_gpus_that_have_them(gpu, capability):
    gpu["capability"] = capability
    x = torch.randn(4, 64)
    parts = triton_ops.quantize(x, "fp8_per_token", "amax")
    assert_same_bits(parts, reference.quantize(x, "fp8_per_token", "amax"))
    assert_same_bits(
        triton_ops.dequantize(parts, "fp8_per_token", 64, torch.float32),
        reference.dequantize(parts, "fp8_per_token", 64, torch.float32),
    )
    assert gpu["ran"] == [("quantize", capability >= 89), ("dequantize", capability >= 89)]


def test_what_the_kernels_do_not_have_is_left_to_the_reference(gpu):
    weight, slot = parts_of("int8")
    x = torch.randn(4, 64)
    args = (weight, slot.weight, slot.activation, "amax", None, None)
    assert triton_ops.linear(x.double(), *args).dtype == torch.float64
    assert_same_bits(triton_ops.linear(x, *args, kernel="reference"), reference.linear(x, *args))
    gpu["capability"] = 75
    assert_same_bits(triton_ops.linear(x, *args), reference.linear(x, *args))
    assert_same_bits(triton_ops.quantize(x, "int8_per_token", "amax"), reference.quantize(x, "int8_per_token", "amax"))
    assert gpu["ran"] == []


def test_wrong_operands_are_errors_of_ours(gpu):
    weight, slot = parts_of("int8")
    with pytest.raises(ConversionError, match="is stored as"):
        triton_ops.linear(torch.randn(4, 60), weight, slot.weight, slot.activation, "amax", None, None)
    with pytest.raises(ConversionError, match="is stored as"):
        triton_ops.dequantize(weight, slot.weight, 60, torch.float32)
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="has no gradient"):
        triton_ops.quantized_linear([x], "", weight, slot.weight, 64, torch.float32, None, None)
    assert gpu["ran"] == []


@pytest.mark.parametrize(("rows", "n", "k"), [(0, 24, 64), (3, 0, 64), (3, 24, 0)])
def test_empty_products(gpu, rows, n, k):
    weight = reference.quantize(torch.randn(n, k), "fp8_per_channel_static", "amax")
    y = triton_ops.linear(
        torch.randn(rows, k), weight, "fp8_per_channel_static", "fp8_per_token", "amax", torch.ones(n), None
    )
    assert_same_bits(y, torch.ones(rows, n))


def test_the_registry_names_them_for_a_gpu(monkeypatch):
    triton_ops.why_not.cache_clear()
    choice = registry.select("linear", "mxfp4", "mxfp4", 64, 64, "cuda")
    assert choice == registry.KernelChoice("triton", "")
    assert "not embedding" in registry.select("embedding", "mxfp4", "", 64, 64, "cuda").reason
    assert triton_ops.why_not(75) == "needs compute capability 8.0, the GPU has 7.5"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    triton_ops.why_not.cache_clear()
    assert registry.select("linear", "mxfp4", "mxfp4", 64, 64, "cuda").name == "reference"
    monkeypatch.undo()
    triton_ops.why_not.cache_clear()
