"""Tables of tuned blockings: what was chosen for which product on which GPU, and which tables are in use.

    with olq_fx.use_tuned("h200.json") as used:
        model(x)                    # products that the table knows are cut as it says
    used.ignored                    # why a table, or a part of it, is not followed

API:
    Problem, Choice, TunedTable                 values; `tuned_json` reads and writes them
    use_tuned(*tables)                          puts tables in front of those in use, for a context
    blocking_for(problem, capability, device)   the blocking of the first table that knows the problem, or None
    tuned(family, x, ...)                       the same, of a call

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
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from olq_fx.errors import ConfigurationError, OlqFxWarning, shown
from olq_fx.formats import Format, get_format
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.kernel_sources import FAMILIES, Family, source_hash, triton_minor
from olq_fx.kernels.support import capability_of, chain_refusal

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)
"""What products are computed in, by name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHAINS = ("", "silu", "gelu", "gelu_tanh", "relu_squared")
GATED = ("", "paired", "interleaved")

_LONGEST_K = 128
"""Columns after which narrow accumulators must be promoted: see `spec` of the products in `numerics`."""

_LIMITS = {"num_warps": 32, "num_stages": 8, "split_k": 64, "group": 64, "block_m": 512, "block_n": 512}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a blocking is chosen for.

    Attributes:
        family: the kernel: `product`, `chain`, `grouped`.
        activation: format of the activations, "" for original precision.
        weight: format of the weight.
        dtype: of activations in original precision, else of the result.
        m: rows, a power of two: it stands for all numbers from the one above its half.
        n: rows of the weight.
        k: K.
        fast_accum: whether sums may stay in narrow accumulators.
        chain: of a chain, its activation; with `gated`, where gate and up are.
        gated: see `chain`.
        output: of a chain, the format of its result.
        experts: of a grouped product, how many there are.
    """

    family: Family
    activation: str
    weight: str
    dtype: str
    m: int
    n: int
    k: int
    fast_accum: bool = False
    chain: str = ""
    gated: str = ""
    output: str = ""
    experts: int = 0

    @property
    def title(self) -> str:
        """For people."""
        if self.family == "chain":
            done = " ".join(filter(None, ("gated" * bool(self.gated), self.chain))) or "as it is"
            more = f", {done}, to {self.output}"
        else:
            more = f", {self.experts} experts" if self.family == "grouped" else ""
        formats = f"{self.activation or self.dtype} x {self.weight}{' (fast_accum)' * self.fast_accum}"
        return f"{self.family} {formats}, {self.m} x {self.n} x {self.k}{more}"


def bucket(m: int) -> int:
    """The power of two that stands for `m` rows.

    >>> bucket(1), bucket(5), bucket(64)
    (1, 8, 64)
    """
    return 1 << (m - 1).bit_length()


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
    wrong = _problem_fault(problem)
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


def _problem_fault(problem: Problem) -> str:
    try:
        formats = [get_format(name) for name in filter(None, (problem.weight, problem.activation, problem.output))]
    except ConfigurationError as error:
        return str(error)
    if not formats or not formats[0].weight or (problem.activation and not formats[1].activation):
        return f"{problem.weight!r} is no weight format, or {problem.activation!r} no activation format"
    if problem.m < 1 or problem.m != bucket(problem.m) or problem.n < 1 or problem.k < 1:
        return f"m is a power of two, n and k are positive, not {(problem.m, problem.n, problem.k)}"
    for name, known in (("family", FAMILIES), ("dtype", DTYPES), ("chain", CHAINS), ("gated", GATED)):
        if getattr(problem, name) not in known:
            return f"{name} is one of {', '.join(map(repr, known))}, not {shown(getattr(problem, name))}"
    chain = problem.family == "chain"
    if bool(problem.output) != chain or ((problem.chain or problem.gated) and not chain):
        return "output is for chains, which have one; chain and gated are for chains only"
    if chain and (wrong := chain_refusal(formats[-1], bool(problem.gated), n=problem.n)):
        return wrong
    if (problem.experts > 0) != (problem.family == "grouped"):
        return "experts is for grouped products, which have some"
    return ""


def blocking_fault(problem: Problem, blocking: Blocking) -> str:
    """Why a blocking would give wrong numbers, or none, for a problem; "" if it would not."""
    for field in dataclasses.fields(blocking):
        value = getattr(blocking, field.name)
        if isinstance(value, bool):
            continue
        if not isinstance(value, int) or not 1 <= value <= _LIMITS.get(field.name, 512):
            return f"{field.name} is a number from 1 to {_LIMITS.get(field.name, 512)}, not {shown(value)}"
        if (field.name.startswith("block_") or field.name == "num_warps") and value & (value - 1):
            return f"{field.name} is a power of two, not {value}"
    if min(blocking.block_m, blocking.block_n, blocking.block_k) < 16:
        return "a tile has 16 rows, columns and a K of 16 at least"
    if problem.family != "product" and blocking.split_k > 1:
        return f"{problem.family} does not split the sum over K"
    if problem.family == "chain":
        group = get_format(problem.output).group[1] or 1
        if blocking.swap or blocking.block_n % group:
            return f"a chain is not swapped, and block_n is a multiple of the {group} columns that share a scale"
    return _columns_fault(problem, blocking.block_k)


def _columns_fault(problem: Problem, block_k: int) -> str:
    """Why K cannot be taken `block_k` at a time in these formats."""
    formats = [get_format(name) for name in filter(None, (problem.weight, problem.activation))]
    if block_k > _LONGEST_K and all(found.element == "e4m3" for found in formats):
        return f"block_k is at most {_LONGEST_K}: narrow sums are promoted at least so often"
    for found in formats:
        inner, outer = scale_columns(found)
        if inner and block_k % inner:
            return f"block_k is a multiple of the {inner} columns of a scale of {found.name}, not {block_k}"
        if outer and outer % block_k:
            return f"block_k divides the {outer} columns of a scale of {found.name}, and {block_k} does not"
    return ""


def scale_columns(format: Format) -> tuple[int, int]:
    """Columns that share a scale which is multiplied into codes, and one which is applied to sums; 0 for none.

    >>> scale_columns(get_format("mxfp4_dualscale")), scale_columns(get_format("fp8_per_block_dynamic"))
    ((32, 512), (0, 128))
    """
    columns = format.group[1] or 0
    if format.scale == "float32":
        return 0, columns
    return columns, (format.coarse[1] or 0) if format.coarse else 0


# What is in use


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """The tables that a context follows, in front of those in use around it and of the shipped ones."""

    tables: tuple[TunedTable, ...]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Why a table, or a part of it, is not followed: by what is installed, and on the current GPU if there is one."""
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

    Args:
        tables: tables or paths of their files; the first that knows a problem is followed.

    Yields:
        What is in use; its `ignored` says what of it is not followed, and why. Each reason is a warning too.

    Raises:
        ConfigurationError: a file is no table.
        ConfigurationTypeError: an argument is neither.
    """
    found = tables_of(tables)
    token = _USED.set((*found, *_USED.get()))
    try:
        yield Used(found)
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
