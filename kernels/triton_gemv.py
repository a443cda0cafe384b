"""Triton kernel for one row of activations: y (1, N) = a (1, K) @ b (N, K).T without a matrix instruction.

One row leaves a matrix instruction empty but for a sixteenth; what counts is that weights are read as fast as memory
gives them. Each thread loads 16 bytes of codes of each of BLOCK_N rows, the threads of a program side by side along K,
multiplies in float32 (int8 by int8 in int32) and keeps sums of its own until the end: the order is fixed, so the bits
are always the same. Operands are those of `olq_fx.kernels.triton_matmul`.

Codes of e2m1 are eight to a word. Moved into the upper bits of float16 they are numbers 2^-14 times as large, two at
once and without a case for the subnormal one; sums are multiplied by 2^14 at the end. So what is below 2^-112 there has
fewer bits than float32 has. Inner scales of such a weight are applied to sums over CHUNK columns.
"""

import triton
import triton.language as tl

from olq_fx.kernels.device import LARGEST, decode
from olq_fx.kernels.triton_matmul import finish
from olq_fx.kernels.triton_operands import inner_scales, load_codes, load_plain

_SIGNS = tl.constexpr(-0x7FFF8000)
_SIZES = tl.constexpr(0x0E000E00)


@triton.jit
def gemv(
    a, a_inner, a_outer, b, b_inner, b_outer, bias, residual, out, partials, N, K, a_stride, a_inner_m, a_inner_k,
    a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, INTEGER: tl.constexpr,
    NATIVE: tl.constexpr, WHOLE: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_K: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N elements of y, or (SPLIT_K above 1) of one of the SPLIT_K sums that make it, into `partials`.

    INTEGER: codes are int8 on both sides and sums int32. NATIVE: whether the GPU casts to float8. CHUNK: columns whose
    sum is scaled at once, B_INNER_K of e2m1; it divides the groups of all scales that are not the same along K.
    WHOLE: K is a multiple of 32.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.zeros((1,), dtype=tl.int32)
    per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    start = tl.program_id(1) * per_split * BLOCK_K
    end = tl.minimum(start + per_split * BLOCK_K, K)
    TYPE: tl.constexpr = tl.int32 if INTEGER else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), dtype=TYPE)
    for first in range(start, end, BLOCK_K):
        x = _values(
            a, a_inner, row, first, 1, K, a_stride, a_inner_m, a_inner_k, A_SIDE, A_INNER, A_INNER_K, INTEGER, NATIVE,
            EVEN_K, BLOCK_K,
        )  # fmt: skip
        if B_SIDE == "e2m1":
            sums = _sums_of_words(b, x, columns, first, N, K, b_stride, CHUNK, WHOLE, EVEN_K, BLOCK_K)
            sums *= inner_scales(b_inner, columns, first, N, K, b_inner_n, b_inner_k, B_INNER, CHUNK, NATIVE, BLOCK_K)
        else:
            w = _values(
                b, b_inner, columns, first, N, K, b_stride, b_inner_n, b_inner_k, B_SIDE, B_INNER, B_INNER_K, INTEGER,
                NATIVE, EVEN_K, BLOCK_K,
            )  # fmt: skip
            sums = tl.sum(tl.reshape(x * w, (BLOCK_N, BLOCK_K // CHUNK, CHUNK)), axis=2)
        if (A_OUTER == "k") or (B_OUTER == "k"):
            scale = _scales_along_k(
                a_outer, b_outer, columns, first, N, K, a_outer_k, b_outer_n, b_outer_k, A_OUTER, B_OUTER, A_OUTER_K,
                B_OUTER_K, B_GROUP, CHUNK, BLOCK_K,
            )  # fmt: skip
            acc = tl.fma(sums, tl.broadcast_to(scale, sums.shape), acc)
        else:
            acc += sums
    total = tl.sum(acc, axis=1)
    if B_SIDE == "e2m1":
        total *= 16384.0
    if SPLIT_K == 1:
        finish(
            total[None, :], a_outer, b_outer, bias, residual, out, row, columns, 1, N, a_outer_m, b_outer_n, A_OUTER,
            B_OUTER, A_GROUP, B_GROUP, False,
        )  # fmt: skip
    else:
        tl.store(partials + tl.program_id(1).to(tl.int64) * N + columns, total, mask=columns < N)


@triton.jit
def _values(
    codes, inner, rows, first, R, K, row_stride, inner_row_stride, inner_column_stride, SIDE: tl.constexpr,
    INNER: tl.constexpr, INNER_K: tl.constexpr, INTEGER: tl.constexpr, NATIVE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(rows, BLOCK_K) numbers of one operand in float32 with their inner scales, or codes of int8 in int32."""
    if SIDE == "plain":
        return load_plain(codes, rows, first, R, K, row_stride, EVEN_K, BLOCK_K).to(tl.float32)
    else:
        found = load_codes(codes, rows, first, R, K, row_stride, SIDE, EVEN_K, BLOCK_K)
        if INTEGER:
            return found.to(tl.int8, bitcast=True).to(tl.int32)
        else:
            value = decode(found, SIDE, NATIVE)
            if INNER != "":
                scales = inner_scales(
                    inner, rows, first, R, K, inner_row_stride, inner_column_stride, INNER, INNER_K, NATIVE, BLOCK_K
                )
                groups = tl.reshape(value, (value.shape[0], BLOCK_K // INNER_K, INNER_K)) * scales[:, :, None]
                value = tl.reshape(groups, value.shape)
            return value


@triton.jit
def _sums_of_words(
    codes, x, rows, first, R, K, row_stride, CHUNK: tl.constexpr, WHOLE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """2^-14 times the sums (rows, BLOCK_K / CHUNK) of codes of e2m1, read as words of eight, times x (1, BLOCK_K)."""
    WORDS: tl.constexpr = BLOCK_K // 8
    columns = first // 8 + tl.arange(0, WORDS)
    inside = rows[:, None] < R
    if not EVEN_K:
        # Whether a thread's four words are all inside must be known for them to be one load.
        end = tl.multiple_of((K + 7) // 8, 4) if WHOLE else (K + 7) // 8
        inside = inside & (columns[None, :] < end)
    # The stride in bytes has known divisors, a number of words would not.
    line = (codes + rows.to(tl.int64) * row_stride).to(tl.pointer_type(tl.int32))
    words = tl.load(line[:, None] + columns[None, :], mask=inside, other=0)
    even, odd = tl.split(tl.reshape(x, (WORDS, 2, 2, 2)))
    x_04, x_26 = tl.split(even)
    x_15, x_37 = tl.split(odd)
    acc = tl.zeros(words.shape, dtype=tl.float32)
    acc = _plus_pair(acc, x_04, ((words << 12) & _SIGNS) | ((words << 9) & _SIZES))
    acc = _plus_pair(acc, x_15, ((words << 8) & _SIGNS) | ((words << 5) & _SIZES))
    acc = _plus_pair(acc, x_26, ((words << 4) & _SIGNS) | ((words << 1) & _SIZES))
    acc = _plus_pair(acc, x_37, (words & _SIGNS) | ((words >> 3) & _SIZES))
    return tl.sum(tl.reshape(acc, (acc.shape[0], BLOCK_K // CHUNK, CHUNK // 8)), axis=2)


@triton.jit
def _plus_pair(acc, x, halves):
    """`acc` + the float16 in both halves of each word times the two x (words, 2)."""
    low, high = tl.split(x)
    first = halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    second = (halves >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    acc = tl.fma(first, tl.broadcast_to(low[None, :], acc.shape), acc)
    return tl.fma(second, tl.broadcast_to(high[None, :], acc.shape), acc)


@triton.jit
def _scales_along_k(
    a_outer, b_outer, rows, first, N, K, a_outer_k, b_outer_n, b_outer_k, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_OUTER_K: tl.constexpr, B_GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The outer scales of both sides that differ along K, for sums over CHUNK columns: (rows or 1, BLOCK_K / CHUNK)."""
    columns = first + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
    scale = tl.full((1, BLOCK_K // CHUNK), 1.0, tl.float32)
    if A_OUTER == "k":
        at = (columns // A_OUTER_K).to(tl.int64) * a_outer_k
        scale = tl.load(a_outer + at, mask=columns < K, other=0.0)[None, :]
    if B_OUTER == "k":
        at = (rows // B_GROUP).to(tl.int64)[:, None] * b_outer_n + (columns // B_OUTER_K).to(tl.int64)[
            None, :
        ] * b_outer_k
        inside = (rows[:, None] < N) & (columns[None, :] < K)
        scale = scale * tl.load(b_outer + at, mask=inside, other=0.0)
        # As in `triton_matmul`: of two large scales no infinity, whose product with a sum of zeros would be NaN.
        scale = tl.where(scale < float("inf"), scale, tl.where(scale == scale, LARGEST, scale))
    return scale
