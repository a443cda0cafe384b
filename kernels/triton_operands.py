"""Tiles of quantized operands as functions of Triton's language: loaded, and decoded as far as a product wants it.

For the kernels that multiply; what SIDE, INNER and DOT say is told in `olq_fx.kernels.triton_matmul`. A tile has
BLOCK_K columns from column `first` on, of the rows that are named; rows and columns outside of (R, K) count as zeros.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device import decode, decode_e4m3, decode_e8m0, unpack


@triton.jit
def load_codes(codes, rows, first, R, K, row_stride, SIDE: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(rows, BLOCK_K) codes from column `first` on, one a byte; 0 outside."""
    if SIDE == "e2m1":
        return unpack(load_bytes(codes, rows, first, R, K, row_stride, 2, EVEN_K, BLOCK_K))
    else:
        return load_bytes(codes, rows, first, R, K, row_stride, 1, EVEN_K, BLOCK_K)


@triton.jit
def load_bytes(
    codes, rows, first, R, K, row_stride, PER_BYTE: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(rows, BLOCK_K / PER_BYTE) bytes of codes from column `first` on; 0 outside."""
    columns = first // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
    # By the stride as it is given, whose divisors are known: those of (K + 1) // 2 are not, and loads would be bytes.
    at = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    inside = rows[:, None] < R
    if not EVEN_K:
        # Rounded up in the way whose divisors are known.
        inside = inside & (columns[None, :] < (K - K // 2 if PER_BYTE == 2 else K))
    return tl.load(codes + at, mask=inside, other=0.0)


@triton.jit
def load_plain(x, rows, first, R, K, row_stride, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(rows, BLOCK_K) values as they are stored; 0 outside."""
    columns = first + tl.arange(0, BLOCK_K)
    inside = rows[:, None] < R
    if not EVEN_K:
        inside = inside & (columns[None, :] < K)
    return tl.load(x + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def inner_scales(
    scale, rows, first, R, K, row_stride, column_stride, INNER: tl.constexpr, GROUP: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(rows, BLOCK_K / GROUP) inner scales in float32; of 0 outside. NATIVE: whether the GPU casts to float8."""
    bytes = inner_bytes(scale, rows, first, R, K, row_stride, column_stride, GROUP, BLOCK_K)
    if INNER == "e8m0":
        return decode_e8m0(bytes)
    else:
        return decode_e4m3(bytes, NATIVE)


@triton.jit
def inner_bytes(
    scale, rows, first, R, K, row_stride, column_stride, GROUP: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """(rows, BLOCK_K / GROUP) inner scales as they are stored; 0 outside."""
    wide = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
    at = rows.to(tl.int64)[:, None] * row_stride + wide.to(tl.int64)[None, :] * column_stride
    return tl.load(scale + at, mask=(rows[:, None] < R) & (wide[None, :] * GROUP < K), other=0)


@triton.jit
def operand(
    codes, inner, rows, first, R, K, row_stride, inner_row_stride, inner_column_stride, SIDE: tl.constexpr,
    INNER: tl.constexpr, INNER_K: tl.constexpr, DOT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(rows, BLOCK_K) of one operand, in the type that DOT says; of `plain` values as they are stored."""
    if SIDE == "plain":
        return load_plain(codes, rows, first, R, K, row_stride, EVEN_K, BLOCK_K)
    elif DOT == "fp8":
        # Loaded as what they are: a cast of the tile would go through registers on its way to the instruction.
        found = codes.to(tl.pointer_type(tl.float8e4nv))
        return load_bytes(found, rows, first, R, K, row_stride, 1, EVEN_K, BLOCK_K)
    elif DOT == "int8":
        found = codes.to(tl.pointer_type(tl.int8))
        return load_bytes(found, rows, first, R, K, row_stride, 1, EVEN_K, BLOCK_K)
    else:
        found = load_codes(codes, rows, first, R, K, row_stride, SIDE, EVEN_K, BLOCK_K)
        value = decode(found, SIDE, False)
        if INNER != "":
            scales = inner_scales(
                inner, rows, first, R, K, inner_row_stride, inner_column_stride, INNER, INNER_K, False, BLOCK_K
            )
            groups = tl.reshape(value, (value.shape[0], BLOCK_K // INNER_K, INNER_K)) * scales[:, :, None]
            value = tl.reshape(groups, value.shape)
        return value.to(tl.float16) if DOT == "fp16" else value.to(tl.bfloat16)


@triton.jit
def block_scaled(
    codes, inner, rows, first, R, K, row_stride, inner_row_stride, inner_column_stride, SIDE: tl.constexpr,
    INNER: tl.constexpr, INNER_K: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One operand as `tl.dot_scaled` takes it: codes as they are stored, two a byte where they are, and scales."""
    PER_BYTE: tl.constexpr = 2 if SIDE == "e2m1" else 1
    stored = codes.to(tl.pointer_type(tl.float8e4nv)) if SIDE == "e4m3" else codes
    found = load_bytes(stored, rows, first, R, K, row_stride, PER_BYTE, EVEN_K, BLOCK_K)
    scales = inner_bytes(inner, rows, first, R, K, inner_row_stride, inner_column_stride, INNER_K, BLOCK_K)
    if INNER == "e4m3":
        scales = scales.to(tl.float8e4nv, bitcast=True)
    return found, scales
