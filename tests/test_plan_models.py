"""Plans of the models of transformers, built from small configurations on meta and on the CPU."""

import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from olq_fx.errors import PlanError
from olq_fx.plan import Plan, plan_for

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = SIZES | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                               "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", MOE | {"shared_expert_intermediate_size": 32}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", MOE | {"rope_parameters": None}),
    "bert": ("BertConfig", "BertForMaskedLM", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2,
                                               "num_attention_heads": 4, "intermediate_size": 64}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64,
                                                      "num_layers": 2, "num_heads": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def build() -> Callable[..., nn.Module]:
    """Build a model by its key."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torchao", "transformers", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)
        import transformers

    def of(name: str, device: str = "meta", **changes: Any) -> nn.Module:
        config, kind, sizes = MODELS[name]
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**(sizes | changes)))
        return model

    return of


def folded(plan: Plan, decision: str) -> dict[str, str]:
    """What is decided of each kind of layer, the layers' numbers left out, with the reason."""
    return {re.sub(r"\.\d+\.", ".N.", row.path): row.reason for row in plan.rows if row.decision == decision}


ATTENTION = [f"model.layers.N.self_attn.{name}_proj.weight" for name in "qkvo"]
MLP = [f"model.layers.N.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
EXPERTS = [f"model.layers.N.mlp.experts.{name}_proj" for name in ("gate_up", "down")]
TIED = "output embedding (lm_head.weight), tied to the embedding "
EMBEDDINGS = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "output embedding"}
ROUTER = "router of a mixture of experts"

