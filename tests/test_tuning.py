"""The tuner without a GPU: what crashes, hangs or spills costs one candidate, what is measured decides."""

import dataclasses
import time
from typing import Any

import pytest
import torch

from olq_fx import testing_machine_code, tuning, tuning_compile
from olq_fx.errors import ConfigurationError
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.triton_candidates import Work, candidates_of, first_guess
from olq_fx.kernels.tuned_json import from_text, to_text
from olq_fx.kernels.tuned_problem import Problem
from olq_fx.progress import Bar
from olq_fx.schemes import SCHEMES
from olq_fx.testing import PythonProcess
from olq_fx.tuning import MARGIN, tune
from olq_fx.tuning_compile import Candidate, compile_all

PROBLEM = Problem(
    family="product",
    activation="int8_per_token",
    weight="int8_per_channel_static",
    dtype="bfloat16",
    m=16,
    n=256,
    k=512,
)
WORK = Work.of(PROBLEM, 80)
FIRST = first_guess(WORK)
LISTED = candidates_of(WORK, 4)


# Compiling


def mean_compiler() -> None:
    """A compiler that crashes with 2 stages, hangs with 4, runs out of memory at 8 warps. For another process."""
    import os

    compile_it = testing_machine_code.machine_code

    def mean(*args: Any, **options: Any) -> Any:
        if options["num_stages"] == 2:
            os.abort()
        if options["num_stages"] == 4:
            time.sleep(600)
        if options["num_warps"] == 8:
            bytearray(1 << 62)
        return compile_it(*args, **options)

    testing_machine_code.machine_code = mean


def test_a_crash_a_hang_and_no_memory_cost_one_candidate_each():
    mean = [{"num_stages": 2}, {"num_stages": 4}, {"num_warps": 8}, {}]
    plain = dataclasses.replace(FIRST, split_k=1)
    listed = [Candidate(WORK, dataclasses.replace(plain, **change)) for change in mean]
    counted: list[int] = []
    found = compile_all([*listed, listed[-1]], jobs=1, timeout=20, setup=mean_compiler, done=lambda: counted.append(1))
    assert [one.candidate for one in found] == [*listed, listed[-1]]
    crash, hang, memory, fine, again = (one.dropped for one in found)
    assert "the compiler crashed or was ended: the process that ran the function is gone: exit status -6" in crash
    assert "it was ended after 20 s in one call" in hang
    assert memory.startswith("does not compile: MemoryError")
    assert fine == again == ""
    assert [one.code is None for one in found] == [True, True, True, False, False]
    assert len(counted) == 5


