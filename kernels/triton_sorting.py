"""Launches of the kernels of `triton_routing`: `experts.route`, the tiles of segments, `experts.combine`."""

import torch
from torch import Tensor

from olq_fx.kernels import triton_routing
from olq_fx.kernels.experts import Segments
from olq_fx.kernels.triton_calls import Call, run

_ONE_CHUNK = 512
"""Pairs that one program sorts by itself."""

_CHUNK = 256
_ELEMENTS = 4096
"""Of a tile that compares each with each: more than 16 a thread, which is unrolled, want more registers than there are.
"""
_WARPS = 8


def route(ids: Tensor, experts: int) -> Segments:
    """`experts.route`: (T, k) integers to the order of their pairs and the segments of `experts` experts."""
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    segments = Segments(offsets, order, ids.shape[1])
    if ids.numel() == 0:
        offsets.zero_()
    else:
        run(route_calls(ids.contiguous(), segments))
    return segments


def route_calls(ids: Tensor, segments: Segments) -> list[Call]:
    """The kernels that fill the order and the offsets of `segments` from `ids` (T, k), contiguous and not empty."""
    pairs, experts, device = ids.numel(), segments.experts, ids.device
    bins = _power_of_two(experts + 2)
    if pairs <= _ONE_CHUNK:
        block = _power_of_two(max(pairs, 32))
        constants = {"BINS": bins, "BLOCK": block, "SLICE": min(block, _ELEMENTS // block)}
        args = (ids, None, None, segments.order, segments.offsets, pairs, experts)
        return [Call(triton_routing.place_pairs, (1,), args, constants, _WARPS)]
    chunks = -(-pairs // _CHUNK)
    counts = torch.empty((chunks, experts + 1), dtype=torch.int32, device=device)
    totals = torch.empty(experts + 1, dtype=torch.int32, device=device)
    across, down = 16, 128
    return [
        Call(triton_routing.count_experts, (chunks,), (ids, counts, pairs, experts), {"BINS": bins, "BLOCK": _CHUNK}),
        Call(
            triton_routing.sum_counts,
            (-(-(experts + 1) // across),),
            (counts, totals, chunks, experts),
            {"BLOCK_C": down, "BLOCK_E": across},
        ),
        Call(
            triton_routing.place_pairs,
            (chunks,),
            (ids, counts, totals, segments.order, segments.offsets, pairs, experts),
            {"BINS": bins, "BLOCK": _CHUNK, "SLICE": _ELEMENTS // _CHUNK},
            _WARPS,
        ),
    ]


def tiles_of(m: int, experts: int, block_m: int, tail: bool) -> int:
    """The most tiles of `block_m` rows that `m` rows in segments have: each of them, as far as the rows go, one more.

    >>> tiles_of(8, 128, 16, tail=False), tiles_of(4096, 8, 128, tail=True)
    (8, 40)
    """
    segments = min(experts + tail, m)
    return segments + (m - segments) // block_m


def table_calls(segments: Segments, m: int, block_m: int, tail: bool) -> tuple[Tensor, list[Call]]:
    """A table of tiles (3, tiles) int32 for `m` rows, and the kernel that fills it: see `triton_routing.tile_table`."""
    tiles, experts = tiles_of(m, segments.experts, block_m, tail), segments.experts
    table = torch.empty((3, tiles), dtype=torch.int32, device=segments.offsets.device)
    bins = _power_of_two(experts + 1)
    block = max(1, min(_ELEMENTS // bins, _power_of_two(tiles)))
    constants = {"TAIL": int(tail), "BLOCK_M": block_m, "BINS": bins, "BLOCK_T": block}
    args = (segments.offsets, table, m, experts, tiles)
    return table, [Call(triton_routing.tile_table, (-(-tiles // block),), args, constants)]


def combine(rows: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """`experts.combine`: the rows (T x k, H) of tokens times their weights (T, k), added to (T, H)."""
    out = torch.empty((ids.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    if ids.numel() == 0:
        return out.zero_()
    if out.numel():
        run(combine_calls(rows.contiguous(), ids.contiguous(), weights.to(torch.float32).contiguous(), experts, out))
    return out


def combine_calls(rows: Tensor, ids: Tensor, weights: Tensor, experts: int, out: Tensor) -> list[Call]:
    """The kernel that fills `out` (T, H), which is not empty; all are contiguous."""
    tokens, n = out.shape
    block_t, block_n = 2, 512
    constants = {"TOP_K": ids.shape[1], "BLOCK_T": block_t, "BLOCK_N": block_n}
    grid = (-(-tokens // block_t), -(-n // block_n))
    return [Call(triton_routing.combine, grid, (rows, ids, weights, out, tokens, n, experts), constants)]


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
