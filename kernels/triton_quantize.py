"""Quantization and its inverse by the Triton kernels of `triton_encode`: what `reference` does, with the same bits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import Format, get_format
from olq_fx.kernels import triton_encode
from olq_fx.kernels.triton_calls import Call, as_bytes, run

_TILE = 4096
"""Elements of a tile of one-row groups: 32 a thread with four warps."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on, and with how many warps."""

    block_m: int
    block_k: int
    num_warps: int = 4

    def grid(self, rows: int, k: int) -> tuple[int, int]:
        """How many tiles an (rows, k) tensor has."""
        return -(-rows // self.block_m), -(-k // self.block_k)


def tile_of(format: Format) -> Tile:
    """The tile for a format, from what its groups are."""
    rows, columns = format.group
    if rows is not None and rows > 1:
        assert columns is not None
        return Tile(rows, columns, max(4, rows * columns // 2048))
    if format.coarse is not None and format.coarse[1] is not None:
        return Tile(_TILE // format.coarse[1], format.coarse[1])
    if by_row(format):
        return Tile(1, _TILE // 2)
    width = max(128, columns or 128)
    return Tile(_TILE // width, width)


def quantize(x: Tensor, format: str, rule: str, native: bool = True) -> list[Tensor]:
    """`reference.quantize`: (R, K) to its parts.

    Args:
        x: (R, K) of a floating dtype, in any layout.
        format: its name.
        rule: one of its scale rules.
        native: whether the GPU casts to float8 (compute capability 8.9 and later).
    """
    found = get_format(format)
    rows, k = x.shape
    if x.numel() == 0:
        return list(numerics.quantize(x, found, rule))
    specs = numerics.part_specs(found, rows, k)
    parts = [torch.empty(spec.shape, dtype=spec.dtype, device=x.device) for spec in specs]
    run(quantize_calls(x if x.dtype in _DTYPES else x.to(torch.float32), parts, found, rule, native))
    return parts


def quantize_calls(x: Tensor, parts: Sequence[Tensor], format: Format, rule: str, native: bool) -> list[Call]:
    """The kernels that fill `parts` from `x` (R, K), which is not empty, of bf16, fp16 or float32.

    A scale of one row and 128 columns may be laid out either way: `parts[1]` is written by its strides.
    """
    codes, scale, *rest = map(as_bytes, parts)
    coarse, (rows, k), tile = rest[0] if rest else None, x.shape, tile_of(format)
    constants = constants_of(format, rule, native, tile)
    if by_row(format):
        grid, args = tile.grid(rows, k)[:1], (x, codes, scale, coarse, *x.stride(), *scale.stride(), rows, k)
        return [Call(triton_encode.quantize_rows, grid, args, constants, tile.num_warps)]
    calls = []
    statistic = None
    if (None, None) in (format.group, format.coarse):
        statistic = torch.zeros(1, dtype=torch.int32, device=x.device)
        calls.append(_amax_call(x, statistic, tile, finite=format.coarse is not None))
    constants |= {"GROUP_M": format.group[0] or 1, "COARSE": coarse_columns(format)}
    args = (x, codes, scale, coarse, statistic, *x.stride(), *scale.stride(), rows, k)
    calls.append(Call(triton_encode.quantize_tiles, tile.grid(rows, k), args, constants, tile.num_warps))
    return calls


def constants_of(format: Format, rule: str, native: bool, tile: Tile) -> dict[str, Any]:
    """The constants of the kernels that write a format."""
    columns = format.group[1]
    return {
        "ELEMENT": format.element,
        "SCALE": format.scale,
        "RULE": rule,
        "GROUP_K": columns or (1 if by_row(format) else tile.block_k),
        "LOG": (columns or 1).bit_length() - 1,
        "NATIVE": native,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
    }


def by_row(format: Format) -> bool:
    """Whether a scale belongs to a whole row."""
    return (1, None) in (format.group, format.coarse)


def coarse_columns(format: Format) -> int:
    """Columns of a coarse group that lies within a tile; 0 where there is none."""
    return (format.coarse[1] or 0) if format.coarse else 0


def _amax_call(x: Tensor, statistic: Tensor, tile: Tile, finite: bool) -> Call:
    """`statistic`, one int32 that is 0, becomes the bits of the largest size in `x`."""
    constants = {"FINITE": finite, "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k}
    args = (x, statistic, *x.stride(), *x.shape)
    return Call(triton_encode.tensor_amax, tile.grid(*x.shape), args, constants, tile.num_warps)


def dequantize(parts: Sequence[Tensor], format: str, k: int, dtype: torch.dtype, native: bool = True) -> Tensor:
    """`reference.dequantize`: parts to (R, k) of `dtype`.

    Args:
        parts: codes and scales, `numerics.part_specs`.
        format: its name.
        k: columns.
        dtype: of the result, a floating one.
        native: whether the GPU casts from float8 (compute capability 8.9 and later).
    """
    out = torch.empty(
        (parts[0].shape[0], k), dtype=dtype if dtype in _DTYPES else torch.float32, device=parts[0].device
    )
    if out.numel():
        run(dequantize_calls([part.contiguous() for part in parts], get_format(format), out, native))
    return out.to(dtype)


def dequantize_calls(parts: Sequence[Tensor], format: Format, out: Tensor, native: bool) -> list[Call]:
    """The kernel that fills `out` (R, K) of bf16, fp16 or float32 from `parts`, each contiguous but for the scales."""
    codes, scale, *rest = map(as_bytes, parts)
    tile, (group_m, group_k) = Tile(_TILE // 128, 128), format.group
    constants = {
        "ELEMENT": format.element,
        "SCALE": format.scale,
        "GROUP_M": group_m or 0,
        "GROUP_K": group_k or 0,
        "COARSE": -1 if format.coarse is None else -2 if format.coarse[0] is None else format.coarse[1] or 0,
        "NATIVE": native,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
    }
    args = (codes, scale, rest[0] if rest else None, out, *scale.stride(), *out.shape)
    return [Call(triton_encode.dequantize_tiles, tile.grid(*out.shape), args, constants, tile.num_warps)]
