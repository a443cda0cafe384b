"""Tuning: which blocking of a product is the best on a GPU, found by compiling and timing what may be.

    found = tune([problem], 90, candidates=24)
    found.table                     a TunedTable: `tuned_json.save` writes it, `olq_fx.use_tuned` follows it
    found.results[0].tried          every candidate, with its time or with the reason why it was dropped

1. `triton_candidates` lists what may be tried, around the first guess.
2. Each is compiled ahead of time in a worker process; what crashes the compiler, spills registers, misses the matrix
   instruction or wants too much shared memory is dropped with that reason (`tuning_compile`).
3. The rest is timed on the GPU (`tuning_measure`). Where there is none, or another one, it is ranked by estimate, and
   the table says that nothing was measured.

The first guess stays unless another one is faster by more than `MARGIN`: what is not is noise.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from olq_fx.cost_model import SHARED_MEMORY, of_capability
from olq_fx.errors import ConfigurationError
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.support import capability_of
from olq_fx.kernels.triton_candidates import Work, candidates_of, estimate, first_guess
from olq_fx.kernels.tuned_problem import Problem
from olq_fx.kernels.tuned_tables import Choice, TunedTable
from olq_fx.progress import Bar
from olq_fx.testing_kernel_table import CodeRow
from olq_fx.tuning_compile import JOBS, Candidate, Compiled, compile_all
from olq_fx.tuning_measure import Measures

CANDIDATES = 24
MARGIN = 0.02
"""The share of its time by which a candidate must be faster than the first guess to replace it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and what became of it.

    Attributes:
        blocking: which.
        dropped: why it is not to be used; "" if it may be.
        estimate: seconds by ceilings, for an order.
        seconds: the median time of one call; None where nothing was measured.
        code: of its kernel; None where it does not compile.
    """

    blocking: Blocking
    dropped: str
    estimate: float
    seconds: float | None
    code: CodeRow | None


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What was found for one problem.

    Attributes:
        problem: which.
        first: the first guess.
        tried: every candidate; the first guess is the first.
        choice: the best; None where nothing can be used.
    """

    problem: Problem
    first: Blocking
    tried: tuple[Tried, ...]
    choice: Choice | None


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """What was found for all problems.

    Attributes:
        capability: of the GPU, 90 for sm_90.
        device: its name; "" where nothing was measured.
        results: in the order of the problems.
    """

    capability: int
    device: str
    results: tuple[Result, ...]

    @property
    def table(self) -> TunedTable:
        """The choices."""
        choices = {result.problem: result.choice for result in self.results if result.choice is not None}
        return TunedTable.of(choices, self.capability, self.device, origin="the tuned table")


def gpu_here(capability: int) -> str:
    """The name of the current GPU if it is of this compute capability, on which candidates can be timed; else ""."""
    if not torch.cuda.is_available() or capability_of(None) != capability:
        return ""
    return torch.cuda.get_device_name()


def tune(
    problems: Iterable[Problem],
    capability: int,
    *,
    candidates: int = CANDIDATES,
    watch: Measures | None = None,
    device: str = "",
    bar: Bar | None = None,
    jobs: int = JOBS,
    **options: Any,
) -> Tuning:
    """Find the best blocking for each problem.

    Args:
        problems: equal ones are looked at once.
        capability: of the GPU, 90 for sm_90.
        candidates: how many to try of each, the first guess among them.
        watch: times candidates; None ranks them by estimate.
        device: the name of the GPU that is timed on.
        bar: shows how far it is.
        jobs: how many compile at once.
        options: others of `tuning_compile.compile_all`.

    Raises:
        ConfigurationError: a problem has no meaning, or nothing is known of the GPU.
    """
    if of_capability(capability) is None:
        known = ", ".join(f"sm_{one}" for one in SHARED_MEMORY if of_capability(one))
        raise ConfigurationError(f"nothing is known of sm_{capability}; valid: {known}")
    bar = bar or Bar()
    works = [Work.of(problem, capability) for problem in dict.fromkeys(problems)]
    listed = [Candidate(work, one) for work in works for one in candidates_of(work, candidates)]
    bar.start("compile", len(listed))
    compiled = compile_all(listed, jobs=jobs, done=bar.advance, **options)
    if watch is not None:
        bar.start("time", len(listed))
    results = []
    for work in works:
        of_work = [one for one in compiled if one.candidate.work is work]
        results.append(_result(work, of_work, watch, bar.advance if watch is not None else lambda: None))
    return Tuning(capability, device if watch is not None else "", tuple(results))


def _result(work: Work, compiled: Sequence[Compiled], watch: Measures | None, done: Callable[[], object]) -> Result:
    first, tried = first_guess(work), []
    # Whose results are the right ones: those of the first guess, or of whatever comes first in its place.
    against: Blocking | None = None
    for one in compiled:
        seconds, dropped = None, one.dropped
        if watch is not None and not dropped:
            try:
                seconds = watch.seconds(work.problem, one.candidate.blocking, against)
                against = against or one.candidate.blocking
            except Exception as error:  # what does not run is dropped like what does not compile
                dropped = f"does not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        done()
        expected = estimate(work, one.candidate.blocking)
        tried.append(Tried(one.candidate.blocking, dropped, expected, seconds, one.code))
    return Result(work.problem, first, tuple(tried), _choice(first, tried))


def _choice(first: Blocking, tried: Sequence[Tried]) -> Choice | None:
    """The fastest, or the first guess where nothing is faster by more than the margin."""
    usable = [one for one in tried if not one.dropped]
    if not usable:
        return None
    best = min(usable, key=_time)
    guess = next((one for one in usable if one.blocking == first), None)
    if guess is not None and _time(best) > (1 - MARGIN) * _time(guess):
        best = guess
    return Choice(
        blocking=best.blocking,
        first=first,
        measured=best.seconds is not None,
        seconds=best.seconds,
        first_seconds=None if guess is None else guess.seconds,
    )


def _time(tried: Tried) -> float:
    return tried.estimate if tried.seconds is None else tried.seconds
