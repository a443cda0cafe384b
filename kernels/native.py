"""The native CPU kernels: loading them, and the operators on CPU tensors.

Each function here does what its namesake in `reference` does, by the C++ kernels where they are there and take the
arguments, else by the reference. Calls go through ctypes, which lets other Python threads run meanwhile.
"""

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.errors import OlqFxWarning
from olq_fx.formats import Format, get_format
from olq_fx.kernels import build, reference

NAME = "native_cpu"
"""What these kernels are called in the registry."""

SWITCH = "OLQ_FX_NATIVE"
"""Setting this environment variable to 0 keeps everything on the reference."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ELEMENTS = {"e4m3": 0, "e2m1": 1, "int8": 2}
_SCALES = {"float32": 0, "e8m0": 1, "e4m3": 2}
_RULES = {"amax": 0, "power_of_two": 1, "floor": 2, "even": 3, "ceil": 4, "mse": 5, "four_over_six": 6}

_SERIAL = 1 << 16
"""Elements, or multiplications by four, below which waking other threads costs more than they save."""


class _Format(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("element", "scale", "group_rows", "group_columns", "coarse", "coarse_columns")
    )


class _Parts(ctypes.Structure):
    _fields_ = (("codes", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("coarse", ctypes.c_void_p))


class _Activation(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("stride", ctypes.c_int64),
        ("parts", _Parts),
        ("format", _Format),
    )


class _Output(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("bias_dtype", ctypes.c_int32),
        ("residual", ctypes.c_void_p),
        ("residual_dtype", ctypes.c_int32),
        ("residual_stride", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The library with its functions declared, or why there is none."""

    library: ctypes.CDLL | None
    reason: str


class _Loader:
    """Builds and loads the library at first use, once for all threads, and warns once if that fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def get(self) -> _Loaded:
        return self._loaded or self._first()

    def _first(self) -> _Loaded:
        with self._lock:
            if self._loaded is not None:
                return self._loaded
            self._loaded = loaded = _load()
        if loaded.reason and not _switched_off():
            warnings.warn(
                f"products and conversion run on the slow reference: {loaded.reason}", OlqFxWarning, stacklevel=5
            )
        return loaded


_LOADER = _Loader()


def why_not() -> str:
    """Why there are no native kernels on this machine; "" if there are. Builds them if that was not tried yet."""
    return _LOADER.get().reason


def refusal(dtype: torch.dtype | None) -> str:
    """Why these kernels leave a product with results of `dtype` to the reference; "" if they do not (None: unknown)."""
    if dtype is None or dtype in _DTYPES:
        return ""
    return f"computes in float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"


def _library(kernel: str) -> ctypes.CDLL | None:
    """The native kernels, if they are there and no other kernel is asked for."""
    return _LOADER.get().library if kernel in ("", NAME) else None


def quantize(x: Tensor, format: str, rule: str) -> list[Tensor]:
    """`reference.quantize` of a CPU tensor (M, K)."""
    library = _LOADER.get().library
    if (
        library is None
        or x.dim() != 2
        or x.numel() == 0
        or not x.is_floating_point()
        or rule not in get_format(format).rules
    ):
        return reference.quantize(x, format, rule)
    return _encode(library, x, format, rule)


def dequantize(parts: Sequence[Tensor], format: str, k: int, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize` of CPU tensors: (R, K) of `dtype`."""
    library = _LOADER.get().library
    if library is None or not parts or parts[0].numel() == 0:
        return reference.dequantize(parts, format, k, dtype)
    rows = parts[0].shape[0]
    parts = _checked(parts, format, rows, k)
    decoded = torch.empty((rows, k), dtype=dtype if dtype in _DTYPES else torch.float32)
    library.olq_decode(
        *_pointers(parts), _pointer(format), rows, k, decoded.data_ptr(), _DTYPES[decoded.dtype], _threads(rows * k)
    )
    return decoded.to(dtype)


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
    """`reference.linear` of CPU tensors: (M, N) in the dtype of `x`."""
    library = _library(kernel)
    if library is None or x.dtype not in _DTYPES or x.dim() != 2 or x.numel() == 0:
        return reference.linear(x, weight, weight_format, activation_format, rule, bias, residual)
    m, k = x.shape
    if activation_format:
        parts = quantize(x, activation_format, rule)
        activation = _Activation(None, 0, 0, _Parts(*_pointers(parts)), _layout(activation_format))
    else:
        return _unquantized(library, [x], weight, weight_format, k, x.dtype, bias, residual)
    return _product(library, activation, m, k, x.dtype, weight, weight_format, bias, residual)


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
    """`reference.quantized_linear` of CPU tensors: (M, N) of `dtype`."""
    library = _library(kernel)
    if library is None or dtype not in _DTYPES or not x or x[0].numel() == 0:
        return reference.quantized_linear(x, activation_format, weight, weight_format, k, dtype, bias, residual)
    reference.refuse_gradient(x[0], bias, residual)
    if not activation_format:
        return _unquantized(library, x, weight, weight_format, k, dtype, bias, residual)
    m = x[0].shape[0]
    x = _checked(x, activation_format, m, k)
    activation = _Activation(None, 0, 0, _Parts(*_pointers(x)), _layout(activation_format))
    return _product(library, activation, m, k, dtype, weight, weight_format, bias, residual)


