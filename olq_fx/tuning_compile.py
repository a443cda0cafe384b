"""Candidates compiled ahead of time in processes of their own: what each becomes on a GPU, or why it is dropped.

API:
    compile_all(candidates, jobs=, timeout=, memory=, setup=, done=) -> list[Compiled]

A compiler that crashes, takes too long or wants too much memory costs the candidate that it was working on, which is
dropped with that reason; the next one has another process.
"""

import dataclasses
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.triton_candidates import Work
from olq_fx.kernels.triton_entries import Entry, instruction_pattern
from olq_fx.kernels.tuned_launches import launches
from olq_fx.testing_kernel_table import CodeRow, code_row, faults
from olq_fx.testing_machine_code import Compiler
from olq_fx.testing_process import ProcessDied

JOBS = 2
TIMEOUT = 120.0
"""Seconds that the compilation of one kernel may take; few take more than two."""

MEMORY = 16 << 30
"""Bytes that a compiler may allocate."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A blocking of a problem."""

    work: Work
    blocking: Blocking


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a candidate.

    Attributes:
        candidate: which.
        dropped: why it is not to be used; "" if it may be.
        code: its main kernel; None where that does not compile.
    """

    candidate: Candidate
    dropped: str
    code: CodeRow | None


def compile_all(
    candidates: Sequence[Candidate],
    *,
    jobs: int = JOBS,
    timeout: float = TIMEOUT,
    memory: int = MEMORY,
    setup: Callable[[], None] | None = None,
    done: Callable[[], object] = lambda: None,
) -> list[Compiled]:
    """Compile candidates, several at once.

    Args:
        candidates: in any order; the results are in the same.
        jobs: how many processes.
        timeout: seconds of one kernel.
        memory: bytes that each process may allocate.
        setup: a function of a module that each process runs first, instead of limiting its memory.
        done: called after each.
    """
    environment = {_MEMORY: str(memory), "OMP_NUM_THREADS": "1"}
    free: queue.SimpleQueue[Compiler] = queue.SimpleQueue()
    compilers = [Compiler(environment, timeout, setup or limit_memory) for _ in range(max(1, jobs))]

    def compiled(candidate: Candidate) -> Compiled:
        compiler = free.get()
        try:
            return _compiled(compiler, candidate)
        finally:
            free.put(compiler)
            done()

    for compiler in compilers:
        free.put(compiler)
    try:
        with ThreadPoolExecutor(len(compilers)) as pool:
            running = [pool.submit(compiled, candidate) for candidate in candidates]
            try:
                return [one.result() for one in running]
            except BaseException:  # an interruption waits for no compiler
                for one in running:
                    one.cancel()
                for compiler in compilers:
                    compiler.abort()
                raise
    finally:
        for compiler in compilers:
            compiler.close()


def _compiled(compiler: Compiler, candidate: Candidate) -> Compiled:
    work, code = candidate.work, None
    for call in launches(work.problem, work.operands, work.capability, candidate.blocking):
        entry = Entry(call.kernel.fn.__name__, (), call, instruction_pattern(call, work.capability))
        try:
            row = code_row(compiler, entry, work.capability)
        except ProcessDied as error:
            return Compiled(candidate, f"the compiler crashed or was ended: {error}", code)
        except Exception as error:  # whatever the compiler says against one candidate, the others are to be tried
            said = " ".join(str(error).split())[:200]
            return Compiled(candidate, f"does not compile: {type(error).__name__}: {said}", code)
        code = row if entry.instruction or code is None else code
        if found := faults(row):
            return Compiled(candidate, "; ".join(found), code)
    return Compiled(candidate, "", code)


_MEMORY = "OLQ_FX_COMPILER_MEMORY"


def limit_memory() -> None:
    """Let this process, and the assembler that it starts, allocate so much and no more. For those of `compile_all`."""
    import resource  # Unix has it, and so has whatever triton runs on

    limit = int(os.environ[_MEMORY])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
