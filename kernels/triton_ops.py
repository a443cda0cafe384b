"""The operators on tensors of an NVIDIA GPU, by Triton kernels.

Each function here does what its namesake in `reference` does: by the kernels of `triton_quantize` and
`triton_product` where Triton is installed, the GPU is of compute capability 8.0 or later and the dtype is one that
they have, else by the reference. Triton is imported with the first tensor.
"""

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from olq_fx.formats import get_format
from olq_fx.kernels import reference

NAME = "triton"
"""What these kernels are called in the registry."""

FAST_ACCUM = "triton_fast_accum"
"""The same, where sums of float8 products may stay in the narrow accumulators of sm_89 and sm_90."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST = 80
_FLOAT8 = 89
"""The first compute capability that casts to and multiplies float8."""


@functools.cache
def why_not(capability: int | None = None) -> str:
    """Why these kernels do not run on a GPU; "" if they do.

    Args:
        capability: of the GPU, 90 for sm_90; None is that of the current device, or one that does where there is none
            (a plan may be made elsewhere).
    """
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    if capability is None:
        capability = capability_of(None) if torch.cuda.is_available() else _LEAST
    return "" if capability >= _LEAST else f"needs compute capability 8.0, the GPU has {capability / 10}"


@functools.cache
def capability_of(device: torch.device | None) -> int:
    """The compute capability of a GPU: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def quantize(x: Tensor, format: str, rule: str) -> list[Tensor]:
    """`reference.quantize` of a GPU's tensor (M, K)."""
    capability = capability_of(x.device)
    fits = x.dim() == 2 and x.is_floating_point() and rule in get_format(format).rules
    if not fits or why_not(capability):
        return reference.quantize(x, format, rule)
    from olq_fx.kernels import triton_quantize

    with torch.cuda.device(x.device):
        return triton_quantize.quantize(x, format, rule, capability >= _FLOAT8)


def dequantize(parts: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize` of a GPU's tensors: (R, K) of `dtype`."""
    if not parts or why_not(capability := capability_of(parts[0].device)):
        return reference.dequantize(parts, format, k, dtype)
    reference.check_parts(parts, format, k)
    from olq_fx.kernels import triton_quantize

    with torch.cuda.device(parts[0].device):
        return triton_quantize.dequantize(parts, format, k, dtype, capability >= _FLOAT8)


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
    if _leaves(x, x.dtype, kernel):
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
    if not x or _leaves(x[0], dtype, kernel) or (not activation_format and x[0].dtype not in _DTYPES):
        return reference.quantized_linear(x, activation_format, weight, weight_format, k, dtype, bias, residual)
    reference.refuse_gradient(*x, bias, residual)
    m = reference.check_quantized_activation(x, activation_format, k)
    reference.check_operands(m, k, weight, weight_format, bias, residual)
    return _product(x, activation_format, weight, weight_format, k, dtype, bias, residual, kernel)


def _leaves(x: Tensor, dtype: torch.dtype, kernel: str) -> bool:
    """Whether a product is left to the reference."""
    return kernel not in ("", NAME, FAST_ACCUM) or dtype not in _DTYPES or bool(why_not(capability_of(x.device)))


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
