"""Executing a plan: refusals first, one weight at a time, originals freed, interruptions survived."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from olq_fx import conversion, panels
from olq_fx.conversion import convert_row, dequantize_, execute, preflight
from olq_fx.errors import ConversionError, InterruptedConversionError
from olq_fx.plan import Plan, plan_for
from olq_fx.quantize import quantize_
from olq_fx.report import Report
from olq_fx.schemes import SCHEMES
from olq_fx.testing import Conv1D, assert_same_bits, record_allocations, storage_census
from olq_fx.weights import QuantizedWeight

Unchanged = Callable[[nn.Module], Any]


def stack(layers: int = 3, size: int = 64, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(size, size, bias=bias) for _ in range(layers)])


def run(model: nn.Module, scheme: str = "fp8_per_block", **options: Any) -> Report:
    plan = plan_for(scheme, model)
    report = Report(plan)
    preflight(model, plan.rows)
    execute(model, plan, report, **options)
    return report


def is_converted(model: nn.Module) -> list[bool]:
    return [isinstance(p, QuantizedWeight) for p in model.parameters() if p.dim() == 2]


# Refusals.


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_with_path_and_count(bad: float, unchanged: Unchanged):
    model = stack()
    with torch.no_grad():
        model[1].weight[3, 4:7] = bad
        model[2].weight[0, 0] = bad
    plan = plan_for("fp8_per_block", model)
    message = r"1\.weight: 3 of 4096 values.*2\.weight: 1 of 4096.*Nothing was converted"
    with unchanged(model), pytest.raises(ConversionError, match=message):
        preflight(model, plan.rows)
    preflight(model, plan.rows, allow_nonfinite=True)
    assert isinstance(ConversionError("x"), ValueError)


def test_what_has_changed_since_the_plan_is_refused(unchanged: Unchanged):
    changes: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
        "shape": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(64, 65))), r"shape is \(64, 65\)"),
        "dtype": (
            lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))),
            "complex64",
        ),
        "int": (
            lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), False)),
            "int8",
        ),
        "gone": (lambda layer: layer._parameters.pop("weight"), "no parameter of the model"),
        "computed": (
            lambda layer: layer._parameters.__setitem__("weight", nn.Parameter(torch.randn(64, 64)) * 2),
            "computed from other tensors",
        ),
        "sparse": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(64, 64).to_sparse())), "layout"),
    }
    for name, (change, message) in changes.items():
        model = stack()
        plan = plan_for("fp8_per_block", model)
        change(model[1])
        with pytest.raises(ConversionError, match=rf"^1\.weight: .*{message}"):
            preflight(model, plan.rows)
        assert is_converted(model) == [False] * len(is_converted(model)), name


def test_memory_shared_with_what_is_not_planned_is_refused(unchanged: Unchanged):
    class Shared(nn.Module):
        def __init__(self, share: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.register_buffer("other", share(self.layer.weight.detach()))

    for share in (lambda w: w, lambda w: w[3:5], lambda w: w.t(), lambda w: w.view(-1)):
        model = Shared(share)
        with unchanged(model), pytest.raises(ConversionError, match=r"layer\.weight: it shares memory with other"):
            run(model)


def test_planned_weights_that_overlap_are_refused(unchanged: Unchanged):
    storage = torch.randn(96, 64)
    model = stack(2)
    model[0].weight, model[1].weight = nn.Parameter(storage[:64]), nn.Parameter(storage[32:])
    with unchanged(model), pytest.raises(ConversionError, match=r"0\.weight: it shares memory with 1\.weight"):
        run(model)


def test_neighbours_in_one_storage_are_converted():
    """As in a memory-mapped checkpoint: one storage, no overlap."""
    storage = torch.randn(128 * 64 + 64)
    model = stack(2)
    model[0].weight = nn.Parameter(storage[: 64 * 64].view(64, 64))
    model[1].weight = nn.Parameter(storage[64 * 64 : 128 * 64].view(64, 64))
    model[1].bias = nn.Parameter(storage[128 * 64 :])
    run(model)
    assert is_converted(model) == [True, True]


def test_rows_that_are_left_alone_are_not_read():
    model = stack()
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))
    plan = plan_for({"quantization": "int8", "ignore": "1"}, model)
    preflight(model, plan.rows)
    execute(model, plan, Report(plan))
    assert is_converted(model) == [True, False, True]


def test_tensors_of_other_types_are_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = stack(1)
    plan = plan_for("int8", model)
    model[0]._parameters["weight"] = nn.Parameter(TwoTensor(torch.randn(64, 64), torch.randn(64, 64)))
    with pytest.raises(ConversionError, match="TwoTensor"):
        preflight(model, plan.rows)


# Conversion.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_are_those_of_quantizing_the_weight(scheme: str):
    model = nn.Sequential(nn.Linear(96, 40), Conv1D(17, 40), nn.MultiheadAttention(48, 4))
    values = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 2}
    report = run(model, scheme)
    assert report.converted == ("0.weight", "1.weight", "2.in_proj_weight", "2.out_proj.weight")
    for name, value in values.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, QuantizedWeight)
        row = report.plan.lookup(name)
        matrix = value.t() if name == "1.weight" else value
        expected = torch.ops.olq_fx.quantize(matrix.contiguous(), row.slot.weight, row.weight_rule)
        for part, other in zip(weight.parts, expected, strict=True):
            assert_same_bits(part, other)
        assert (weight.shape, weight.dtype, weight.stride()) == (value.shape, value.dtype, value.stride())
        assert (weight.path, weight.spec.activation) == (name, row.slot.activation or "")
        assert isinstance(weight, nn.Parameter)
        assert not weight.requires_grad


def test_trainable_weights_are_frozen_and_the_rest_keeps_training():
    model = stack()
    model[1].weight.requires_grad_(False)
    report = run(model)
    assert report.frozen == ("0.weight", "2.weight")
    assert all(layer.bias.requires_grad for layer in model)
    assert not any(layer.weight.requires_grad for layer in model)
    dequantize_(model)
    assert [layer.weight.requires_grad for layer in model] == [True, False, True]


def test_each_original_is_freed_before_the_next_is_read(monkeypatch: pytest.MonkeyPatch):
    """Ties, aliases of modules and distinct parameters on one storage included; without the garbage collector."""
    model = stack(6)
    model[3].weight = model[0].weight
    model.add_module("alias", model[1])
    model[4].weight = nn.Parameter(model[2].weight.detach())
    originals = {name: weakref.ref(p) for name, p in model.named_parameters() if p.dim() == 2}
    alive: list[list[str]] = []
    convert = panels.convert

    def watched(source: Tensor, *args: Any) -> Any:
        alive.append([name for name, reference in originals.items() if reference() is not None])
        return convert(source, *args)

    monkeypatch.setattr(panels, "convert", watched)
    gc.collect()
    gc.disable()
    try:
        report = run(model)
    finally:
        gc.enable()
    assert report.converted == ("0.weight", "1.weight", "2.weight", "5.weight")
    order = ["0.weight", "1.weight", "2.weight", "4.weight", "5.weight"]
    assert alive == [order, order[1:], order[2:], order[4:]]
    assert all(reference() is None for reference in originals.values())


def test_ties_and_aliases_are_converted_once():
    model = stack(4)
    model[3].weight = model[0].weight
    model.add_module("alias", model[1])
    model[2].weight = nn.Parameter(model[0].weight.detach())
    report = run(model)
    assert report.converted == ("0.weight", "1.weight")
    assert model[0].weight is model[3].weight is model[2].weight
    assert model.get_submodule("alias").weight is model[1].weight


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_block", "mxfp4_dualscale", "nvfp4_per_token"])
def test_peak_is_one_converted_weight_and_bounded_temporaries(scheme: str):
    with record_allocations() as allocations:
        model = stack(4, 640, bias=False).bfloat16()
        original = sum(p.nbytes for p in model.parameters())
        with allocations.mark("quantize"):
            report = quantize_(model, scheme)
    stored = sum(p.stored_bytes for p in model.parameters() if isinstance(p, QuantizedWeight))
    start = allocations.at_start("quantize")
    assert allocations.peak("quantize") <= start + stored // 4 + 64 * 2**20
    assert allocations.at_end("quantize") <= start - original + stored + 4096
    assert len(report.converted) == 4


def test_no_original_storage_is_alive_afterwards():
    model = stack(4, 256)
    model[3].weight = model[0].weight
    gc.collect()
    before = set(storage_census())
    run(model)
    census = {pointer: record for pointer, record in storage_census().items() if pointer not in before}
    # Nothing new but the parts; and of the model nothing but these and what was not converted.
    parts = sum(part.nbytes for p in model.parameters() if isinstance(p, QuantizedWeight) for part in p.parts)
    assert sum(record.bytes for record in census.values()) <= parts
    census = storage_census(model)
    stored = sum(part.nbytes for p in model.parameters() if isinstance(p, QuantizedWeight) for part in p.parts)
    assert sum(record.bytes for record in census.values()) == stored + 4 * 256 * 4


def test_conversion_in_inference_mode_can_be_refreshed_outside():
    model = stack(1)
    with torch.inference_mode():
        run(model)
        y = model(torch.ones(1, 64))
    assert not any(part.is_inference() for part in model[0].weight.parts)
    model[0].weight.copy_(torch.randn(64, 64))
    assert not torch.equal(model(torch.ones(1, 64)), y)


def test_a_model_built_in_inference_mode():
    with torch.inference_mode():
        model = stack(1)
    run(model)
    x = torch.ones(1, 64, requires_grad=True)
    with torch.no_grad():
        model(x)


def test_two_threads_convert_once(monkeypatch: pytest.MonkeyPatch):
    model = stack(3)
    plan = plan_for("int8", model)
    converted: list[int] = []
    convert = panels.convert
    monkeypatch.setattr(panels, "convert", lambda *args: (converted.append(1), convert(*args))[1])
    found: list[list[Tensor]] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait()
        found.append([convert_row(model, row) for row in plan.rows])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 3
    assert all(a is b for a, b in zip(*found, strict=True))


def test_device_moves_the_rest_of_the_model_too():
    model = stack(2)
    model.register_buffer("table", torch.arange(3.0))
    model[0].bias.grad = torch.ones(64)
    bias = model[0].bias
    run(model, device=torch.device("cpu"))
    assert model[0].bias is bias
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    with torch.device("meta"):
        empty = stack(1)
    run(empty, "int8", device=torch.device("cpu"))
    assert empty[0].weight.pending.device.type == "cpu"
    assert empty[0].bias.is_meta


def test_fake_weights_are_pending():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = stack(1)
    report = run(model)
    assert report.pending == ("0.weight",)
    assert model[0].weight.pending is not None


# Interruptions.


class StopError(Exception):
    """What goes wrong."""


@pytest.mark.parametrize(
    "error", [StopError("no luck"), MemoryError("full"), torch.OutOfMemoryError("CUDA out of memory")]
)
@pytest.mark.parametrize("position", [0, 2])
def test_an_error_on_the_way_lists_what_is_converted(error: Exception, position: int, monkeypatch: pytest.MonkeyPatch):
    model, reference = stack(4), stack(4)
    reference.load_state_dict(model.state_dict())
    calls = itertools.count()
    convert = panels.convert

    def failing(*args: Any) -> Any:
        if next(calls) == position:
            raise error
        return convert(*args)

    monkeypatch.setattr(panels, "convert", failing)
    with pytest.raises(InterruptedConversionError) as caught:
        run(model)
    assert caught.value.__cause__ is error
    done, left = [f"{i}.weight" for i in range(position)], [f"{i}.weight" for i in range(position, 4)]
    assert f"{position} converted ({', '.join(done) or 'none'})" in str(caught.value)
    assert f"{4 - position} in original precision ({', '.join(left)})" in str(caught.value)
    assert is_converted(model) == [True] * position + [False] * (4 - position)
    with torch.no_grad():
        model(torch.randn(2, 64))
    report = run(model)
    assert report.already == tuple(done)
    assert report.converted == tuple(left)
    run(reference)
    x = torch.randn(2, 64)
    assert_same_bits(model(x).detach(), reference(x).detach())


def test_an_interrupt_from_the_keyboard_is_raised_with_a_note(monkeypatch: pytest.MonkeyPatch):
    model = stack(3)
    calls = itertools.count()
    convert = panels.convert

    def failing(*args: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return convert(*args)

    monkeypatch.setattr(panels, "convert", failing)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(model)
    told = " ".join([*map(str, caught.value.args), *getattr(caught.value, "__notes__", [])])
    assert "1 converted (0.weight), 2 in original precision (1.weight, 2.weight)" in told
    assert is_converted(model) == [True, False, False]


def test_an_interrupt_while_a_tie_is_replaced_leaves_no_half(monkeypatch: pytest.MonkeyPatch):
    model = stack(3)
    model[2].weight = model[0].weight
    attach = conversion.state.attach
    calls = itertools.count()

    def failing(module: nn.Module) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        attach(module)

    monkeypatch.setattr(conversion.state, "attach", failing)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert model[0].weight is model[2].weight
    assert is_converted(model) == [True, False]
    assert model[2]._state_dict_hooks


# And back.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantize_gives_ordinary_parameters_with_the_dequantized_values(scheme: str):
    model = nn.Sequential(nn.Linear(96, 40), Conv1D(150, 40), nn.MultiheadAttention(48, 4)).bfloat16()
    model[0].weight = nn.Parameter(torch.randn(96, 40).bfloat16().t())
    before = {name: (p.shape, p.stride(), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    run(model, scheme)
    values = {name: p.dequantize() for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
    dequantize_(model)
    after = {name: (p.shape, p.stride(), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert after == before
    for name, value in values.items():
        assert type(model.get_parameter(name)) is nn.Parameter
        assert_same_bits(model.get_parameter(name).detach(), value)
    report = run(model, scheme)
    assert len(report.converted) == 4


def test_dequantize_keeps_ties_and_takes_pending_weights():
    model = stack(3)
    model[2].weight = model[0].weight
    run(model)
    dequantize_(model)
    assert model[0].weight is model[2].weight
    with torch.device("meta"):
        empty = stack(1)
    run(empty)
    dequantize_(empty)
    assert type(empty[0].weight) is nn.Parameter
    assert empty[0].weight.is_meta


def test_dequantize_in_bounded_memory():
    with record_allocations() as allocations:
        model = nn.Sequential(*[nn.Linear(640, 640, bias=False) for _ in range(3)]).bfloat16()
        run(model, "mxfp4")
        with allocations.mark("dequantize"):
            dequantize_(model)
    final = sum(p.nbytes for p in model.parameters())
    assert allocations.at_end("dequantize") - allocations.at_start("dequantize") < final
    assert allocations.peak("dequantize") - allocations.at_start("dequantize") <= final + 64 * 2**20


def test_plans_are_for_this_model_only():
    plan: Plan = plan_for("int8", stack(2))
    with pytest.raises((ConversionError, AttributeError)):
        preflight(nn.Sequential(nn.ReLU()), plan.rows)
