"""What a blocking is chosen for, and which blockings give the right numbers for it. Knows no triton.

API:
    Problem                                 the key of a tuned table
    bucket(m) -> int                        the power of two that stands for M
    problem_fault(problem) -> str           why there is no such problem
    blocking_fault(problem, blocking) -> str    why a blocking would give wrong numbers for it
    scale_columns(format) -> (inner, outer)     columns that share a scale
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import torch

from olq_fx.errors import ConfigurationError, shown
from olq_fx.formats import Format, get_format
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.kernel_sources import FAMILIES, Family
from olq_fx.kernels.support import chain_refusal

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)
"""What products are computed in, by name."""

CHAINS = ("", "silu", "gelu", "gelu_tanh", "relu_squared")
GATED = ("", "paired", "interleaved")

_LONGEST_K = 128
"""Columns after which the narrow sums of float8 instructions are promoted, at the latest."""

_FORMS = ("tiles", "persistent", "gemv")
_LIMITS = {"num_warps": 32, "num_stages": 8, "split_k": 512, "group": 64, "block_k": 8192}


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


def problem_fault(problem: Problem) -> str:
    """Why there is no such problem; "" if there is."""
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
        value, limit = getattr(blocking, field.name), _LIMITS.get(field.name, 512)
        if isinstance(value, (bool, str)):
            continue
        if not isinstance(value, int) or not 1 <= value <= limit:
            return f"{field.name} is a number from 1 to {limit}, not {shown(value)}"
        if (field.name.startswith("block_") or field.name == "num_warps") and value & (value - 1):
            return f"{field.name} is a power of two, not {value}"
    return _form_fault(problem, blocking) or _tile_fault(problem, blocking)


def _form_fault(problem: Problem, blocking: Blocking) -> str:
    """Why a problem cannot be computed in this form, which says what kernel runs."""
    if blocking.form not in _FORMS:
        return f"form is one of {', '.join(map(repr, _FORMS))}, not {shown(blocking.form)}"
    if blocking.form == "tiles":
        return ""
    if problem.family != "product":
        return f"{problem.family} has no form {blocking.form!r}"
    if blocking.swap or (blocking.form == "persistent" and blocking.split_k > 1):
        return f"{blocking.form!r} is not swapped, and 'persistent' does not split the sum over K"
    if blocking.form == "gemv" and (problem.m > 1 or blocking.block_m > 1):
        return "'gemv' is for one row"
    return ""


def _tile_fault(problem: Problem, blocking: Blocking) -> str:
    """What is wrong with the extents of a tile."""
    if blocking.form == "gemv":
        columns = max(scale_columns(get_format(problem.weight))[0], 32)
        return f"block_k is a multiple of {columns}" if blocking.block_k % columns else ""
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
    if block_k > _LONGEST_K:
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
