"""Operands of products: every pair of formats, quantized tensors, tensors without values."""

import torch

from olq_fx import numerics
from olq_fx.formats import FORMATS, get_format

WEIGHTS = [name for name, found in FORMATS.items() if found.weight]
# Of ordinary size: scales whose product float32 does not have are another matter, see triton_matmul.
KINDS = ("normal", "zero", "outlier", "constant", "power_of_two")
ACTIVATIONS = [*(name for name, found in FORMATS.items() if found.activation), ""]


def quantized(x, format, weight=False):
    if not format:
        return [x]
    found = get_format(format)
    return list(numerics.quantize(x, found, found.weight_rule if weight else found.activation_rule))


def values(parts, format, k):
    return numerics.dequantize(tuple(parts), get_format(format), k) if format else parts[0].float()


def meta(format, rows, k, dtype=torch.bfloat16):
    if not format:
        return [torch.empty(rows, k, dtype=dtype, device="meta")]
    return [
        torch.empty(part.shape, dtype=part.dtype, device="meta")
        for part in numerics.part_specs(get_format(format), rows, k)
    ]
