"""Triton kernels that quantize: (R, K) of bf16, fp16 or float32 to codes and scales, for every format.

- `quantize_tiles`: formats whose statistics lie within a tile, or are given (those of a whole tensor).
- `quantize_rows`: formats with a statistic of the whole row; a program owns its rows and reads them twice.
- `tensor_amax`: the largest size of a tensor, for the first.

One program has a tile of (BLOCK_M, BLOCK_K) and sees it as groups (R, S): S = GROUP_M x GROUP_K elements each, where
GROUP_M is 1 or the whole BLOCK_M (then GROUP_K is BLOCK_K). What lies outside of the tensor is 0, as padding is.
Codes and scales are written as bytes, e8m0 and e4m3 scales too; only float32 scales are float32.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device import (
    LARGEST,
    NVFP4_RANGE,
    decode,
    decode_e4m3,
    decode_e8m0,
    encode,
    finite_size_bits,
    float32_scale,
    from_bits,
    group_amax,
    nvfp4_reciprocal,
    over_power_of_two,
    pack,
    quotient,
    size_bits,
)
from olq_fx.kernels.device_scales import mx_scale, nvfp4_scale, plain_scale


@triton.jit
def load_tile(x, row_stride, column_stride, rows, columns, R, K):
    """The float32 tile at (rows, columns) of an (R, K) tensor; 0 outside."""
    at = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    return tl.load(x + at, mask=(rows[:, None] < R) & (columns[None, :] < K), other=0.0).to(tl.float32)


@triton.jit
def store_codes(out, codes, rows, first_column, R, K, ELEMENT: tl.constexpr):
    """Write a tile of codes, one a byte, whose first column is `first_column`; e2m1 two a byte."""
    if ELEMENT == "e2m1":
        bytes = pack(codes)
        width = (K + 1) // 2
        first = first_column // 2
    else:
        bytes = codes
        width = K
        first = first_column
    columns = first + tl.arange(0, bytes.shape[1])
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out + at, bytes, mask=(rows[:, None] < R) & (columns[None, :] < width))


@triton.jit
def encode_groups(
    groups, amax, coarse, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, LOG: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """(R, S) values and (R,) sizes to one code a byte (R, S) and the scales (R,) as they are stored.

    `coarse`: (R,) global scales g where the scales are e4m3; else unused.
    """
    if SCALE == "float32":
        scale = plain_scale(amax, ELEMENT, RULE)
        scaled = quotient(groups, scale)
    elif SCALE == "e8m0":
        written = mx_scale(groups, amax, ELEMENT, RULE, LOG)
        scale = written.to(tl.uint8)
        scaled = over_power_of_two(groups, written)
    else:
        scale = nvfp4_scale(groups, amax, coarse, RULE, LOG, NATIVE)
        scaled = quotient(groups, decode_e4m3(scale, NATIVE) * coarse)
    return encode(scaled, ELEMENT, NATIVE), scale


@triton.jit
def quantize_tiles(
    x, codes, scale, coarse, statistic, row_stride, column_stride, scale_row_stride, scale_column_stride, R, K,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr,
    COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize a tile.

    `statistic`: None, or one int32: `size_bits` of the largest size of the tensor (of its finite ones for nvfp4).
    COARSE: columns of a coarse group within the tile; 0 where there is none.
    `coarse`: where its scales go, row by row; of a whole tensor one float32, as its reciprocal.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_K
    tile = load_tile(x, row_stride, column_stride, rows, first + tl.arange(0, BLOCK_K), R, K)
    write_tile(
        tile, codes, scale, coarse, statistic, rows, first, scale_row_stride, scale_column_stride, R, K, ELEMENT, SCALE,
        RULE, GROUP_M, GROUP_K, COARSE, LOG, NATIVE,
    )  # fmt: skip


@triton.jit
def write_tile(
    tile, codes, scale, coarse, statistic, rows, first, scale_row_stride, scale_column_stride, R, K,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr,
    COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of the float32 tile at (rows, first); the arguments are those of `quantize_tiles`."""
    BLOCK_M: tl.constexpr = tile.shape[0]
    BLOCK_K: tl.constexpr = tile.shape[1]
    SIZE: tl.constexpr = GROUP_M * GROUP_K
    COUNT: tl.constexpr = BLOCK_M * BLOCK_K // SIZE
    groups = tl.reshape(tile, (COUNT, SIZE))
    amax = group_amax(groups)
    unit = amax
    if statistic is not None:
        whole = from_bits(tl.load(statistic + tl.zeros((COUNT,), dtype=tl.int32)))
        if SCALE == "e4m3":
            unit = _global_of_tensor(whole, coarse)
        else:
            amax = whole
    if COARSE > 0:
        unit = _coarse_in_tile(groups, coarse, rows, first, R, K, COARSE, SIZE, BLOCK_M, BLOCK_K)
        groups = tl.div_rn(groups, tl.broadcast_to(unit[:, None], groups.shape))
        amax = tl.div_rn(amax, unit)
    found, scales = encode_groups(groups, amax, unit, ELEMENT, SCALE, RULE, LOG, NATIVE)
    store_codes(codes, tl.reshape(found, (BLOCK_M, BLOCK_K)), rows, first, R, K, ELEMENT)
    if (statistic is not None) and (SCALE == "float32"):
        tl.store(scale + tl.zeros((COUNT,), dtype=tl.int32), scales)  # the same one from every program
    else:
        high = rows if GROUP_M == 1 else tl.min(rows, axis=0) // GROUP_M + tl.arange(0, 1)
        wide = first // GROUP_K + tl.arange(0, BLOCK_K // GROUP_K)
        at = high.to(tl.int64)[:, None] * scale_row_stride + wide.to(tl.int64)[None, :] * scale_column_stride
        inside = (high[:, None] * GROUP_M < R) & (wide[None, :] * GROUP_K < K)
        tl.store(scale + at, tl.reshape(scales, (BLOCK_M // GROUP_M, BLOCK_K // GROUP_K)), mask=inside)


@triton.jit
def _global_of_tensor(amax, coarse):
    """(R,) copies of a tensor's largest finite size to its global scale g, kept as the reciprocal G."""
    reciprocal = nvfp4_reciprocal(amax)
    tl.store(coarse + tl.zeros(amax.shape, dtype=tl.int32), reciprocal)
    return tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), reciprocal)


@triton.jit
def _coarse_in_tile(
    groups, coarse, rows, first, R, K, COARSE: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The scale of the coarse group that each group belongs to, over its finite values; written to `coarse` too."""
    COUNT: tl.constexpr = BLOCK_M * BLOCK_K // COARSE
    PART: tl.constexpr = COARSE // SIZE
    sizes = tl.max(finite_size_bits(groups), axis=1)
    largest = from_bits(tl.max(tl.reshape(sizes, (COUNT, PART)), axis=1))
    found = float32_scale(largest, 6.0)
    wide = first // COARSE + tl.arange(0, BLOCK_K // COARSE)
    at = rows.to(tl.int64)[:, None] * tl.cdiv(K, COARSE) + wide[None, :]
    inside = (rows[:, None] < R) & (wide[None, :] * COARSE < K)
    tl.store(coarse + at, tl.reshape(found, (BLOCK_M, BLOCK_K // COARSE)), mask=inside)
    return tl.reshape(tl.broadcast_to(found[:, None], (COUNT, PART)), (COUNT * PART,))


@triton.jit
def quantize_rows(
    x, codes, scale, coarse, row_stride, column_stride, scale_row_stride, scale_column_stride, R, K,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr, GROUP_K: tl.constexpr, LOG: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize whole rows: one float32 scale each, or (SCALE e4m3) a global one each above blocks of GROUP_K."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    bits = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for first in range(0, K, BLOCK_K):
        tile = load_tile(x, row_stride, column_stride, rows, first + tl.arange(0, BLOCK_K), R, K)
        bits = tl.maximum(bits, row_bits(tile, SCALE))
    of_row = write_row_scale(bits, scale, coarse, rows, scale_row_stride, R, ELEMENT, SCALE, RULE)
    for first in range(0, K, BLOCK_K):
        tile = load_tile(x, row_stride, column_stride, rows, first + tl.arange(0, BLOCK_K), R, K)
        write_row_tile(
            tile, of_row, codes, scale, rows, first, scale_row_stride, scale_column_stride, R, K, ELEMENT, SCALE,
            GROUP_K, LOG, NATIVE,
        )  # fmt: skip


@triton.jit
def row_bits(tile, SCALE: tl.constexpr):
    """(R, C) to (R,) int32: `size_bits` of the largest size of each row, for SCALE e4m3 of its largest finite one."""
    sizes = finite_size_bits(tile) if SCALE == "e4m3" else size_bits(tile)
    return tl.max(sizes, axis=1)


@triton.jit
def write_row_scale(
    bits, scale, coarse, rows, scale_row_stride, R, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr
):
    """The float32 scale of each row from its `row_bits`, written to `scale`; to `coarse` where SCALE is e4m3."""
    amax = from_bits(bits)
    if SCALE == "e4m3":
        of_row = float32_scale(amax, NVFP4_RANGE)
        tl.store(coarse + rows, of_row, mask=rows < R)
    else:
        of_row = plain_scale(amax, ELEMENT, RULE)
        tl.store(scale + rows.to(tl.int64) * scale_row_stride, of_row, mask=rows < R)
    return of_row


@triton.jit
def write_row_tile(
    tile, of_row, codes, scale, rows, first, scale_row_stride, scale_column_stride, R, K, ELEMENT: tl.constexpr,
    SCALE: tl.constexpr, GROUP_K: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write the codes of a part of rows, and the scales of its blocks where it has some."""
    if SCALE == "e4m3":
        found = _blocks_of_rows(
            tile, scale, of_row, rows, first, scale_row_stride, scale_column_stride, R, K, GROUP_K, LOG, NATIVE
        )
    else:
        found = encode(quotient(tile, of_row), ELEMENT, NATIVE)
    store_codes(codes, found, rows, first, R, K, ELEMENT)


@triton.jit
def _blocks_of_rows(
    tile, scale, of_row, rows, first, scale_row_stride, scale_column_stride, R, K, GROUP_K: tl.constexpr,
    LOG: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile of e2m1 codes under e4m3 block scales, which are written, and the given global ones of the rows."""
    BLOCK_M: tl.constexpr = tile.shape[0]
    PART: tl.constexpr = tile.shape[1] // GROUP_K
    groups = tl.reshape(tile, (BLOCK_M * PART, GROUP_K))
    unit = tl.reshape(tl.broadcast_to(of_row[:, None], (BLOCK_M, PART)), (BLOCK_M * PART,))
    found, scales = encode_groups(groups, group_amax(groups), unit, "e2m1", "e4m3", "amax", LOG, NATIVE)
    wide = first // GROUP_K + tl.arange(0, PART)
    at = rows.to(tl.int64)[:, None] * scale_row_stride + wide.to(tl.int64)[None, :] * scale_column_stride
    inside = (rows[:, None] < R) & (wide[None, :] * GROUP_K < K)
    tl.store(scale + at, tl.reshape(scales, (BLOCK_M, PART)), mask=inside)
    return tl.reshape(found, tile.shape)


@triton.jit
def tensor_amax(
    x, statistic, row_stride, column_stride, R, K, FINITE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Raise `statistic`, one int32 that begins at 0, to `size_bits` of the tensor's largest (FINITE: finite) size."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = load_tile(x, row_stride, column_stride, rows, columns, R, K)
    raise_statistic(tile, statistic, FINITE)


@triton.jit
def raise_statistic(tile, statistic, FINITE: tl.constexpr):
    """Raise `statistic`, one int32, to `size_bits` of the largest (FINITE: finite) size of a tile."""
    sizes = finite_size_bits(tile) if FINITE else size_bits(tile)
    # The order of sizes is that of their bits: an integer maximum is exact, and free of the order of programs.
    tl.atomic_max(statistic, tl.max(tl.max(sizes, axis=1), axis=0), sem="relaxed")


@triton.jit
def dequantize_tiles(
    codes, scale, coarse, out, scale_row_stride, scale_column_stride, R, K, ELEMENT: tl.constexpr,
    SCALE: tl.constexpr, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr, COARSE: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of (R, K) values of the output's dtype. GROUP_M, GROUP_K, COARSE: 0 is the whole axis.

    COARSE: -1 where there is no second scale, -2 where it is one reciprocal for the tensor, else columns of a group.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows[:, None] < R) & (columns[None, :] < K)
    if ELEMENT == "e2m1":
        at = rows.to(tl.int64)[:, None] * ((K + 1) // 2) + columns[None, :] // 2
        code = (tl.load(codes + at, mask=inside, other=0) >> ((columns[None, :] % 2) * 4).to(tl.uint8)) & 15
    else:
        code = tl.load(codes + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=inside, other=0)
    value = decode(code, ELEMENT, NATIVE)
    high = rows // GROUP_M if GROUP_M > 0 else tl.zeros((BLOCK_M,), dtype=tl.int32)
    wide = columns // GROUP_K if GROUP_K > 0 else tl.zeros((BLOCK_K,), dtype=tl.int32)
    at = high.to(tl.int64)[:, None] * scale_row_stride + wide.to(tl.int64)[None, :] * scale_column_stride
    stored = tl.load(scale + at, mask=inside, other=0)
    if SCALE == "e8m0":
        factor = decode_e8m0(stored)
    elif SCALE == "e4m3":
        factor = decode_e4m3(stored, NATIVE)
    else:
        factor = stored
    product = value * factor
    if COARSE == -2:
        product = product * tl.div_rn(1.0, tl.load(coarse))
    elif COARSE >= 0:
        width = tl.cdiv(K, COARSE) if COARSE > 0 else 1
        part = columns // COARSE if COARSE > 0 else tl.zeros((BLOCK_K,), dtype=tl.int32)
        at = rows.to(tl.int64)[:, None] * width + part[None, :]
        product = product * tl.load(coarse + at, mask=inside, other=0.0)
    limited = tl.clamp(product, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + rows.to(tl.int64)[:, None] * K + columns[None, :], limited.to(out.dtype.element_ty), mask=inside)
