"""Formats whose groups are wider than a tile of a product, as functions of Triton's language.

The kernel that computes the values raises one maximum a group, which tiles share; the kernel that multiplies them next
quantizes what it loads by these maxima. A maximum is `size_bits`, an int32: the order of sizes is that of their bits,
so an atomic maximum of integers is exact, and free of the order of programs; above all numbers is Inf, above that NaN.

Values are quantized by the functions that write codes elsewhere, so that they have the bits of those.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device import (
    NVFP4_RANGE,
    decode,
    decode_e4m3,
    decode_e8m0,
    encode,
    finite_size_bits,
    float32_scale,
    from_bits,
    group_amax,
    pack,
    size_bits,
)
from olq_fx.kernels.device_scales import plain_scale
from olq_fx.kernels.triton_encode import encode_groups
from olq_fx.kernels.triton_matmul import accumulated_rows, constant_scale, dot, scaled
from olq_fx.kernels.triton_operands import block_scaled, load_plain, operand


@triton.jit
def raise_maxima(tile, maxima, rows, first, M, PARTS: tl.constexpr, WIDE: tl.constexpr, FINITE: tl.constexpr):
    """Raise `maxima` (M, PARTS) to those of a float32 tile at (rows, first), which lies within one group of each row.

    WIDE: columns of a group. FINITE: whether NaN and Inf are left out.
    """
    sizes = finite_size_bits(tile) if FINITE else size_bits(tile)
    at = rows.to(tl.int64) * PARTS + first // WIDE
    tl.atomic_max(maxima + at, tl.max(sizes, axis=1), mask=rows < M, sem="relaxed")


@triton.jit
def row_units(
    maxima, rows, part, M, PARTS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr
):
    """The float32 scales (rows,) of the groups that `maxima` belong to: number `part` of each row."""
    bits = tl.load(maxima + rows.to(tl.int64) * PARTS + part, mask=rows < M, other=0)
    amax = from_bits(bits)
    if SCALE == "float32":
        return plain_scale(amax, ELEMENT, RULE)
    elif SCALE == "e4m3":
        return float32_scale(amax, NVFP4_RANGE)
    else:
        return float32_scale(amax, 6.0)


@triton.jit
def row_quotient(tile, unit):
    """(R, C) over (R,), each quotient that a code can depend on rounded as a true division rounds it.

    One division a row, and five operations an element. The first quotient by the reciprocal is wrong by less than 1.5
    units in the last place, the second by less than one; then what remains of it is exact, and a third with the
    correctly rounded reciprocal is the correctly rounded one (Markstein). Smaller scales and their rows go up by 2^64,
    so that nothing that counts is below what float32 has. Rows with NaN and Inf have any quotients: their scale is NaN.
    """
    up = tl.where(unit < 5.421010862427522e-20, 18446744073709551616.0, 1.0)
    divisor = unit * up
    inverse = tl.broadcast_to(tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), divisor)[:, None], tile.shape)
    negative = tl.broadcast_to((0.0 - divisor)[:, None], tile.shape)
    value = tile * up[:, None]
    found = value * inverse
    found = tl.fma(tl.fma(found, negative, value), inverse, found)
    return tl.fma(tl.fma(found, negative, value), inverse, found)


@triton.jit
def coded_groups(
    tile, unit, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_K: tl.constexpr,
    COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(R, C) values under the coarse scales `unit` (R,) to codes (R C / GROUP_K, GROUP_K) and scales as stored."""
    R: tl.constexpr = tile.shape[0]
    PART: tl.constexpr = tile.shape[1] // GROUP_K
    groups = tl.reshape(tile, (R * PART, GROUP_K))
    amax = group_amax(groups)
    of_group = tl.reshape(tl.broadcast_to(unit[:, None], (R, PART)), (R * PART,))
    if COARSE > 0:
        groups = tl.div_rn(groups, tl.broadcast_to(of_group[:, None], groups.shape))
        amax = tl.div_rn(amax, of_group)
    return encode_groups(groups, amax, of_group, ELEMENT, SCALE, RULE, LOG, NATIVE)


