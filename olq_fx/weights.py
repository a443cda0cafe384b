"""Converted weights: `QuantizedWeight`, a tensor that stands where the original weight stood.

    QuantizedWeight(parts, spec, dtype, size, stride=None, pending=None)
        .codes, .scale, .coarse, .parts     plain tensors in (N, K)-major layout (`numerics.part_specs`)
        .spec                               WeightSpec: weight, activation ("" = none), the two rules, transposed, ...
        .dequantize(dtype=None)             a plain tensor of the weight's shape
        .pending, .path, .was_trainable, .stored_bytes, .reduction_size
    fill(weight, values)                    give a pending weight its data
    missing(weight)                         how many values have not arrived
    quantize_weight(values, spec)           convert a plain tensor: the parts, wrapped
    QuantizedWeight.__olq_fx_quantized__    true, for code that must not import this module

What works on one, in eager mode, under autocast, in inference mode, and traced by torch.compile or torch.export:

- linear, mm, addmm, bmm, mv, matmul (either side), linear einsums, multi_head_attention_forward: quantized products
  with the output dtype, the refusals and the gradients (of inputs and biases) that the unquantized ones have. A product
  along the other axis is refused outside a backward pass.
- t, transpose, detach, alias, view (broadcasting only), expand; rows by slice, chunk, split, select.
- clone, deepcopy, pickle, `.to`, `.half()`: codes and scales keep their dtype, only the nominal dtype changes.
- `+=` and `-=` of a tensor of its shape: the sum, converted into the same storage (how adapters are merged).
- `copy_` and `.data =` of original-precision values: converted into the same storage; of a pending weight also into any
  view of it, in any order: it converts with the last value.
- embedding, index_select, integer indexing: dequantized rows, only those asked for.
- statistics and comparisons (norm, sum, mean, max, ==, ...): of the dequantized values.

Experts in one tensor (E, N, K) or (E, K, N) are a `QuantizedStack`, a QuantizedWeight with these products:

- bmm, baddbmm, matmul, grouped_mm, einsums with all experts, `transformers::grouped_mm_fallback`.
- `weight[ids]` (nothing is gathered) and those; `weight[i]`, unbind, and what a matrix can.

Everything else raises UnsupportedError with the weight's name: arithmetic would leave the quantized product in silence.
"""

import torch
from torch import Tensor

from olq_fx import weights_experts, weights_functions, weights_inplace, weights_pieces  # noqa: F401 (handlers)
from olq_fx.weights_arrival import become, fill, missing, settle
from olq_fx.weights_aten import FLOATING
from olq_fx.weights_encoding import encode, without_values
from olq_fx.weights_stack import QuantizedStack
from olq_fx.weights_tensor import Pending, QuantizedWeight, WeightSpec

__all__ = [
    "FLOATING",
    "Pending",
    "QuantizedStack",
    "QuantizedWeight",
    "WeightSpec",
    "become",
    "fill",
    "missing",
    "pending_weight",
    "quantize_weight",
    "settle",
    "without_values",
]


def quantize_weight(values: Tensor, spec: WeightSpec, device: torch.device | None = None) -> QuantizedWeight:
    """Convert a matrix, or the matrices of experts.

    Args:
        values: (N, K), or (K, N) if `spec.transposed`; of E experts (E, N, K) or (E, K, N). Any floating dtype and
            strides.
        spec: how to store and use it.
        device: where the parts go; by default where `values` are.

    Returns:
        A weight of the shape, dtype and strides of `values`.
    """
    parts = encode(values.detach(), spec, values.device if device is None else device)
    return _kind(values.dim())(parts, spec, values.dtype, values.shape, values.stride())


def pending_weight(like: Tensor, spec: WeightSpec, pending: Pending) -> QuantizedWeight:
    """A weight of the shape, dtype and strides of `like` that has no data yet."""
    parts = without_values(spec, like.shape)
    return _kind(like.dim())(parts, spec, like.dtype, like.shape, like.stride(), pending)


def _kind(dimensions: int) -> type[QuantizedWeight]:
    return QuantizedStack if dimensions == 3 else QuantizedWeight