def grouped_linear(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    offsets: Tensor,
    matrices: int,
) -> Tensor | None:
    """The products of ragged segments of rows, each with the weight of its own expert, in one call.

    Args:
        x: the parts of activations (M, K), or a list of one tensor.
        activation_format: their format, "" for original precision.
        weight: the parts of (E, N, K), contiguous: each expert's of `matrices` matrices, one after the other.
        weight_format: its format.
        k: K.
        dtype: of the result.
        bias: (E, N) or None.
        offsets: (E + 1,) integers: rows from `offsets[e]` to `offsets[e + 1]` belong to expert e.
        matrices: how many a weight is made of.

    Returns:
        (M, N), 0 where a row belongs to nobody; None where there are no native kernels that take the call. Shapes are
        the caller's to check.
    """
    library, n = _LOADER.get().library, weight[0].shape[1]
    taken = library is not None and dtype in _DTYPES and all(part.is_contiguous() for part in weight)
    if library is None or not taken or 0 in (x[0].shape[0], n, k):
        return None
    m = x[0].shape[0]
    # Whatever they are, nothing is read or written beyond the rows.
    offsets = offsets.to(torch.int64).clamp(0, m)
    if activation_format:
        x = _checked(x, activation_format, m, k)
        given = _Activation(None, 0, 0, _Parts(*_pointers(x)), _layout(activation_format))
    else:
        x = [_readable(x[0], x[0].stride(1) == 1 or k == 1)]
        given = _Activation(x[0].data_ptr(), _DTYPES[x[0].dtype], x[0].stride(0), _Parts(), _Format())
    y = torch.zeros((m, n), dtype=dtype)
    output = _Output(y.data_ptr(), _DTYPES[dtype], n)
    if bias is not None:
        bias = _readable(bias, bias.is_contiguous())
        output.bias, output.bias_dtype = bias.data_ptr(), _DTYPES[bias.dtype]
    operands = ctypes.byref(given), ctypes.byref(_Parts(*_pointers(weight))), _pointer(weight_format)
    sizes = (offsets.data_ptr(), len(weight[0]), matrices, n // matrices, k, torch.get_num_threads())
    if library.olq_grouped_product(*operands, ctypes.byref(output), *sizes):
        raise MemoryError(f"no memory to decode activations of shape ({m}, {k})")
    return y


def _unquantized(
    library: ctypes.CDLL,
    activation: Sequence[Tensor],
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """The product with an activation in original precision, a list of one tensor."""
    m = reference.check_quantized_activation(activation, "", k)
    x = activation[0] if activation[0].dtype in _DTYPES else activation[0].to(torch.float32)
    x = x if x.stride(1) == 1 or k == 1 else x.contiguous()
    given = _Activation(x.data_ptr(), _DTYPES[x.dtype], x.stride(0), _Parts(), _Format())
    return _product(library, given, m, k, dtype, weight, weight_format, bias, residual)


def _encode(library: ctypes.CDLL, x: Tensor, format: str, rule: str) -> list[Tensor]:
    if x.dtype not in _DTYPES:
        x = x.to(torch.float32)
    rows, k = x.shape
    x = x if x.stride(1) == 1 or k == 1 else x.contiguous()
    parts = [torch.empty(shape, dtype=dtype) for shape, dtype in _expected(format, rows, k)]
    library.olq_encode(
        x.data_ptr(),
        _DTYPES[x.dtype],
        rows,
        k,
        x.stride(0),
        _pointer(format),
        _RULES[rule],
        *_pointers(parts),
        _threads(rows * k),
    )
    return parts


def _product(
    library: ctypes.CDLL,
    activation: _Activation,
    m: int,
    k: int,
    dtype: torch.dtype,
    weight: Sequence[Tensor],
    weight_format: str,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    n = weight[0].shape[0] if weight else 0
    weight = _checked(weight, weight_format, n, k)
    y = torch.empty((m, n), dtype=dtype)
    output = _Output(y.data_ptr(), _DTYPES[dtype], n)
    if bias is not None or residual is not None:
        reference.check_operands(m, k, weight, weight_format, bias, residual)
    if bias is not None:
        bias = _readable(bias, bias.is_contiguous())
        output.bias, output.bias_dtype = bias.data_ptr(), _DTYPES[bias.dtype]
    if residual is not None:
        residual = _readable(residual, residual.stride(1) == 1)
        output.residual, output.residual_dtype = residual.data_ptr(), _DTYPES[residual.dtype]
        output.residual_stride = residual.stride(0)
    threads = _threads(m * n * k // 4)
    parts = _Parts(*_pointers(weight))
    if library.olq_product(
        ctypes.byref(activation), ctypes.byref(parts), _pointer(weight_format), ctypes.byref(output), m, n, k, threads
    ):
        raise MemoryError(f"no memory to decode activations of shape ({m}, {k})")
    return y


def _readable(added: Tensor, laid_out: bool) -> Tensor:
    """A bias or residual in a dtype and layout that the kernels read."""
    if added.dtype not in _DTYPES:
        added = added.to(torch.float32)
    return added if laid_out else added.contiguous()


def _checked(parts: Sequence[Tensor], format: str, rows: int, k: int) -> Sequence[Tensor]:
    """The parts as contiguous tensors; an error if their shapes and dtypes are not those of the format."""
    expected = _expected(format, rows, k)
    if len(parts) == len(expected):
        pairs = zip(parts, expected, strict=True)
        if all(part.shape == shape and part.dtype == dtype and part.is_contiguous() for part, (shape, dtype) in pairs):
            return parts
    reference.check_parts(parts, format, k)
    return [part.contiguous() for part in parts]


def _pointers(parts: Sequence[Tensor]) -> tuple[int | None, int | None, int | None]:
    return parts[0].data_ptr(), parts[1].data_ptr(), parts[2].data_ptr() if len(parts) > 2 else None


def _threads(work: int) -> int:
    return 1 if work < _SERIAL else torch.get_num_threads()


@functools.lru_cache(maxsize=4096)
def _expected(format: str, rows: int, k: int) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
    return tuple((spec.shape, spec.dtype) for spec in numerics.part_specs(get_format(format), rows, k))


@functools.cache
def _layout(format: str) -> _Format:
    found: Format = get_format(format)
    coarse, columns = 0, 0
    if found.coarse is not None:
        rows, span = found.coarse
        coarse, columns = 3 if span else 2 if rows else 1, span or 0
    group_rows, group_columns = found.group
    return _Format(_ELEMENTS[found.element], _SCALES[found.scale], group_rows or 0, group_columns or 0, coarse, columns)


@functools.cache
def _pointer(format: str) -> "ctypes._Pointer[_Format]":
    return ctypes.pointer(_layout(format))


def _switched_off() -> bool:
    return os.environ.get(SWITCH, "").strip() == "0"


def _load() -> _Loaded:
    if _switched_off():
        return _Loaded(None, f"switched off by {SWITCH}=0")
    built = build.build()
    if built.path is None:
        return _Loaded(None, built.reason)
    try:
        return _Loaded(_declare(ctypes.CDLL(str(built.path))), "")
    except (OSError, AttributeError):
        # Damaged, or of a system library that is gone: once more from the sources.
        built = build.build(again=True)
    try:
        return _Loaded(_declare(ctypes.CDLL(str(built.path))), "") if built.path else _Loaded(None, built.reason)
    except (OSError, AttributeError) as error:
        return _Loaded(None, f"the native kernels cannot be loaded: {error}")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Say what the functions take; an integer for each pointer into a tensor."""
    library.olq_sizes.restype = ctypes.c_int64
    sizes = sum(ctypes.sizeof(each) << 16 * i for i, each in enumerate((_Format, _Activation, _Output)))
    if library.olq_sizes() != sizes:
        raise OSError("its structures are laid out in another way")
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    format = ctypes.POINTER(_Format)
    library.olq_encode.argtypes = (
        *(pointer, int32, int64, int64, int64, format, int32),
        *(pointer, pointer, pointer, int32),
    )
    library.olq_decode.argtypes = (pointer, pointer, pointer, format, int64, int64, pointer, int32, int32)
    library.olq_product.argtypes = (
        *(ctypes.POINTER(_Activation), ctypes.POINTER(_Parts), format, ctypes.POINTER(_Output)),
        *(int64, int64, int64, int32),
    )
    library.olq_grouped_product.argtypes = (
        *(ctypes.POINTER(_Activation), ctypes.POINTER(_Parts), format, ctypes.POINTER(_Output)),
        *(pointer, int64, int64, int64, int64, int32),
    )
    library.olq_grouped_product.argtypes = (
        *(ctypes.POINTER(_Activation), ctypes.POINTER(_Parts), format, ctypes.POINTER(_Output)),
        *(pointer, int64, int64, int64, int64, int32),
    )
    return library
