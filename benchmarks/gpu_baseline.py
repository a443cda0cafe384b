"""A plain Triton product of block-scaled fp8, as a baseline: the design that serving libraries publish, and no more.

A program computes a tile of 64 x 128, walks over K in steps of 128 with loads through pointers, and adds each product
of fp8 tiles, times the scale of its rows and that of its block of the weight, to a float32 tile. Tiles are visited in
groups of 32 rows of tiles. No descriptors, no persistence, no splitting of K: vLLM's defaults for shapes without a
tuned configuration are 64 x 128 x 128, groups of 32, four warps and two stages.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 32, "num_warps": 4, "num_stages": 2}


@triton.jit
def block_product(
    a, b, a_scale, b_scale, out, M, N, K, a_scale_row, a_scale_column, b_scale_row, b_scale_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`out` (M, N) from fp8 codes `a` (M, K) and `b` (N, K), both contiguous, with scales each 1 x 128, 128 x 128."""
    down, wide = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * wide) * GROUP
    height = min(down - first, GROUP)
    rows = (first + program % (GROUP * wide) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (program % (GROUP * wide) // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end read those of the beginning, and are not written.
    a_at = a + (rows % M)[:, None] * K + depth[None, :]
    b_at = b + (columns % N)[None, :] * K + depth[:, None]
    a_scale_at = a_scale + (rows % M) * a_scale_row
    b_scale_at = b_scale + (columns % N) // 128 * b_scale_row
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        left = tl.load(a_at, mask=depth[None, :] < K - step * BLOCK_K, other=0.0)
        right = tl.load(b_at, mask=depth[:, None] < K - step * BLOCK_K, other=0.0)
        group = step * BLOCK_K // 128
        row_scale = tl.load(a_scale_at + group * a_scale_column)
        column_scale = tl.load(b_scale_at + group * b_scale_column)
        total += tl.dot(left, right) * row_scale[:, None] * column_scale[None, :]
        a_at += BLOCK_K
        b_at += BLOCK_K
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


def arguments(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> tuple[Any, ...]:
    """What the kernel takes before its constants."""
    return (a, b, a_scale, b_scale, out, *out.shape, a.shape[1], *a_scale.stride(), *b_scale.stride())


def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> Tensor:
    """Fill `out` (M, N).

    Args:
        a: (M, K) float8_e4m3fn.
        b: (N, K) float8_e4m3fn.
        a_scale: (M, K / 128) float32, by any strides.
        b_scale: (N / 128, K / 128) float32.
        out: (M, N), contiguous.
    """
    grid = (triton.cdiv(out.shape[0], OPTIONS["BLOCK_M"]) * triton.cdiv(out.shape[1], OPTIONS["BLOCK_N"]),)
    block_product[grid](*arguments(a, b, a_scale, b_scale, out), **OPTIONS)
    return out
