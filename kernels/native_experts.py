"""Products of experts on a CPU: `experts.grouped_linear` by one call of the native kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from olq_fx.kernels import experts, native
from olq_fx.kernels.experts import Segments, Stack


def grouped_linear(
    x: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    k: int,
    dtype: torch.dtype,
    segments: Segments,
    *,
    gather: bool = False,
    scatter: bool = False,
) -> Tensor:
    """`experts.grouped_linear` of CPU tensors, without weights of rows.

    Raises:
        ConversionError: operands do not fit.
    """
    experts.check_grouped(x, activation_format, stack, k, segments, gather, scatter, None)
    order, rows = segments.order, x
    if gather and order is not None:
        rows = experts.rows_at(x, activation_format, order // segments.top_k if segments.top_k > 1 else order)
    given = (stack.parts, stack.format, k, dtype, stack.bias, segments.offsets, 1 if stack.whole else stack.shards)
    y = native.grouped_linear(rows, activation_format, *given)
    if y is None:
        args = (x, activation_format, stack, k, dtype, segments)
        return experts.grouped_linear(*args, gather=gather, scatter=scatter, product=native.quantized_linear)
    return torch.empty_like(y).index_copy_(0, order.to(torch.int64), y) if scatter and order is not None else y
