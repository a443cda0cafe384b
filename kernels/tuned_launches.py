"""A problem of a tuned table as operands and launches: without values to compile, with random ones to time.

API:
    meta_operands(problem) -> Operands              without values
    random_operands(problem, device, seed, quantize) -> Operands
    launches(problem, operands, capability, blocking) -> list[Call]
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import Format, get_format
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.experts import Segments, Stack
from olq_fx.kernels.triton_calls import Call
from olq_fx.kernels.triton_experts import grouped_calls
from olq_fx.kernels.triton_linear_chain import Chain, chain_call
from olq_fx.kernels.triton_product import Operand, operand_of, product_calls
from olq_fx.kernels.tuned_problem import DTYPES, Problem

Quantize = Callable[[Tensor, str], list[Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """What a problem reads and writes.

    Attributes:
        x: the parts of the activations (M, K), or a list of one tensor.
        weight: the parts of (N, K); of a grouped product those of (E, N, K).
        outputs: the result (M, N), or its parts.
        segments: of a grouped product, which rows are whose; each expert has as many as the others.
    """

    x: list[Tensor]
    weight: list[Tensor]
    outputs: list[Tensor]
    segments: Segments | None
    formats: tuple[str, str]

    @property
    def a(self) -> Operand:
        """The activations."""
        return operand_of(self.x, self.formats[0])

    @property
    def b(self) -> Operand:
        """The weight; of a grouped product that of one expert."""
        return operand_of([part[0] for part in self.weight] if self.segments else self.weight, self.formats[1])


def meta_operands(problem: Problem) -> Operands:
    """Operands on the meta device."""
    dtype = DTYPES[problem.dtype]

    def make(format: str, rows: int, number: int) -> list[Tensor]:
        if not format:
            return [torch.empty(rows, problem.k, dtype=dtype, device="meta")]
        return empty_parts(get_format(format), rows, problem.k, torch.device("meta"))

    return _operands(problem, torch.device("meta"), make)


def random_operands(problem: Problem, device: torch.device, seed: int, quantize: Quantize) -> Operands:
    """Normally distributed operands; `quantize` takes values and the name of a format."""
    dtype = DTYPES[problem.dtype]

    def make(format: str, rows: int, number: int) -> list[Tensor]:
        generator = torch.Generator(device=device).manual_seed(1000 * seed + number)
        values = torch.randn((rows, problem.k), generator=generator, device=device).to(dtype)
        return quantize(values, format) if format else [values]

    return _operands(problem, device, make)


def _operands(problem: Problem, device: torch.device, make: Callable[[str, int, int], list[Tensor]]) -> Operands:
    x = make(problem.activation, problem.m, 0)
    segments = None
    if problem.family == "grouped":
        experts = [make(problem.weight, problem.n, number + 1) for number in range(problem.experts)]
        weight = [torch.stack(parts) for parts in zip(*experts, strict=True)]
        bounds = torch.linspace(0, problem.m, problem.experts + 1, dtype=torch.float64).round().to(torch.int32)
        segments = Segments(bounds.to(device))
    else:
        weight = make(problem.weight, problem.n, 1)
    columns = problem.n // 2 if problem.gated else problem.n
    if problem.output:
        outputs = empty_parts(get_format(problem.output), problem.m, columns, device)
    else:
        outputs = [torch.empty(problem.m, columns, dtype=DTYPES[problem.dtype], device=device)]
    return Operands(x, weight, outputs, segments, (problem.activation, problem.weight))


def launches(problem: Problem, operands: Operands, capability: int, blocking: Blocking) -> list[Call]:
    """The kernels that fill `operands.outputs`, cut as `blocking` says."""
    how: dict[str, Any] = {"capability": capability, "blocking": blocking}
    if problem.family == "product":
        plain = (operands.x, problem.activation, operands.weight, problem.weight, problem.k, operands.outputs[0])
        return product_calls(*plain, **how, fast_accum=problem.fast_accum)
    if problem.family == "grouped":
        assert operands.segments is not None
        stack = Stack(operands.weight, problem.weight)
        given = (operands.x, problem.activation, stack, problem.k, operands.outputs[0], operands.segments)
        return grouped_calls(*given, tail=False, **how, fast_accum=problem.fast_accum)
    chain, output = Chain(problem.chain, problem.gated), get_format(problem.output)  # type: ignore[arg-type]
    where = (operands.a, operands.b, problem.k, DTYPES[problem.dtype], chain, operands.outputs, output)
    return [chain_call(*where, output.activation_rule, None, None, None, **how)]


def empty_parts(format: Format, rows: int, k: int, device: torch.device) -> list[Tensor]:
    """The parts of a quantized (rows, k) tensor, without values."""
    return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in numerics.part_specs(format, rows, k)]
