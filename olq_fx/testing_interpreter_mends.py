"""What is mended in Triton's interpreter: see `olq_fx.testing_interpreter`. For a process that does nothing else.

The only module that knows private parts of the interpreter; what it replaces has the same names in triton 3.6 to 3.9.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_CARRIER = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}
_NO_ARITHMETIC = (
    "arithmetic on bfloat16 is wrong in Triton's interpreter: cast to float32 after the load, and back for the store"
)


def install() -> None:
    """Replace what is wrong, add what is not checked."""
    np.seterr(all="ignore")  # NaN and Inf are inputs like others, and no hardware warns of them
    interpreter._convert_float = convert_float
    builder = interpreter.InterpreterBuilder
    builder.create_dot, builder.create_dot_scaled = create_dot, create_dot_scaled
    builder.create_fma = create_fma
    _formats_of_dot_scaled()
    for name in ("binary_op", "unary_op", "create_fabs"):
        setattr(builder, name, _without_bfloat16(getattr(builder, name)))
    reduce_input = interpreter.ReduceScanOpInterface.apply
    interpreter.ReduceScanOpInterface.apply = lambda self, value: reduce_input(self, _checked_input(value))
    _index_by_size_one()
    _Bounds().install()


def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any = None) -> Any:
    """A cast as the hardware does it: to nearest even, saturating for float8; arrays of the bits' integers."""
    value = torch.from_numpy(np.ascontiguousarray(data)).view(TORCH_DTYPES[source])
    # Through float32, which has all values of the narrower types; from float64 one rounding only.
    value = value if value.dtype == torch.float64 else value.to(torch.float32)
    wanted = TORCH_DTYPES[target]
    if target in (tl.float8e4nv, tl.float8e5):
        limit = torch.finfo(wanted).max
        value = value.clamp(-limit, limit)
    value = value.to(wanted)
    return value.view(_CARRIER[value.element_size()]).numpy().reshape(np.shape(data))


def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once. (The interpreter rounds the product too.)"""
    if z.dtype.scalar != tl.float32:
        raise TypeError("products and sums are contracted in float32 only")
    product = x.data.astype(np.float64) * y.data.astype(np.float64)  # exact: 48 bits
    addend = z.data.astype(np.float64)
    total = product + addend
    # What the sum lost (Knuth) makes its last bit odd: then it rounds to float32 as the exact sum does.
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    exact = np.where((lost != 0) & np.isfinite(lost) & even, odd, total)
    return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """The product of two tiles: of floats in float32 (exact products), of int8 in int32."""
    left, right = (_wide(operand) for operand in (a, b))
    product = np.matmul(left, right, dtype=np.result_type(left, d.data.dtype))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _wide(operand: Any) -> Any:
    dtype = operand.dtype.scalar
    if dtype in TORCH_DTYPES:
        return torch.from_numpy(np.ascontiguousarray(operand.data)).view(TORCH_DTYPES[dtype]).float().numpy()
    return operand.data.astype(np.int32)


def create_dot_scaled(
    self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *rest: Any
) -> Any:
    """The product of two tiles of codes with their scales, computed in float64; codes of e2m1 are packed along K."""
    acc = rest[-1]
    product = _dequantized(a, a_scale) @ _dequantized(b, b_scale, transposed=True).T
    return interpreter.TensorHandle(product.numpy().astype(np.float32) + acc.data, acc.dtype.scalar)


def _dequantized(codes: Any, scale: Any, transposed: bool = False) -> torch.Tensor:
    """(R, K) float64 values of codes (R, K), or (K, R), under scales (R, K / G)."""
    data = torch.from_numpy(np.ascontiguousarray(codes.data.T if transposed else codes.data))
    if codes.dtype.scalar == tl.float8e4nv:
        values = data.view(torch.float8_e4m3fn).double()
    else:
        nibbles = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
        values = torch.where(nibbles > 7, -1.0, 1.0) * sizes[(nibbles & 7).long()]
    stored = torch.from_numpy(np.ascontiguousarray(scale.data))
    if scale.dtype.scalar == tl.float8e4nv:
        factors = stored.view(torch.float8_e4m3fn).double()
    else:
        power = torch.ldexp(torch.ones(1, dtype=torch.float64), stored.int() - 127)
        factors = torch.where(stored == 255, torch.nan, power)
    return values * factors.repeat_interleave(values.shape[1] // factors.shape[1], 1)


class _Constant(str):
    """A string in the interpreter, which the language before triton 3.8 takes for a constant."""

    @property
    def value(self) -> str:
        return str(self)


def _formats_of_dot_scaled() -> None:
    """Formats are plain strings in the interpreter, of which the language wants the value (triton 3.6 and 3.7)."""
    semantic: Any = interpreter.TritonSemantic
    original = semantic.dot_scaled

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *(_Constant(arg) if isinstance(arg, str) else arg for arg in args), **kwargs)

    semantic.dot_scaled = wrapped


def _without_bfloat16(operation: Any) -> Any:
    def checked(self: Any, *operands: Any, **kwargs: Any) -> Any:
        if any(getattr(operand, "dtype", None) == tl.bfloat16 for operand in operands):
            raise TypeError(_NO_ARITHMETIC)
        return operation(self, *operands, **kwargs)

    return checked


def _checked_input(value: Any) -> Any:
    each = value if isinstance(value, tuple) else (value,)
    if any(getattr(tensor, "dtype", None) == tl.bfloat16 for tensor in each):
        raise TypeError(_NO_ARITHMETIC)
    return value


def _index_by_size_one() -> None:
    """A runtime bound of `range` is an array of one element, which newer numpy takes for no index (triton 3.6)."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.reshape(()))

    interpreter._patch_lang_tensor = patched


