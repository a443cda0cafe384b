"""`olq-fx tune`: find the best blocking of the products of a model, or of given shapes, and write them as a table."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch

from olq_fx.cli_answers import DONE, FAILED, Answer
from olq_fx.cli_models import source_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.cost_model import Architecture
from olq_fx.errors import ConfigurationError, PlanError, shown
from olq_fx.kernels.kernel_sources import Family
from olq_fx.kernels.support import product as supports_product
from olq_fx.kernels.tuned_json import save
from olq_fx.kernels.tuned_problem import DTYPES, Problem, bucket, problem_fault
from olq_fx.optional_packages import optional_package
from olq_fx.plan import plan_for
from olq_fx.progress import progress_bar
from olq_fx.schemes import Slot
from olq_fx.tables import table_of

NOT_MEASURED = (
    "nothing was measured: there is no such GPU here. The order is an estimate from published ceilings; compile and "
    "time again where the model runs"
)
_SHAPE = re.compile(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", re.ASCII)
_COLUMNS: Mapping[str, Literal["left", "right"]] = {
    "problem": "left",
    "first guess": "left",
    "choice": "left",
    "us, first": "right",
    "us": "right",
    "tried": "right",
    "dropped": "right",
    "why": "left",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How to tune.

    Attributes:
        architecture: the GPU.
        out: where the table goes; "" for nowhere.
        candidates: how many to try of each problem.
        jobs: how many compile at once.
        rounds: how often each is timed.
        measure: whether to time them, where the GPU is here.
    """

    architecture: Architecture
    out: str
    candidates: int
    jobs: int
    rounds: int
    measure: bool


def of_model(
    model: str, config: QuantizationConfig, rows: Sequence[int], dtype: torch.dtype | None, strict: bool
) -> list[Problem]:
    """The products of every layer of a model that would be quantized.

    Args:
        model: a folder or `module:callable`; it is built without memory.
        config: what is asked for.
        rows: numbers M of rows of activations.
        dtype: of the model; None for its own.
        strict: whether a pattern that matches nothing is an error.

    Raises:
        PlanError: there is none.
    """
    plan = plan_for(config, source_of(model).on_meta(dtype), strict=strict)
    found: dict[Problem, None] = {}
    for row in plan.quantized:
        if row.kind == "embedding" or len(row.shape) != 2 or row.slot is None:
            continue
        for m in rows:
            n, k = row.shape
            problem = problem_of("product", row.slot, (m, n, k), row.dtype, config.fast_accum)
            found[problem] = None
    if not found:
        raise PlanError("no linear layer would be quantized: there is nothing to tune")
    return list(found)


def of_shapes(
    shapes: Sequence[str],
    config: QuantizationConfig,
    dtype: torch.dtype | None,
    family: str,
    experts: int,
) -> list[Problem]:
    """Problems of given shapes, in the formats that a configuration has for linear layers.

    Raises:
        ConfigurationError: a shape is not MxNxK, or the configuration has no formats for it.
    """
    slot = config.moe if family == "grouped" else config.linear
    if slot is None:
        raise ConfigurationError("a shape is tuned in the formats of a scheme, and this configuration names none")
    return [
        problem_of(cast(Family, family), slot, shape_of(text), dtype or torch.bfloat16, config.fast_accum, experts)
        for text in dict.fromkeys(shapes)
    ]


def shape_of(text: str) -> tuple[int, int, int]:
    """M, N and K of `MxNxK`.

    Raises:
        ConfigurationError: it is none.
    """
    match = _SHAPE.fullmatch(text.strip().lower())
    if match is None or not all(map(int, match.groups())):
        raise ConfigurationError(f"--shape takes MxNxK, three positive numbers as in 64x4096x4096, not {shown(text)}")
    m, n, k = map(int, match.groups())
    return m, n, k


def problem_of(
    family: Family,
    slot: Slot,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    fast_accum: bool,
    experts: int = 0,
) -> Problem:
    """A problem in the formats of `slot`; a chain is SiLU x up, quantized for the next layer.

    Raises:
        ConfigurationError: no kernel computes it.
    """
    activation = slot.activation or ""
    if reason := supports_product(slot.weight, activation, dtype=dtype, activation_dtype=dtype).reason:
        raise ConfigurationError(f"{activation or dtype} x {slot.weight} cannot be tuned: {reason}")
    narrow = fast_accum and bool(supports_product(slot.weight, activation, fast_accum=True))
    if family == "chain" and not activation:
        raise ConfigurationError("a chain quantizes its result to the format of activations, and this scheme has none")
    m, n, k = sizes
    problem = Problem(
        family=family,
        activation=activation,
        weight=slot.weight,
        dtype=next(name for name, known in DTYPES.items() if known is dtype),
        m=bucket(m),
        n=n,
        k=k,
        fast_accum=narrow,
    )
    if family == "chain":
        problem = dataclasses.replace(problem, fast_accum=False, chain="silu", gated="paired", output=activation)
    elif family == "grouped":
        problem = dataclasses.replace(problem, experts=experts)
    if reason := problem_fault(problem):
        raise ConfigurationError(f"{problem.title}: {reason}")
    return problem


