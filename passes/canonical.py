"""The one form of a linear layer inside the passes: matrices only, the weight as it comes into the graph.

    %y : "f32[s0, N]" = canonical.linear(%x : "f32[s0, K]", %weight, %bias, transposed=False, start=0, stop=N)

It is an executable function, so that a graph can be checked after any pass; no graph leaves the passes with one.
"""

from torch import Tensor
from torch.nn import functional


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False, start: int = 0, stop: int | None = None
) -> Tensor:
    """`x @ W.T + bias` of rows `start` to `stop` of W.

    Args:
        x: (M, K).
        weight: W, (N, K); (K, N) if `transposed`.
        bias: (stop - start,), or None.
        transposed: how the weight is stored.
        start: the first row of W.
        stop: the row after the last one; N by default.

    Returns:
        (M, stop - start) in the dtype of `x`.
    """
    matrix = weight.t() if transposed else weight
    return functional.linear(x, matrix[start:stop].to(x.dtype), bias)
