"""Shapes and layouts on which other libraries fail. Numbers 8 to 12."""

import copy

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import RecordingBackend, assert_layer_close, assert_same_bits, assert_sqnr

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)

# (out, in)
SHAPES = [(40, 24), (33, 17), (1, 1), (250, 130), (17, 32), (64, 192)]


@every_scheme
def test_08_every_shape_is_quantized_right_and_in_the_report(route, scheme):
    model = nn.ModuleDict({f"{rows}x{columns}": nn.Linear(columns, rows) for rows, columns in SHAPES})

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, *xs: torch.Tensor) -> list[torch.Tensor]:
            return [each(x) for each, x in zip(self.layers.values(), xs, strict=True)]

    inputs = [torch.randn(3, columns) for _, columns in SHAPES]
    quantized = route(Each(), scheme, *inputs)
    for (name, each), x, y in zip(model.items(), inputs, quantized(*inputs), strict=True):
        assert_layer_close(y, x, each.weight, each.bias)
        row = quantized.report.plan.lookup(f"layers.{name}.weight")
        assert row.decision == "quantize", row
        assert (row.shape[0], row.shape[1]) == tuple(int(extent) for extent in name.split("x"))
    assert quantized.converted == tuple(f"layers.{name}.weight" for name in model)


@every_scheme
def test_09_empty_inputs(route, scheme):
    model = nn.Linear(72, 24).bfloat16()
    quantized = route(model, scheme, torch.empty(0, 72, dtype=torch.bfloat16))
    assert isinstance(model.weight, olq_fx.QuantizedWeight)
    for shape in [(0, 72), (2, 0, 72), (5, 0, 72), (0, 3, 72)]:
        y = quantized(torch.empty(shape, dtype=torch.bfloat16))
        assert_same_bits(y, torch.empty(*shape[:-1], 24, dtype=torch.bfloat16), name=str(shape))


def test_09_empty_inputs_compiled_by_inductor(route):
    model = nn.Linear(72, 24)
    x = torch.randn(0, 72)
    quantized = route(model, "fp8_per_block", x, inner="inductor")
    compiled = torch.compile(model) if route.name == "quantize_" else quantized
    with torch.no_grad():
        assert_same_bits(compiled(x), torch.empty(0, 24))
        assert_layer_close(compiled(torch.ones(2, 72)), torch.ones(2, 72), model.weight, model.bias)


@every_scheme
def test_10_non_contiguous_inputs_give_the_same_bits(route, scheme):
    model = nn.Linear(64, 24)
    base = torch.randn(64, 6, 5, 64)
    inputs = {
        "transposed": base[:, 0, :, 0].T,
        "strided": base[::7, 1, ::2, ::1].transpose(0, 1),
        "columns": torch.randn(6, 128)[:, ::2],
        "expanded": base[:1, 2].expand(4, -1, -1),
        "offset": torch.randn(5 * 64 + 3)[3:].view(5, 64),
        "channels last": torch.randn(2, 5, 3, 64).contiguous(memory_format=torch.channels_last),
    }
    quantized = route(model, scheme, inputs["offset"])
    for name, x in inputs.items():
        if SCHEMES[scheme].linear.activation:
            # A quantized input is a new tensor; one in original precision goes to the product as it lies.
            assert_same_bits(quantized(x), quantized(x.contiguous().clone()), name=name)
        assert_layer_close(quantized(x), x, model.weight, model.bias)
    assert not any(x.is_contiguous() for name, x in inputs.items() if name != "offset")


@pytest.mark.parametrize("scheme", [name for name, each in SCHEMES.items() if each.linear.activation])
def test_11_a_number_of_blocks_that_is_no_multiple_of_4(route, scheme):
    """Each block has its own magnitude, so that a scale taken from a neighbour would be seen."""
    for blocks in (1, 3, 5, 6, 7):
        check_blocks(route, scheme, blocks, size=128 if scheme == "fp8_per_block" else 32)


def check_blocks(route, scheme, blocks, size):
    model = nn.Linear(blocks * size, 48, bias=False)
    magnitudes = 2.0 ** (torch.arange(blocks) % 4).repeat_interleave(size)
    x = torch.randn(5, blocks * size) * magnitudes
    with torch.no_grad():
        model.weight.mul_(magnitudes.flip(0))
    original = copy.deepcopy(model)
    y = route(model, scheme, x)(x)
    assert_layer_close(y, x, model.weight)
    with torch.no_grad():
        assert_sqnr(y, original(x), 12)


BATCHES = (8, 5, 1, 3, 17)


def compilations(model: nn.Module, recording: RecordingBackend, dynamic: bool) -> int:
    torch.compiler.reset()
    compiled = torch.compile(model, backend=recording)
    with torch.no_grad():
        for batch in BATCHES:
            x = torch.randn(batch, 32)
            if dynamic and batch > 1:
                torch._dynamo.mark_dynamic(x, 0)
            compiled(x)
            compiled(x.clone())
    return recording.compilations


DYNAMIC = [(name, False) for name in SCHEMES] + [("fp8_per_block", True), ("mxfp4_weight_only", True)]


@pytest.mark.parametrize(("scheme", "dynamic"), DYNAMIC)
def test_12_as_many_compilations_as_the_original(scheme, dynamic):
    original = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    expected = compilations(copy.deepcopy(original), RecordingBackend(None), dynamic)
    assert not dynamic or expected <= 2

    by_backend = copy.deepcopy(original)
    assert compilations(by_backend, RecordingBackend(scheme), dynamic) == expected

    in_place = copy.deepcopy(original)
    olq_fx.quantize_(in_place, scheme)
    assert compilations(in_place, RecordingBackend(None), dynamic) == expected


@every_scheme
def test_12_batches_in_turn_are_right(route, scheme):
    model = nn.Linear(32, 48)
    quantized = route(model, scheme, torch.randn(8, 32))
    compiled = torch.compile(model, backend="eager") if route.name == "quantize_" else quantized.run
    with torch.no_grad():
        for batch in BATCHES:
            x = torch.randn(batch, 32)
            assert_layer_close(compiled(x), x, model.weight, model.bias)
