"""The stacks of experts in the models of transformers, in each of their forms, found by a traced call without data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from olq_fx.candidates import Candidate, candidates_of, combine
from olq_fx.errors import PlanError
from olq_fx.optional_packages import load_transformers
from olq_fx.passes import find_uses
from olq_fx.passes.capture import linear_uses

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHARED = {"shared_expert_intermediate_size": 32}
DEEPSEEK = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# name -> (configuration, model, changes, the block with the experts, its router, whether stacks are (E, K, N))
MODELS: dict[str, tuple[str, str, dict[str, Any], str, str, bool]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {}, "mlp", "gate", False),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", SHARED, "mlp", "gate", False),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {}, "mlp", "gate", False),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK, "mlp", "gate", False),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"rope_parameters": None}, "mlp", "router", True),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {"intermediate_size_mlp": 64}, "feed_forward", "router", True),
}  # fmt: skip
FORMS = [
    pytest.param(name, form, dtype, marks=() if each and (form != "eager" or name == "gpt_oss") else pytest.mark.slow)
    for name in MODELS
    for form in ("grouped_mm", "batched_mm", "eager")
    for dtype in (torch.float32, torch.bfloat16)
    for each in [(dtype == torch.bfloat16) == (form == "grouped_mm")]
    if name != "llama4"
]


def built(name: str, form: str, dtype: torch.dtype) -> Any:
    """A model without data whose experts are computed in a form ("" for the only one that it has)."""
    config, kind, changes, *_ = MODELS[name]
    transformers = load_transformers()
    with torch.device("meta"):
        made = getattr(transformers, kind)(getattr(transformers, config)(**SIZES | changes))
    if form:
        made.set_experts_implementation(form)
    return made.eval().to(dtype)


def traced(model: nn.Module) -> tuple[Candidate, ...]:
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    return linear_uses(model, (), {"input_ids": tokens, "use_cache": False})


@pytest.mark.parametrize(("name", "form", "dtype"), [*FORMS, ("llama4", "", torch.float32)])
def test_experts_of_models_are_found(name: str, form: str, dtype: torch.dtype):
    model = built(name, form, dtype)
    found = {candidate.path: candidate for candidate in traced(model)}
    assert not form or model.get_experts_implementation() == {"": form}
    *_, block, router, transposed = MODELS[name]
    at = f"model.layers.0.{block}"
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    assert {path: (c.shape, c.transposed, c.left_alone) for path, c in found.items() if c.kind == "moe"} == {
        f"{at}.experts.gate_up_proj": ((4, 2 * inner, hidden), transposed, ""),
        f"{at}.experts.down_proj": ((4, hidden, inner), transposed, ""),
    }
    assert (found[f"{at}.{router}.weight"].kind, found[f"{at}.{router}.weight"].shape) == ("linear", (4, hidden))
    known = {candidate.path: candidate for candidate in combine(candidates_of(model), found.values(), whole=True)}
    assert known[f"{at}.{router}.weight"].left_alone == "router of a mixture of experts"
    assert {path for path, candidate in known.items() if candidate.kind == "moe" and candidate.use_known} == {
        path for path, candidate in found.items() if candidate.kind == "moe"
    }


def test_operators_of_transformers_by_both_names(capture):
    load_transformers().MixtralForCausalLM  # defines them  # noqa: B018
    call, weight = torch.ops.transformers.grouped_mm_fallback, nn.Parameter(torch.ones(4, 6, 8))
    x, offsets = torch.ones(5, 8), torch.tensor([1, 2, 3, 5])
    captured = capture(
        lambda: call(x, weight.mT, offsets) + call.default(x, weight.mT, offs=offsets), weights={"w": weight}
    )
    (uses,) = find_uses.stack_uses(captured.gm)
    assert [use.transposed for use in uses.products] == [False, False]


class Looped(nn.Module):
    """A loop over experts that nobody but its author knows."""

    def __init__(self, *, hit: bool) -> None:
        super().__init__()
        self.hit = hit
        self.experts = nn.Parameter(torch.ones(4, 8, 8))
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.before(x)
        y = torch.zeros_like(x)
        for expert in F.one_hot(ids, 4).sum(0).nonzero()[:, 0] if self.hit else range(4):
            rows = torch.where(ids == expert)[0]
            y.index_add_(0, rows, F.linear(x[rows], self.experts[expert]))
        return self.after(y)


IDS = torch.tensor([0, 1, 1, 3, 0])


def test_loop_over_all_experts_is_traced():
    found = {candidate.path: candidate for candidate in linear_uses(Looped(hit=False), (torch.ones(5, 8), IDS))}
    assert {path: candidate.kind for path, candidate in found.items()} == {
        "before.weight": "linear",
        "after.weight": "linear",
        "experts": "moe",
    }
    assert (found["experts"].shape, found["experts"].transposed, found["experts"].obstacle) == ((4, 8, 8), False, "")


def test_expert_that_data_chooses_is_traced():
    class First(Looped):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.before(x) @ self.experts[ids[0].item()]

    found = {candidate.path: candidate for candidate in linear_uses(First(hit=False), (torch.ones(5, 8), IDS))}
    assert (found["experts"].kind, found["experts"].transposed) == ("moe", True)


def test_loop_over_chosen_experts_needs_data():
    with pytest.raises(PlanError, match=r"Looped cannot be traced without data .*leave them out"):
        linear_uses(Looped(hit=True), (torch.ones(5, 8), IDS))
