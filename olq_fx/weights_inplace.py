"""Adding to a converted weight in place: what merging an adapter does, `layer.weight.data += delta`, and undoing it.

The sum of the dequantized values, in float32, and the other tensor is converted into the same storage. The result is a
quantized weight again, with the error of its format; what is added must have the shape of the weight. Other arithmetic
in place stays refused.
"""

from typing import Any

import torch
from torch import Tensor

from olq_fx.weights_tensor import QuantizedWeight, overrides


@overrides(Tensor.add_, Tensor.sub_)
def _add_(func: Any, weight: Any, other: Any, *, alpha: Any = 1) -> Any:
    """`weight += alpha * other` or `weight -= alpha * other`."""
    if not _takes(weight, other):
        return func(weight, other, alpha=alpha)
    with torch.no_grad():
        _add(func, weight.ready(), other.detach(), alpha)
    return weight


def _takes(weight: Any, other: Any) -> bool:
    """Whether a tensor can be added to a weight in place. What an optimizer trains is no place for its steps."""
    return (
        isinstance(weight, QuantizedWeight)
        and not weight.requires_grad
        and isinstance(other, Tensor)
        and other.shape == weight.shape
        and other.is_floating_point()
        and weight.dim() in (2, 3)
    )


def _add(func: Any, weight: Any, other: Tensor, alpha: Any) -> None:
    """Matrix by matrix, so that no more than one is in original precision."""
    if weight.dim() == 3:
        for index in range(weight.shape[0]):
            _add(func, weight.select(0, index), other[index], alpha)
        return
    values = other.dequantize() if isinstance(other, QuantizedWeight) else other
    weight.copy_(func(weight.dequantize(torch.float32), values.to(weight.device, torch.float32), alpha=alpha))