def test_an_interruption_waits_for_no_compiler():
    """Or this test would: for a compiler that hangs."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    plain = dataclasses.replace(FIRST, split_k=1)
    listed = [Candidate(WORK, one) for one in (plain, dataclasses.replace(plain, num_stages=4), plain)]
    with pytest.raises(KeyboardInterrupt):
        compile_all(listed, jobs=2, timeout=3000, setup=mean_compiler, done=interrupt)


def starts_a_child() -> int:
    import subprocess
    import sys

    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_what_a_compiler_has_started_ends_with_it():
    """An assembler that hangs is a process of its own."""
    with PythonProcess() as process:
        pid = process.call(starts_a_child)
        assert alive(pid)
    for _ in range(300):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def limits() -> tuple[int, int]:
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)


def test_a_compiler_has_so_much_memory_and_no_more():
    environment = {tuning_compile._MEMORY: str(8 << 30)}
    with PythonProcess(environment, setup=tuning_compile.limit_memory) as process:
        assert process.call(limits) == (8 << 30, 8 << 30)
        with pytest.raises(MemoryError):
            process.call(bytearray_of, 16 << 30)


def bytearray_of(size: int) -> int:
    return len(bytearray(size))


def test_what_spills_or_misses_its_instruction_is_dropped_with_the_reason():
    fp8 = Problem(
        family="product",
        activation="fp8_per_block_dynamic",
        weight="fp8_per_block_static",
        dtype="bfloat16",
        m=4096,
        n=4096,
        k=4096,
    )
    work = Work.of(fp8, 90)
    spills, low = Blocking(128, 256, 128, num_warps=8), Blocking(16, 64, 128)
    found = compile_all([Candidate(work, one) for one in (spills, low)])
    assert "accesses to local memory" in found[0].dropped
    assert "not ^wgmma" in found[1].dropped


# Choosing


class Times:
    """Gives known times; a blocking without one does not run."""

    def __init__(self, *times: float | None) -> None:
        self.times = dict(zip(LISTED, times, strict=True))
        self.against: list[Blocking | None] = []

    def seconds(self, problem: Problem, blocking: Blocking, against: Blocking | None) -> float:
        self.against.append(against)
        found = self.times[blocking]
        if found is None:
            raise ArithmeticError("its results are 0.5 away\nfrom those of the first guess")
        return found


@pytest.fixture
def compiled(monkeypatch):
    """Compilers that drop what is asked for, and do nothing else."""
    dropped: dict[Blocking, str] = {}

    def fake(candidates: Any, **options: Any) -> list[Any]:
        return [tuning_compile.Compiled(one, dropped.get(one.blocking, ""), None) for one in candidates]

    monkeypatch.setattr(tuning, "compile_all", fake)
    return dropped


def chosen(watch: Times | None, **options: Any) -> Any:
    [result] = tune([PROBLEM, PROBLEM], 80, candidates=4, watch=watch, device="A100", **options).results
    return result


def test_the_fastest_is_chosen(compiled):
    watch = Times(4e-6, 5e-6, 3e-6, 3.5e-6)
    choice = chosen(watch).choice
    assert (choice.blocking, choice.first) == (LISTED[2], FIRST)
    assert (choice.measured, choice.seconds, choice.first_seconds) == (True, 3e-6, 4e-6)
    assert watch.against == [None, FIRST, FIRST, FIRST]


@pytest.mark.parametrize(("share", "stays"), [(MARGIN / 2, True), (2 * MARGIN, False)])
def test_the_first_guess_stays_where_nothing_is_clearly_faster(compiled, share, stays):
    choice = chosen(Times(1e-6, 2e-6, (1 - share) * 1e-6, 2e-6)).choice
    assert (choice.blocking == FIRST) == stays


def test_what_does_not_run_is_dropped_with_the_reason(compiled):
    compiled[LISTED[1]] = "8 bytes of stack"
    result = chosen(Times(None, 1e-9, 3e-6, 4e-6))
    assert result.choice.blocking == LISTED[2]
    assert (result.choice.measured, result.choice.first_seconds) == (True, None)
    said = "does not run: ArithmeticError: its results are 0.5 away from those of the first guess"
    assert [one.dropped for one in result.tried] == [said, "8 bytes of stack", "", ""]
    assert [one.seconds for one in result.tried] == [None, None, 3e-6, 4e-6]


def test_where_nothing_can_be_used_there_is_no_choice(compiled):
    compiled.update(dict.fromkeys(LISTED, "8 bytes of stack"))
    found = tune([PROBLEM], 80, candidates=4)
    assert found.results[0].choice is None
    assert found.table.choices == {}


def test_without_a_gpu_the_estimate_orders_and_the_table_says_so(compiled):
    found = tune([PROBLEM], 80, candidates=4, device="A100")
    [result] = found.results
    assert result.choice is not None
    assert (result.choice.measured, result.choice.seconds, result.choice.first_seconds) == (False, None, None)
    fastest = min(one.estimate for one in result.tried)
    taken = next(one.estimate for one in result.tried if one.blocking == result.choice.blocking)
    assert taken <= fastest / (1 - MARGIN)
    assert found.device == found.table.device == ""
    assert from_text(to_text(found.table), "x") == found.table


def test_a_table_of_what_was_measured_names_the_gpu(compiled):
    found = tune([PROBLEM], 80, candidates=4, watch=Times(1e-6, 1e-6, 1e-6, 1e-6), device="A100")
    assert (found.table.device, found.table.capability) == ("A100", 80)
    assert set(found.table.choices) == {PROBLEM}


class Counted(Bar):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def start(self, what: str, total: int | None) -> None:
        self.said.append([what, total, 0])

    def advance(self) -> None:
        self.said[-1][2] += 1


def test_a_bar_goes_to_its_end():
    bar = Counted()
    tune([PROBLEM], 80, candidates=2, jobs=1, bar=bar, watch=Times(1e-6, 1e-6, 1e-6, 1e-6))
    assert bar.said == [["compile", 2, 2], ["time", 2, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_first_guess_and_others_stay_in_registers(scheme, capability):
    """What ships is a candidate that can be used, and not the only one."""
    slot = SCHEMES[scheme].linear
    names: Any = {"activation": slot.activation or "", "weight": slot.weight, "dtype": "bfloat16"}
    problems = [Problem(family="product", **names, m=m, n=4096, k=4096) for m in (1, 64, 4096)]
    for result in tune(problems, capability, candidates=6).results:
        assert result.tried[0].dropped == ""
        assert sum(not one.dropped for one in result.tried) >= 2


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigurationError, match="nothing is known of sm_75; valid: sm_80"):
        tune([PROBLEM], 75)


def test_no_gpu_is_here_for_another_capability(monkeypatch):
    assert torch.cuda.is_available() or tuning.gpu_here(90) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    assert (tuning.gpu_here(90), tuning.gpu_here(80)) == ("NVIDIA H200", "")
