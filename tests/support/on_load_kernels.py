"""What a product takes of the values that it quantizes on load, written to memory: for the tests of these functions."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from olq_fx.formats import get_format
from olq_fx.kernels.device_maxima import quantized_blocks, quantized_operand, raise_maxima, row_quotient, row_units
from olq_fx.kernels.on_load import maxima_of
from olq_fx.kernels.template_lowering import format_constants

BLOCK = 64
"""Columns of a tile."""

_OF_FORMAT = ("ELEMENT", "SCALE", "RULE", "GROUP_K", "COARSE", "LOG", "NATIVE")


@triton.jit
def maxima_kernel(
    x, maxima, M, K, PARTS: tl.constexpr, WIDE: tl.constexpr, FINITE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Raise `maxima` to those of a tile."""
    rows, columns = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K),
    )
    inside = (rows[:, None] < M) & (columns[None, :] < K)
    tile = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
    raise_maxima(tile, maxima, rows, tl.program_id(1) * BLOCK_K, M, PARTS, WIDE, FINITE)


@triton.jit
def operand_kernel(
    x, maxima, out, scales, M, K, PARTS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, RULE: tl.constexpr,
    GROUP_K: tl.constexpr, COARSE: tl.constexpr, LOG: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What enters the product of a tile: numbers (M, K), or packed codes (M, K / 2) and scales (M, K / GROUP_K)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_K
    columns = first + tl.arange(0, BLOCK_K)
    inside = (rows[:, None] < M) & (columns[None, :] < K)
    tile = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
    part = first // COARSE if COARSE > 0 else 0
    unit = row_units(maxima, rows, part, M, PARTS, ELEMENT, SCALE, RULE)
    if DOT == "scaled":
        packed, found = quantized_blocks(tile, unit, ELEMENT, SCALE, RULE, GROUP_K, LOG, NATIVE)
        half = first // 2 + tl.arange(0, BLOCK_K // 2)
        at = rows[:, None] * (K // 2) + half[None, :]
        tl.store(out + at, packed, mask=(rows[:, None] < M) & (half[None, :] < K // 2))
        wide = first // GROUP_K + tl.arange(0, BLOCK_K // GROUP_K)
        at = rows[:, None] * (K // GROUP_K) + wide[None, :]
        written = (rows[:, None] < M) & (wide[None, :] < K // GROUP_K)
        tl.store(scales + at, found.to(tl.uint8, bitcast=True), mask=written)
    else:
        found = quantized_operand(tile, unit, ELEMENT, SCALE, RULE, GROUP_K, COARSE, LOG, NATIVE, DOT)
        tl.store(out + rows[:, None] * K + columns[None, :], found.to(tl.float32), mask=inside)


@triton.jit
def quotient_kernel(x, scale, out, R: tl.constexpr, C: tl.constexpr):
    """(R, C) over (R,)."""
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + at, row_quotient(tl.load(x + at), tl.load(scale + tl.arange(0, R))))


def raised(x: Tensor, format: str) -> Tensor:
    """The maxima (M, P) of (M, K) float32, raised tile by tile."""
    wanted = maxima_of(get_format(format))
    assert wanted is not None
    (m, k), parts = x.shape, wanted.parts(x.shape[1])
    found = torch.zeros((m, parts), dtype=torch.int32)
    grid = (-(-m // 16), -(-k // BLOCK))
    maxima_kernel[grid](x, found, m, k, parts, wanted.wide or k, wanted.finite, 16, BLOCK)
    return found


def operand(x: Tensor, maxima: Tensor, format: str, dot: str, native: bool = True) -> tuple[Tensor, Tensor]:
    """What enters the instruction `dot` of (M, K) float32: see `operand_kernel`."""
    found = get_format(format)
    constants: dict[str, Any] = format_constants(found, found.activation_rule, 90 if native else 80)
    m, k = x.shape
    packed = dot == "scaled"
    out = torch.zeros((m, k // 2) if packed else (m, k), dtype=torch.uint8 if packed else torch.float32)
    scales = torch.zeros((m, k // constants["GROUP_K"]), dtype=torch.uint8)
    grid = (-(-m // 16), -(-k // BLOCK))
    given = {name: constants[name] for name in _OF_FORMAT}
    operand_kernel[grid](x, maxima, out, scales, m, k, maxima.shape[1], **given, DOT=dot, BLOCK_M=16, BLOCK_K=BLOCK)
    return out, scales


def quotients(x: Tensor, scale: Tensor) -> Tensor:
    """(R, C) over (R,), powers of two."""
    out = torch.empty_like(x)
    quotient_kernel[(1,)](x, scale, out, *x.shape)
    return out
