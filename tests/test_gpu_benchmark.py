"""The logic of `make gpu` on a machine without a GPU: tables, medians, ratios, targets, files, time limits.

What times is replaced by one that gives known times; kernels are not launched, but every comparison is made.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu
import gpu_baseline
import gpu_data
import gpu_parts
import gpu_products
import gpu_timing
import pytest
import torch
from gpu_timing import Comparison, Figure, Target, figures_of, measure, measure_all

from olq_fx.formats import FORMATS
from olq_fx.gpu_timing import Entry, copies_of
from olq_fx.kernels import reference
from olq_fx.testing import Interpreter, assert_kernel_code

ROOT = Path(__file__).parents[1]


def entry(name: str, work: int = 1000) -> Entry:
    return Entry(name, lambda number: lambda: None, work, work)


class FakeTimer:
    """Gives the times of each entry in their order; entries without times do not run."""

    def __init__(self, times: dict[str, list[float]]) -> None:
        self.times = {name: list(found) for name, found in times.items()}
        self.order: list[str] = []

    def prepare(self, entry: Entry) -> Callable[[], float]:
        if entry.name not in self.times:
            raise RuntimeError("no such\n kernel")

        def seconds() -> float:
            self.order.append(entry.name)
            return self.times[entry.name].pop(0)

        return seconds


COMPARISON = Comparison(
    "copy less", (entry("ours"), entry("copy"), entry("other", 2000)), "GB/s", (Target(0.85, "copy"), Target(500.0))
)


def test_medians_ratios_and_targets():
    timer = FakeTimer({"ours": [2e-9, 9e-9, 2e-9], "copy": [1.8e-9] * 3, "other": [8e-9, 1e-9, 4e-9]})
    found = measure(COMPARISON, timer, 3)
    assert (found.notes, found.errors) == ((), ())
    against_copy, absolute, against_other, copy, other = found.figures
    assert timer.order == ["ours", "copy", "other"] * 3
    assert (against_copy.seconds, against_copy.fastest) == (2e-9, 2e-9)
    assert against_copy.rate == pytest.approx(500)
    assert (against_copy.peer, against_copy.target, against_copy.reached) == ("copy", 0.85, True)
    assert against_copy.ratio == pytest.approx(0.9)
    assert (absolute.peer, absolute.ratio, absolute.target) == ("", None, 500.0)
    assert absolute.reached == (absolute.rate >= 500.0)
    assert (against_other.peer, against_other.target, against_other.reached) == ("other", None, None)
    assert against_other.ratio == pytest.approx(1.0)
    assert (copy.entry, copy.peer, other.entry) == ("copy", "", "other")
    assert other.rate == pytest.approx(500)


@pytest.mark.parametrize(("seconds", "reached"), [(2.1e-9, True), (2.2e-9, False)])
def test_a_target_is_a_bound_on_the_ratio_of_rates(seconds, reached):
    figure = measure(COMPARISON, FakeTimer({"ours": [seconds], "copy": [1.8e-9], "other": [1.0]}), 1).figures[0]
    assert figure.reached is reached
    assert figure.cells()[-1] == ("reached: 0.85" if reached else "MISSED: 0.85")


def test_a_peer_that_does_not_run_leaves_its_target_open():
    found = measure(COMPARISON, FakeTimer({"ours": [1e-9], "other": [1e-9]}), 1)
    assert found.notes == ("copy less: copy does not run here (RuntimeError: no such kernel)",)
    assert found.errors == ()
    against_copy = found.figures[0]
    assert (against_copy.peer, against_copy.ratio, against_copy.reached) == ("copy", None, None)
    assert against_copy.cells()[-1] == "not measured: 0.85"
    assert gpu.said_of_targets(found.figures) == "targets: 1 reached, 0 missed, 1 not measured"


def test_what_is_wrong_is_not_timed():
    def check() -> None:
        raise AssertionError("0.500 away")

    timer = FakeTimer({"ours": [1.0], "copy": [1.0], "other": [1.0]})
    found = measure(dataclasses.replace(COMPARISON, check=check), timer, 1)
    assert found.errors == ("copy less: AssertionError: 0.500 away",)
    assert (found.figures, timer.order) == ((), [])


def test_our_own_failure_is_an_error_and_the_others_are_measured():
    timer = FakeTimer({"second": [1e-9]})
    second = Comparison("second", (entry("second"),), "TFLOP/s")

    def broken() -> Comparison:
        raise ModuleNotFoundError("no kernels")

    freed: list[int] = []
    found = measure_all([lambda: COMPARISON, broken, lambda: second], timer, 1, 60.0, after=lambda: freed.append(1))
    assert found.errors == (
        "copy less: RuntimeError: no such kernel",
        "comparison 1: ModuleNotFoundError: no kernels",
    )
    [figure] = found.figures
    assert (figure.entry, figure.unit) == ("second", "TFLOP/s")
    assert figure.rate == pytest.approx(1.0)
    assert len(freed) == 3


def test_what_is_not_begun_in_time_is_an_error():
    now = iter([0.0, 1.0, 61.0])
    timer = FakeTimer({"ours": [1e-9] * 9, "copy": [1e-9] * 9, "other": [1e-9] * 9})
    found = measure_all([lambda: COMPARISON] * 3, timer, 1, 60.0, clock=lambda: next(now))
    assert found.errors == ("2 of 3 comparisons not measured: time is up",)
    assert len(found.figures) == 5


def test_copies_exceed_the_cache():
    cache = 50 << 20
    for size in (1, 1 << 20, 60 << 20, 1 << 30):
        copies = copies_of(size, cache, 64)
        assert 2 <= copies <= 64
        assert copies == 64 or copies * size > 3 * cache


def test_without_peers_and_targets_there_is_one_figure():
    [figure] = figures_of(Comparison("alone", (entry("ours"),), "GB/s"), {"ours": [1e-6]})
    assert (figure.peer, figure.ratio, figure.target) == ("", None, None)
    assert len(figure.cells()) == len(gpu_timing.COLUMNS)


# The program


def test_without_a_gpu_the_program_says_so():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py")],
        capture_output=True,
        text=True,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2
    assert "finds no CUDA device here" in " ".join(done.stdout.split())


ABOUT = {"device": "GPU", "torch": "2", "commit": "abc"}


@pytest.fixture
def a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "machine", lambda: ABOUT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "CudaTimer", lambda: FakeTimer({"ours": [1e-9] * 2, "copy": [1e-9] * 2}))


@pytest.mark.usefixtures("a_machine")
def test_a_part_is_written_beside_those_that_ran_before(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gpu.PARTS, "quantize", lambda: iter([lambda: COMPARISON]))
    path = tmp_path / "new" / "gpu.json"
    assert gpu.main(["--part", "quantize", "--rounds", "2", "--json", str(path)]) == 0
    gpu.write(path, "fused", {"errors": []})
    results = json.loads(path.read_text())
    assert results["machine"] == ABOUT
    assert list(results["parts"]) == ["quantize", "fused"]
    figures = results["parts"]["quantize"]["figures"]
    assert [figure["peer"] for figure in figures] == ["copy", "", ""]
    assert set(figures[0]) == {field.name for field in dataclasses.fields(Figure)}
    said = capsys.readouterr().out
    assert "other does not run here" in said
    assert "targets: 2 reached" in said


@pytest.mark.usefixtures("a_machine")
def test_results_of_another_commit_are_not_kept(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    gpu.write(path, "fused", {"errors": []})
    monkeypatch.setattr(gpu, "machine", lambda: ABOUT | {"commit": "def"})
    gpu.write(path, "grouped", {"errors": []})
    assert list(json.loads(path.read_text())["parts"]) == ["grouped"]


@pytest.mark.usefixtures("a_machine")
def test_an_error_of_ours_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "fused", lambda: iter([lambda: Comparison("x", (entry("absent"),), "GB/s")]))
    path = tmp_path / "gpu.json"
    assert gpu.main(["--part", "fused", "--json", str(path)]) == 1
    part = json.loads(path.read_text())["parts"]["fused"]
    assert part["errors"] == ["x: RuntimeError: no such kernel"]
    assert part["notes"] == list(gpu.NOTES["fused"])


@pytest.mark.usefixtures("a_machine")
def test_several_parts_have_processes_of_their_own(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    def run(command: list[str], timeout: float, check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert timeout == gpu.LIMIT == 540.0
        if "grouped" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, -11 if "fused" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(path)]) == 1
    asked = [command[command.index("--part") + 1] for command in commands]
    assert asked == ["tests", "quantize", "products", "grouped", "fused"]
    parts = json.loads(path.read_text())["parts"]
    assert parts == {
        "grouped": {"errors": ["ended after 540 s"]},
        "fused": {"errors": ["ended with exit code -11"]},
    }


def test_the_report_of_the_tests(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/>'
        '</testcase><testcase classname="b" name="no"><skipped/></testcase></testsuite></testsuites>'
    )
    assert gpu.read_report(path, 1) == {
        "tests": {"ran": 2, "failed": 1, "skipped": 1},
        "skipped": ["b::no"],
        "errors": ["a::bad failed"],
    }
    assert gpu.read_report(tmp_path / "none.xml", 4)["errors"] == ["pytest ended with exit code 4"]


# Every comparison can be made: on the CPU, in small, without launching kernels


@pytest.fixture
def in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_data, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_data, "capability", lambda: 90)
    monkeypatch.setattr(
        gpu_data, "quantized", lambda x, format: list(reference.quantize(x, format, FORMATS[format].rules[0]))
    )
    monkeypatch.setattr(gpu_parts, "SHAPE", (64, 256))
    monkeypatch.setattr(gpu_products, "LARGE", (96, 128, 512))
    monkeypatch.setattr(gpu_products, "WIDE", (128, 512))
    monkeypatch.setattr(gpu_products, "OF_EXPERTS", (64, 128))


KERNELS = {"products": "triton_product", "grouped": "triton_experts", "fused": "triton_fused"}
"""The modules of `olq_fx.kernels` that parts import when their turn comes."""


def launches(comparison: Comparison) -> list[object]:
    """What is done before launching, of our entries and of the copy."""
    return [one.make(0) for one in comparison.entries if one.name in ("olq_fx", gpu_products.TILES, gpu_data.COPY)]


@pytest.mark.usefixtures("in_small")
@pytest.mark.parametrize("part", gpu_parts.PARTS)
def test_every_comparison_can_be_made_where_its_kernels_are(part):
    made = list(gpu_parts.PARTS[part]())
    if part in KERNELS and importlib.util.find_spec(f"olq_fx.kernels.{KERNELS[part]}") is None:
        with pytest.raises(ModuleNotFoundError, match=r"olq_fx\.kernels"):
            launches(made[0]())
        return
    comparisons = [make() for make in made]
    titles = [comparison.title for comparison in comparisons]
    assert len(set(titles)) == len(titles) >= 6
    for comparison in comparisons:
        assert launches(comparison)
        names = [one.name for one in comparison.entries]
        assert len(set(names)) == len(names)
        assert {target.against for target in comparison.targets} <= {"", *names}
        assert all(one.work > 0 and one.touched > 0 for one in comparison.entries)


@pytest.mark.usefixtures("in_small")
def test_every_format_is_quantized_in_its_default_rules():
    titles = " ".join(make().title for make in gpu_parts.PARTS["quantize"]())
    for format in FORMATS.values():
        assert f"quantize {format.name} {format.weight_rule} " in titles
        assert f"quantize {format.name} {format.activation_rule} " in titles
        assert f"dequantize {format.name} " in titles


@pytest.mark.usefixtures("in_small")
@pytest.mark.parametrize("name", ["torch._scaled_mm by row", "torch._scaled_mm by tensor", "torch._int_mm"])
def test_peers_take_what_they_are_given(name):
    """As far as torch has them for the CPU too."""
    by_name = {
        one.name: (comparison, one)
        for make in (gpu_products.row_comparison, gpu_products.tensor_comparison, gpu_products.int8_comparison)
        for comparison in [make()]
        for one in comparison.entries
    }
    run = by_name[name][1].make(0)
    assert run().shape == gpu_products.LARGE[:2]


# The baseline


def test_the_baseline_multiplies():
    m, n, k = 70, 130, 384
    x = reference.quantize(torch.randn(m, k), "fp8_per_block_dynamic", "amax")
    weight = reference.quantize(torch.randn(n, k), "fp8_per_block_static", "amax")
    with Interpreter() as interpreter:
        out = interpreter.call(gpu_baseline.multiply, x[0], weight[0], x[1], weight[1], torch.empty(m, n))
    decoded = reference.dequantize(x, "fp8_per_block_dynamic", k, torch.float64)
    expected = decoded @ reference.dequantize(weight, "fp8_per_block_static", k, torch.float64).T
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-3)


def test_the_baseline_uses_the_instruction_of_float8():
    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp8, scale = torch.float8_e4m3fn, torch.float32
    args = gpu_baseline.arguments(
        meta(4096, 16384, dtype=fp8),
        meta(7168, 16384, dtype=fp8),
        meta(4096, 128, dtype=scale),
        meta(56, 128, dtype=scale),
        meta(4096, 7168, dtype=torch.bfloat16),
    )
    constants = {name: value for name, value in gpu_baseline.OPTIONS.items() if name.isupper()}
    assert_kernel_code(gpu_baseline.block_product, args, constants, {90: "wgmma.*e4m3"}, num_warps=4, num_stages=2)
