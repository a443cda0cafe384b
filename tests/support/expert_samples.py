"""Weights and rows of experts for tests, with and without values."""

import itertools

import torch

from olq_fx import numerics
from olq_fx.formats import get_format
from olq_fx.kernels.experts import Segments, Stack


def quantized(x, format):
    """The parts of an activation; a list of one tensor where there is no format."""
    if not format:
        return [x]
    found = get_format(format)
    return list(numerics.quantize(x, found, found.activation_rule))


def stacked(parts):
    """Parts of several weights, one axis more in front; torch stacks no float8."""
    bytes = [
        torch.stack([part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in each])
        for each in zip(*parts, strict=True)
    ]
    return [each.view(part.dtype) for each, part in zip(bytes, parts[0], strict=True)]


def stack_of(weights, format, bias=None, shards=1, interleaved=False):
    """The stack of weights (E, N, K), each of whose shards has a scale of the whole tensor of its own."""
    found = get_format(format)
    return Stack(
        stacked([_expert(weight, found, shards, interleaved) for weight in weights]), format, bias, interleaved
    )


def _expert(weight, found, shards, interleaved):
    n = weight.shape[0]
    size = n // shards
    if interleaved:
        rows = [slice(shard, n, shards) for shard in range(shards)]
    else:
        rows = [slice(shard * size, (shard + 1) * size) for shard in range(shards)]
    each = [numerics.quantize(weight[where], found, found.weight_rule) for where in rows]
    if shards == 1:
        return each[0]
    return [_joined(parts, rows) for parts in zip(*each, strict=True)]


def _joined(parts, rows):
    """Parts of shards in their rows; scales of whole shards one after the other."""
    if parts[0].shape[0] == 1:
        return torch.cat(parts)
    whole = torch.empty((sum(part.shape[0] for part in parts), parts[0].shape[1]), dtype=torch.uint8)
    for where, part in zip(rows, parts, strict=True):
        whole[where] = part.view(torch.uint8)
    return whole.view(parts[0].dtype)


def segments_of(lengths, order=None, top_k=1, dtype=torch.int32):
    """The segments of these lengths."""
    return Segments(torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype), order, top_k)


def meta(shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_stack(experts, n, k, format, bias=False):
    specs = numerics.part_specs(get_format(format), n, k)
    return Stack(
        [meta((experts, *spec.shape), spec.dtype) for spec in specs], format, meta((experts, n)) if bias else None
    )


def meta_rows(format, rows, k):
    """An activation of (rows, k) without values."""
    if not format:
        return [meta((rows, k))]
    return [meta(spec.shape, spec.dtype) for spec in numerics.part_specs(get_format(format), rows, k)]
