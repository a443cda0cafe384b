"""What the Triton kernels say that they take: the plan and the operators ask the same functions, and agree."""

import contextlib

import pytest
import torch
from torch import nn

from olq_fx.formats import FORMATS
from olq_fx.kernels import native, reference, registry, support, triton_ops, triton_product
from olq_fx.kernels.support import Support
from olq_fx.plan import plan_for
from olq_fx.schemes import SCHEMES

FP8 = ("fp8_per_channel_static", "fp8_per_token")
BLOCK = ("fp8_per_block_static", "fp8_per_block_dynamic")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (support.product(*FP8), ""),
        (support.product(*FP8, dtype=torch.bfloat16, capability=90), ""),
        (support.product(*FP8, dtype=torch.float64), "computes in float32, bfloat16 and float16, not float64"),
        (support.product("mxfp4", "", activation_dtype=torch.float64), "not float64"),
        (support.product("mxfp4", "mxfp4", activation_dtype=torch.float64), ""),
        (support.product(*FP8, capability=75), "needs compute capability 8.0, the GPU has 7.5"),
        (support.product(*FP8, device_type="cpu"), "runs on cuda, not on cpu"),
        (support.product(*FP8, fast_accum=True), ""),
        (support.product(*BLOCK, fast_accum=True), "multiplies float8 by float8 with scales by tensor or by row only"),
        (support.product(FP8[0], "", fast_accum=True), "multiplies float8 by float8"),
        (support.grouped("mxfp4", "", capability=90), ""),
        (support.grouped(*BLOCK, dtype=torch.int8), "not int8"),
        (support.quantize("mxfp4", "mse"), ""),
        (support.quantize("mxfp4", "most"), "mxfp4 has no scale rule 'most'"),
        (support.quantize("mxfp4", dimensions=3), "quantizes matrices, not 3 dimensions"),
        (support.quantize("mxfp4", dtype=torch.int32), "quantizes floating point, not int32"),
        (support.quantize("mxfp4", dtype=torch.float64), ""),
        (support.dequantize("mxfp4", dtype=torch.int32), "gives floating point, not int32"),
        (support.dequantize("mxfp4", dtype=torch.float64, capability=80), ""),
        (support.chain(*BLOCK, "mxfp8", gated=True, n=256), ""),
        (support.chain(*BLOCK, "mxfp8", gated=True, n=257), "one of 257 columns does not have"),
        (support.chain(*BLOCK, "mxfp8", gated=True, residual=True), "a residual has no place"),
        (support.chain(*BLOCK, "mxfp8", residual=True, dtype=torch.float16), ""),
        (support.chain(*BLOCK, "fp8_per_token"), "fp8_per_token has a statistic of more than a piece of a row"),
        (support.chain(*BLOCK, "mxfp8", dtype=torch.float64), "not float64"),
        (support.producer("mxfp8", dtype=torch.float16), ""),
        (support.producer("", dtype=torch.float16, capability=80), ""),
        (support.producer("fp8_per_channel_static"), "fp8_per_channel_static is no activation format"),
        (support.producer("mxfp8", dtype=torch.float64), "not float64"),
    ],
)
def test_what_is_taken_and_why_not(asked: Support, said: str):
    assert said in asked.reason
    assert bool(asked) == (said == "")


def test_without_triton_nothing_is_taken(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    support.why_not.cache_clear()
    try:
        for asked in (support.product(*FP8), support.chain(*BLOCK, "mxfp8"), support.producer("mxfp8")):
            assert asked == Support("needs the package triton")
    finally:
        support.why_not.cache_clear()


class Ran(Exception):  # noqa: N818
    """A Triton kernel was about to run."""


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernel_of_the_plan_is_the_one_that_runs(monkeypatch, scheme, dtype, capability):
    """On a GPU of any capability, in any dtype that a model has."""

    def ran(*args, **kwargs):
        raise Ran

    support.why_not.cache_clear()
    for module in (support, triton_ops):
        monkeypatch.setattr(module, "capability_of", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton_product, "quantized_linear", ran)
    monkeypatch.setattr(triton_ops, "quantize", reference.quantize)
    try:
        model = nn.ModuleDict({"up": nn.Linear(64, 48, dtype=dtype, device="meta")})
        [row] = plan_for(scheme, model, device="cuda").quantized
        slot = row.slot
        assert slot is not None
        weight = reference.quantize(torch.randn(48, 64), slot.weight, FORMATS[slot.weight].weight_rule)
        rule = FORMATS[slot.activation].activation_rule if slot.activation else ""
        given = (torch.randn(3, 64, dtype=dtype), weight, slot.weight, slot.activation or "", rule, None, None)
        if row.kernel == "triton":
            with pytest.raises(Ran):
                triton_ops.linear(*given)
        else:
            assert row.kernel == "reference"
            assert ("7.5" if capability == 75 else "not float64") in row.kernel_reason
            assert triton_ops.linear(*given).dtype == dtype
    finally:
        support.why_not.cache_clear()


def test_the_native_kernels_leave_float64_to_the_reference_in_the_plan_too():
    choice = registry.select("linear", "mxfp4", "mxfp4", 64, 64, "cpu", torch.float64)
    assert choice.name == "reference"
    assert "native_cpu: computes in float32, bfloat16 and float16, not float64" in choice.reason
    assert native.refusal(torch.bfloat16) == native.refusal(None) == ""
    assert "not float64" in registry.refusal("native_cpu", "linear", "mxfp4", "mxfp4", 64, 64, "cpu", torch.float64)


def test_amd_gpus_are_left_to_the_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    support.why_not.cache_clear()
    try:
        assert support.why_not(90) == "needs a GPU of NVIDIA's"
    finally:
        monkeypatch.undo()
        support.why_not.cache_clear()
    assert support.why_not(90) == ""
