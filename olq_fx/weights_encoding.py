"""Original-precision values into the parts of a converted weight: a matrix, or the matrices of experts one by one.

    without_values(spec, size) -> Parts              on meta
    encode(values, spec, device) -> Parts
    empty_parts_of(spec, size, device) -> Parts
    encode_into(parts, values, spec)                 into existing storage; the bytes equal those of `encode`
    check_values(values, label)                      refuses NaN, Inf and other dtypes, reading once and keeping nothing
    count_nonfinite(values) -> int

Values have the shape of the tensor: (N, K), (E, N, K), or with the last two exchanged if `spec.transposed`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from olq_fx import numerics, panels
from olq_fx.errors import ConversionError
from olq_fx.numerics import Parts
from olq_fx.weights_tensor import WeightSpec


def without_values(spec: WeightSpec, size: Sequence[int]) -> Parts:
    """The parts of a weight of this size, on meta."""
    return empty_parts_of(spec, size, torch.device("meta"))


def empty_parts_of(spec: WeightSpec, size: Sequence[int], device: torch.device) -> Parts:
    """The parts of a weight of this size, without values."""
    *leading, first, second = size
    n, k = (second, first) if spec.transposed else (first, second)
    if not leading:
        return panels.empty_parts(spec.format, n, k, device)
    found = numerics.part_specs(spec.format, n // spec.shards, k)
    shapes = [(*leading, spec.shards * part.shape[0], part.shape[1]) for part in found]
    return tuple(torch.empty(shape, dtype=part.dtype, device=device) for shape, part in zip(shapes, found, strict=True))


def encode(values: Tensor, spec: WeightSpec, device: torch.device) -> Parts:
    """The parts of `values`, of any floating dtype and strides, on `device`."""
    if values.dim() == 2:
        return panels.convert(values.t() if spec.transposed else values, spec.format, spec.weight_rule, device)
    parts = empty_parts_of(spec, values.shape, device)
    encode_into(parts, values, spec)
    return parts


def encode_into(parts: Parts, values: Tensor, spec: WeightSpec) -> None:
    """Convert `values` into the storage of `parts`."""
    if values.dim() == 2:
        panels.convert_into(parts, values.t() if spec.transposed else values, spec.format, spec.weight_rule)
        return
    for target, matrix in _matrices(parts, values, spec):
        panels.convert_into(target, matrix, spec.format, spec.weight_rule)


def _matrices(parts: Parts, values: Tensor, spec: WeightSpec) -> Iterator[tuple[Parts, Tensor]]:
    """Every matrix (n, K) that has scales of its own, with where it goes: of each expert its shards in their order."""
    for index in range(values.shape[0]):
        matrix = values[index].t() if spec.transposed else values[index]
        n = matrix.shape[0] // spec.shards
        for shard in range(spec.shards):
            rows = matrix[shard :: spec.shards] if spec.interleaved else matrix[shard * n : (shard + 1) * n]
            yield tuple(of_shard(part[index], shard, spec.shards) for part in parts), rows


def of_shard(part: Tensor, shard: int, shards: int) -> Tensor:
    """The rows of one shard, of a part of one matrix."""
    rows = part.shape[0] // shards
    return part[shard * rows : (shard + 1) * rows]


def count_nonfinite(values: Tensor) -> int:
    """How many values are NaN or Inf."""
    if values.dim() < 3:
        return panels.count_nonfinite(values if values.dim() == 2 else values.reshape(1, -1))
    return sum(count_nonfinite(matrix) for matrix in values)


def check_values(values: Tensor, label: str) -> None:
    """Refuse values that cannot be converted.

    Raises:
        ConversionError: a dtype that is not a floating one, or NaN or Inf among the values.
    """
    if not values.is_floating_point():
        raise ConversionError(f"{label} cannot be given values of {values.dtype}: a floating dtype is needed")
    if bad := count_nonfinite(values.detach()):
        raise ConversionError(f"{label} cannot be given these values: {bad} of {values.numel()} are NaN or Inf")
