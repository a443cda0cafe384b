"""The operator of the first product of experts with what is between it and the second, `olq_fx::grouped_gated`.

    hidden = quantized_grouped_linear(x, ..., weight, ...)      (M, shards x I)
    inner = experts.gated(hidden, ...)                          (M, I)
    parts of inner in the format of the second product, or [inner]

Late passes put it into compiled graphs for GPUs, where `triton_expert_chain` makes one kernel of it if a tile holds the
groups of the format; elsewhere, and for other formats, it is the three steps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from olq_fx import numerics, torch_private
from olq_fx.formats import get_format
from olq_fx.kernels import expert_ops, experts, ops, reference, support
from olq_fx.kernels.experts import Gated, Segments, Stack
from olq_fx.kernels.support import capability_of

_SCHEMA = (
    "grouped_gated(Tensor[] x, str activation_format, Tensor offs, Tensor[] weight, str weight_format, int k, "
    "ScalarType dtype, Tensor? bias, int shards, str activation, float alpha, float limit, str output_format, str rule)"
    " -> Tensor[]"
)


def grouped_gated(
    x: Sequence[Tensor],
    activation_format: str,
    offs: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    shards: int,
    activation: str,
    alpha: float,
    limit: float,
    output_format: str,
    rule: str,
) -> list[Tensor]:
    """Rows in the order of their experts through the first product and the activation after it.

    Args:
        x, activation_format, offs, weight, weight_format, k, dtype, bias: as `expert_ops.quantized_grouped_linear`
            takes them.
        shards: 2 of gate and up, 1 where there is no gate.
        activation, alpha, limit: see `experts.Gated`.
        output_format: of the result, "" for the dtype.
        rule: one of its scale rules.

    Returns:
        The parts of (M, I), or a list of one tensor. Of rows that belong to nobody they are those of 0, or anything.

    Raises:
        ConversionError: operands do not fit.
        UnsupportedError: a gradient is wanted.
    """
    reference.refuse_gradient(*x, bias, said="olq_fx.grouped_gated has no gradient")
    gated = Gated(expert_ops.kind_of(activation), alpha, limit)
    stack = Stack(weight, weight_format, bias, shards)
    reference.check_quantized_activation(x, activation_format, k)
    if _one_kernel(x[0], weight_format, activation_format, output_format, dtype):
        return _fused(x, activation_format, offs, stack, k, dtype, gated, output_format, rule)
    product = torch.ops.olq_fx.quantized_grouped_linear.default
    hidden = product(x, activation_format, offs, weight, weight_format, k, dtype, bias, shards)
    inner = experts.gated(hidden, gated, shards)
    if not output_format:
        return [inner]
    quantized: list[Tensor] = torch.ops.olq_fx.quantize.default(inner, output_format, rule)
    return quantized


def _one_kernel(x: Tensor, weight_format: str, activation_format: str, output_format: str, dtype: torch.dtype) -> bool:
    if not x.is_cuda or support.between_refusal(output_format):
        return False
    capability = capability_of(x.device)
    given = None if activation_format else dtype
    return bool(
        support.grouped(weight_format, activation_format, dtype=dtype, activation_dtype=given, capability=capability)
    )


def _fused(
    x: Sequence[Tensor],
    activation_format: str,
    offs: Tensor,
    stack: Stack,
    k: int,
    dtype: torch.dtype,
    gated: Gated,
    output_format: str,
    rule: str,
) -> list[Tensor]:
    from olq_fx.kernels import triton_expert_chain
    from olq_fx.kernels.triton_calls import run

    rows, device = x[0].shape[0], x[0].device
    order = torch.arange(rows, dtype=torch.int32, device=device)
    segments = Segments(functional.pad(offs, (1, 0)), order)
    like = torch.empty(0, dtype=dtype, device=device)
    parts = _results(rows, stack.parts[0].shape[1] // stack.shards, dtype, output_format, device)
    for part in parts:
        part.zero_()
    if rows:
        with torch.cuda.device(device):
            calls = triton_expert_chain.expert_chain_calls(
                *(x, activation_format, stack, k, gated, parts, output_format, rule, like, segments),
                capability=capability_of(device),
            )
            run(calls)
    return parts


def _results(rows: int, k: int, dtype: torch.dtype, format: str, device: torch.device) -> list[Tensor]:
    if not format:
        return [torch.empty((rows, k), dtype=dtype, device=device)]
    specs = numerics.part_specs(get_format(format), rows, k)
    return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]


def _shape(
    x: Sequence[Tensor],
    activation_format: str,
    offs: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    shards: int,
    activation: str,
    alpha: float,
    limit: float,
    output_format: str,
    rule: str,
) -> list[Tensor]:
    reference.check_quantized_activation(x, activation_format, k)
    return _results(x[0].shape[0], weight[0].shape[1] // shards, dtype, output_format, x[0].device)


def _register() -> None:
    """Define the operator; what each device runs is decided by the function itself."""
    ops.LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    ops.LIBRARY.impl("olq_fx::grouped_gated", grouped_gated, "CompositeExplicitAutograd")
    torch_private.hide_from_dynamo(grouped_gated)
    torch.library.register_fake("olq_fx::grouped_gated", _shape, lib=ops.LIBRARY)


_register()
