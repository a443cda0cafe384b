"""Weights that are cut over processes (DTensor): converted piece by piece, with the bytes of slices of the whole.

    obstacle(tensor, spec) -> str                 why a distributed weight cannot be converted; alike in all processes
    converted_piece(tensor, spec) -> DTensor      of converted pieces, which lie as the original did
    parts_of(weight, placement) -> list           the parts of all pieces, distributed as the weight is: for state dicts
    weight_of(tensor) -> QuantizedWeight | None   a converted weight, or this process's piece of one

A cut must fall between groups. What belongs to a whole row or a whole matrix (a scale for a row whose columns are cut,
the scale of a matrix, the global scale of nvfp4) is taken over all pieces.
"""

from typing import Any

import torch
from torch import Tensor

from olq_fx import panels, torch_distributed
from olq_fx.formats import Format
from olq_fx.numerics import part_specs
from olq_fx.torch_distributed import Placement
from olq_fx.weights import QuantizedWeight, WeightSpec, quantize_weight
from olq_fx.weights_encoding import count_nonfinite, empty_parts_of


def weight_of(tensor: object) -> QuantizedWeight | None:
    """A converted weight, or this process's piece of one that is distributed; None for anything else."""
    if isinstance(tensor, QuantizedWeight):
        return tensor
    if torch_distributed.is_distributed(tensor):
        local: Any = torch_distributed.local_tensor(tensor)
        return local if isinstance(local, QuantizedWeight) else None
    return None


def obstacle(tensor: Tensor, spec: WeightSpec) -> str:
    """Why a distributed weight cannot be converted, from what all processes know alike; "" if it can."""
    placement = torch_distributed.placement_of(tensor)
    assert placement is not None
    if placement.unusual:
        return (
            f"it is distributed with {placement.unusual}; plain pieces (Shard) and copies (Replicate) can be converted"
        )
    if torch_distributed.local_tensor(tensor).is_meta:
        return "it is distributed and has no data yet: load it first"
    for dim in placement.cuts:
        if reason := _wrong_cut(placement, dim, spec):
            return reason
    return ""


def _wrong_cut(placement: Placement, dim: int, spec: WeightSpec) -> str:
    """Why a dimension cannot be cut as it is; the nearest cut that can be made is named."""
    size, pieces = placement.shape[dim], placement.pieces(dim)
    length = -(-size // pieces)
    if length * (pieces - 1) >= size:
        return f"dimension {dim} of {size} is cut into {pieces} pieces, some of which are empty"
    if len(placement.shape) == 3:
        return "" if dim == 0 else "the matrices of its experts are cut; cut between experts (Shard(0))"
    along_k = dim == (0 if spec.transposed else 1)
    step = _step(spec.format, along_k=along_k)
    if length % step == 0:
        return ""
    nearest = max(step, round(length / step) * step)
    what = "columns" if along_k else "rows"
    return (
        f"its {size} {what} are cut after {length}, within a group of {step} that shares a scale in {spec.weight}; the "
        f"nearest cut between groups is after {nearest}"
    )


def _step(format: Format, *, along_k: bool) -> int:
    """What a cut must be a multiple of: the extents of groups that do not reach over all."""
    axis = 1 if along_k else 0
    extents = [format.group[axis], format.coarse[axis] if format.coarse else None]
    step = max((extent for extent in extents if extent is not None), default=1)
    return max(step, 2) if along_k and format.packed else step


def nonfinite(tensor: Tensor) -> int:
    """How many values of a distributed weight are NaN or Inf in all its pieces, as every process finds alike."""
    placement = torch_distributed.placement_of(tensor)
    assert placement is not None
    local = torch_distributed.local_tensor(tensor).detach()
    count = torch.tensor(count_nonfinite(local), device=local.device)
    return int(torch_distributed.reduce_over(count, placement, "sum", placement.cuts))


def converted_piece(tensor: Tensor, spec: WeightSpec, path: str) -> Any:
    """Convert this process's piece; all processes call it in the same order.

    Args:
        tensor: a DTensor for which there is no obstacle.
        spec: of the whole weight.
        path: for messages.

    Returns:
        A DTensor of the converted pieces, without gradient.
    """
    placement = torch_distributed.placement_of(tensor)
    assert placement is not None
    local = torch_distributed.local_tensor(tensor).detach()
    if local.dim() == 3:
        weight = quantize_weight(local, spec)
    else:
        parts = empty_parts_of(spec, local.shape, local.device)
        matrix = local.t() if spec.transposed else local
        panels.convert_into(parts, matrix, spec.format, spec.weight_rule, _pieces(placement, spec))
        weight = QuantizedWeight(parts, spec, local.dtype, local.shape, local.stride())
    weight.path, weight.was_trainable = path, tensor.requires_grad
    return torch_distributed.distributed(weight, placement)


def _pieces(placement: Placement, spec: WeightSpec) -> panels.Pieces:
    """How the statistics of groups are those of the whole matrix."""

    def of_all(largest: Tensor) -> Tensor:
        return torch_distributed.reduce_over(largest, placement, "max", placement.cuts)

    def of_rows(largest: Tensor) -> Tensor:
        return torch_distributed.reduce_over(largest, placement, "max", [k])

    k = 0 if spec.transposed else 1
    return panels.Pieces(of_all if placement.cuts else None, of_rows if k in placement.cuts else None)


def parts_of(weight: QuantizedWeight, placement: Placement) -> list[Any]:
    """The parts of a distributed weight as DTensors: cut as the weight is, or copies of scales that belong to all."""
    return [
        torch_distributed.distributed(part, place)
        for part, place in zip(weight.parts, part_placements(weight, placement), strict=True)
    ]


def part_placements(weight: QuantizedWeight, placement: Placement) -> list[Placement]:
    """How each part of a distributed weight lies."""
    format, found = weight.spec.format, []
    extents: list[tuple[int | None, int | None]] = [(1, 1), format.group]
    if format.coarse is not None:
        extents.append(format.coarse)
    for part, shape, extent in zip(weight.parts, _whole_shapes(weight, placement), extents, strict=True):
        placements = list(placement.placements)
        for dim, axis in placement.cuts.items():
            place = _axis_of_part(weight, dim)
            reaches = part.dim() == 2 and extent[place] is None
            placements[axis] = torch_distributed.replicated() if reaches else torch_distributed.shard_of(place)
        stride = torch.empty(shape, device="meta").stride()
        found.append(Placement(placement.mesh, tuple(placements), shape, stride))
    return found


def _axis_of_part(weight: QuantizedWeight, dim: int) -> int:
    """The dimension of the parts, which lie (N, K), for one of the weight."""
    return 1 - dim if weight.spec.transposed and len(weight.shape) == 2 else dim


def _whole_shapes(weight: QuantizedWeight, placement: Placement) -> list[tuple[int, ...]]:
    *experts, first, second = placement.shape
    n, k = (second, first) if weight.spec.transposed else (first, second)
    if experts:
        return [(experts[0], *part.shape[1:]) for part in weight.parts]
    return [part.shape for part in part_specs(weight.spec.format, n, k)]
