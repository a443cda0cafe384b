"""Products by the Triton kernels of `triton_matmul`: what `reference.quantized_linear` does, for every pair of formats.

Which matrix instruction multiplies depends on both operands and on the GPU (`instruction_of`); how the work is cut into
programs (`Blocking`) depends on the shape.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx.formats import get_format
from olq_fx.kernels import reference, triton_gemv, triton_matmul, triton_persistent
from olq_fx.kernels.blocking import TENSOR_MEMORY as TENSOR_MEMORY
from olq_fx.kernels.blocking import Blocking, multiprocessors
from olq_fx.kernels.triton_calls import Call, as_bytes, run
from olq_fx.kernels.tuned_tables import tuned

_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""How many bfloat16 numbers make one of a wider dtype."""

_VECTOR = 16
"""Bytes that a thread loads at once."""

_PROGRAMS = 264
"""How many programs fill a large GPU: two for each of 132 multiprocessors."""

_FLOAT8 = 89
"""The first compute capability that casts to float8."""

_DESCRIPTORS = (90, *TENSOR_MEMORY)
"""Compute capabilities that read by tensor descriptors; on sm_120 triton 3.6 makes of each such load a write to local
memory."""

_BYTES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What enters a matrix instruction as it is stored, one a byte."""

_LONGEST_INT8 = (2**31 - 1) // 127**2
"""Columns whose products of int8 codes cannot overflow an int32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product, as the kernels take it: see `triton_matmul`.

    Attributes:
        side: `plain` or the element of its codes.
        codes: (R, K) values or codes.
        inner: scale that is multiplied into the codes, `e8m0`, `e4m3` or "", each of `inner_k` columns.
        outer: scale that is applied to sums: "", `const`, `reciprocal`, or `k` for one each `outer_k` columns.
        group: rows that share an outer scale, 0 for all.
        inner_scale, outer_scale: the tensors, or None.
    """

    side: str
    codes: Tensor
    inner: str = ""
    inner_k: int = 1
    outer: str = ""
    group: int = 1
    outer_k: int = 1
    inner_scale: Tensor | None = None
    outer_scale: Tensor | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the inner and of the outer scales, by row and by column."""
        return tuple(
            stride
            for scale in (self.inner_scale, self.outer_scale)
            for stride in ((0, 0) if scale is None else scale.stride())
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """In the order of the kernels' names: SIDE, INNER, INNER_K, OUTER, GROUP, OUTER_K."""
        return self.side, self.inner, self.inner_k, self.outer, self.group, self.outer_k


def operand_of(parts: Sequence[Tensor], format: str) -> Operand:
    """The parts of a quantized tensor, or a list of one plain tensor ("" for its format), as an operand."""
    if not format:
        return Operand("plain", parts[0])
    found = get_format(format)
    codes, scale, *rest = map(as_bytes, parts)
    rows, columns = found.group
    if found.scale == "float32":
        outer = "const" if columns is None else "k"
        return Operand(found.element, codes, outer=outer, group=rows or 0, outer_k=columns or 1, outer_scale=scale)
    assert columns is not None
    inside = Operand(found.element, codes, inner=found.scale, inner_k=columns, inner_scale=scale)
    if found.coarse is None:
        return inside
    high, wide = found.coarse
    outer = "reciprocal" if high is None else "const" if wide is None else "k"
    return dataclasses.replace(inside, outer=outer, group=high or 0, outer_k=wide or 1, outer_scale=rest[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """How operands enter the matrix instruction.

    Attributes:
        dot: `fp8`, `int8`, `fp16`, `bf16`, `scaled`.
        parts: how many bfloat16 make one activation.
        promote: whether sums over K-blocks are added apart, in float32.
    """

    dot: str
    parts: int
    promote: bool


def instruction_of(a: Operand, b: Operand, k: int, capability: int, fast_accum: bool = False) -> Instruction:
    """The matrix instruction for activations `a` and weight `b` on a GPU of this compute capability.

    Codes enter as they are where both are int8 or both e4m3 (from sm_89 on) without inner scales; with them where both
    have the same and no other (from sm_100 on), e4m3 with e2m1 only on sm_100 and sm_103: for sm_120 Triton 3.7 makes
    of such a pair bfloat16 by a way that spills. Else as the fp16 or bfloat16 numbers that they are, which is exact.
    Sums of fp8 products are narrow before sm_100 and are promoted to float32 each K-block, unless `fast_accum` allows
    them not to be.
    """
    by_block = "k" in (a.outer, b.outer)
    if a.side == b.side == "int8" and not by_block and k <= _LONGEST_INT8:
        return Instruction("int8", 1, False)
    if a.side == b.side == "e4m3" and not (a.inner or b.inner) and capability >= 89:
        return Instruction("fp8", 1, by_block or (capability < 100 and not fast_accum))
    native = capability in TENSOR_MEMORY or (a.side == b.side and capability >= 100)
    if native and a.inner and not by_block and (a.inner, a.inner_k) == (b.inner, b.inner_k):
        return Instruction("scaled", 1, by_block)
    if a.side == "plain":
        if a.codes.dtype == torch.float16 and b.inner != "e8m0":
            return Instruction("fp16", 1, by_block)
        return Instruction("bf16", _PARTS[a.codes.dtype], by_block)
    return Instruction("bf16", 1, by_block)


def blocking_of(m: int, n: int, k: int, a: Operand, b: Operand, instruction: Instruction, capability: int) -> Blocking:
    """An analytic first choice: the form for the number of rows, and what suits it.

    One row has the form of its own. Where codes enter the matrix instruction as they are stored and there are more
    tiles than multiprocessors, a program takes one tile after the other.
    """
    if m == 1 and _in_words(b):
        return gemv_blocking_of(n, k, b, capability)
    found = tile_blocking_of(m, n, k, a, b, instruction, capability)
    tiles = -(-m // found.block_m) * -(-n // found.block_n)
    if found.swap or instruction.dot not in _BYTES or tiles <= multiprocessors(None, capability):
        return found
    # One more tile on its way where shared memory has room for it.
    stages = 4 if capability in _DESCRIPTORS else found.num_stages
    # Of int8 on sm_100 mma.sync makes products (triton 3.7): a tile 128 high leaves too few registers to write float32.
    low = capability in TENSOR_MEMORY and instruction.dot == "int8"
    block_m = 64 if low else found.block_m
    return dataclasses.replace(found, form="persistent", num_stages=stages, block_m=block_m)


def gemv_blocking_of(n: int, k: int, b: Operand, capability: int) -> Blocking:
    """For one row: 16 bytes of codes a thread, warps side by side along K, enough programs.

    More warps where they leave no rest of K, or where K is so long that the rest is small; fewer where scales along K
    take registers, since several warps that exchange activations spill with them on sm_90 and sm_100. Of float8 that is
    scaled by row or tensor fewer rows on sm_120, where four spill by triton 3.8.
    """
    most = {"": 4, "e8m0": 2, "e4m3": 1}[b.inner]
    per_warp = _VECTOR * 32 * (2 if b.side == "e2m1" else 1)
    several = (warps for warps in (4, 2) if warps <= most)
    warps = next((some for some in several if k % (some * per_warp) == 0 or k >= 8 * some * per_warp), 1)
    heights = (2,) if (b.side, b.outer, capability) == ("e4m3", "const", 120) else (4, 2)
    block_n = next((rows for rows in heights if n >= 2 * _PROGRAMS * rows), 1)
    split = max(1, min(_PROGRAMS // -(-n // block_n), k // (warps * per_warp)))
    return Blocking(1, block_n, warps * per_warp, split_k=split, num_warps=warps, form="gemv")


def _in_words(b: Operand) -> bool:
    """Whether codes that are packed can be read four bytes at a time."""
    rows, columns = b.codes.stride(0), b.codes.stride(1)
    return b.side != "e2m1" or (columns == 1 and rows % 4 == 0 and b.codes.data_ptr() % 4 == 0)


def tile_blocking_of(
    m: int, n: int, k: int, a: Operand, b: Operand, instruction: Instruction, capability: int
) -> Blocking:
    """For tiles: few tokens on the narrow side, enough programs, tiles that stay in registers."""
    decoded = instruction.dot in ("bf16", "fp16")
    # Each part of a wide activation is one more operand in registers.
    widest = 32 if instruction.parts > 1 else 64 if decoded else 128
    if decoded and capability == 120 and a.inner and b.inner and a.side != b.side:
        widest = 32  # two ways to decode beside the accumulators
    block_k = min([widest, *(side.outer_k for side in (a, b) if side.outer == "k")])
    if m <= 64:
        block_m = max(16, min(1 << (m - 1).bit_length(), 32 if instruction.parts > 1 else 64))
        block_n = 64 if decoded else 128
        tiles = -(-m // block_m) * -(-n // block_n)
        split = max(1, min(_PROGRAMS // tiles, k // (4 * block_k), 16))
        # With four warps the copy of a tall tile out of tensor memory leaves some of it in local memory.
        tall = instruction.dot == "fp8" and capability in TENSOR_MEMORY
        warps = 8 if block_m == 64 or tall or (block_m == 32 and crowded(instruction, capability)) else 4
        return Blocking(block_m, block_n, block_k, swap=True, split_k=split, num_warps=warps)
    if instruction.parts > 1:
        return Blocking(64, 64, block_k, num_warps=8 if crowded(instruction, capability) else 4)
    # Where accumulators are registers of mma.sync, those of two sums and the operands leave no room for a larger tile.
    if decoded or (instruction.promote and capability in (86, 89, 120)):
        return Blocking(64, 128, block_k, num_warps=8)
    return Blocking(128, 128, block_k, num_warps=8)


def crowded(instruction: Instruction, capability: int) -> bool:
    """Whether the three parts of float32 leave four warps too few registers: on sm_120 some spill by triton 3.8."""
    return instruction.parts == _PARTS[torch.float32] and capability == 120


def quantized_linear(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    capability: int,
    fast_accum: bool = False,
) -> Tensor:
    """`reference.quantized_linear`: the parts of (M, K) and of (N, K) to (M, N) of `dtype`.

    Args:
        x: the parts of the activations, or a list of one tensor in bf16, fp16 or float32.
        activation_format: their format, "" for original precision.
        weight: the parts of the weight.
        weight_format: its format.
        k: K.
        dtype: bf16, fp16 or float32.
        bias: (N,) or None.
        residual: (M, N) or None, added after the rounding.
        capability: of the GPU, 90 for sm_90.
        fast_accum: lets products of fp8 with scales by row or tensor stay in the narrow accumulators of sm_89 and
            sm_90.
    """
    m, n = x[0].shape[0], weight[0].shape[0]
    if m == 0 or n == 0 or k == 0:
        return reference.quantized_linear(x, activation_format, weight, weight_format, k, dtype, bias, residual)
    out = torch.empty((m, n), dtype=dtype, device=x[0].device)
    x = x if activation_format else [x[0] if x[0].stride(1) == 1 else x[0].contiguous()]
    calls = product_calls(
        *(x, activation_format, weight, weight_format, k, out),
        bias=bias,
        residual=residual,
        capability=capability,
        fast_accum=fast_accum,
    )
    run(calls)
    return out


def product_calls(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    capability: int,
    fast_accum: bool = False,
    blocking: Blocking | None = None,
) -> list[Call]:
    """The kernels that fill `out` (M, N); the other arguments are those of `quantized_linear`.

    Args:
        blocking: in place of the tuned or the analytic choice. Its `block_k` must divide the groups of scales along K.
    """
    a, b = operand_of(x, activation_format), operand_of(weight, weight_format)
    m, n = out.shape
    instruction = instruction_of(a, b, k, capability, fast_accum)
    chosen = (
        blocking
        or tuned(
            *("product", x[0], activation_format, weight_format, out.dtype, (m, n, k), capability),
            fast_accum=fast_accum,
        )
        or blocking_of(m, n, k, a, b, instruction, capability)
    )
    bias, residual = (None if added is None else added.contiguous() for added in (bias, residual))
    partials = None
    if chosen.split_k > 1:
        kind = torch.int32 if instruction.dot == "int8" else torch.float32
        partials = torch.empty((chosen.split_k, m, n), dtype=kind, device=out.device)
    args = (*tensors_of(a, b), bias, residual, out, partials, m, n, k, *strides_of(a, b))
    if chosen.form == "gemv":
        calls = [_gemv_call(a, b, args, instruction, chosen, capability)]
    elif chosen.form == "persistent":
        calls = [_persistent_call(a, b, args, instruction, chosen, capability)]
    else:
        calls = [_tile_call(a, b, args, instruction, chosen)]
    if partials is not None:
        calls.append(_sum_call(partials, a, b, bias, residual, out))
    return calls


def _tile_call(a: Operand, b: Operand, args: tuple[Any, ...], instruction: Instruction, chosen: Blocking) -> Call:
    """One program for each tile and each part of K."""
    m, n, k = args[10:13]
    constants = {
        **constants_of(a, b, instruction, chosen, k),
        "UNIFORM_B": b.outer == "k" and b.group % chosen.block_n == 0,
        "SWAP": chosen.swap,
        "SPLIT_K": chosen.split_k,
    }
    grid = (-(-m // chosen.block_m) * -(-n // chosen.block_n), chosen.split_k)
    return Call(triton_matmul.product, grid, args, constants, chosen.num_warps, chosen.num_stages)


def _persistent_call(
    a: Operand, b: Operand, args: tuple[Any, ...], instruction: Instruction, chosen: Blocking, capability: int
) -> Call:
    """As many programs as the GPU has multiprocessors, with tensor descriptors where there are such."""
    m, n, k = args[10:13]
    fits = all(map(triton_persistent.fits_descriptor, (a.codes, b.codes)))
    tma = fits and capability in _DESCRIPTORS and instruction.dot in _BYTES
    operands = list(args[:6])
    if tma:
        for position, operand, rows in ((0, a, chosen.block_m), (3, b, chosen.block_n)):
            codes = operand.codes.view(_BYTES[instruction.dot])
            operands[position] = triton_persistent.descriptor(codes, rows, chosen.block_k)
    constants = {
        **constants_of(a, b, instruction, chosen, k),
        "UNIFORM_B": b.outer == "k" and b.group % chosen.block_n == 0,
        "TMA": tma,
        "FLATTEN": True,
    }
    tiles = -(-m // chosen.block_m) * -(-n // chosen.block_n)
    grid = (min(tiles, multiprocessors(args[8].device, capability)),)
    kernel = triton_persistent.product_persistent
    return Call(kernel, grid, (*operands, *args[6:9], *args[10:]), constants, chosen.num_warps, chosen.num_stages)


def _gemv_call(
    a: Operand, b: Operand, args: tuple[Any, ...], instruction: Instruction, chosen: Blocking, capability: int
) -> Call:
    """One program for each few elements of the row and each part of K."""
    _, n, k = args[10:13]
    constants = {
        **_constants_of_operands(a, b),
        "INTEGER": instruction.dot == "int8",
        "NATIVE": capability >= _FLOAT8,
        "WHOLE": k % 32 == 0,
        "EVEN_K": k % chosen.block_k == 0,
        "SPLIT_K": chosen.split_k,
        "CHUNK": b.inner_k if b.side == "e2m1" else _VECTOR,
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
    }
    grid = (-(-n // chosen.block_n), chosen.split_k)
    return Call(triton_gemv.gemv, grid, (*args[:10], *args[11:]), constants, chosen.num_warps, chosen.num_stages)


def tensors_of(a: Operand, b: Operand) -> tuple[Tensor | None, ...]:
    """Codes and scales, in the order of the kernels' parameters."""
    return a.codes, a.inner_scale, a.outer_scale, b.codes, b.inner_scale, b.outer_scale


def strides_of(a: Operand, b: Operand) -> tuple[int, ...]:
    """Of codes by row and of scales, in the order of the kernels' parameters."""
    return a.codes.stride(0), *a.strides, b.codes.stride(0), *b.strides


def constants_of(a: Operand, b: Operand, instruction: Instruction, blocking: Blocking, k: int) -> dict[str, Any]:
    """What all kernels that multiply are compiled for."""
    return {
        **_constants_of_operands(a, b),
        "DOT": instruction.dot,
        "PARTS": instruction.parts,
        "PROMOTE": instruction.promote,
        "EVEN_K": k % blocking.block_k == 0,
        "BLOCK_M": blocking.block_m,
        "BLOCK_N": blocking.block_n,
        "BLOCK_K": blocking.block_k,
        "GROUP": blocking.group,
    }


def _constants_of_operands(a: Operand, b: Operand) -> dict[str, Any]:
    names = ("SIDE", "INNER", "INNER_K", "OUTER", "GROUP", "OUTER_K")
    sides = (("A", a), ("B", b))
    return {
        f"{side}_{name}": value for side, operand in sides for name, value in zip(names, operand.constants, strict=True)
    }


def _sum_call(
    partials: Tensor, a: Operand, b: Operand, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> Call:
    """The kernel that adds what the programs of one tile have summed."""
    m, n = out.shape
    block_m, block_n = 8, 128
    args = (partials, a.outer_scale, b.outer_scale, bias, residual, out, m, n, a.strides[2], b.strides[2])
    constants = {
        "A_OUTER": a.outer,
        "B_OUTER": b.outer,
        "A_GROUP": a.group,
        "B_GROUP": b.group,
        "SPLIT_K": partials.shape[0],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    grid = (-(-m // block_m), -(-n // block_n))
    return Call(triton_matmul.add_partials, grid, args, constants)