@triton.jit
def quantized_operand(
    tile, unit, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_K: tl.constexpr,
    COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A float32 tile (R, C) quantized under `unit` (R,), as `triton_operands.operand` gives stored codes to DOT."""
    if SCALE == "float32":
        code = encode(row_quotient(tile, unit), ELEMENT, NATIVE)
        if DOT == "fp8":
            return code.to(tl.float8e4nv, bitcast=True)
        elif DOT == "int8":
            return code.to(tl.int8, bitcast=True)
        else:
            return decode(code, ELEMENT, False).to(tl.bfloat16)
    else:
        code, stored = coded_groups(tile, unit, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE)
        scale = decode_e8m0(stored) if SCALE == "e8m0" else decode_e4m3(stored, False)
        return tl.reshape(decode(code, ELEMENT, False) * scale[:, None], tile.shape).to(tl.bfloat16)


@triton.jit
def quantized_blocks(
    tile, unit, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_K: tl.constexpr,
    LOG: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The same as `triton_operands.block_scaled` gives stored codes to `tl.dot_scaled`: packed codes, and scales."""
    code, stored = coded_groups(tile, unit, ELEMENT, SCALE, RULE, GROUP_K, 0, LOG, NATIVE)
    scales = tl.reshape(stored, (tile.shape[0], tile.shape[1] // GROUP_K))
    return pack(tl.reshape(code, tile.shape)), scales.to(tl.float8e4nv, bitcast=True)


@triton.jit
def sum_on_load(
    values, maxima, unit, b, b_inner, b_outer, rows, columns, M, N, K, row_stride, b_stride, b_inner_n, b_inner_k,
    b_outer_n, b_outer_k, PARTS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, B_SIDE: tl.constexpr,
    B_INNER: tl.constexpr, B_INNER_K: tl.constexpr, B_OUTER: tl.constexpr, B_GROUP: tl.constexpr,
    B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`triton_matmul.sum_over` over all of K, of values (M, K) that are quantized as they are loaded.

    unit: (rows,) what `row_units` gives of each row where COARSE is 0, else unused. The other arguments are those of
    `sum_over` and of `triton_encode.write_tile`.
    """
    TYPE: tl.constexpr = tl.int32 if DOT == "int8" else tl.float32
    acc = tl.zeros((rows.shape[0], columns.shape[0]), dtype=TYPE)
    for first in range(0, K, BLOCK_K):
        start_from = tl.zeros((rows.shape[0], columns.shape[0]), dtype=TYPE) if PROMOTE else acc
        tile = load_plain(values, rows, first, M, K, row_stride, EVEN_K, BLOCK_K).to(tl.float32)
        if COARSE > 0:
            of_rows = row_units(maxima, rows, first // COARSE, M, PARTS, ELEMENT, SCALE, RULE)
            left_scale = of_rows
        else:
            of_rows = unit
            left_scale = tl.full(rows.shape, 1.0, tl.float32)
        if DOT == "scaled":
            left, left_blocks = quantized_blocks(tile, of_rows, ELEMENT, SCALE, RULE, GROUP_K, LOG, NATIVE)
            right, right_blocks = block_scaled(
                b, b_inner, columns, first, N, K, b_stride, b_inner_n, b_inner_k, B_SIDE, B_INNER, B_INNER_K, EVEN_K,
                BLOCK_K,
            )  # fmt: skip
            found = tl.dot_scaled(left, left_blocks, ELEMENT, tl.trans(right), right_blocks, B_SIDE, start_from)
        else:
            left = quantized_operand(tile, of_rows, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE, DOT)
            right = operand(
                b, b_inner, columns, first, N, K, b_stride, b_inner_n, b_inner_k, B_SIDE, B_INNER, B_INNER_K, DOT,
                EVEN_K, BLOCK_K,
            )  # fmt: skip
            found = dot(left, right, start_from, 1, False)
        if PROMOTE:
            acc = accumulated_rows(
                acc, found, left_scale, b_outer, columns, first, N, b_outer_n, b_outer_k, B_OUTER, B_GROUP, B_OUTER_K,
                UNIFORM_B, False,
            )  # fmt: skip
        else:
            acc = found
    return acc


@triton.jit
def with_units(
    acc, unit, b_outer, columns, N, b_outer_n, COARSE: tl.constexpr, B_OUTER: tl.constexpr, B_GROUP: tl.constexpr
):
    """`triton_matmul.with_constants` of sums by `sum_on_load`."""
    value = acc.to(tl.float32)
    left = tl.full(unit.shape, 1.0, tl.float32) if COARSE > 0 else unit
    right = constant_scale(b_outer, columns, N, b_outer_n, B_OUTER, B_GROUP)
    if (COARSE == 0) or (B_OUTER == "const") or (B_OUTER == "reciprocal"):
        value = scaled(value, tl.broadcast_to(left[:, None], value.shape), tl.broadcast_to(right[None, :], value.shape))
    return value
