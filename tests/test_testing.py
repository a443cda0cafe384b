"""The testing kit catches what it is for: each helper is shown a right value and a wrong one."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import gelu, linear, silu

import olq_fx
from olq_fx import testing
from olq_fx.configuration import QuantizationConfig
from olq_fx.formats import FORMATS, Format
from olq_fx.numerics import dequantize, quantize

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_of_every_dtype(dtype):
    value = torch.arange(12.0).view(3, 4).T.to(dtype)
    testing.assert_same_bits(value, value.clone())
    other = value.clone()
    other[2, 1] = 0
    with pytest.raises(AssertionError, match=r"1 of 12 elements differ, .*\n  at \(2, 1\): ") as caught:
        testing.assert_same_bits(other, value)
    assert str(dtype) in str(caught.value)
    assert "[0x" in str(caught.value)


def test_same_bits_shows_values_and_bits():
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    actual = expected.clone()
    actual.view(torch.int32)[1, 0] += 1
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_bits((expected, actual), [expected, expected], name="parts")
    assert str(caught.value) == (
        "parts[1]: 1 of 4 elements differ, torch.float32 (2, 2)\n"
        "  at (1, 0): 3.000000238418579 [0x40400001], expected 3.0 [0x40400000]"
    )


def test_same_bits_limits_what_it_shows():
    with pytest.raises(AssertionError, match=r"20 of 20[^$]*\n  and 17 more$") as caught:
        testing.assert_same_bits(torch.zeros(20), torch.ones(20), limit=3)
    assert str(caught.value).count("  at (") == 3


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), "differ"),
        (torch.tensor([1]), torch.tensor([1.0]), "dtype torch.int64, expected torch.float32"),
        (torch.ones(2, 1), torch.ones(2), r"shape \(2, 1\), expected \(2,\)"),
        ((torch.ones(1),), (torch.ones(1), torch.ones(1)), "expected 2 items, got tuple of length 1"),
        ({"a": 1}, {"b": 1}, r"keys \['a'\], expected \['b'\]"),
        (None, torch.ones(1), "expected a tensor, got NoneType"),
        (1, 1.0, "got 1, expected 1.0"),
    ],
)
def test_same_bits_tells_apart(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_same_bits(actual, expected)


def test_same_bits_compares_nan_by_its_payload():
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    testing.assert_same_bits(quiet, quiet.clone())
    with pytest.raises(AssertionError, match=r"nan \[0x7fc00001\], expected nan \[0x7fc00000\]"):
        testing.assert_same_bits(other, quiet)


def test_same_bits_of_converted_weights():
    first, second = nn.Linear(40, 24), nn.Linear(40, 24)
    second.load_state_dict(first.state_dict())
    olq_fx.quantize_(first, "mxfp8")
    olq_fx.quantize_(second, "mxfp8")
    testing.assert_same_bits(first.weight, second.weight)
    second.weight.codes.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(AssertionError, match=r"parts\[0\]: 1 of 960 elements differ.*\n  at \(3, 5\)"):
        testing.assert_same_bits(first.weight, second.weight)
    with pytest.raises(AssertionError, match="expected QuantizedWeight"):
        testing.assert_same_bits(nn.Linear(40, 24).weight, first.weight)


@given(testing.tensors(rows=(1, 4), columns=(1, 70)), testing.formats())
def test_half_step_bound_holds_and_is_tight(x, chosen):
    parts = quantize(x, chosen.format, chosen.rule)
    bound = testing.half_step_bound(x, parts, chosen.format)
    error = (x.double() - dequantize(parts, chosen.format, x.shape[1]).double()).abs()
    assert bool((error <= bound).all()), (error - bound).max()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_half_step_bound_refuses_a_wrong_code(fmt: Format):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)) + 3
    codes, *scales = quantize(x, fmt, fmt.rules[0])
    wrong = codes.clone()
    wrong.view(torch.uint8)[2, 7] = 0
    bound = testing.half_step_bound(x, (wrong, *scales), fmt)
    error = (x.double() - dequantize((wrong, *scales), fmt, 64).double()).abs()
    assert (error > bound).nonzero()[:, 0].tolist() == [2] * (2 if fmt.packed else 1)
    # The bound is no more than a step wide anywhere but where the format cannot reach.
    reached = x.double().abs() <= 6 * testing.effective_scale((codes, *scales), fmt, 64) * (1 if fmt.packed else 64)
    assert bool((bound <= 0.26 * x.double().abs().clamp(min=1))[reached].all())


def test_element_step_of_every_element():
    def steps(name: str, *magnitudes: float) -> list[float]:
        return testing.element_step(torch.tensor(magnitudes, dtype=torch.float64), FORMATS[name]).tolist()

    assert steps("mxfp4", 0, 0.5, 1.75, 2, 3.5, 4, 6) == [0.5, 0.5, 0.5, 1, 1, 2, 2]
    assert steps("mxfp8", 0, 2**-9, 2**-6, 2**-5, 1, 1.9, 448) == [2**-9, 2**-9, 2**-9, 2**-8, 1 / 8, 1 / 8, 32]
    assert steps("int8_per_token", 0, 5, 127) == [1, 1, 1]


def test_effective_scale_of_a_non_finite_group_is_nan():
    x = torch.ones(2, 64)
    x[1, 40] = math.nan
    for fmt in FORMATS.values():
        if fmt.activation:
            scale = testing.effective_scale(quantize(x, fmt, fmt.rules[0]), fmt, 64)
            assert bool(scale[1, 40].isnan()), fmt.name
            assert bool(scale[0].isnan().any()) == (fmt.group == (None, None)), fmt.name


@pytest.mark.parametrize("dtype", testing.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_close(dtype, with_bias):
    generator = torch.Generator().manual_seed(2)
    x, w, bias = (torch.randn(shape, generator=generator) for shape in ((5, 96), (7, 96), (7,)))
    used = bias if with_bias else None
    residual = torch.randn(5, 7, generator=generator).to(dtype)
    y = linear(x, w, used).to(dtype)
    testing.assert_product_close(y, x, w, bias=used)
    testing.assert_product_close((y.float() + residual.float()).to(dtype), x, w, bias=used, residual=residual)
    wrong = y.clone()
    wrong[3, 2] += 1e-3 if dtype == torch.float32 else 0.1
    with pytest.raises(AssertionError, match=r"1 of 35 elements .* K = 96 .*\n  at \(3, 2\): "):
        testing.assert_product_close(wrong, x, w, bias=used)


def test_product_close_notices_a_low_precision_scale():
    """A scale rounded to bfloat16 before the product is caught, whatever the output dtype."""
    x, w = torch.randn(4, 64), torch.randn(8, 64)
    scale = torch.tensor(1.0013)
    y = (x @ w.T) * scale.bfloat16().float()
    with pytest.raises(AssertionError, match="outside the bound"):
        testing.assert_product_close(y, x * scale, w)


def test_product_close_wants_non_finite_values_where_they_belong():
    x, w = torch.ones(2, 8), torch.ones(3, 8)
    x[1, 2] = math.nan
    y = x @ w.T
    testing.assert_product_close(y, x, w)
    with pytest.raises(AssertionError, match=r"3 of 6"):
        testing.assert_product_close(torch.full((2, 3), 8.0), x, w)
    with pytest.raises(AssertionError, match=r"at \(0, 1\): nan"):
        testing.assert_product_close(y.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(math.nan)), x, w)


def test_product_close_allows_overflow_only_where_it_is_due():
    x, w = torch.full((1, 4), 200.0), torch.full((1, 4), 90.0)
    y = torch.tensor([[math.inf]], dtype=torch.float16)
    testing.assert_product_close(y, x, w)
    with pytest.raises(AssertionError, match="inf"):
        testing.assert_product_close(y, x / 2, w)


def test_sqnr():
    reference = torch.tensor([3.0, 4.0])
    assert testing.sqnr(reference + torch.tensor([0.5, 0.0]), reference) == pytest.approx(20.0)
    assert testing.sqnr(reference, reference) == math.inf
    assert testing.sqnr(reference, torch.zeros(2)) == -math.inf
    testing.assert_sqnr(reference * 1.001, reference, 59)
    with pytest.raises(AssertionError, match=r"logits: 60\.00 dB, at least 61"):
        testing.assert_sqnr(reference * 1.001, reference, 61, name="logits")
    with pytest.raises(AssertionError, match="1 of 2 elements are not finite"):
        testing.assert_sqnr(torch.tensor([1.0, math.nan]), reference, 0)


def test_recording_backend_tells_which_operators_went_and_came():
    case = testing.model_case("llama_block")
    recording = testing.RecordingBackend("mxfp8")
    with torch.no_grad():
        torch.compile(case.model, backend=recording)(*case.args)
    recording.assert_compilations(1)
    recording.assert_replaced({linear: 7}, {torch.ops.olq_fx.quantize: 4, torch.ops.olq_fx.quantized_linear: 7})
    assert recording.count_before("*silu*") == recording.count_after("*silu*") == 1
    with pytest.raises(AssertionError, match=r"7 before and 0 after, expected 6 and 0(.|\n)*--- before"):
        recording.assert_replaced(gone={linear: 6})
    with pytest.raises(AssertionError, match=r"olq_fx\.quantize: 0 before and 4 after, expected 0 and 7"):
        recording.assert_replaced(new={torch.ops.olq_fx.quantize: 7})
    with pytest.raises(AssertionError, match="1 compilations, expected 2"):
        recording.assert_compilations(2)


def test_recording_backend_without_a_configuration_only_watches():
    recording = testing.RecordingBackend(None)
    compiled = torch.compile(lambda x: silu(x).view(-1) @ x.view(-1), backend=recording)
    compiled(torch.ones(4, 4))
    compiled(torch.ones(5, 5))
    recording.assert_compilations(2)
    assert recording.before[0].operators == {".view": 2, "torch.nn.functional.silu": 1, "_operator.matmul": 1}
    assert recording.before[0].text == recording.after[0].text


def test_recorded_graphs_do_not_follow_later_changes():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    recorded = testing.RecordedGraph.of(module)
    module.graph.erase_node(next(iter(module.graph.find_nodes(op="output"))))
    assert recorded.count(torch.relu) == 1
    assert len(recorded.graph.find_nodes(op="output")) == 1


def test_count_kernels():
    def fused(x, w):
        return (gelu(x) * 2 + 1) @ w.T

    counted = testing.count_kernels(fused, torch.randn(8, 16), torch.randn(4, 16))
    assert len(counted.generated) == 1
    assert "gelu" in counted.generated[0]
    assert counted.external == ("extern_kernels.mm",)
    assert counted.total == 2
    # A second time, though every cache knows the function by now.
    assert testing.count_kernels(fused, torch.randn(8, 16), torch.randn(4, 16)).total == 2


def test_storage_census_counts_shared_memory_once():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    assert testing.live_bytes(model) == 2 * 64 * 64 * 4
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[:8])
    assert testing.live_bytes(model) == 64 * 64 * 4
    (record,) = testing.storage_census(model).values()
    assert record.tensors == ("(64, 64) torch.float32", "(8, 64) torch.float32")


def test_storage_census_sees_births_and_deaths():
    before = testing.storage_census()
    kept = torch.empty(1234567, dtype=torch.uint8)
    born = [record for pointer, record in testing.storage_census().items() if pointer not in before]
    assert [record.bytes for record in born] == [1234567]
    pointer = kept.untyped_storage().data_ptr()
    del kept
    assert pointer not in testing.storage_census()


def test_storage_census_looks_into_converted_weights_and_skips_meta():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False, device="meta"))
    olq_fx.quantize_(model, "int8", ignore=["1"])
    assert testing.live_bytes(model) == 64 * 64 + 64 * 4


def test_what_the_profiler_announces_is_withheld_and_nothing_else(capfd, monkeypatch):
    """It writes to the file descriptor, as do others meanwhile."""
    start = torch.profiler.profile.start

    def noisy(self):
        os.write(2, b"USDT: of another kind\n")
        start(self)
        os.write(2, b"without an end")

    monkeypatch.setattr(torch.profiler.profile, "start", noisy)
    with testing.record_allocations():
        os.write(2, b" and within\n")
    assert capfd.readouterr() == ("", "USDT: of another kind\nwithout an end and within\n")


def test_record_allocations_without_a_standard_error():
    code = "import os, olq_fx.testing as t; os.close(2)\nwith t.record_allocations() as a: pass\nprint('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "done\n"


def test_record_allocations():
    with testing.record_allocations() as allocations:
        kept = torch.zeros(1 << 18)
        with allocations.mark("work"):
            doubled = kept * 2
            del kept
            total = doubled + 1
            del doubled
    assert total.numel() == 1 << 18
    assert allocations.at_start("work") == 1 << 20
    assert allocations.peak("work") - (2 << 20) in range(64)
    assert allocations.at_end("work") - (1 << 20) in range(64)
    with pytest.raises(KeyError, match="other"):
        allocations.peak("other")


@given(testing.tensors())
def test_drawn_tensors_are_finite(x):
    assert x.ndim == 2
    assert bool(x.isfinite().all())


def test_drawn_tensors_cover_the_kinds_and_layouts():
    seen = {"contiguous": 0, "strided": 0, "zero rows": 0, "empty": 0, "extreme": 0, "subnormal": 0}

    @given(testing.tensors(dtypes=[torch.float16]))
    def look(x):
        seen["contiguous"] += x.is_contiguous()
        seen["strided"] += not x.is_contiguous()
        seen["empty"] += x.shape[0] == 0
        seen["zero rows"] += bool((x == 0).all(1).any())
        seen["extreme"] += bool((x.abs() == 65504).any())
        seen["subnormal"] += bool(((x != 0) & (x.abs() < torch.finfo(torch.float16).smallest_normal)).any())

    look()
    assert min(seen.values()) > 0, seen


@given(testing.tensors(rows=(1, 5), nonfinite=True))
def test_drawn_tensors_are_non_finite_on_request(x):
    assert not bool(x.isfinite().all()) or x.stride(0) == 0


@given(st.sampled_from(testing.LAYOUTS), st.integers(1, 4), st.integers(1, 9))
def test_layouts_keep_the_values(layout, rows, columns):
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    laid = testing.laid_out(values, layout)
    testing.assert_same_bits(laid, values[:1].expand(rows, columns) if layout == "expanded" else values)


@given(testing.formats("weight"), testing.formats("activation"))
def test_drawn_formats_have_the_use(weight, activation):
    assert weight.format.weight
    assert weight.rule in weight.format.rules
    assert activation.format.activation
    assert activation.rule in activation.format.rules


@given(testing.configurations())
def test_drawn_configurations_are_valid(config):
    assert QuantizationConfig.parse(config) == QuantizationConfig.parse(QuantizationConfig.parse(config).to_dict())


@given(testing.configurations(["0", "2", "4"]))
def test_drawn_configurations_fit_the_model(config):
    case = testing.model_case("linear_stack")
    report = olq_fx.quantize_(case.model, config)
    assert report.converted


@given(testing.models())
def test_drawn_models_run(case):
    with torch.no_grad():
        first = case.model(*case.args)
        assert bool(first.isfinite().all())
        again = testing.model_case(case.name, first.dtype)
        assert again.weights == case.weights


@pytest.mark.parametrize("name", testing.MODELS)
def test_models_are_reproducible_and_leave_the_random_state(name):
    state = torch.random.get_rng_state()
    first, second, other = testing.model_case(name), testing.model_case(name), testing.model_case(name, seed=1)
    testing.assert_same_bits(torch.random.get_rng_state(), state)
    testing.assert_same_bits(dict(first.model.state_dict()), dict(second.model.state_dict()))
    testing.assert_same_bits(first.args, second.args)
    assert not torch.equal(first.args[0], other.args[0])
    for path in first.weights:
        assert first.model.get_parameter(path).ndim == 2


def test_only_strategies_need_hypothesis():
    program = """
import sys
sys.modules["hypothesis"] = None
from olq_fx import testing
testing.assert_same_bits(1, 1)
for name in ("tensors", "formats", "schemes", "configurations", "models"):
    try:
        getattr(testing, name)()
    except ImportError as error:
        assert f"olq_fx.testing.{name}()" in str(error) and "pip install hypothesis" in str(error), error
    else:
        raise SystemExit(f"{name} made a strategy without hypothesis")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_is_what_the_kit_offers():
    offered = {name for name, value in vars(testing).items() if getattr(value, "__module__", "").startswith("olq_fx.")}
    assert offered <= set(testing.__all__)
    assert all(hasattr(testing, name) for name in testing.__all__)
