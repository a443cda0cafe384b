"""Which calls the Triton kernels take: one function a family, without tensors and without triton.

API:
    Support(reason)                     true where a call is taken; else it says why not
    quantize, dequantize, product, chain, producer, grouped     (...) -> Support
    between_refusal(format) -> str      why nothing between two products of experts is done by the first of them
    chain_refusal(format, ...) -> str   why no tile of a product can be quantized to a format
    why_not(capability=None) -> str     why none of these kernels runs on a GPU, "" if they do
    capability_of(device) -> int        90 for sm_90

The plan asks these functions through `registry`, with what is known before there is a tensor; the operators ask them
again with each call (`triton_ops`). An argument that is None is not known yet, and no reason.
"""

import dataclasses
import functools
import importlib.util

import torch

from olq_fx.formats import Format, get_format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What products read, where activations are not quantized, and write."""

FLOAT8 = 89
"""The first compute capability that casts to and multiplies float8."""

_LEAST = 80
_DEVICE = "cuda"


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """Whether a kernel takes a call: true if it does.

    Attributes:
        reason: why it does not; "" if it does.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        """Whether the kernel takes the call."""
        return not self.reason


@functools.cache
def why_not(capability: int | None = None) -> str:
    """Why these kernels do not run on a GPU; "" if they do.

    Args:
        capability: of the GPU, 90 for sm_90; None is that of the current device, or one that does where there is none
            (a plan may be made elsewhere).
    """
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    if torch.version.hip is not None:
        return "needs a GPU of NVIDIA's"
    if capability is None:
        capability = capability_of(None) if torch.cuda.is_available() else _LEAST
    return "" if capability >= _LEAST else f"needs compute capability 8.0, the GPU has {capability / 10}"


@functools.cache
def capability_of(device: torch.device | None) -> int:
    """The compute capability of a GPU: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def quantize(
    format: str,
    rule: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    dimensions: int = 2,
    device_type: str = _DEVICE,
    capability: int | None = None,
) -> Support:
    """Quantization of a tensor of `dtype` with so many dimensions to `format` by a rule of its own."""
    found = get_format(format)
    return _first(
        _device(device_type, capability),
        "" if dimensions == 2 else f"quantizes matrices, not {dimensions} dimensions",
        "" if dtype is None or dtype.is_floating_point else f"quantizes floating point, not {_name(dtype)}",
        "" if rule is None or rule in found.rules else f"{found.name} has no scale rule {rule!r}",
    )


def dequantize(
    format: str, *, dtype: torch.dtype | None = None, device_type: str = _DEVICE, capability: int | None = None
) -> Support:
    """The values of a tensor in `format`, in `dtype`."""
    get_format(format)
    return _first(
        _device(device_type, capability),
        "" if dtype is None or dtype.is_floating_point else f"gives floating point, not {_name(dtype)}",
    )


def product(
    weight_format: str,
    activation_format: str,
    *,
    dtype: torch.dtype | None = None,
    activation_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    device_type: str = _DEVICE,
    capability: int | None = None,
) -> Support:
    """The product of activations and a weight in these formats; every shape is taken.

    Args:
        weight_format: of the weight.
        activation_format: of the activations; "" for original precision.
        dtype: of the result.
        activation_dtype: of activations in original precision.
        fast_accum: whether sums may stay in narrow accumulators.
        device_type: of the tensors.
        capability: of the GPU.
    """
    formats = [get_format(name) for name in (weight_format, activation_format) if name]
    return _first(
        _narrow_sums(formats, both=bool(activation_format)) if fast_accum else "",
        _device(device_type, capability),
        _computes(dtype),
        "" if activation_format else _computes(activation_dtype),
    )


def chain(
    weight_format: str,
    activation_format: str,
    output_format: str,
    *,
    gated: bool = False,
    residual: bool = False,
    n: int | None = None,
    dtype: torch.dtype | None = None,
    activation_dtype: torch.dtype | None = None,
    device_type: str = _DEVICE,
    capability: int | None = None,
) -> Support:
    """A product whose result goes through a pointwise chain and is quantized to `output_format`, in one kernel.

    Args:
        weight_format: of the weight (N, K).
        activation_format: of the activations; "" for original precision.
        output_format: of the result.
        gated: whether the chain multiplies two halves of the product.
        residual: whether a residual is added before the activation.
        n: N.
        dtype: that the product and each step are rounded to.
        activation_dtype: of activations in original precision.
        device_type: of the tensors.
        capability: of the GPU.
    """
    multiplied = product(
        weight_format, activation_format, dtype=dtype, activation_dtype=activation_dtype, device_type=device_type,
        capability=capability,
    )  # fmt: skip
    return _first(
        multiplied.reason,
        quantize(output_format, device_type=device_type, capability=capability).reason,
        chain_refusal(get_format(output_format), gated, residual, n),
    )


def chain_refusal(format: Format, gated: bool = False, residual: bool = False, n: int | None = None) -> str:
    """Why the results of a chain cannot be quantized to `format` in the kernel that computes them; "" if they can."""
    rows, columns = format.group
    if rows != 1 or columns is None or format.coarse is not None:
        return f"{format.name} has a statistic of more than a piece of a row, which no tile of a product holds"
    if gated and residual:
        return "a residual has no place before the activation of a gated product"
    if gated and n is not None and n % 2:
        return f"gate and up are halves of a product, which one of {n} columns does not have"
    return ""


def between_refusal(format: str) -> str:
    """Why the first product of experts cannot quantize what the second one reads to `format`; "" if it can.

    An empty format, original precision, is what it can write too.
    """
    return chain_refusal(get_format(format)) if format else ""


def producer(
    output_format: str,
    *,
    dtype: torch.dtype | None = None,
    device_type: str = _DEVICE,
    capability: int | None = None,
) -> Support:
    """A norm or an activation whose values, of `dtype`, are quantized to `output_format`; "" for as they are."""
    found = get_format(output_format) if output_format else None
    return _first(
        "" if found is None or found.activation else f"{found.name} is no activation format",
        _device(device_type, capability),
        _computes(dtype),
    )


def grouped(
    weight_format: str,
    activation_format: str,
    *,
    dtype: torch.dtype | None = None,
    activation_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    device_type: str = _DEVICE,
    capability: int | None = None,
) -> Support:
    """The product of ragged segments of rows with a weight of their own; the arguments are those of `product`."""
    return product(
        weight_format, activation_format, dtype=dtype, activation_dtype=activation_dtype, fast_accum=fast_accum,
        device_type=device_type, capability=capability,
    )  # fmt: skip


def _first(*reasons: str) -> Support:
    return Support(next(filter(None, reasons), ""))


def _device(device_type: str, capability: int | None) -> str:
    if device_type != _DEVICE:
        return f"runs on {_DEVICE}, not on {device_type}"
    return why_not(capability)


def _computes(dtype: torch.dtype | None) -> str:
    return "" if dtype is None or dtype in DTYPES else f"computes in float32, bfloat16 and float16, not {_name(dtype)}"


def _narrow_sums(formats: list[Format], both: bool) -> str:
    rowwise = all(found.element == "e4m3" and found.scale == "float32" and found.group[1] is None for found in formats)
    return "" if both and rowwise else "multiplies float8 by float8 with scales by tensor or by row only"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
