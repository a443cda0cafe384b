"""linear -> pointwise chain -> quantization as one kernel: launches of `triton_chain`.

A chain is: the product with its bias, rounded; plus a residual, rounded; an activation, rounded; times the other half
of a gated product, rounded. What leaves is codes and scales of any format whose groups are short pieces of a row, in
the layout that the next product reads; and the values too, where somebody else needs them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.errors import UnsupportedError
from olq_fx.formats import Format, get_format
from olq_fx.kernels import reference, triton_chain
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.producers import Activation, ActivationKind, activate
from olq_fx.kernels.support import chain_refusal
from olq_fx.kernels.triton_calls import Call, as_bytes, run
from olq_fx.kernels.triton_product import (
    TENSOR_MEMORY,
    Instruction,
    Operand,
    constants_of,
    instruction_of,
    operand_of,
    strides_of,
    tensors_of,
    tile_blocking_of,
)
from olq_fx.kernels.tuned_tables import tuned

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_FLOAT8 = 89
_MMA_SYNC = (80, 86, 89, 120)


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """What happens between a product and the quantization of its result.

    Attributes:
        kind: an activation, or "" for none.
        gated: where the rows of gate and up are in a weight (2 I, K): `paired` halves or `interleaved`; "" where the
            product is not gated.
    """

    kind: ActivationKind | Literal[""] = ""
    gated: Literal["", "paired", "interleaved"] = ""


def linear_chain_quantize(
    x: Sequence[Tensor],
    activation_format: str,
    weight: Sequence[Tensor],
    weight_format: str,
    k: int,
    dtype: torch.dtype,
    chain: Chain,
    output_format: str,
    rule: str,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    keep: bool = False,
    capability: int,
    blocking: Blocking | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Quantize `chain(x @ weight.T + bias)` in the kernel that computes it.

    Args:
        x: the parts of (M, K), or a list of one tensor.
        activation_format: their format, "" for original precision.
        weight: the parts of (N, K).
        weight_format: its format.
        k: K.
        dtype: what the product and each step of the chain are rounded to: bf16, fp16 or float32.
        chain: what is computed of the product. The result is (M, N), or (M, N / 2) where it is gated.
        output_format: what the result is quantized to.
        rule: one of its scale rules.
        bias: (N,) or None.
        residual: (M, N) or None; not where the chain is gated.
        keep: whether the values are wanted too.
        capability: of the GPU, 90 for sm_90.
        blocking: in place of the tuned or the analytic choice; without swap and split.

    Returns:
        The parts of the result, and its values or None.

    Raises:
        UnsupportedError: the format's groups are no pieces of rows; a residual of a gated product.
    """
    found = get_format(output_format)
    m, n = x[0].shape[0], weight[0].shape[0]
    width = n // 2 if chain.gated else n
    specs = numerics.part_specs(found, m, width)
    if m == 0 or width == 0 or k == 0:
        return _of_nothing(x[0], (m, width), dtype, chain, found, rule, bias, residual, keep)
    parts = [torch.empty(spec.shape, dtype=spec.dtype, device=x[0].device) for spec in specs]
    values = torch.empty((m, width), dtype=dtype, device=x[0].device) if keep else None
    operands = operand_of(x, activation_format), operand_of(weight, weight_format)
    blocking = blocking or tuned(
        *("chain", x[0], activation_format, weight_format, dtype, (m, n, k), capability),
        chain=chain.kind,
        gated=chain.gated,
        output=output_format,
    )
    call = chain_call(
        *operands, k, dtype, chain, parts, found, rule, bias, residual, values, capability=capability, blocking=blocking
    )
    run([call])
    return parts, values


def _of_nothing(
    like: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    chain: Chain,
    format: Format,
    rule: str,
    bias: Tensor | None,
    residual: Tensor | None,
    keep: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """The result where no product is summed, or K = 0, where bias and residual are all there is."""
    columns = shape[1] * (2 if chain.gated else 1)
    y = reference.finish(torch.zeros((shape[0], columns), device=like.device), dtype, bias, residual)
    if chain.kind and y.numel():
        y = activate(Activation(chain.kind, chain.gated or None), [y])
    elif chain.gated:
        y = y[:, : shape[1]]
    return list(numerics.quantize(y, format, rule)), y if keep else None


def chain_call(
    a: Operand,
    b: Operand,
    k: int,
    dtype: torch.dtype,
    chain: Chain,
    parts: Sequence[Tensor],
    format: Format,
    rule: str,
    bias: Tensor | None,
    residual: Tensor | None,
    values: Tensor | None,
    *,
    capability: int,
    blocking: Blocking | None = None,
) -> Call:
    """The kernel that fills `parts` and `values`; the arguments are those of `linear_chain_quantize`."""
    reason = chain_refusal(format, bool(chain.gated), residual is not None, b.codes.shape[0])
    if reason:
        raise UnsupportedError(f"no kernel fuses this chain: {reason}")
    m, n = a.codes.shape[0], b.codes.shape[0]
    instruction = instruction_of(a, b, k, capability)
    chosen = blocking or chain_blocking(m, n, k, a, b, instruction, format, chain, capability)
    group = format.group[1] or 1
    per_tile = chosen.block_n * (2 if chain.gated else 1)
    constants = {
        **constants_of(a, b, instruction, chosen, k),
        "UNIFORM_B": b.outer == "k" and b.group % per_tile == 0 and chain.gated != "paired",
        "KIND": chain.kind,
        "GATED": chain.gated,
        "DTYPE": _NAMES[dtype],
        "ELEMENT": format.element,
        "SCALE": format.scale,
        "RULE": rule,
        "GROUP_K": group,
        "LOG": group.bit_length() - 1,
        "NATIVE": capability >= _FLOAT8,
    }
    codes, scale = map(as_bytes, parts)
    bias, residual = (None if added is None else added.contiguous() for added in (bias, residual))
    args = (*tensors_of(a, b), bias, residual, values, codes, scale, m, n, k, *strides_of(a, b), *scale.stride())
    width = n // 2 if chain.gated else n
    grid = (-(-m // chosen.block_m) * -(-width // chosen.block_n),)
    return Call(triton_chain.product_chain, grid, args, constants, chosen.num_warps, chosen.num_stages)


def chain_blocking(
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    instruction: Instruction,
    format: Format,
    chain: Chain,
    capability: int,
) -> Blocking:
    """An analytic first choice: whole groups in a tile, no more accumulators than registers hold."""
    block_k = tile_blocking_of(m, n, k, a, b, instruction, capability).block_k
    group = format.group[1] or 1
    # Block scales are applied in tensor memory for 128 rows at a time.
    block_m, warps = 128 if instruction.dot == "scaled" and capability in TENSOR_MEMORY else 64, 8
    block_n = max(group, 64 if chain.gated else 32)
    if block_m == 128 and format.element == "e2m1" and not triton_chain.PACKS_WIDE:
        block_n = group
    if capability in _MMA_SYNC:
        # Lower tiles are of use; accumulators and the operands are registers of the same threads.
        block_m = max(16, min(64, 1 << (m - 1).bit_length()))
        if chain.gated:
            block_m = min(block_m, 32 if block_n > 64 else 64)
        elif block_m < 64:
            warps = 4
    return Blocking(block_m, block_n, block_k, num_warps=warps)
