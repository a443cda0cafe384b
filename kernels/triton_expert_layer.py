"""Layers of experts by Triton kernels: what `experts.layer` does, in as few kernels as the formats allow.

No function waits for the device: grids follow from shapes alone, so that a CUDA graph of a call serves all routings.
"""

import torch
from torch import Tensor

from olq_fx.formats import get_format
from olq_fx.kernels.experts import Layer, Segments, check_layer
from olq_fx.kernels.support import FLOAT8, between_refusal
from olq_fx.kernels.triton_calls import Call, run
from olq_fx.kernels.triton_expert_chain import expert_chain_calls
from olq_fx.kernels.triton_experts import empty_parts, gated_calls, grouped_calls
from olq_fx.kernels.triton_quantize import quantize_calls
from olq_fx.kernels.triton_sorting import combine_calls, route_calls


def layer(x: Tensor, ids: Tensor, weights: Tensor, experts: Layer, capability: int) -> Tensor:
    """`experts.layer`: tokens (T, H) in bf16, fp16 or float32 through the experts `ids` (T, k), times `weights`.

    Args:
        x: (T, H).
        ids: (T, k) integers.
        weights: (T, k), taken as float32.
        experts: the weights of the layer.
        capability: of the GPU, 90 for sm_90.

    Raises:
        ConversionError: operands do not fit.
    """
    check_layer(x, ids, weights, experts)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0 or ids.numel() == 0:
        return out.zero_()
    run(layer_calls(x, ids.contiguous(), weights.to(torch.float32).contiguous(), experts, out, capability))
    return out


def layer_calls(x: Tensor, ids: Tensor, weights: Tensor, experts: Layer, out: Tensor, capability: int) -> list[Call]:
    """The kernels that fill `out` (T, H); `ids` and `weights` (T, k) are contiguous, and none is empty.

    They are those of routing, the quantization of `x`, two products, and the sum over choices. What is between the
    products is done by the first one, but where `support.between_refusal` says why it cannot.
    """
    name, device, m = experts.activation_format, x.device, ids.numel()
    count, top_k = experts.gate_up.parts[0].shape[0], ids.shape[1]
    order = torch.empty(m, dtype=torch.int32, device=device)
    segments = Segments(torch.empty(count + 1, dtype=torch.int32, device=device), order, top_k)
    read = [x if x.stride(1) == 1 else x.contiguous()]
    calls = route_calls(ids, segments)
    if name:
        read = empty_parts(x.shape[0], x.shape[1], name, x, torch.empty)
        calls += quantize_calls(x, read, get_format(name), experts.rule, capability >= FLOAT8)
    between = empty_parts(m, experts.inner, name, x, torch.empty)
    calls += _first_calls(x, read, between, experts, segments, capability)
    # A token with one choice has one product: its weight is applied where that is written.
    single = top_k == 1
    rows = out if single else torch.empty((m, out.shape[1]), dtype=x.dtype, device=device)
    calls += grouped_calls(
        *(between, name, experts.down, experts.inner, rows, segments),
        scatter=True,
        weights=weights if single else None,
        tail=single,
        capability=capability,
    )
    return calls if single else [*calls, *combine_calls(rows, ids, weights, count, out)]


def _first_calls(
    x: Tensor, read: list[Tensor], between: list[Tensor], experts: Layer, segments: Segments, capability: int
) -> list[Call]:
    """The kernels from what the first product reads to what the second one does."""
    name, rule, stack = experts.activation_format, experts.rule, experts.gate_up
    if not between_refusal(name):
        return expert_chain_calls(
            *(read, name, stack, x.shape[1], experts.gated, between, name, rule, x, segments), capability=capability
        )
    hidden = torch.empty((between[0].shape[0], stack.parts[0].shape[1]), dtype=x.dtype, device=x.device)
    given = (read, name, stack, x.shape[1], hidden, segments)
    calls = grouped_calls(*given, gather=True, tail=False, capability=capability)
    native = capability >= FLOAT8
    return [*calls, *gated_calls(hidden, experts.gated, segments, between, name, rule, native, stack.shards)]
