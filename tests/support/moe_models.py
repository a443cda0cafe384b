"""Models with experts for the tests of whole models: those of transformers from small configurations, the trained one,
and blocks whose sizes a test chooses."""

import pathlib
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx.optional_packages import load_transformers

TRAINED = pathlib.Path(__file__).parents[1] / "data" / "tiny-qwen3moe-wiki"

FORMS = ("eager", "batched_mm", "grouped_mm")
"""The implementations of experts that transformers has for every device."""

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DEEPSEEK = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
# name -> (configuration, model, changes of sizes)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"rope_parameters": None}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {"intermediate_size_mlp": 64}),
}


def built(name: str, form: str = "", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model in evaluation mode with random weights, whose experts are computed in a form.

    Args:
        name: of `MODELS`, or `trained`: the trained model, or `trained_1`: its first layer alone.
        form: of `FORMS`; "" for what the model does by itself.
        dtype: of its parameters.
        changes: of the configuration.
    """
    transformers = load_transformers()
    if name.startswith("trained"):
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(str(TRAINED), dtype=dtype)
        if name.endswith("_1"):
            model.model.layers = model.model.layers[:1]
    else:
        config, kind, own = MODELS[name]
        model = getattr(transformers, kind)(getattr(transformers, config)(**_SIZES | own | changes))
        _fill(model)
    if form:
        model.set_experts_implementation(form)
    return model.eval().requires_grad_(False).to(dtype)


def _fill(model: nn.Module) -> None:
    """Values that reach the output: what the models start with is too small for that."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def words(rows: int = 2, length: int = 12) -> Tensor:
    """Token numbers for any of the models."""
    return (torch.arange(rows * length).view(rows, length) * 37) % 91 + 3


def logits(model: Any, ids: Tensor) -> Tensor:
    """What a model, compiled or not, makes of token numbers."""
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def stacks(model: nn.Module) -> dict[str, Tensor]:
    """The weights of experts by path: all parameters of three dimensions."""
    return {path: parameter for path, parameter in model.named_parameters() if parameter.dim() == 3}


def experts_of(model: nn.Module) -> Any:
    """The module of experts of the first layer."""
    return next(module for path, module in model.named_modules() if path.endswith(".experts"))


def experts(kind: str = "qwen3_moe", form: str = "grouped_mm", dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """One module of experts alone.

    Args:
        kind: of `MODELS`, not llama4.
        form: of `FORMS`.
        dtype: of its parameters.
        sizes: `experts`, `hidden`, `inner`.
    """
    count, inner = sizes.get("experts", 4), sizes.get("inner", 48)
    changes: dict[str, Any] = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), inner),
        "hidden_size": sizes.get("hidden", 64),
        "num_experts_per_tok": min(2, count),
    }
    return experts_of(built(kind, form, dtype, **changes))
