"""Products with the converted weights of experts, below autograd, on rows.

All come to one of two operators: rows in the order of their experts (`grouped_linear`), or rows that each say whose
they are (`gathered_linear`), so that no weight is ever gathered. As for matrices, the quantization of the input is
written out where a product is recorded (`weights_recording`).
"""

import dataclasses
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from olq_fx import torch_private
from olq_fx.errors import UnsupportedError
from olq_fx.formats import get_format
from olq_fx.weights_recording import quantized_once
from olq_fx.weights_stack import QuantizedStack, in_tensor_order


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Whose the rows of a product are.

    Attributes:
        ends: (E,) integers, the end of each expert's rows, which lie in their order; or
        ids: (M,) integers, the expert of each row.
        all_mine: whether every row belongs to an expert.
    """

    ends: Tensor | None = None
    ids: Tensor | None = None
    all_mine: bool = False

    def of(self, count: int, experts: int) -> Tensor:
        """(M,): the expert of each row, `experts` where it is nobody's."""
        if self.ids is not None:
            mine = (self.ids >= 0) & (self.ids < experts)
            return torch.where(mine, self.ids.to(torch.int64), experts)
        assert self.ends is not None
        rows = torch.arange(count, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, rows, right=True)


def one_each(x: Tensor, weight: QuantizedStack, bias: Tensor | None = None) -> Tensor:
    """`x @ weight`, (B, M, C) times (B, C, D), as `torch.bmm` has it.

    Args:
        x: rows for each of the weights.
        weight: as many as `x` has.
        bias: (D,) or None.

    Raises:
        RuntimeError: shapes or dtypes differ, as for plain tensors.
        UnsupportedError: the product runs along N, and this is no backward pass.
    """
    batch, m = x.shape[0], x.shape[1]
    if x.dim() != 3 or weight.dim() != 3 or batch != weight.shape[0]:
        raise RuntimeError(f"batch sizes or dimensions of {tuple(x.shape)} and {tuple(weight.shape)} differ")
    if weight.ids is None:
        ends = torch.arange(1, weight.experts + 1, dtype=torch.int32, device=x.device) * m
        rows = Rows(ends=ends, all_mine=True)
    else:
        rows = Rows(ids=weight.ids.reshape(-1)[:, None].expand(-1, m).reshape(-1))
    y = product(x.reshape(batch * m, x.shape[2]), weight, rows, bias)
    return y.reshape(batch, m, y.shape[1])


def all_of_one(weight: QuantizedStack, m: int) -> Rows:
    """`m` rows for the matrix of one expert."""
    if weight.ids is None:
        return Rows(ends=torch.full((1,), m, dtype=torch.int32, device=weight.codes.device), all_mine=True)
    return Rows(ids=weight.ids.reshape(1).expand(m))


def product(x: Tensor, weight: QuantizedStack, rows: Rows, bias: Tensor | None = None) -> Tensor:
    """Rows (M, C), each times the matrix (C, D) of its expert; what is nobody's becomes 0.

    Raises:
        RuntimeError: shapes or dtypes differ, as for plain tensors.
        UnsupportedError: the product runs along N, and this is no backward pass: the groups of scales run along K.
    """
    c, d = weight.shape[-2:]
    if x.shape[1] != c:
        raise RuntimeError(f"rows of {x.shape[1]} cannot be multiplied with {c} x {d} ({weight.label})")
    if x.dtype != weight.dtype:
        raise RuntimeError(f"rows are {x.dtype}, but {weight.label} is {weight.dtype}")
    if weight.spec.transposed:
        return rows_along_k(x, weight, rows, bias)
    if bias is None and torch_private.in_backward():
        return _along_n(x, weight, rows)
    raise UnsupportedError(
        f"{weight.label} was quantized along its last axis, but this product runs along the other one; "
        "leave the experts in original precision (ignore) or multiply by weight.dequantize()"
    )


def rows_along_k(x: Tensor, weight: QuantizedStack, rows: Rows, bias: Tensor | None = None) -> Tensor:
    """(M, K) to (M, N), whatever the orientation of the tensor; `bias` is (N,) or None."""
    y = in_tensor_order(_along_k(x, weight, rows), weight.spec, 1)
    return y if bias is None else y + bias


def _along_k(x: Tensor, weight: QuantizedStack, rows: Rows) -> Tensor:
    spec, parts, ops = weight.spec, weight.parts, torch.ops.olq_fx
    recording = torch_private.current_recording() if spec.activation else None
    where = rows.ids if rows.ends is None else rows.ends
    if recording is None:
        operator = ops.gathered_linear.default if rows.ends is None else ops.grouped_linear.default
        y: Tensor = operator(x, where, parts, spec.weight, spec.activation, spec.activation_rule, None, spec.shards)
        return y
    operator = ops.quantized_gathered_linear.default if rows.ends is None else ops.quantized_grouped_linear.default
    found = get_format(spec.activation)
    if (None, None) in (found.group, found.coarse) and not rows.all_mine:
        # What belongs to nobody may be anything, and would count for a statistic of the whole tensor.
        x = torch.where((rows.of(x.shape[0], weight.experts) < weight.experts)[:, None], x, 0)
    quantized = quantized_once(x, spec.activation, spec.activation_rule, recording)
    recorded: Tensor = operator(
        quantized, spec.activation, where, parts, spec.weight, x.shape[1], x.dtype, None, spec.shards
    )
    return recorded


def _along_n(gradient: Tensor, weight: QuantizedStack, rows: Rows) -> Tensor:
    """(M, N) to (M, K): the gradient of the dequantized product."""
    spec = weight.spec
    if spec.interleaved:
        gradient = rearrange(gradient, "m (n shard) -> m (shard n)", shard=spec.shards)
    operator: Any = torch.ops.olq_fx.gathered_linear_backward.default
    ids = rows.of(gradient.shape[0], weight.experts)
    found: Tensor = operator(
        gradient, ids, weight.parts, spec.weight, spec.shards, weight.reduction_size, gradient.dtype
    )
    return found
