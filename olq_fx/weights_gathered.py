"""What `fully_shard` (FSDP2) asks of a parameter: only codes and scales travel.

    pieces of rows: `new_piece(weight, size)` is storage for one
    Gathered: the methods that FSDP calls before and after it gathers the pieces of all processes

FSDP cuts dimension 0 and keeps the pieces; before a layer runs it gathers what `fsdp_pre_all_gather` returns and makes
the parameter of it with `fsdp_post_all_gather`. What travels are bytes, so that parts of any dtype go in one message.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx.errors import UnsupportedError
from olq_fx.formats import Format


class Gathered:
    """The methods of a converted weight that FSDP calls."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The parts of this process's piece as bytes, and what the whole will be made with.

        Args:
            mesh: of the processes that have the pieces.
            outer_size, outer_stride: of the whole weight.
            module, mp_policy: not needed.
        """
        weight: Any = self
        parts = tuple(part.contiguous().view(torch.uint8) for part in weight.parts)
        about = tuple((part.dtype, tuple(part.shape)) for part in weight.parts)
        return parts, (about, int(mesh.size()), tuple(outer_size), tuple(outer_stride))

    def fsdp_post_all_gather(
        self, all_gather_outputs: Sequence[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight over the gathered bytes; a second time they are in the same storage already."""
        if out is not None:
            return None
        weight: Any = self
        about, pieces, size, stride = metadata
        format, experts = weight.spec.format, len(size) == 3
        extents = (1, format.group[0], format.coarse[0] if format.coarse else None)
        parts = []
        for gathered, (dtype, shape), rows in zip(all_gather_outputs, about, extents, strict=False):
            whole = gathered.view(dtype).view(pieces, *shape)
            same = rows is None and not experts
            parts.append(whole[0] if same else whole.flatten(0, 1))
        return weight.like(parts=parts, dtype=param_dtype, size=size, stride=stride), ()


def new_piece(weight: Any, size: Sequence[int]) -> Any:
    """Storage for a piece of a weight, cut along dimension 0.

    Args:
        weight: the whole.
        size: of the piece.

    Raises:
        UnsupportedError: pieces would differ in size, or share scales: the nearest cut is named.
    """
    size = tuple(size)
    _check_cut(weight, size)
    rows = size[0] if len(size) == 2 else None
    format: Format = weight.spec.format
    extents = (1, format.group[0], format.coarse[0] if format.coarse else None)
    parts = []
    for part, extent in zip(weight.parts, extents, strict=False):
        count = size[0] if rows is None else (part.shape[0] if extent is None else rows // extent)
        parts.append(torch.zeros((count, *part.shape[1:]), dtype=part.dtype, device=part.device))
    spec = dataclasses.replace(weight.spec, skip=0, rows_of_larger=False)
    return weight.like(parts=parts, spec=spec, size=size)


def _check_cut(weight: Any, size: tuple[int, ...]) -> None:
    whole, rows = int(weight.shape[0]), size[0]
    name = f"{weight.label}: fully_shard"
    if weight.spec.transposed and len(size) == 2:
        raise UnsupportedError(f"{name} cuts dimension 0, which is K here; its parts lie by rows of N")
    if rows == 0 or whole % rows:
        raise UnsupportedError(f"{name} cuts its {whole} rows into pieces of {rows}, which are not all alike")
    height = weight.spec.format.group[0] if len(size) == 2 else 1
    if height is not None and rows % height and rows != whole:
        nearest = max(height, round(rows / height) * height)
        raise UnsupportedError(
            f"{name} cuts its {whole} rows after {rows}, within a block of {height} that shares a scale in "
            f"{weight.spec.weight}; the nearest cut between blocks is after {nearest}"
        )
