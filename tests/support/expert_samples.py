"""Weights and rows of experts for tests, with and without values."""

import itertools

import torch

from olq_fx import numerics
from olq_fx.formats import get_format
from olq_fx.kernels.experts import Segments, Stack, part_specs_of_stack

INSTRUCTIONS = {
    ("fp8", 89): r"^mma\.sync.*e4m3",
    ("fp8", 90): r"^wgmma.*e4m3\.e4m3",
    ("fp8", 100): r"^tcgen05.*f8f6f4",
    ("fp8", 120): r"^mma\.sync.*e4m3",
    ("int8", 80): r"^mma\.sync.*s8",
    ("int8", 89): r"^mma\.sync.*s8",
    ("int8", 90): r"^wgmma.*s8",
    ("int8", 100): r"^mma\.sync.*s8",
    ("int8", 120): r"^mma\.sync.*s8",
    ("scaled", 100): r"^tcgen05.*block_scale",
    ("scaled", 120): r"^mma\.sync.*block_scale",
    ("fp16", 80): r"^mma\.sync.*f16",
    ("fp16", 89): r"^mma\.sync.*f16",
    ("fp16", 90): r"^wgmma.*f16",
    ("fp16", 100): r"^tcgen05.*f16",
    ("fp16", 120): r"^mma\.sync.*f16",
    ("bf16", 80): r"^mma\.sync.*bf16",
    ("bf16", 89): r"^mma\.sync.*bf16",
    ("bf16", 90): r"^wgmma.*bf16",
    ("bf16", 100): r"^tcgen05.*f16",
    ("bf16", 120): r"^mma\.sync.*bf16",
}
"""By what enters it and the compute capability: the matrix instruction that is meant."""


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


def stack_of(weights, format, bias=None, shards=1):
    """The stack of weights (E, N, K), each of whose shards is quantized by itself."""
    found = get_format(format)
    return Stack(stacked([_expert(weight, found, shards) for weight in weights]), format, bias, shards)


def _expert(weight, found, shards):
    each = [numerics.quantize(shard, found, found.weight_rule) for shard in weight.chunk(shards)]
    return [_joined(parts) for parts in zip(*each, strict=True)]


def _joined(parts):
    """Parts of shards one after the other; torch joins no float8."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def segments_of(lengths, order=None, top_k=1, dtype=torch.int32):
    """The segments of these lengths."""
    return Segments(torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype), order, top_k)


def meta(shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_stack(experts, n, k, format, bias=False, shards=1):
    specs = part_specs_of_stack(get_format(format), experts, n // shards, k, shards)
    return Stack([meta(spec.shape, spec.dtype) for spec in specs], format, meta((experts, n)) if bias else None, shards)


def meta_rows(format, rows, k):
    """An activation of (rows, k) without values."""
    if not format:
        return [meta((rows, k))]
    return [meta(spec.shape, spec.dtype) for spec in numerics.part_specs(get_format(format), rows, k)]