def tune(problems: Sequence[Problem], options: TuneOptions) -> Answer:
    """Tune, and write the table; the exit code is that of a failure where a problem has no blocking that runs.

    Raises:
        MissingPackageError: triton is not installed.
        ConfigurationError: the table cannot be written, or a problem has no meaning.
    """
    triton = optional_package("triton", "test", "tuning kernels")
    from olq_fx import tuning
    from olq_fx.tuning_measure import Stopwatch

    capability = options.architecture.capability
    device = tuning.gpu_here(capability) if options.measure else ""
    with Stopwatch(options.rounds) as watch, progress_bar(True) as bar:
        found = tuning.tune(
            problems,
            capability,
            candidates=options.candidates,
            watch=watch if device else None,
            device=device,
            bar=bar,
            jobs=options.jobs,
        )
    if options.out:
        save(found.table, options.out)
    failed = sum(result.choice is None for result in found.results)
    return Answer(_data(found, options, triton.__version__), _text(found, options), FAILED if failed else DONE)


def check_out(out: str) -> None:
    """Hold `--out` to a path where a file can be, before anything is compiled.

    Raises:
        ConfigurationError: it is a folder, or in one that is not there.
    """
    path = Path(out)
    if out and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigurationError(f"--out {out}: no file can be written there")


def check_family(family: str, experts: int) -> None:
    """Hold `--kernel` and `--experts` to each other.

    Raises:
        ConfigurationError: one goes without the other.
    """
    if (family == "grouped") != (experts > 0):
        raise ConfigurationError("--experts N goes with --kernel grouped, which needs it")


def _data(found: Any, options: TuneOptions, triton: str) -> dict[str, Any]:
    return {
        "architecture": f"sm_{found.capability}",
        "device": found.device,
        "measured": bool(found.device),
        "triton": triton,
        "out": options.out or None,
        "problems": [
            {
                "problem": dataclasses.asdict(result.problem),
                "choice": result.choice and dataclasses.asdict(result.choice),
                "tried": [_tried(one) for one in result.tried],
            }
            for result in found.results
        ],
    }


def _tried(one: Any) -> dict[str, Any]:
    code = one.code and {"registers": one.code.registers, "shared_memory": one.code.shared_memory}
    return {
        "blocking": dataclasses.asdict(one.blocking),
        "dropped": one.dropped,
        "estimate": one.estimate,
        "seconds": one.seconds,
        "code": code,
    }


def _text(found: Any, options: TuneOptions) -> str:
    lines = [table_of(_COLUMNS, [_cells(result) for result in found.results])]
    lines.append(f"measured on {found.device}" if found.device else NOT_MEASURED)
    failed = sum(result.choice is None for result in found.results)
    if failed:
        lines.append(f"{failed} of {len(found.results)} problems have no blocking that can be used")
    if options.out:
        lines.append(f"{len(found.results) - failed} choices for sm_{found.capability} written to {options.out}")
    return "\n".join(lines)


def _cells(result: Any) -> tuple[str, ...]:
    dropped = [one.dropped for one in result.tried if one.dropped]
    choice = result.choice
    chosen = (
        "none" if choice is None else "the first guess" if choice.blocking == result.first else cut(choice.blocking)
    )
    times = (None, None) if choice is None else (choice.first_seconds, choice.seconds)
    return (
        result.problem.title,
        cut(result.first),
        chosen,
        *("" if seconds is None else f"{1e6 * seconds:.1f}" for seconds in times),
        str(len(result.tried)),
        str(len(dropped)),
        "; ".join(dict.fromkeys(dropped)),
    )


def cut(blocking: Any) -> str:
    """A blocking for people: its tile, then whatever is not as by default.

    >>> from olq_fx.kernels.blocking import Blocking
    >>> cut(Blocking(16, 128, 128, swap=True, split_k=8))
    '16 x 128 x 128, swap, split_k 8'
    """
    said = [f"{blocking.block_m} x {blocking.block_n} x {blocking.block_k}"]
    for field in dataclasses.fields(blocking):
        value = getattr(blocking, field.name)
        if field.default is not dataclasses.MISSING and value != field.default:
            said.append(field.name if value is True else f"{field.name} {value}")
    return ", ".join(said)