class _Bounds:
    """Holds every access of a kernel to the memory of the tensors that it was given.

    They are copied to places far from each other: what is beside one of them in memory may be another one.
    """

    margin = 1 << 16

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def install(self) -> None:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

        def checked_load(this: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self.check("load", pointers, mask)
            return load(this, pointers, mask, *rest, **named)

        def checked_store(this: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self.check("store", pointers, mask)
            return store(this, pointers, value, mask, *rest, **named)

        def checked_atomic(this: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.check("atomic", pointers, mask)
            return atomic(this, operation, pointers, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
        builder.create_atomic_rmw = checked_atomic
        executor._init_args_hst = lambda this, args, kwargs: self.enter(args, kwargs)
        executor._restore_args_dev = lambda this, *args: self.leave()

    def enter(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a kernel, with copies of their tensors."""
        self.ranges, self.copies = [], {}
        return [self.moved(value) for value in args], {name: self.moved(value) for name, value in kwargs.items()}

    def leave(self) -> None:
        """Write the copies back."""
        for original, copy in self.copies.values():
            original.copy_(copy)

    def moved(self, value: Any) -> Any:
        if hasattr(value, "block_shape") and hasattr(value, "base"):
            return dataclasses.replace(value, base=self.moved(value.base))
        if isinstance(value, tuple):
            return tuple(map(self.moved, value))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.copies:
            original = torch.empty(0, dtype=torch.uint8).set_(storage)
            wide = torch.empty(original.numel() + 2 * self.margin, dtype=torch.uint8)
            copy = wide[self.margin : self.margin + original.numel()]
            self.copies[storage.data_ptr()] = original, copy.copy_(original)
        copy = self.copies[storage.data_ptr()][1]
        first = self.margin // value.element_size() + value.storage_offset()
        moved = torch.empty(0, dtype=value.dtype).set_(copy.untyped_storage(), first, value.shape, value.stride())
        self.ranges.append(_range(moved))
        return moved

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        active = np.broadcast_to(getattr(mask, "data", mask), np.shape(pointers.data))
        addresses = pointers.data[active].astype(np.uint64)
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end in self.ranges:
            inside |= (addresses >= np.uint64(start)) & (addresses + np.uint64(size) <= np.uint64(end))
        if not inside.all():
            raise IndexError(
                f"{int((~inside).sum())} of {inside.size} addresses of a {what} are outside of all tensors"
            )


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) that the elements of a tensor lie in, which are not all of its storage."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
