"""Tables of tuned blockings: what was chosen for which product on which GPU, and which tables are in use.

    with olq_fx.use_tuned("h200.json") as used:
        model(x)                    # products that the table knows are cut as it says
    used.ignored                    # why a table, or a part of it, is not followed

API:
    Choice, TunedTable                          values; `tuned_json` reads and writes them, `tuned_problem` has the keys
    use_tuned(*tables)                          puts tables in front of those in use, for a context
    blocking_for(problem, capability, device)   the blocking of the first table that knows the problem, or None
    tuned(family, x, ...)                       the same, of a call
    state() -> str                              what is in use, for the keys of caches

A table is followed on the GPU that it names, with the triton and the kernels that it was made with, and nowhere else.
What is in use is a context variable: another thread, or another task, has tables of its own.

Another blocking than before, another `split_k` above all, adds the same numbers in another order: results stay within
the bound of `numerics`, but may differ in their last bits from those of the first guess. With one table in use two runs
have equal bits, as without any.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from olq_fx.errors import ConfigurationError, OlqFxWarning, shown
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.kernel_sources import Family, source_hash, triton_minor
from olq_fx.kernels.support import capability_of
from olq_fx.kernels.tuned_problem import DTYPES, Problem, blocking_fault, bucket, problem_fault

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for a problem.

    Attributes:
        blocking: the choice.
        first: the first guess, which it replaces.
        measured: whether both were timed; else the choice is by estimate.
        seconds: the median time of one call; None where nothing was measured.
        first_seconds: that of the first guess; None where it was not measured, or does not run.
    """

    blocking: Blocking
    first: Blocking
    measured: bool = False
    seconds: float | None = None
    first_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """Choices for one GPU, made with one triton and one state of the kernels.

    Attributes:
        capability: of the GPU, 90 for sm_90.
        device: its name; "" for every one of that capability.
        triton: the minor version, `3.7`.
        sources: of each family in it, `source_hash`.
        choices: by problem.
        origin: where it came from, for messages.

    Raises:
        ConfigurationError: a choice has no meaning, or breaks a rule of the numbers.
    """

    capability: int
    triton: str
    sources: Mapping[Family, str]
    choices: Mapping[Problem, Choice]
    device: str = ""
    origin: str = dataclasses.field(default="a table", compare=False)

    def __post_init__(self) -> None:  # noqa: D105
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        object.__setattr__(self, "choices", MappingProxyType(dict(self.choices)))
        for number, (problem, choice) in enumerate(self.choices.items()):
            reason = fault(problem, choice)
            if not reason and problem.family not in self.sources:
                reason = f"the sources of {problem.family} are not named"
            if reason:
                raise ConfigurationError(f"{self.origin}: entry {number}: {reason}")

    @classmethod
    def of(
        cls, choices: Mapping[Problem, Choice], capability: int, device: str = "", origin: str = "a table"
    ) -> "TunedTable":
        """A table made here: with this triton and these kernels."""
        families = sorted({problem.family for problem in choices})
        sources = {family: source_hash(family) for family in families}
        return cls(
            capability=capability,
            triton=triton_minor(),
            sources=sources,
            choices=choices,
            device=device,
            origin=origin,
        )

    def stale(self, family: Family) -> str:
        """Why what it says of a family does not hold here any more, on whatever GPU; "" if it does."""
        if self.triton != (minor := triton_minor()):
            here = f"triton {minor} is installed" if minor else "triton is not installed"
            return f"{self.origin} was made with triton {self.triton}, and {here}"
        if self.sources.get(family, source_hash(family)) != source_hash(family):
            return f"{self.origin} was made with other sources of the kernel {family}"
        return ""

    def elsewhere(self, capability: int, device: str) -> str:
        """Why it is not for a GPU; "" if it is."""
        if self.capability != capability:
            return f"{self.origin} is for sm_{self.capability}, not for sm_{capability}"
        if self.device and self.device != device:
            return f"{self.origin} is for {self.device}, not for {device or 'another device'}"
        return ""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Why parts of it are not followed here, each reason once."""
        return tuple(dict.fromkeys(filter(None, map(self.stale, self.sources))))


def fault(problem: Problem, choice: Choice) -> str:
    """What is wrong with an entry of a table; "" if nothing is."""
    wrong = problem_fault(problem)
    if wrong:
        return wrong
    for name, blocking in (("blocking", choice.blocking), ("first", choice.first)):
        if wrong := blocking_fault(problem, blocking):
            return f"{name}: {wrong}"
    if choice.measured != (choice.seconds is not None):
        return "seconds are given where something was measured, and only there"
    if choice.first_seconds is not None and not choice.measured:
        return "first_seconds are given, and nothing was measured"
    for name, seconds in (("seconds", choice.seconds), ("first_seconds", choice.first_seconds)):
        if seconds is not None and not 0 < seconds < float("inf"):
            return f"{name} is a positive number, not {shown(seconds)}"
    return ""


# What is in use


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """The tables that a context follows, in front of those in use around it and of the shipped ones."""

    tables: tuple[TunedTable, ...]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Why a table, or a part of it, is not followed: by what is installed, and on the current GPU."""
        return tuple(reason for table in self.tables for reason in (*table.ignored, *_not_here(table)))


