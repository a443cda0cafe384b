"""The operators on tensors of an NVIDIA GPU, by Triton kernels.

Each function here does what its namesake in `reference` does: by the kernels of `triton_quantize` and
`triton_product` where `support` says that they take the call, else by the reference. Triton is imported with the first
tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from olq_fx.kernels import reference, support
from olq_fx.kernels.support import FLOAT8, capability_of, why_not

__all__ = ["FAST_ACCUM", "NAME", "capability_of", "dequantize", "linear", "quantize", "quantized_linear", "why_not"]

NAME = "triton"
"""What these kernels are called in the registry."""

FAST_ACCUM = "triton_fast_accum"
"""The same, where sums of float8 products may stay in the narrow accumulators of sm_89 and sm_90."""


def quantize(x: Tensor, format: str, rule: str) -> list[Tensor]:
    """`reference.quantize` of a GPU's tensor (M, K)."""
    capability = capability_of(x.device)
    if not support.quantize(format, rule, dtype=x.dtype, dimensions=x.dim(), capability=capability):
        return reference.quantize(x, format, rule)
    from olq_fx.kernels import triton_quantize

    with torch.cuda.device(x.device):
        return triton_quantize.quantize(x, format, rule, capability >= FLOAT8)


def dequantize(parts: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize` of a GPU's tensors: (R, K) of `dtype`."""
    if not parts or not support.dequantize(format, dtype=dtype, capability=capability_of(parts[0].device)):
        return reference.dequantize(parts, format, k, dtype)
    reference.check_parts(parts, format, k)
    from olq_fx.kernels import triton_quantize

    native = capability_of(parts[0].device) >= FLOAT8
    with torch.cuda.device(parts[0].device):
        return triton_quantize.dequantize(parts, format, k, dtype, native)


def linear(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_format: str,
    activation_format: str,
    rule: str,
    bias: Tensor | None,
    residual: Tensor | None,
    kernel: str = "",
) -> Tensor:
    """`reference.linear` of a GPU's tensors: (M, N) in the dtype of `x`."""
    if not _takes(x, weight_format, activation_format, x.dtype, kernel):
        return reference.linear(x, weight, weight_format, activation_format, rule, bias, residual)
    m, k = reference.check_activation(x)
    reference.check_operands(m, k, weight, weight_format, bias, residual)
    parts = quantize(x, activation_format, rule) if activation_format else [x]
    return _product(parts, activation_format, weight, weight_format, k, x.dtype, bias, residual, kernel)


def quantized_linear(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    kernel: str = "",
) -> Tensor:
    """`reference.quantized_linear` of a GPU's tensors: (M, N) of `dtype`."""
    if not x or not _takes(x[0], weight_format, activation_format, dtype, kernel):
        return reference.quantized_linear(x, activation_format, weight, weight_format, k, dtype, bias, residual)
    reference.refuse_gradient(*x, bias, residual)
    m = reference.check_quantized_activation(x, activation_format, k)
    reference.check_operands(m, k, weight, weight_format, bias, residual)
    return _product(x, activation_format, weight, weight_format, k, dtype, bias, residual, kernel)


def _takes(x: Tensor, weight_format: str, activation_format: str, dtype: torch.dtype, kernel: str) -> bool:
    """Whether these kernels run a product; else the reference does."""
    return kernel in ("", NAME, FAST_ACCUM) and bool(
        support.product(
            weight_format,
            activation_format,
            dtype=dtype,
            activation_dtype=None if activation_format else x.dtype,
            capability=capability_of(x.device),
        )
    )


def _product(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    kernel: str,
) -> Tensor:
    from olq_fx.kernels import triton_product

    x, weight = _by_rows(x, activation_format), _by_rows(weight, weight_format)
    capability = capability_of(x[0].device)
    with torch.cuda.device(x[0].device):
        return triton_product.quantized_linear(
            *(x, activation_format, weight, weight_format, k, dtype, bias, residual, capability, kernel == FAST_ACCUM)
        )


def _by_rows(parts: Sequence[Tensor], format: str) -> Sequence[Tensor]:
    """Parts whose codes and coarse scales lie row by row; the kernels read group scales by their strides."""
    if not format:
        return parts
    codes, scale, *rest = parts
    return [codes.contiguous(), scale, *(part.contiguous() for part in rest)]
