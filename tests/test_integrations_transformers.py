"""A layer of quantized experts of transformers as one operator: what it computes, and when another one does."""

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import ConfigurationError, ConfigurationTypeError
from olq_fx.integrations.transformers import NAME, use_experts
from olq_fx.testing import assert_same_bits

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MODELS = ("Qwen3Moe", "GptOss")
IDS = torch.arange(14).reshape(2, 7)


@pytest.fixture(scope="module")
def transformers() -> Any:
    # torchao, which transformers loads, logs what it lacks without a GPU.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return pytest.importorskip("transformers")


@pytest.fixture
def build(transformers: Any) -> Any:
    def of(name: str) -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, f"{name}Config")(**SIZES)
            model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        return model

    return of


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scheme", ["fp8_per_block", "nvfp4_per_token", "int8_per_channel_weight_only"])
def test_it_computes_what_the_loop_does(build: Any, name: str, scheme: str):
    model = build(name)
    olq_fx.quantize_(model, scheme)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        expected = logits(model)
        assert use_experts(model) == {}
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_same_bits(logits(compiled), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_one_operator_runs_a_layer(build: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    from olq_fx.kernels import experts

    ran = []
    original = experts.layer
    monkeypatch.setattr(experts, "layer", lambda *args, **kwargs: ran.append(1) or original(*args, **kwargs))
    model = build(name)
    use_experts(model)
    with torch.no_grad():
        logits(model)
        assert ran == []
        olq_fx.quantize_(model, {"moe": "int8"})
        logits(model)
    assert ran == [1]


def test_gradients_take_the_other_way(build: Any):
    model = build("Qwen3Moe")
    olq_fx.quantize_(model, {"moe": "int8"})
    assert use_experts(model) == {}
    with torch.no_grad():
        expected = logits(model)
    y = logits(model)
    torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


def test_layers_that_it_cannot_run_are_named_and_go_on(build: Any):
    path = "model.layers.0.mlp.experts"
    model = build("Qwen3Moe")
    assert use_experts(model) == {path: "its experts are not quantized"}
    olq_fx.quantize_(model, {"targets": {"*.gate_up_proj": "mxfp4", "*.down_proj": "int8"}})
    assert use_experts(model) == {path: "its products have different activations: 'mxfp4' and 'int8_per_token'"}
    with torch.no_grad():
        found = logits(model)
        model.set_experts_implementation("grouped_mm")
        assert_same_bits(found, logits(model))


def test_an_activation_that_is_no_known_one_is_found_by_trying(build: Any):
    model = build("Qwen3Moe")
    olq_fx.quantize_(model, {"moe": "int8"})
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = nn.Softplus()
    (reason,) = use_experts(model).values()
    assert reason.startswith("what it computes between its two products is none of silu")
    experts.act_fn = nn.GELU(approximate="tanh")
    assert use_experts(model) == {}


def test_what_has_no_experts_to_choose_is_an_error(build: Any, transformers: Any):
    with pytest.raises(ConfigurationTypeError, match="a Linear is no model of transformers 5"):
        use_experts(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="no module of this Qwen3ForCausalLM takes"):
        use_experts(build("Qwen3"))
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert NAME in ALL_EXPERTS_FUNCTIONS
