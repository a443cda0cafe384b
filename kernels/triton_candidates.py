"""Which blockings may be tried for a problem: around the first guess, those that can be fast, best expected first.

API:
    Work.of(problem, capability) -> Work            a problem with its operands' kinds and its instruction
    first_guess(work) -> Blocking
    candidates_of(work, count=None) -> tuple[Blocking, ...]     the first guess leads
    slow_or_wrong(work, blocking) -> str            why a blocking is no candidate; "" if it is
    estimate(work, blocking) -> float               seconds, by ceilings: for an order, not for a promise

A candidate gives the right numbers (`tuned_problem.blocking_fault`), has the same matrix instruction as the first guess
where that depends on the tile, wants no more shared memory than there is, and no more accumulators than stay in
registers. Whether the compiler agrees is found by compiling: see `olq_fx.tuning`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from olq_fx import numerics
from olq_fx.cost_model import SHARED_MEMORY, architecture
from olq_fx.formats import get_format
from olq_fx.kernels.blocking import Blocking, multiprocessors
from olq_fx.kernels.triton_experts import grouped_blocking_of
from olq_fx.kernels.triton_linear_chain import Chain, chain_blocking
from olq_fx.kernels.triton_product import TENSOR_MEMORY, Instruction, Operand, blocking_of, instruction_of
from olq_fx.kernels.tuned_launches import Operands, meta_operands
from olq_fx.kernels.tuned_problem import Problem, blocking_fault, bucket

_GROUP = 8
"""Of every first guess."""

_MMA_SYNC = (80, 86, 89, 120)
_ACCUMULATORS = 128
"""Of a thread, beside which operands and addresses have registers: more have spilled wherever they were compiled."""

_LATENCY, _STEP, _LAUNCH = 0.8e-6, 0.03e-6, 2e-6
"""Seconds until operands come from memory, of the barriers of a K-block, of a second kernel: orders of magnitude."""

_DOTS = {"scaled": "fp8", "fp16": "bf16"}


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A problem on a GPU.

    Attributes:
        problem: what is computed.
        capability: of the GPU, 90 for sm_90.
        operands: without values.
        instruction: the matrix instruction.
    """

    problem: Problem
    capability: int
    operands: Operands
    instruction: Instruction

    @classmethod
    def of(cls, problem: Problem, capability: int) -> "Work":
        """The work that a problem is on a GPU of this compute capability."""
        operands = meta_operands(problem)
        instruction = instruction_of(operands.a, operands.b, problem.k, capability, problem.fast_accum)
        return cls(problem, capability, operands, instruction)


def first_guess(work: Work) -> Blocking:
    """What the kernels take where nothing is tuned."""
    problem, a, b = work.problem, work.operands.a, work.operands.b
    sizes = (problem.m, problem.n, problem.k)
    if problem.family == "grouped":
        return grouped_blocking_of(problem.m, problem.experts, a, b, work.instruction, work.capability)
    if problem.family == "chain":
        chain, output = Chain(problem.chain, problem.gated), get_format(problem.output)  # type: ignore[arg-type]
        return chain_blocking(*sizes, a, b, work.instruction, output, chain, work.capability)
    return blocking_of(*sizes, a, b, work.instruction, work.capability)


def candidates_of(work: Work, count: int | None = None) -> tuple[Blocking, ...]:
    """The first guess, then what may be better, the best of each tile by `estimate` first.

    Args:
        work: what is computed, where.
        count: how many at most; None is all. Few of them are of different tiles.
    """
    first = first_guess(work)
    others = {one for one in _around(work, first) if one != first and not slow_or_wrong(work, one)}
    ranked = sorted(others, key=lambda one: (estimate(work, one), _changed(first, one), dataclasses.astuple(one)))
    by_tile: dict[tuple[Any, ...], list[Blocking]] = {}
    for one in ranked:
        by_tile.setdefault((one.block_m, one.block_n, one.swap), []).append(one)
    # The best of each tile, then the second of each: those of one tile are near each other.
    turns = itertools.zip_longest(*by_tile.values())
    return (first, *(one for turn in turns for one in turn if one is not None))[:count]


def _changed(first: Blocking, other: Blocking) -> int:
    """In how many fields two blockings differ."""
    pairs = zip(dataclasses.astuple(first), dataclasses.astuple(other), strict=True)
    return sum(mine != theirs for mine, theirs in pairs)


