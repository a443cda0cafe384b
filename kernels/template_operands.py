"""Operands of products as templates take them: of buffers of Inductor."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from olq_fx import torch_templates
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.template_sources import Side
from olq_fx.kernels.triton_product import Operand, operand_of


def tile_choices(first: Blocking) -> list[Blocking]:
    """The analytic choice; where Inductor may measure, others that need no other text."""
    if not torch_templates.wants_tuning():
        return [first]
    others = [
        dataclasses.replace(first, block_m=block_m, num_warps=warps, num_stages=stages)
        for block_m in {max(16, first.block_m // 2), first.block_m, 2 * first.block_m}
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]
    return [first, *(each for each in others if each != first)]


def operand_like(parts: Sequence[Any], format: str) -> Operand:
    """The operand that a kernel sees, of tensors without values."""
    shapes = [
        torch.empty([torch_templates.hint(extent) for extent in part.get_size()], dtype=part.get_dtype(), device="meta")
        for part in parts
    ]
    return operand_of(shapes, format)


def side_of(name: str, operand: Operand) -> Side:
    """What a source says of an operand by this name."""
    return Side(name, operand.inner_scale is not None, operand.outer_scale is not None, operand.constants)


def buffers_of(parts: Sequence[Any], format: str) -> list[Any]:
    """The parts in the order of `Side.arguments`: codes and coarse scales row by row, others by their strides."""
    if not format:
        return [torch_templates.contiguous(parts[0])]
    codes, scale, *rest = parts
    return [
        torch_templates.contiguous(codes),
        torch_templates.realized(scale),
        *(torch_templates.contiguous(part) for part in rest),
    ]
