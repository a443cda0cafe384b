"""The cost model: figures worked out by hand, and what must hold of every format, shape and architecture."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from olq_fx.cost_model import (
    ARCHITECTURES,
    ROWS,
    architecture,
    instruction,
    of_capability,
    original_cost,
    quantized_cost,
    rows_lost,
)
from olq_fx.errors import ConfigurationError
from olq_fx.formats import get_format
from olq_fx.kernels import registry
from olq_fx.plan import plan_for
from olq_fx.schemes import SCHEMES, Slot, pairs

H200 = architecture("h200")
FP8_BLOCK = SCHEMES["fp8_per_block"].linear
SLOTS = [pair.slot for pair in pairs()]
SIZES = st.integers(1, 30000)


def test_the_original_by_hand():
    cost = original_cost(4096, 7168, 16384, H200)
    assert cost.operations == 2 * 4096 * 7168 * 16384
    assert cost.bytes == 2 * (4096 * 16384 + 7168 * 16384 + 4096 * 7168)
    assert cost.quantization_bytes == 0
    assert cost.bound == "compute"
    assert cost.seconds == pytest.approx(972.3e-6, rel=1e-3)  # 962.1 TFLOP at 989.5 TFLOP/s


def test_a_decoded_token_by_hand():
    cost = quantized_cost(FP8_BLOCK, 1, 8192, 8192, H200)
    weight = 8192 * 8192 + 4 * 64 * 64
    codes = 8192 + 4 * 64
    assert cost.product_bytes == weight + codes + 2 * 8192
    assert cost.quantization_bytes == 2 * 8192 + codes
    assert cost.bound == "memory"
    assert cost.seconds == pytest.approx(cost.bytes / 4.8e12)
    fused = quantized_cost(FP8_BLOCK, 1, 8192, 8192, H200, fused=True)
    assert (fused.product_bytes, fused.quantization_bytes) == (cost.product_bytes, 0)


def test_a_scale_of_the_whole_tensor_reads_it_twice():
    once = quantized_cost(Slot("fp8_per_tensor_static", "fp8_per_token"), 64, 512, 512, H200)
    twice = quantized_cost(Slot("fp8_per_tensor_static", "fp8_per_tensor_dynamic"), 64, 512, 512, H200)
    scales = 4 * 64 - 4
    assert twice.quantization_bytes - once.quantization_bytes == 2 * 64 * 512 - scales


@pytest.mark.parametrize(
    ("weight", "activation", "expected"),
    [  # on sm_80, sm_89, sm_90, sm_100, sm_120; that the kernels do so is tested with them
        ("fp8_per_block_static", "fp8_per_block_dynamic", ("bf16 (w8a16)", "fp8", "fp8", "fp8", "fp8")),
        ("fp8_per_tensor_static", "fp8_per_token", ("bf16 (w8a16)", "fp8", "fp8", "fp8", "fp8")),
        ("int8_per_channel_static", "int8_per_token", ("int8",) * 5),
        ("mxfp8", "mxfp8", ("bf16 (w8a16)",) * 3 + ("mxf8f6f4",) * 2),
        ("mxfp4", "mxfp4", ("bf16 (w4a16)",) * 3 + ("mxf4",) * 2),
        ("mxfp4_dualscale", "mxfp4_dualscale", ("bf16 (w4a16)",) * 5),
        ("nvfp4", "nvfp4_per_token", ("bf16 (w4a16)",) * 3 + ("mxf4nvf4",) * 2),
        ("mxfp4", "mxfp8", ("bf16 (w4a16)",) * 3 + ("mxf8f6f4", "bf16 (w4a16)")),
        ("mxfp8", "mxfp4", ("bf16 (w8a16)",) * 3 + ("mxf8f6f4", "bf16 (w8a16)")),
        ("mxfp4", "mxfp4_dualscale", ("bf16 (w4a16)",) * 5),
        ("mxfp4", "fp8_per_token", ("bf16 (w4a16)",) * 5),
        ("nvfp4", "mxfp4", ("bf16 (w4a16)",) * 5),
        ("int8_per_channel_static", "fp8_per_token", ("bf16 (w8a16)",) * 5),
        ("fp8_per_channel_static", None, ("bf16 (w8a16)",) * 5),
        ("nvfp4", None, ("bf16 (w4a16)",) * 5),
    ],
)
def test_the_instruction_of_each_architecture(weight, activation, expected):
    pair = get_format(weight), None if activation is None else get_format(activation)
    assert tuple(instruction(*pair, capability).name for capability in (80, 89, 90, 100, 120)) == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
@given(slot=st.sampled_from(SLOTS), m=SIZES, n=SIZES, k=SIZES)
def test_every_pair_has_a_cost_everywhere(name, slot, m, n, k):
    gpu = ARCHITECTURES[name]
    cost = quantized_cost(slot, m, n, k, gpu)
    fused = quantized_cost(slot, m, n, k, gpu, fused=True)
    original = original_cost(m, n, k, gpu)
    assert cost.operations == original.operations
    assert cost.seconds >= fused.seconds >= max(fused.bytes / gpu.bandwidth, cost.operations / max(gpu.rates.values()))
    assert fused.quantization_bytes == 0
    assert (cost.quantization_bytes == 0) == (slot.activation is None)
    assert cost.instruction.rate in gpu.rates
    if slot.activation is None and cost.bytes < original.bytes:
        assert cost.seconds <= original.seconds


@given(m=SIZES, n=SIZES, k=SIZES, factor=st.integers(2, 9))
def test_more_rows_never_cost_less(m, n, k, factor):
    for slot in (FP8_BLOCK, SCHEMES["mxfp4"].linear):
        few, many = quantized_cost(slot, m, n, k, H200), quantized_cost(slot, factor * m, n, k, H200)
        assert few.seconds < many.seconds <= factor * few.seconds * (1 + 1e-9)


def test_names_of_architectures():
    assert [architecture(name).name for name in ("sm_90", "SM90", "sm-90", "H200")] == ["sm_90"] * 3 + ["h200"]
    assert architecture("sm_90").bandwidth == architecture("h200").bandwidth > architecture("h100").bandwidth
    assert {of_capability(cap).capability for cap in (80, 89, 90, 100, 120)} == {80, 89, 90, 100, 120}
    assert of_capability(75) is None
    with pytest.raises(ConfigurationError, match="did you mean 'sm_90'"):
        architecture("sm_91")


def test_the_table_is_dense_and_sourced():
    for one in ARCHITECTURES.values():
        assert one.source
        assert one.device in one.ceilings
        assert one.rates["int8"] > one.rates["bf16"]
        assert ("fp8" in one.rates) == (one.capability >= 89)
        assert ("fp4" in one.rates) == (one.capability >= 100)
    assert H200.rates["fp8"] == 1979e12
    assert H200.bandwidth == 4.8e12


def test_rows_at_which_a_layer_loses():
    assert rows_lost(FP8_BLOCK, 8192, 8192, [H200]) == ()
    assert rows_lost(SCHEMES["mxfp4"].linear, 8192, 8192, [H200]) == (4096,)
    assert rows_lost(SCHEMES["mxfp4"].linear, 8192, 8192, [architecture("b200")]) == ()
    assert rows_lost(SCHEMES["mxfp4"].linear, 8192, 8192, [H200, architecture("b200")]) == ()
    assert rows_lost(FP8_BLOCK, 1, 8192, [H200]) == ROWS


# What a plan says of a GPU where a kernel of its own runs the layer


@pytest.fixture
def a_kernel_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    only_cuda = registry.Kernel("some_gpu_kernel", "cuda", lambda product: "")
    monkeypatch.setattr(registry, "KERNELS", (only_cuda, *registry.KERNELS))


def planned(scheme: str, n: int, backend: str = "auto"):
    with torch.device("meta"):
        model = nn.ModuleDict({"up": nn.Linear(8192, n, bias=False, dtype=torch.bfloat16)})
    return plan_for({"quantization": scheme, "linear_backend": backend}, model, device="cuda").rows[0]


@pytest.mark.usefixtures("a_kernel_for_gpus")
def test_a_plan_uses_the_model_on_the_gpu_that_is_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    row = planned("mxfp4", 8192)
    assert (row.kernel, row.warning) == ("some_gpu_kernel", "")
    assert row.kernel_reason == "expected to be slower than in bfloat16 with 4096 rows"
    assert planned("fp8_per_block", 8192).kernel_reason == ""
    assert planned("fp8_per_block", 1).warning == "expected to be slower than in bfloat16 whatever the number of rows"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert planned("mxfp4", 8192).kernel_reason == ""


@pytest.mark.usefixtures("a_kernel_for_gpus")
def test_without_a_gpu_a_loss_must_hold_everywhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned("mxfp4", 8192).kernel_reason == ""
    assert planned("mxfp8", 1).warning
    small = dataclasses.asdict(planned("int8", 16))
    assert small["warning"] == "", "the rule of the CPU is not that of a GPU"


def test_the_reference_on_a_gpu_is_a_loss_whatever_the_model_says():
    assert planned("fp8_per_block", 8192, "reference").warning.endswith("the reference decodes the weight in each call")