def _around(work: Work, first: Blocking) -> Iterator[Blocking]:
    """What differs from the first guess in some of its fields; not all of it is a candidate."""
    if first.form == "gemv":
        yield from _of_one_row(first)
        first = dataclasses.replace(first, form="tiles")
    splits = (1, 2, 3, 4, 6, 8, 12, 16) if work.problem.family == "product" else (1,)
    swaps = (False,) if work.problem.family == "chain" else (first.swap, not first.swap)
    tiles_m = [size for size in (16, 32, 64, 128, 256) if size <= _tallest(work)]
    warps_of = (4, 8)
    forms = dict.fromkeys((first.form, "tiles"))
    for form, block_m, block_n, block_k, swap, num_warps, num_stages in itertools.product(
        forms, tiles_m, (32, 64, 128, 256), (32, 64, 128), swaps, warps_of, (2, 3, 4)
    ):
        tile: dict[str, Any] = {"form": form, "block_m": block_m, "block_n": block_n, "block_k": block_k, "swap": swap}
        whole = dataclasses.replace(first, **tile, split_k=1, group=_GROUP, num_warps=num_warps, num_stages=num_stages)
        if slow_or_wrong(work, whole):
            continue  # however the sum is split, and in whatever order the tiles come
        for split_k, group in itertools.product(splits, (_GROUP, 1)):
            yield dataclasses.replace(whole, split_k=split_k, group=group)


def _of_one_row(first: Blocking) -> Iterator[Blocking]:
    """Around a first guess without a matrix instruction: rows, warps and parts of K of a program."""
    per_warp = first.block_k // first.num_warps
    for block_n, warps, split_k in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16)):
        changed: dict[str, Any] = {
            "block_n": block_n,
            "num_warps": warps,
            "block_k": warps * per_warp,
            "split_k": split_k,
        }
        yield dataclasses.replace(first, **changed)


def slow_or_wrong(work: Work, blocking: Blocking) -> str:
    """Why a blocking is not worth a try; "" if it is."""
    return (
        blocking_fault(work.problem, blocking)
        or _instruction_fault(work, blocking)
        or _size_fault(work, blocking)
        or _waste(work, blocking)
    )


def _instruction_fault(work: Work, blocking: Blocking) -> str:
    """Whether the tile is too small for the matrix instruction of the first guess."""
    if blocking.form == "gemv":
        return ""
    dot = work.instruction.dot
    high, wide = (blocking.block_n, blocking.block_m) if blocking.swap else (blocking.block_m, blocking.block_n)
    if blocking.block_k < (32 if dot in ("fp8", "int8", "scaled") else 16):
        return f"the {dot} instruction takes 32 columns at a time"
    if dot == "scaled" and blocking.block_k < 64:
        return "block-scaled instructions want K-blocks of 64"
    if high < _least_high(work):
        return f"the high side of the matrix instruction has {high}, not {_least_high(work)}"
    return "" if wide >= 16 else f"the matrix instruction is 16 wide at least, not {wide}"


def _least_high(work: Work) -> int:
    """Rows of the matrix instruction: a lower tile falls back to a slower one."""
    if work.capability in _MMA_SYNC:
        return 16
    return 128 if work.instruction.dot == "scaled" and work.capability in TENSOR_MEMORY else 64


def _size_fault(work: Work, blocking: Blocking) -> str:
    """Whether operands or accumulators have no room."""
    limit = SHARED_MEMORY[work.capability]
    if (wanted := shared_memory(work, blocking)) > limit:
        return f"about {wanted} bytes of shared memory, the limit being {limit}"
    threads = 32 * blocking.num_warps
    if blocking.form == "gemv":
        held = blocking.block_n * blocking.block_k // threads
        return f"{held} numbers a thread, of which {_ACCUMULATORS} stay in registers" if held > _ACCUMULATORS else ""
    gates = 2 if work.problem.gated else 1
    sums = 2 if work.instruction.promote else 1
    most = _ACCUMULATORS
    if work.capability in _MMA_SYNC or work.instruction.dot in ("bf16", "fp16"):
        most //= 2  # operands are registers too
    if work.instruction.parts > 1:
        most //= 2
    held = blocking.block_m * blocking.block_n * gates * sums // threads
    if held > most:
        return f"{held} accumulators a thread, of which {most} stay in registers"
    return ""


def shared_memory(work: Work, blocking: Blocking) -> int:
    """About how many bytes the operands of all stages take; at least one."""
    if blocking.form == "gemv":
        return 1  # codes go to registers at once
    gates = 2 if work.problem.gated else 1
    row = _width(work.operands.a, work.instruction) * blocking.block_k
    column = _width(work.operands.b, work.instruction) * blocking.block_k
    return math.ceil(blocking.num_stages * (blocking.block_m * row + gates * blocking.block_n * column))


def _width(side: Operand, instruction: Instruction) -> float:
    """Bytes of an element as it is loaded."""
    if side.side == "plain":
        return float(side.codes.dtype.itemsize)
    return 0.5 if side.side == "e2m1" else 1.0


