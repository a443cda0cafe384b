"""Products of experts, and what is between two, by the Triton kernels of `triton_grouped`: what `experts` does.

No function waits for the device: grids follow from shapes alone, so that a CUDA graph of a call serves all routings.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import get_format
from olq_fx.kernels import experts, triton_grouped
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.experts import Gated, Segments, Stack
from olq_fx.kernels.triton_calls import Call, as_bytes, run
from olq_fx.kernels.triton_product import (
    TENSOR_MEMORY,
    Instruction,
    Operand,
    crowded,
    instruction_of,
    operand_of,
)
from olq_fx.kernels.triton_quantize import Tile, by_row, coarse_columns, constants_of, tile_of
from olq_fx.kernels.triton_sorting import table_calls
from olq_fx.kernels.tuned_tables import tuned

_PLAIN = Tile(8, 256)
_NARROW = 64
NAMES = ("SIDE", "INNER", "INNER_K", "OUTER", "GROUP", "OUTER_K")


def grouped_blocking_of(
    m: int, experts: int, a: Operand, b: Operand, instruction: Instruction, capability: int
) -> Blocking:
    """An analytic first choice for `m` rows of as many experts, from the mean length of a segment.

    As for dense products, but for the sum over K, which is not split: there are tiles of many experts.
    """
    decoded, wide = instruction.dot in ("bf16", "fp16"), instruction.parts > 1
    widest = 32 if wide else 64 if decoded else 128
    block_k = min([widest, *(side.outer_k for side in (a, b) if side.outer == "k")])
    mean = -(-m // experts)
    if mean <= 64:
        # Of two sums beside operands that are being decoded, mma.sync has not more than 32 columns in registers.
        narrow = wide or (decoded and instruction.promote and capability < 90)
        block_m = max(16, min(1 << (mean - 1).bit_length(), 32 if narrow else 64))
        warps = 8 if block_m == 64 or (block_m == 32 and crowded(instruction, capability)) else 4
        # Out of tensor memory, promoted sums of a swapped tile that is not narrow leave no room for the operands.
        swap = not (block_m == 64 and instruction.promote and capability in TENSOR_MEMORY)
        return Blocking(block_m, 64 if decoded else 128, block_k, swap=swap, num_warps=warps)
    if wide:
        return Blocking(64, 64, block_k, num_warps=8 if crowded(instruction, capability) else 4)
    # Where accumulators are registers of mma.sync, those of two sums and the operands leave no room for a larger tile.
    if decoded or (instruction.promote and capability in (86, 89, 120)):
        return Blocking(64, 128, block_k, num_warps=8)
    return Blocking(128, 128, block_k, num_warps=8)


def grouped_linear(
    x: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    k: int,
    dtype: torch.dtype,
    segments: Segments,
    *,
    gather: bool = False,
    scatter: bool = False,
    weights: Tensor | None = None,
    capability: int,
    fast_accum: bool = False,
) -> Tensor:
    """`experts.grouped_linear`, for activations and results in bf16, fp16 and float32.

    Args:
        capability: of the GPU, 90 for sm_90.
        fast_accum: see `triton_product.quantized_linear`.
    """
    m = experts.check_grouped(x, activation_format, stack, k, segments, gather, scatter, weights)
    n = stack.parts[0].shape[1]
    if m == 0 or n == 0 or k == 0:
        return experts.grouped_linear(
            x, activation_format, stack, k, dtype, segments, gather=gather, scatter=scatter, weights=weights
        )
    out = torch.empty((m, n), dtype=dtype, device=x[0].device)
    x = x if activation_format else [x[0] if x[0].stride(1) == 1 else x[0].contiguous()]
    calls = grouped_calls(
        *(x, activation_format, stack, k, out, segments),
        gather=gather,
        scatter=scatter,
        weights=None if weights is None else weights.contiguous(),
        tail=True,
        capability=capability,
        fast_accum=fast_accum,
    )
    run(calls)
    return out


def grouped_calls(
    x: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    k: int,
    out: Tensor,
    segments: Segments,
    *,
    gather: bool = False,
    scatter: bool = False,
    weights: Tensor | None = None,
    tail: bool,
    capability: int,
    fast_accum: bool = False,
    blocking: Blocking | None = None,
) -> list[Call]:
    """The kernels that fill `out` (M, N); the other arguments are those of `grouped_linear`.

    Args:
        tail: whether rows that belong to nobody become 0; else they are not written.
        blocking: in place of the tuned or the analytic choice, with `split_k` 1. Its `block_k` must divide groups of
            scales along K.
    """
    a, b = operand_of(x, activation_format), expert_operand(stack)
    m, n = out.shape
    instruction, shard = instruction_of(a, b, k, capability, fast_accum), _shard_of(stack, b)
    chosen = (
        blocking
        or tuned(
            *("grouped", x[0], activation_format, stack.format, out.dtype, (m, n, k), capability),
            fast_accum=fast_accum,
            experts=segments.experts,
        )
        or _of_shards(grouped_blocking_of(m, segments.experts, a, b, instruction, capability), shard)
    )
    table, calls = table_calls(segments, m, chosen.block_m, tail)
    tiles = table.shape[1]
    tensors = (a.codes, a.inner_scale, a.outer_scale, b.codes, b.inner_scale, b.outer_scale)
    strides = (
        a.codes.stride(0),
        *a.strides,
        *b.codes.stride()[:2],
        *strides_of_scale(b.inner_scale),
        *strides_of_scale(b.outer_scale),
    )
    args = (
        *(*tensors, None if stack.bias is None else stack.bias.contiguous(), weights, out, table, segments.order),
        *(tiles, x[0].shape[0], segments.experts, n, k, *strides),
    )
    constants = {
        **{f"A_{name}": value for name, value in zip(NAMES, a.constants, strict=True)},
        **{f"B_{name}": value for name, value in zip(NAMES, b.constants, strict=True)},
        "DOT": instruction.dot,
        "PARTS": instruction.parts,
        "PROMOTE": instruction.promote,
        "EVEN_K": k % chosen.block_k == 0,
        "UNIFORM_B": b.outer == "k" and b.group % chosen.block_n == shard % chosen.block_n == 0,
        "SWAP": chosen.swap,
        "GATHER": segments.top_k if gather else 0,
        "SCATTER": scatter,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "GROUP": chosen.group,
        "B_SHARD": shard,
    }
    grid, kernel = (tiles * -(-n // chosen.block_n),), triton_grouped.grouped_product
    return [*calls, Call(kernel, grid, args, constants, chosen.num_warps, chosen.num_stages)]


def expert_operand(stack: Stack) -> Operand:
    """The weights of all experts as an operand whose tensors have an axis of experts in front."""
    codes, scale, *rest = map(as_bytes, stack.parts)
    of_one = operand_of([part[0] for part in stack.parts], stack.format)
    # A scale of a whole shard is one of its rows.
    group = of_one.group or (codes.shape[1] // stack.shards if stack.shards > 1 else 0)
    if not of_one.inner:
        return dataclasses.replace(of_one, codes=codes, outer_scale=scale, group=group)
    return dataclasses.replace(
        of_one, codes=codes, inner_scale=scale, outer_scale=rest[0] if rest else None, group=group
    )


def _shard_of(stack: Stack, b: Operand) -> int:
    """Rows of a shard that ends within a group of scales along K; 0 where groups know of no shards."""
    n = stack.parts[0].shape[1] // stack.shards
    return n if b.outer == "k" and stack.shards > 1 and n % b.group else 0


def _of_shards(blocking: Blocking, shard: int) -> Blocking:
    """Narrow tiles for shards of so many rows, which divide it or are low too.

    A scale for each column leaves no room for the sums of a larger one.
    """
    if not shard or blocking.swap or blocking.block_n <= _NARROW:
        return blocking
    block_m = blocking.block_m if shard % _NARROW == 0 else min(blocking.block_m, 64)
    return dataclasses.replace(blocking, block_m=block_m, block_n=_NARROW)


def strides_of_scale(scale: Tensor | None) -> tuple[int, ...]:
    """Of scales of all experts: by expert, row and column."""
    return (0, 0, 0) if scale is None else scale.stride()


def gated_parts(
    hidden: Tensor, activation: Gated, segments: Segments, format: str, rule: str, native: bool = True, shards: int = 2
) -> list[Tensor]:
    """`experts.gated` of the rows of all segments, then `reference.quantize` of these: the parts of (M, I).

    Args:
        hidden: (M, shards x I) of bf16, fp16 or float32.
        activation: what is computed.
        segments: which rows there are; in the parts, those that belong to nobody are 0.
        format: of the result; "" for a list of one tensor of the dtype of `hidden`.
        rule: one of its scale rules.
        native: whether the GPU casts to float8 (compute capability 8.9 and later).
        shards: 2, or 1 where there is no gate.
    """
    parts = empty_parts(hidden.shape[0], hidden.shape[1] // shards, format, hidden, torch.zeros)
    if hidden.numel():
        run(gated_calls(hidden.contiguous(), activation, segments, parts, format, rule, native, shards))
    return parts


def empty_parts(rows: int, k: int, format: str, like: Tensor, allocate: Any) -> list[Tensor]:
    """What a tensor (rows, k) is quantized into; of one tensor like `like` where `format` is empty."""
    if not format:
        return [allocate((rows, k), dtype=like.dtype, device=like.device)]
    specs = numerics.part_specs(get_format(format), rows, k)
    return [allocate(spec.shape, dtype=spec.dtype, device=like.device) for spec in specs]


def gated_calls(
    hidden: Tensor,
    activation: Gated,
    segments: Segments,
    parts: Sequence[Tensor],
    format: str,
    rule: str,
    native: bool,
    shards: int = 2,
) -> list[Call]:
    """The kernels that fill `parts` from `hidden` (M, shards x I), contiguous; those of nobody's rows do not."""
    rows, k = hidden.shape[0], hidden.shape[1] // shards
    found = get_format(format) if format else None
    tile = tile_of(found) if found else _PLAIN
    common: dict[str, Any] = {"KIND": activation.kind, "GATED": shards == 2}
    sizes = (segments.experts, k, activation.alpha, activation.limit)
    if found is None:
        return [_tiles_call("values", hidden, (parts[0], None, None, None, None), segments, sizes, tile, common)]
    codes, scale, *rest = map(as_bytes, parts)
    coarse = rest[0] if rest else None
    common |= constants_of(found, rule, native, tile)
    if by_row(found):
        args = (hidden, codes, scale, coarse, segments.offsets, hidden.stride(0), *scale.stride(), *sizes)
        return [Call(triton_grouped.gated_rows, tile.grid(rows, k)[:1], args, common, tile.num_warps)]
    common["COARSE"] = coarse_columns(found)
    calls, statistic = [], None
    if found.group == (None, None):
        statistic = torch.zeros(1, dtype=torch.int32, device=hidden.device)
        calls.append(_tiles_call("amax", hidden, (None, None, None, None, statistic), segments, sizes, tile, common))
    targets = (None, codes, scale, coarse, statistic)
    return [*calls, _tiles_call("codes", hidden, targets, segments, sizes, tile, common)]


def _tiles_call(
    sink: str,
    hidden: Tensor,
    targets: tuple[Tensor | None, ...],
    segments: Segments,
    sizes: tuple[Any, ...],
    tile: Tile,
    constants: dict[str, Any],
) -> Call:
    """One launch of `gated_tiles`; `targets` are values, codes, scale, coarse and statistic."""
    unused = {"ELEMENT": "", "SCALE": "", "RULE": "", "GROUP_K": 1, "COARSE": 0, "LOG": 0, "NATIVE": False}
    blocks = {"SINK": sink, "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k}
    strides = (0, 0) if targets[2] is None else targets[2].stride()
    args = (hidden, *targets, segments.offsets, hidden.stride(0), *strides, *sizes)
    grid = tile.grid(hidden.shape[0], sizes[1])
    return Call(triton_grouped.gated_tiles, grid, args, {**unused, **constants, **blocks}, tile.num_warps)
