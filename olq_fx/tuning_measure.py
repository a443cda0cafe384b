"""Candidates timed on the GPU of this machine, in a process of their own: a fault on the GPU costs one candidate.

    with Stopwatch(rounds=20) as watch:
        seconds = watch.seconds(problem, blocking, first)

Random data, CUDA graphs over copies that no cache holds, the median of the rounds (`gpu_timing`). What a candidate
computes is compared with what the first guess computes before it is timed.
"""

import functools
import statistics
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import get_format
from olq_fx.gpu_timing import CudaTimer, Entry, Run
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.support import FLOAT8, capability_of
from olq_fx.kernels.tuned_launches import Operands, launches, random_operands
from olq_fx.kernels.tuned_problem import Problem
from olq_fx.testing_process import PythonProcess

if TYPE_CHECKING:
    from typing_extensions import Self

ROUNDS = 20
TIMEOUT = 120.0
_APART = 0.01
"""The distance of results, relative to their size, from which they are not those of one product in two orders."""


class Measures(Protocol):
    """Times a candidate."""

    def seconds(self, problem: Problem, blocking: Blocking, against: Blocking | None) -> float:
        """The median seconds of one call.

        Args:
            problem: what is computed.
            blocking: how it is cut.
            against: a blocking whose results are the right ones; None takes those of this one.

        Raises:
            Exception: it cannot run, or its results are not the right ones.
        """
        ...


class Stopwatch:
    """Times candidates on the current GPU. A context manager.

    Args:
        rounds: how often each is timed.
        timeout: seconds that one may take.
    """

    def __init__(self, rounds: int = ROUNDS, timeout: float = TIMEOUT) -> None:  # noqa: D107
        self._rounds = rounds
        self._process = PythonProcess(timeout=timeout)

    def __enter__(self) -> "Self":
        """The watch itself; its process starts with the first candidate."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End its process."""
        self._process.close()

    def seconds(self, problem: Problem, blocking: Blocking, against: Blocking | None) -> float:
        """See `Measures`."""
        try:
            found: float = self._process.call(time_candidate, problem, blocking, against, self._rounds)
        except Exception:
            self._process.close()  # after a fault on the GPU nothing in that process runs any more
            raise
        return found


def time_candidate(problem: Problem, blocking: Blocking, against: Blocking | None, rounds: int) -> float:
    """The median seconds of one call of a candidate on the GPU, after its results have been compared.

    Raises:
        ArithmeticError: its results are not those of `against`.
    """
    if against is not None and against != blocking:
        distance = _distance(values_of(problem, blocking), values_of(problem, against))
        if not distance < _APART:
            raise ArithmeticError(f"its results are {distance:.3g} away from those of the first guess")
    entry = Entry(str(blocking), lambda number: _launching(problem, number, blocking), 1, touched(problem))
    seconds = CudaTimer().prepare(entry)
    return statistics.median(seconds() for _ in range(rounds))


def values_of(problem: Problem, blocking: Blocking) -> Tensor:
    """What a blocking computes of the first copy of the data, in float32."""
    operands = _copy(problem, 0)
    for output in operands.outputs:
        output.view(torch.uint8).fill_(0xFF)  # NaN, or codes that are far away
    _launching(problem, 0, blocking)()
    if not problem.output:
        return operands.outputs[0].to(torch.float32)
    columns = problem.n // 2 if problem.gated else problem.n
    return numerics.dequantize(tuple(operands.outputs), get_format(problem.output), columns)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def _launching(problem: Problem, number: int, blocking: Blocking) -> Run:
    calls = launches(problem, _copy(problem, number), capability_of(_device()), blocking)

    def run() -> None:
        for call in calls:
            call.run()

    return run


def touched(problem: Problem) -> int:
    """Bytes of the data of one call."""
    moved = 4 * problem.m * problem.n
    for name, rows in ((problem.activation, problem.m), (problem.weight, problem.n * max(1, problem.experts))):
        moved += numerics.quantized_bytes(get_format(name), rows, problem.k) if name else 2 * rows * problem.k
    return moved


@functools.lru_cache(maxsize=64)
def _copy(problem: Problem, number: int) -> Operands:
    """Data of one copy, kept for the next candidate; those of other problems go."""
    if number == 0:
        _copy.cache_clear()
    from olq_fx.kernels.triton_quantize import quantize

    native = capability_of(_device()) >= FLOAT8

    def quantized(values: Tensor, format: str) -> list[Tensor]:
        return quantize(values, format, get_format(format).rules[0], native)

    return random_operands(problem, _device(), number, quantized)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