def _not_here(table: TunedTable) -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    index = torch.cuda.current_device()
    reason = table.elsewhere(capability_of(torch.device("cuda", index)), _gpu_name(index))
    return (reason,) if reason else ()


_USED: contextvars.ContextVar[tuple[TunedTable, ...]] = contextvars.ContextVar("olq_fx_tuned", default=())


@contextlib.contextmanager
def use_tuned(*tables: "TunedTable | str | os.PathLike[str]") -> Iterator[Used]:
    """Follow tuned tables in this context: this thread, or this task.

    A model that `quantize_` has converted is called in such a context; `backend(tuned=...)` makes one for each call.

    Args:
        tables: tables or paths of their files; the first that knows a problem is followed.

    Yields:
        What is in use; its `ignored` says what of it is not followed, and why. Each reason is a warning too.

    Raises:
        ConfigurationError: a file is no table.
        ConfigurationTypeError: an argument is neither.
    """
    found = tables_of(tables)
    with following(found):
        yield Used(found)


@contextlib.contextmanager
def following(tables: tuple[TunedTable, ...]) -> Iterator[None]:
    """`use_tuned` without a look at the tables: for what has had that, and is called often."""
    token = _USED.set((*tables, *_USED.get()))
    try:
        yield
    finally:
        _USED.reset(token)


def tables_of(given: Iterable[Any]) -> tuple[TunedTable, ...]:
    """Tables, with files read; what of them is not followed here is a warning.

    Raises:
        ConfigurationError, ConfigurationTypeError: see `use_tuned`.
    """
    from olq_fx.kernels.tuned_json import table_from

    found = tuple(map(table_from, given))
    for reason in Used(found).ignored:
        warnings.warn(f"a tuned table is not followed: {reason}", OlqFxWarning, stacklevel=2)
    return found


def tuned(
    family: Family,
    x: Tensor,
    activation: str,
    weight: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    capability: int,
    *,
    fast_accum: bool = False,
    chain: str = "",
    gated: str = "",
    output: str = "",
    experts: int = 0,
) -> Blocking | None:
    """The tuned blocking of a call, or None; what the kernels ask before they take their first guess.

    Args:
        family: of the kernel.
        x: the activations, or their codes.
        activation: their format, "" for original precision.
        weight: format of the weight.
        dtype: of the result.
        sizes: M, N, K.
        capability: of the GPU.
        fast_accum: as in `Problem`, like all that follow.
        chain: likewise.
        gated: likewise.
        output: likewise.
        experts: likewise.
    """
    tables = (*_USED.get(), *shipped())
    if not tables:
        return None
    m, n, k = sizes
    problem = Problem(
        family=family,
        activation=activation,
        weight=weight,
        dtype=_NAMES[dtype if activation else x.dtype],
        m=bucket(m),
        n=n,
        k=k,
        fast_accum=fast_accum,
        chain=chain,
        gated=gated,
        output=output,
        experts=experts,
    )
    return blocking_for(problem, capability, x.device)


def blocking_for(problem: Problem, capability: int, device: torch.device) -> Blocking | None:
    """The blocking that the first table in use has for a problem; None where none knows it."""
    for table in (*_USED.get(), *shipped()):
        choice = table.choices.get(problem)
        if choice is None or table.elsewhere(capability, _name_of(device)) or table.stale(problem.family):
            continue
        return choice.blocking
    return None


def state() -> str:
    """What is in use as text, for the keys of code that was compiled with a look at it."""
    tables = (*_USED.get(), *shipped())
    return hashlib.sha256(repr(tables).encode()).hexdigest()[:16] if tables else ""


@functools.cache
def shipped() -> tuple[TunedTable, ...]:
    """The tables that come with the package: those that its index lists."""
    from olq_fx.kernels.tuned_json import read_index

    return read_index()


def _name_of(device: torch.device) -> str:
    return _gpu_name(device.index) if device.type == "cuda" else ""


@functools.cache
def _gpu_name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)