EXPECTED: dict[str, tuple[list[str], dict[str, str]]] = {
    "gpt2": (
        [f"transformer.h.N.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")],
        {
            "transformer.wte.weight": TIED + "transformer.wte.weight",
            "transformer.wpe.weight": "embedding",
        },
    ),
    "llama": (ATTENTION + MLP, EMBEDDINGS),
    "qwen3": (
        ATTENTION + MLP,
        {"model.embed_tokens.weight": TIED + "model.embed_tokens.weight"},
    ),
    "qwen3_moe": (ATTENTION + EXPERTS, {**EMBEDDINGS, "model.layers.N.mlp.gate.weight": ROUTER}),
    "qwen2_moe": (
        ATTENTION + EXPERTS + [path.replace("mlp", "mlp.shared_expert") for path in MLP],
        {
            **EMBEDDINGS,
            "model.layers.N.mlp.gate.weight": ROUTER,
            "model.layers.N.mlp.shared_expert_gate.weight": ROUTER,
        },
    ),
    "gpt_oss": (ATTENTION + EXPERTS, {**EMBEDDINGS, "model.layers.N.mlp.router.weight": ROUTER}),
    "bert": (
        [f"bert.encoder.layer.N.{name}.weight" for name in ("attention.self.query", "attention.self.key",
         "attention.self.value", "attention.output.dense", "intermediate.dense", "output.dense")]
        + ["cls.predictions.transform.dense.weight"],
        {
            "bert.embeddings.word_embeddings.weight": "output embedding (cls.predictions.decoder.weight), tied to the "
            "embedding bert.embeddings.word_embeddings.weight",
            "bert.embeddings.position_embeddings.weight": "embedding",
            "bert.embeddings.token_type_embeddings.weight": "embedding",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_is_quantized_and_what_is_left_alone(build, name, device):
    plan = plan_for("fp8_per_block", build(name, device))
    quantized, left = EXPECTED[name]
    assert sorted(folded(plan, "quantize")) == sorted(quantized)
    assert folded(plan, "leave") == left


def test_the_plan_is_the_same_on_meta(build):
    on_meta, on_cpu = (plan_for("nvfp4_per_token", build("llama", device)) for device in ("meta", "cpu"))
    for first, second in zip(on_meta.rows, on_cpu.rows, strict=True):
        assert (first.path, first.shape, first.decision, first.slot, first.bytes_after) == (
            second.path, second.shape, second.decision, second.slot, second.bytes_after,
        )  # fmt: skip


def test_conv1d_is_stored_the_other_way(build):
    plan = plan_for("int8", build("gpt2"))
    row = plan.lookup("transformer.h.1.attn.c_attn.weight")
    assert (row.shape, row.transposed) == ((96, 32), True)
    assert not any(row.transposed for row in plan_for("int8", build("llama")).rows)


def test_bytes_of_experts_that_stay_are_said(build):
    """91 % of a model left alone in silence is what peers do; here the plan and its share say so."""
    plan = plan_for({"linear": "mxfp4"}, build("qwen3_moe", num_experts=64, num_local_experts=64))
    assert plan.share < 0.1
    assert re.search(r"experts in original precision: .*, 9\d\.\d% of all parameters", str(plan))


BOTH = ["gate_up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("config", "layers", "names"),
    [
        ({"moe": "mxfp4"}, [0, 1], BOTH),
        ({"targets": {"*.experts": "mxfp4"}}, [0, 1], BOTH),
        ({"targets": {"*.mlp.experts": "mxfp4"}}, [0, 1], BOTH),
        ({"targets": {"model.layers.0.mlp.experts": "fp8"}}, [0], BOTH),
        ({"targets": {"*.experts.gate_up_proj": "fp8"}}, [0, 1], ["gate_up_proj"]),
        ({"targets": {r"re:.*\.1\.mlp\.experts\.down_proj": "fp8"}}, [1], ["down_proj"]),
        ({"moe": "int8", "ignore": ["*.experts.down_proj"]}, [0, 1], ["gate_up_proj"]),
        ({"moe": "int8", "ignore": ["model.layers.1.mlp.experts"]}, [0], BOTH),
    ],
)
def test_experts_are_asked_for_by_block_and_by_parameter(build, config, layers, names):
    plan = plan_for(config, build("qwen3_moe"))
    expected = [f"model.layers.{layer}.mlp.experts.{name}" for layer in layers for name in names]
    assert [row.path for row in plan.quantized] == expected


def test_the_two_weights_of_experts_may_have_different_schemes(build):
    plan = plan_for({"targets": {"*.experts.gate_up_proj": "mxfp4", "*.experts.down_proj": "int8"}}, build("gpt_oss"))
    assert {row.path.rpartition(".")[2]: row.formats for row in plan.quantized} == {
        "gate_up_proj": "mxfp4 / mxfp4",
        "down_proj": "int8_per_channel_static / int8_per_token",
    }


def test_of_gpt_oss_it_is_known_that_gate_and_up_take_turns(build):
    rows = {row.path.rpartition(".")[2]: row for row in plan_for("fp8", build("gpt_oss")).quantized}
    gate_up, down = rows["gate_up_proj"], rows["down_proj"]
    assert (gate_up.transposed, gate_up.shards, gate_up.interleaved) == (True, 2, True)
    assert (down.transposed, down.shards, down.interleaved) == (True, 1, False)


def test_asking_for_a_router_alone_is_an_error_that_says_how(build):
    with pytest.raises(PlanError, match=r"use unknown; pass example_inputs or use backend\(\)"):
        plan_for({"targets": {"model.layers.0.mlp.gate": "fp8"}}, build("qwen3_moe"))


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bert", "t5"])
def test_a_tied_output_layer_is_opted_in_once_under_any_name(build, name):
    model = build(name)
    tied = next(row for row in plan_for("fp8", model).rows if row.reason.startswith("output embedding ("))
    for path in tied.names:
        row = plan_for({"quantization": "fp8", "include": [path.removesuffix(".weight")]}, model).lookup(path)
        assert (row.decision, row.kind, row.names) == ("quantize", "linear", tied.names)


def test_shared_embeddings_of_t5(build):
    plan = plan_for("fp8", build("t5"))
    assert plan.lookup("shared.weight").names[:3] == (
        "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
    )  # fmt: skip
    relative = plan.lookup("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    assert (relative.kind, relative.reason) == ("embedding", "embedding")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("model.layers.1.self_attn.q_porj", "'model.layers.1.self_attn.q_proj'"),
        ("model.layer.0.mlp.up_proj", "'model.layers.0.mlp.up_proj'"),
        ("*.gate_porj", "'gate_proj'"),
        (r"re:.*\.q_porj$", "'q_proj'"),
        ("self_attn.q_proj", "matches nothing"),
        ("model.layers.0", "'model.layers.0.*'"),
        ("model.norm", "is no linear, expert or embedding weight"),
        ("model.layers.0.mlp.act_fn", "is no linear, expert or embedding weight"),
    ],
)
def test_typos_offer_the_nearest_name(build, pattern, said):
    with pytest.raises(PlanError) as caught:
        plan_for({"quantization": "fp8", "ignore": [pattern]}, build("llama"))
    assert said in str(caught.value)
