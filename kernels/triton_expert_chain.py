"""The first product of experts with the activation after it, as one kernel: launches of `triton_grouped_chain`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from olq_fx.errors import UnsupportedError
from olq_fx.formats import Format, get_format
from olq_fx.kernels import triton_grouped_chain
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.experts import Gated, Segments, Stack
from olq_fx.kernels.support import FLOAT8, between_refusal
from olq_fx.kernels.triton_calls import Call, as_bytes
from olq_fx.kernels.triton_experts import NAMES, expert_operand, grouped_blocking_of, strides_of_scale
from olq_fx.kernels.triton_product import TENSOR_MEMORY, Instruction, Operand, instruction_of, operand_of
from olq_fx.kernels.triton_sorting import table_calls

_MMA_SYNC = (80, 86, 89, 120)
_NARROW = 64


def expert_chain_calls(
    x: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    k: int,
    gated: Gated,
    parts: Sequence[Tensor],
    output_format: str,
    rule: str,
    like: Tensor,
    segments: Segments,
    *,
    capability: int,
    blocking: Blocking | None = None,
) -> list[Call]:
    """The kernels that fill `parts` from rows that are gathered: `experts.gated` of their product, quantized.

    Args:
        x: the parts of (T, K), or a list of one tensor.
        activation_format: their format, "" for original precision.
        stack: (E, shards x I, K): gate and up, or up alone.
        k: K.
        gated: what is computed of them.
        parts: of (M, I), in the order of experts; rows that belong to nobody are not written.
        output_format: their format; "" for a list of one tensor.
        rule: one of its scale rules.
        like: a tensor of the dtype that products and activations are rounded to.
        segments: which rows belong to which expert, with an order.
        capability: of the GPU, 90 for sm_90.
        blocking: in place of the analytic choice. Its `block_k` must divide groups of scales along K, and groups of the
            output its `block_n`.

    Raises:
        UnsupportedError: no tile holds the statistics of the output format (`support.between_refusal`).
    """
    if reason := between_refusal(output_format):
        raise UnsupportedError(f"no kernel fuses the activation between experts: {reason}")
    a, b = operand_of(x, activation_format), expert_operand(stack)
    if stack.shards > 1 and b.outer == "const" and b.group != 1:
        b = dataclasses.replace(b, group=0)  # a shard is a matrix by itself
    if b.outer == "reciprocal":
        b = dataclasses.replace(b, group=0)
    m, n = parts[0].shape[0], stack.parts[0].shape[1] // stack.shards
    found = get_format(output_format) if output_format else None
    instruction = instruction_of(a, b, k, capability)
    chosen = blocking or expert_chain_blocking(m, segments.experts, a, b, instruction, found, capability)
    table, calls = table_calls(segments, m, chosen.block_m, False)
    codes, scale, *_ = map(as_bytes, parts) if found else (None, None)
    values = None if found else parts[0]
    outer = b.outer_scale
    shard = 0 if outer is None else outer.shape[1] // stack.shards * outer.stride(1)
    args = (
        *(a.codes, a.inner_scale, a.outer_scale, b.codes, b.inner_scale, outer),
        *(None if stack.bias is None else stack.bias.contiguous(), like, values, codes, scale, table, segments.order),
        *(table.shape[1], x[0].shape[0], segments.experts, n, k, gated.alpha, gated.limit),
        *(a.codes.stride(0), *a.strides, *b.codes.stride()[:2]),
        *(*strides_of_scale(b.inner_scale), *strides_of_scale(outer), shard),
        *((0, 0) if scale is None else scale.stride()),
    )
    constants = {
        **_constants(a, b, instruction, chosen, k),
        **_output_constants(found, rule, capability),
        "GATHER": segments.top_k,
        "KIND": gated.kind,
        "SHARDS": stack.shards,
    }
    grid = (table.shape[1] * -(-n // chosen.block_n),)
    kernel = triton_grouped_chain.grouped_chain
    return [*calls, Call(kernel, grid, args, constants, chosen.num_warps, chosen.num_stages)]


def _constants(a: Operand, b: Operand, instruction: Instruction, chosen: Blocking, k: int) -> dict[str, Any]:
    return {
        **{f"A_{name}": value for name, value in zip(NAMES, a.constants, strict=True)},
        **{f"B_{name}": value for name, value in zip(NAMES, b.constants, strict=True)},
        "DOT": instruction.dot,
        "PARTS": instruction.parts,
        "PROMOTE": instruction.promote,
        "EVEN_K": k % chosen.block_k == 0,
        "UNIFORM_B": b.outer == "k" and b.group % chosen.block_n == 0,
        "SWAP": chosen.swap,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "GROUP": chosen.group,
    }


def _output_constants(format: Format | None, rule: str, capability: int) -> dict[str, Any]:
    if format is None:
        return {"ELEMENT": "", "SCALE": "", "RULE": "", "GROUP_K": 1, "LOG": 0, "NATIVE": False}
    group = format.group[1] or 1
    return {
        "ELEMENT": format.element,
        "SCALE": format.scale,
        "RULE": rule,
        "GROUP_K": group,
        "LOG": group.bit_length() - 1,
        "NATIVE": capability >= FLOAT8,
    }


def expert_chain_blocking(
    m: int, experts: int, a: Operand, b: Operand, instruction: Instruction, output: Format | None, capability: int
) -> Blocking:
    """An analytic first choice: that of a product by itself, with whole groups of the output in a tile.

    One product is held while the other is summed. That wants lower tiles where accumulators are registers of mma.sync,
    and more warps where the sums are of several parts.
    """
    found = grouped_blocking_of(m, experts, a, b, instruction, capability)
    group = (output.group[1] or 1) if output else 1
    found = dataclasses.replace(found, block_n=max(found.block_n, group))
    if instruction.parts > 1 and not found.swap:
        found = dataclasses.replace(found, num_warps=8)
    if capability in TENSOR_MEMORY and instruction.dot == "scaled" and output and output.packed:
        # The scales of block-scaled instructions are those of 128 rows: of the side that is 128 high.
        if found.swap:
            return dataclasses.replace(found, block_m=min(found.block_m, 32))
        return dataclasses.replace(found, block_n=_NARROW)
    if capability not in _MMA_SYNC:
        return found
    decoded = instruction.dot in ("bf16", "fp16")
    if found.swap or (decoded and instruction.promote):
        warps = 8 if decoded and instruction.parts == 1 and capability < FLOAT8 else found.num_warps
        return dataclasses.replace(found, block_m=min(found.block_m, 32), swap=True, num_warps=warps)
    if instruction.dot == "scaled":
        return dataclasses.replace(found, block_m=min(found.block_m, 64))
    return dataclasses.replace(found, block_n=max(_NARROW, group)) if decoded and capability == 120 else found
