"""Triton kernel for many rows: as many programs as the GPU has multiprocessors, each with one tile after the other.

While a program writes one tile, what it reads for the next one is already on its way, and no program waits for a place.
On sm_90 and sm_100 codes come by tensor descriptors (TMA): one thread asks for a whole tile and no thread computes
addresses. A descriptor wants rows that begin at multiples of 16 bytes; others are read by pointers, as on other GPUs.

The tiles, their order and the order of each sum are those of `triton_matmul.product`, so the bits are too.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from olq_fx.kernels.triton_matmul import accumulated, dot, finish, sum_over, tile_at

_ALIGNED = 16
"""Bytes that the beginnings of a descriptor's rows are multiples of."""


def fits_descriptor(codes: Tensor) -> bool:
    """Whether codes (R, K), one a byte, can be read by a descriptor."""
    row, column = codes.stride()
    return column == 1 and row % _ALIGNED == 0 and codes.data_ptr() % _ALIGNED == 0


def descriptor(codes: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of codes (R, K) for tiles (rows, columns)."""
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [rows, columns])


@triton.jit
def product_persistent(
    a, a_inner, a_outer, b, b_inner, b_outer, bias, residual, out, M, N, K, a_stride, a_inner_m, a_inner_k, a_outer_m,
    a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k,
    A_SIDE: tl.constexpr, A_INNER: tl.constexpr, A_INNER_K: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr,
    A_OUTER_K: tl.constexpr, B_SIDE: tl.constexpr, B_INNER: tl.constexpr, B_INNER_K: tl.constexpr,
    B_OUTER: tl.constexpr, B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, UNIFORM_B: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Every tile of y whose number is that of the program, or that plus a multiple of the number of programs.

    TMA: `a` and `b` are descriptors. FLATTEN: whether loads of the next tile begin before the end of this one. The rest
    is as in `triton_matmul.product`.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if TMA:
            acc = _sum_of_tiles(
                a, a_outer, b, b_outer, tile_m, tile_n, rows, columns, M, N, K, a_outer_m, a_outer_k, b_outer_n,
                b_outer_k, A_OUTER, A_GROUP, A_OUTER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PROMOTE, UNIFORM_B, BLOCK_M,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc = sum_over(
                a, a_inner, a_outer, b, b_inner, b_outer, rows, columns, 0, K, M, N, K, a_stride, a_inner_m, a_inner_k,
                a_outer_m, a_outer_k, b_stride, b_inner_n, b_inner_k, b_outer_n, b_outer_k, A_SIDE, A_INNER, A_INNER_K,
                A_OUTER, A_GROUP, A_OUTER_K, B_SIDE, B_INNER, B_INNER_K, B_OUTER, B_GROUP, B_OUTER_K, DOT, PARTS,
                PROMOTE, EVEN_K, UNIFORM_B, False, BLOCK_K,
            )  # fmt: skip
        finish(
            acc, a_outer, b_outer, bias, residual, out, rows, columns, M, N, a_outer_m, b_outer_n, A_OUTER, B_OUTER,
            A_GROUP, B_GROUP, False,
        )  # fmt: skip


@triton.jit
def _sum_of_tiles(
    a, a_outer, b, b_outer, tile_m, tile_n, rows, columns, M, N, K, a_outer_m, a_outer_k, b_outer_n, b_outer_k,
    A_OUTER: tl.constexpr, A_GROUP: tl.constexpr, A_OUTER_K: tl.constexpr, B_OUTER: tl.constexpr,
    B_GROUP: tl.constexpr, B_OUTER_K: tl.constexpr, DOT: tl.constexpr, PROMOTE: tl.constexpr, UNIFORM_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`triton_matmul.sum_over` of codes that descriptors read."""
    TYPE: tl.constexpr = tl.int32 if DOT == "int8" else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=TYPE)
    for first in range(0, K, BLOCK_K):
        left = a.load([tile_m * BLOCK_M, first])
        right = b.load([tile_n * BLOCK_N, first])
        start_from = tl.zeros((BLOCK_M, BLOCK_N), dtype=TYPE) if PROMOTE else acc
        found = dot(left, right, start_from, 1, False)
        if PROMOTE:
            acc = accumulated(
                acc, found, a_outer, b_outer, rows, columns, first, M, N, a_outer_m, a_outer_k, b_outer_n, b_outer_k,
                A_OUTER, B_OUTER, A_GROUP, B_GROUP, A_OUTER_K, B_OUTER_K, UNIFORM_B, False,
            )  # fmt: skip
        else:
            acc = found
    return acc