def _waste(work: Work, blocking: Blocking) -> str:
    """Whether part of the programs would have nothing to do."""
    problem, rows = work.problem, _rows(work)
    if blocking.block_m > _tallest(work):
        return f"tiles of {blocking.block_m} for {rows} rows"
    if blocking.block_n > max(32, 2 * _columns(problem)):
        return f"tiles of {blocking.block_n} for {_columns(problem)} columns"
    steps = -(-problem.k // blocking.block_k)
    if blocking.split_k > 1 and (blocking.split_k - 1) * -(-steps // blocking.split_k) >= steps:
        return f"{steps} K-blocks for {blocking.split_k} programs"
    tiles = _tiles(work, blocking)
    if blocking.split_k > 1 and tiles * blocking.split_k > 4 * multiprocessors(None, work.capability):
        return "enough programs without splitting the sum over K further"
    if blocking.group != _GROUP and tiles <= multiprocessors(None, work.capability):
        return "another order of tiles that are all computed at once"
    return ""


def _rows(work: Work) -> int:
    """Rows that a tile may have: of a grouped product, those of one expert on average."""
    return max(1, -(-work.problem.m // max(1, work.problem.experts)))


def _tallest(work: Work) -> int:
    """Rows of a tile that are of use; a chain, which is not swapped, has none of fewer than the instruction."""
    return max(_least_high(work) if work.problem.family == "chain" else 16, bucket(_rows(work)))


def _columns(problem: Problem) -> int:
    return problem.n // 2 if problem.gated else problem.n


def _tiles(work: Work, blocking: Blocking) -> int:
    experts = max(1, work.problem.experts)
    return experts * -(-_rows(work) // blocking.block_m) * -(-_columns(work.problem) // blocking.block_n)


def estimate(work: Work, blocking: Blocking) -> float:
    """Seconds of a call by the ceilings of the GPU: of its memory, of its instruction, of one multiprocessor."""
    if blocking.form == "gemv":
        return _estimate_of_one_row(work, blocking)
    problem, gpu = work.problem, architecture(f"sm_{work.capability}")
    processors = multiprocessors(None, work.capability)
    rate = gpu.rates[_DOTS.get(work.instruction.dot, work.instruction.dot)] / processors  # type: ignore[index]
    staged = shared_memory(work, blocking)
    at_once = max(1, min(SHARED_MEMORY[work.capability] // staged, 2))
    persistent = blocking.form == "persistent"
    at_once = 1 if persistent else at_once
    waves = -(-_tiles(work, blocking) * blocking.split_k // (processors * at_once))
    gates = 2 if problem.gated else 1
    steps = -(-problem.k // (blocking.block_k * blocking.split_k))
    operations = 2 * blocking.block_m * blocking.block_n * gates * blocking.block_k * work.instruction.parts
    # Tiles come through the L2 cache, with about three times the bandwidth of the memory, and no faster than what is
    # on its way meanwhile: all stages but the one in use.
    on_its_way = at_once * staged * (blocking.num_stages - 1) / blocking.num_stages
    bandwidth = min(3 * gpu.bandwidth / processors, on_its_way / _LATENCY)
    step = max(at_once * operations / rate, at_once * staged / blocking.num_stages / bandwidth)
    if work.instruction.promote:
        step *= 1.2 if blocking.num_warps > 4 or at_once > 1 else 1.4
    moved = _moved(problem) + (8 * problem.m * problem.n * blocking.split_k if blocking.split_k > 1 else 0)
    # A program that goes on to its next tile has the operands of it under way.
    busy = waves * steps * (step + _STEP) + _LATENCY * (1 if persistent else waves)
    return max(busy, moved / gpu.bandwidth) + (_LAUNCH if blocking.split_k > 1 else 0)


def _estimate_of_one_row(work: Work, blocking: Blocking) -> float:
    """The time of the weight's bytes, longer where few of them are under way at once."""
    programs = _tiles(work, blocking) * blocking.split_k
    under_way = programs * blocking.block_n * blocking.block_k * _width(work.operands.b, work.instruction)
    gpu = architecture(f"sm_{work.capability}")
    bandwidth = min(gpu.bandwidth, under_way / _LATENCY)
    return _moved(work.problem) / bandwidth + _LATENCY + (_LAUNCH if blocking.split_k > 1 else 0)


def _moved(problem: Problem) -> int:
    """Bytes that a call reads and writes at least."""
    weight = numerics.quantized_bytes(get_format(problem.weight), problem.n, problem.k) * max(1, problem.experts)
    plain = 4 if problem.dtype == "float32" else 2
    read = plain * problem.m * problem.k
    if problem.activation:
        read = numerics.quantized_bytes(get_format(problem.activation), problem.m, problem.k)
    written = plain * problem.m * problem.n
    if problem.output:
        written = numerics.quantized_bytes(get_format(problem.output), problem.m, _columns(problem))
    return weight + read + written
