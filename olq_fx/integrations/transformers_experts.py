"""An implementation of experts for models of transformers 5: a layer of quantized experts as one operator.

    olq_fx.quantize_(model, {"moe": "mxfp4"})
    olq_fx.integrations.transformers.use_experts(model)

Every implementation of transformers' own runs on quantized experts, two products and what lies between them apart. This
one hands a whole layer to `torch.ops.olq_fx.experts`, which quantizes between its two products, multiplies only where
there are tokens, and waits for no device. A layer that it cannot run goes on as `grouped_mm`, and `use_experts` says
why.
"""

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from olq_fx.errors import ConfigurationError, ConfigurationTypeError
from olq_fx.kernels.experts import KINDS, Gated, gated
from olq_fx.weights import QuantizedStack

NAME = "olq_fx"
"""The name under which the implementation is registered."""

_OTHERWISE = "grouped_mm"


_BETWEEN = "_olq_fx_between"
"""The attribute of a module of experts that says what it computes between its products: kind, alpha and limit."""


def use_experts(model: nn.Module) -> dict[str, str]:
    """Let the quantized experts of a model run as one operator a layer.

    Args:
        model: of transformers 5 or later; its experts may be quantized before or after.

    Returns:
        Paths of the modules of experts that run as `grouped_mm` instead, each with the reason.

    Raises:
        ConfigurationTypeError: it is no model of transformers.
        ConfigurationError: its experts take no other implementation.
    """
    choose = getattr(model, "set_experts_implementation", None)
    if not callable(choose):
        raise ConfigurationTypeError(f"a {type(model).__name__} is no model of transformers 5: it chooses no experts")
    register()
    found = {path: module for path, module in model.named_modules() if _holds_experts(module)}
    if not found:
        raise ConfigurationError(f"no module of this {type(model).__name__} takes an implementation of experts")
    for module in found.values():
        between = _between(module)
        setattr(module, _BETWEEN, None if between is None else (between.kind, between.alpha, between.limit))
    choose(NAME)
    return {path: reason for path, module in found.items() if (reason := refusal(module))}


def register() -> None:
    """Give transformers the implementation `olq_fx`; a second time changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _holds_experts(module: nn.Module) -> bool:
    """Whether a module is one that `use_experts_implementation` of transformers has decorated."""
    return all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "has_gate", "_apply_gate"))


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What a module of experts computes.

    Args:
        module: the module.
        hidden_states: (T, H).
        top_k_index: (T, k), which experts each token has chosen; E for those of another device.
        top_k_weights: (T, k), what their results count.

    Returns:
        (T, H) of the dtype of `hidden_states`.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
    if needs_gradient or refusal(module):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        found: Tensor = ALL_EXPERTS_FUNCTIONS[_OTHERWISE](module, hidden_states, top_k_index, top_k_weights)
        return found
    gate_up, down = module.gate_up_proj, module.down_proj
    spec = gate_up.spec
    bias, down_bias = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    if bias is not None and spec.interleaved:
        bias = rearrange(bias, "e (n shard) -> e (shard n)", shard=spec.shards)
    y: Tensor = torch.ops.olq_fx.experts.default(
        *(hidden_states.to(gate_up.dtype), top_k_index, top_k_weights.to(torch.float32)),
        *(gate_up.parts, spec.weight, bias, 2),  # where it makes no difference, the weight itself knows no shards
        *(down.parts, down.spec.weight, down_bias),
        *(spec.activation, spec.activation_rule),
        *getattr(module, _BETWEEN),
    )
    return y.to(hidden_states.dtype)


def refusal(module: Any) -> str:
    """Why a module of experts cannot run as one operator; "" if it can."""
    if getattr(module, _BETWEEN, None) is None:
        return "what it computes between its two products is none of " + ", ".join(KINDS)
    gate_up, down = getattr(module, "gate_up_proj", None), module.down_proj
    if not isinstance(gate_up, QuantizedStack) or not isinstance(down, QuantizedStack):
        return "its experts are not quantized"
    if (gate_up.spec.activation, gate_up.spec.activation_rule) != (down.spec.activation, down.spec.activation_rule):
        return f"its products have different activations: {gate_up.spec.activation!r} and {down.spec.activation!r}"
    if gate_up.spec.kernel or down.spec.kernel:
        return "the configuration asks for the kernel of its products"
    if module.has_post_expert_norm:
        return "it has a norm after each expert"
    return ""


def _between(module: Any) -> Gated | None:
    """What a module computes between its products, found by trying; None if it is nothing that the operator knows."""
    if not module.has_gate:
        return None
    generator = torch.Generator().manual_seed(0)
    probe = 8 * torch.randn((16, 64), generator=generator)
    interleaved = not module.is_concatenated
    with torch.no_grad():
        expected = module._apply_gate(probe)
    paired = rearrange(probe, "m (n shard) -> m (shard n)", shard=2) if interleaved else probe
    for candidate in _candidates(vars(module)):
        found = gated(paired, candidate)
        if expected.shape == found.shape and torch.allclose(expected, found, rtol=1e-5, atol=1e-5):
            return candidate
    return None


def _candidates(attributes: Mapping[str, Any]) -> list[Gated]:
    alpha, limit = attributes.get("alpha"), attributes.get("limit")
    clamped = {"alpha": alpha, "limit": limit} if isinstance(alpha, float) and isinstance(limit, float) else {}
    return [Gated(kind, **clamped) for kind in KINDS]
