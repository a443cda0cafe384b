"""Configurations as people write them, and the plans of one model that they resolve to, or exactly which error."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from olq_fx.errors import OlqFxError, OlqFxWarning, PlanError
from olq_fx.plan import Plan, plan_for
from olq_fx.schemes import ALIASES, SCHEMES, Slot, pairs

T, T_DYNAMIC = "fp8_per_tensor_static / fp8_per_token", "fp8_per_tensor_static / fp8_per_tensor_dynamic"
C, B = "fp8_per_channel_static / fp8_per_token", "fp8_per_block_static / fp8_per_block_dynamic"
M8, M4, D4 = "mxfp8 / mxfp8", "mxfp4 / mxfp4", "mxfp4_dualscale / mxfp4_dualscale"
N4, I8 = "nvfp4 / nvfp4_per_token", "int8_per_channel_static / int8_per_token"
B64 = "fp8_per_block_static_64x32 / fp8_per_block_dynamic_1x32"


class Attention(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(8, 24 if name == "qkv_proj" else 8))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList([Mlp(), Mlp()])


class Layer(nn.Module):
    def __init__(self, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm = attention, mlp, nn.LayerNorm(8)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(8, 48))


class Model(nn.Module):
    """A block with fused attention and a dense MLP, one with separate attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            [
                Layer(Attention("qkv_proj", "o_proj"), Mlp()),
                Layer(Attention("q_proj", "k_proj", "v_proj", "o_proj"), Moe()),
            ]
        )
        self.lm_head = nn.Linear(8, 16)


DENSE = (
    *("layers.0.attn.qkv_proj", "layers.0.attn.o_proj"),
    *("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"),
    *("layers.1.attn.q_proj", "layers.1.attn.k_proj", "layers.1.attn.v_proj", "layers.1.attn.o_proj"),
)
EXPERTS = tuple(f"layers.1.mlp.experts.{n}.{name}_proj" for n in (0, 1) for name in ("gate", "up", "down"))
QKV = tuple(f"layers.1.attn.{name}_proj" for name in "qkv")
FIRST = tuple(path for path in DENSE if path.startswith("layers.0."))


def left(*paths: str) -> dict[str, str | None]:
    return dict.fromkeys(paths)


def only(formats: str, *paths: str) -> dict[str, str | None]:
    return dict.fromkeys(paths, formats)


def written(slot: Slot) -> str:
    return f"{slot.weight} / {slot.activation or 'none'}"


# configuration -> formats of dense layers, of experts, and of the layers that differ from that
Row = tuple[Any, str | None, str | None, dict[str, str | None]]

PLANS: list[Row] = [
    # schemes and aliases, in any spelling
    *((name, written(s.linear), written(s.moe), {}) for name, s in SCHEMES.items()),
    *((name.upper().replace("_", "-"), written(s.linear), written(s.moe), {}) for name, s in SCHEMES.items()),
    *((name, written(SCHEMES[s].linear), written(SCHEMES[s].moe), {}) for name, s in ALIASES.items()),
    (None, None, None, {}),
    ("none", None, None, {}),
    # every weight format with every activation format
    *(({"linear": {"weight": p.slot.weight, "activation": p.slot.activation}},
       written(p.slot), None, {}) for p in pairs()),
    *(({"moe": p.slot.weight}, None, written(p.slot), {}) for p in pairs() if p.default),
    # rules 0 to 2
    ({"quantization": "fp8", "quantization_config": {"moe": "mxfp4"}}, T, M4, {}),
    ({"quantization": "fp8", "moe": {"weight": "mxfp4"}}, T, M4, {}),
    ({"quantization": "fp8", "moe": {"activation": None}}, T, "fp8_per_tensor_static / none", {}),
    ({"quantization": "fp8", "linear": {"weight": None, "activation": None}}, None, T, {}),
    ({"quantization": "mxfp8", "linear": {"activation": "int8_per_token"}}, "mxfp8 / int8_per_token", M8, {}),
    ({"quantization": "online", "linear": "mxfp8"}, M8, None, {}),
    ({"linear": Slot("mxfp8", None)}, "mxfp8 / none", None, {}),
    # rule 3: targets
    ({"targets": {"layers.0.mlp.up_proj": "fp8"}}, None, None, only(T, "layers.0.mlp.up_proj")),
    ({"targets": {"layers.0.mlp.up_proj.weight": "fp8"}}, None, None, only(T, "layers.0.mlp.up_proj")),
    ({"targets": {"*": "fp8"}}, T, T, {}),
    ({"targets": {"re:layers": "fp8"}}, T, T, {}),
    ({"targets": {"*.experts.*": "mxfp4", "*.attn.*": "mxfp8"}}, None, M4,
     only(M8, *(p for p in DENSE if ".attn." in p))),
    ({"targets": {"*.up_proj": "fp8", "layers.0.*": "fp8"}}, None, None,
     only(T, *FIRST, *(p for p in EXPERTS if "up" in p))),
    ({"targets": {"lm_head": "fp8", "layers.1.mlp.gate": {"weight": "mxfp8", "activation": None}}}, None, None,
     {"lm_head": T, "layers.1.mlp.gate": "mxfp8 / none"}),
    ({"targets": {"embed_tokens": "fp8"}}, None, None, {"embed_tokens": "fp8_per_tensor_static / none"}),
    ({"targets": {"*.experts.[0].up_proj": "int8"}}, None, None, only(I8, "layers.1.mlp.experts.0.up_proj")),
    # rule 5: ignore
    ({"quantization": "fp8", "ignore": "*.mlp.*"}, T, None, left(*(p for p in DENSE if ".mlp." in p))),
    ({"quantization": "fp8", "ignore": ["re:layers.0"]}, T, T, left(*FIRST)),
    ({"quantization": "fp8", "ignore": ["layers.?.attn.o_proj"]}, T, T,
     left("layers.0.attn.o_proj", "layers.1.attn.o_proj")),
    ({"quantization": "fp8", "ignore": ["lm_head", "embed_tokens", "re:.*mlp.gate$"]}, T, T, {}),
    ({"quantization": "fp8", "ignore": ["re:.*experts"]}, T, None, {}),
    # rule 6: flat dictionaries
    ({"method": "fp8", "ignored_layers": ["layers.0.attn.o_proj"]}, T, T, left("layers.0.attn.o_proj")),
    ({"quant_method": "mxfp8", "activation_scheme": "dynamic"}, M8, M8, {}),
    # fused layers: the fused name in the model
    ({"quantization": "fp8", "ignore": ["layers.0.attn.qkv_proj"]}, T, T, left("layers.0.attn.qkv_proj")),
    ({"quantization": "fp8", "ignore": [f"layers.0.attn.{n}_proj" for n in "qkv"]}, T, T,
     left("layers.0.attn.qkv_proj")),
    ({"quantization": "fp8", "ignore": [f"layers.0.attn.{n}_proj.weight" for n in "qkv"]}, T, T,
     left("layers.0.attn.qkv_proj")),
    ({"quantization": "fp8", "ignore": ["re:layers.0.attn.[qkv]_proj$"]}, T, T, left("layers.0.attn.qkv_proj")),
    ({"quantization": "fp8", "ignore": ["*.[qkv]_proj"]}, T, T, left("layers.0.attn.qkv_proj", *QKV)),
    ({"targets": {f"layers.0.attn.{n}_proj": "fp8" for n in "qkv"}}, None, None, only(T, "layers.0.attn.qkv_proj")),
    ({"targets": {"layers.0.attn.qkv_proj": "fp8", "layers.1.attn.q_proj": "mxfp8"}}, None, None,
     {"layers.0.attn.qkv_proj": T, "layers.1.attn.q_proj": M8}),
    # and its shards in the model
    ({"quantization": "fp8", "ignore": ["layers.1.attn.qkv_proj"]}, T, T, left(*QKV)),
    ({"quantization": "fp8", "ignore": ["layers.1.attn.qkv_proj.weight"]}, T, T, left(*QKV)),
    ({"quantization": "fp8", "ignore": ["*.qkv_proj"]}, T, T, left("layers.0.attn.qkv_proj", *QKV)),
    ({"quantization": "fp8", "ignore": ["re:.*qkv_proj"]}, T, T, left("layers.0.attn.qkv_proj", *QKV)),
    ({"quantization": "fp8", "ignore": ["layers.0.mlp.gate_up_proj"]}, T, T,
     left("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")),
    ({"targets": {"*.experts.*.gate_up_proj": "fp8"}}, None, None,
     only(T, *(p for p in EXPERTS if "down" not in p))),
    ({"quantization": "fp8", "ignore": ["layers.1.attn.q_proj"]}, T, T, left("layers.1.attn.q_proj")),
    ({"quantization": "fp8", "packed_modules_mapping": {"mine": ["o_proj", "q_proj"]}, "ignore": ["*.mine"]}, T, T,
     left("layers.1.attn.o_proj", "layers.1.attn.q_proj")),
    # include
    ({"quantization": "fp8", "include": ["lm_head"]}, T, T, {"lm_head": T}),
    ({"quantization": "fp8", "include": ["embed_tokens"]}, T, T, {"embed_tokens": "fp8_per_tensor_static / none"}),
    ({"quantization": "fp8", "include": ["gate", "*.adaLN_modulation.1"]}, T, T,
     {"layers.1.mlp.gate": T, "layers.0.adaLN_modulation.1": T, "layers.1.adaLN_modulation.1": T}),
    ({"targets": {"*": "fp8"}, "include": ["lm_head"]}, T, T, {"lm_head": T}),
    # components
    ({"layers.0": "fp8", "layers.1": None}, None, None, only(T, *FIRST)),
    ({"layers": "fp8", "layers.1.mlp": "mxfp4"}, T, M4, {}),
    ({"quantization": "int8", "components": {"layers.0": "fp8"}}, I8, I8, only(T, *FIRST)),
    ({"default": "int8", "layers.0": {"method": "fp8", "ignored_layers": ["attn.o_proj"]}}, I8, I8,
     only(T, *FIRST) | left("layers.0.attn.o_proj")),
    ({"default": "int8", "layers.0": {"method": "fp8", "ignored_layers": ["layers.0.attn.o_proj"]}}, I8, I8,
     only(T, *FIRST) | left("layers.0.attn.o_proj")),
    ({"layers.0": {"targets": {"attn.qkv_proj": "mxfp4", "re:mlp": "int8"}}}, None, None,
     {"layers.0.attn.qkv_proj": M4} | only(I8, *(p for p in FIRST if ".mlp." in p))),
    ({"components": {"layers": {"0": "fp8", "default": "mxfp8"}}}, M8, M8, only(T, *FIRST)),
    # options
    ({"quantization": "fp8", "per_token_activation": False}, T_DYNAMIC, T_DYNAMIC, {}),
    ({"quantization": "fp8_per_block", "weight_block_size": [64, 32]},
     B64, B64, {}),
    ({"quantization": "fp8_per_block", "weight_block_size": [128, 128]}, B, B, {}),
    ({"quantization": "mxfp8", "weight_block_size": [64, 32]}, M8, M8, {}),
    ({"quantization": "fp8", "num_bf16_fallback_layers": 1}, T, T, left(*FIRST)),
    ({"quantization": "fp8", "num_bf16_fallback_layers": 0}, T, T, {}),
    ({"quantization": "mxfp4_dualscale"}, D4, D4, {}),
    ({"quantization": "fp8", "num_bf16_fallback_layers": 1, "include": ["layers.0.attn.o_proj"]}, T, T,
     left(*(p for p in FIRST if p != "layers.0.attn.o_proj"))),
    ({"targets": {"*": "fp8", "layers.0.attn.o_proj": "fp8"}, "num_bf16_fallback_layers": 1}, T, T,
     left(*(p for p in FIRST if p != "layers.0.attn.o_proj"))),
    ({"quantization": "fp8", "fast_accum": True}, T, T, {}),
    ({"quantization": "fp8", "linear_backend": "auto", "moe_backend": "reference"}, T, T, {}),
    ({"quantization": "nvfp4_per_token", "four_over_six": False, "allow_nonfinite": True}, N4, N4, {}),
    ({"quantization": "fp8_per_channel", "skip_unprofitable": True, "ignore": []}, C, C, {}),
]  # fmt: skip

ERRORS: list[tuple[Any, str]] = [
    ({"quantization": "fp8", "ignore": ["layers.0.attn.o_porj"]},
     "ignore: the pattern 'layers.0.attn.o_porj' matches nothing; did you mean 'layers.0.attn.o_proj' or "
     "'layers.1.attn.v_proj' or 'layers.1.attn.q_proj'?"),
    ({"quantization": "fp8", "ignore": ["layers.0.norm"]},
     "ignore: 'layers.0.norm' is no linear, expert or embedding weight, and nothing else is ever quantized; drop it"),
    ({"quantization": "fp8", "ignore": ["layers.0.attn"]},
     "ignore: 'layers.0.attn' is a container with 'layers.0.attn.o_proj' and others inside; write 'layers.0.attn.*' "
     "for all that is in it"),
    ({"targets": {"*.up_proj": "fp8", "layers.0.*": "mxfp8"}},
     "layers.0.mlp.up_proj.weight matches targets with different values: '*.up_proj', 'layers.0.*'"),
    ({"targets": {"*.up_proj": "fp8"}, "ignore": ["layers.0.*"]},
     "layers.0.mlp.up_proj.weight matches both ignore 'layers.0.*' and targets '*.up_proj'; a layer is named by one of "
     "the two"),
    ({"targets": {"lm_*": "fp8", "*.up_proj": "fp8"}},
     "targets: the pattern 'lm_*' quantizes nothing; lm_head.weight: output embedding; only its exact path opts it in, "
     "not 'lm_*'"),
    ({"quantization": "fp8", "ignore": ["*"]},
     "nothing would be quantized; embed_tokens.weight and 19 more: ignored by '*'"),
    ({"quantization": "fp8", "include": ["lm_head"], "ignore": ["lm_*"]},
     "include: the pattern 'lm_head' quantizes nothing; lm_head.weight: ignored by 'lm_*'"),
    # fused layers
    ({"quantization": "fp8", "ignore": ["layers.0.attn.q_proj"]},
     "ignore: layers.0.attn.qkv_proj is one layer for q_proj, k_proj, v_proj, and the patterns match q_proj but not "
     "k_proj, v_proj; name all of them or 'layers.0.attn.qkv_proj'"),
    ({"quantization": "fp8", "ignore": ["*.q_proj", "re:.*k_proj"]},
     "ignore: layers.0.attn.qkv_proj is one layer for q_proj, k_proj, v_proj, and the patterns match q_proj, k_proj "
     "but not v_proj; name all of them or 'layers.0.attn.qkv_proj'"),
    ({"targets": {"*.q_proj": "fp8", "*.k_proj": "fp8", "*.v_proj": "mxfp8"}},
     "layers.0.attn.qkv_proj.weight matches targets with different values: '*.k_proj', '*.q_proj', '*.v_proj'"),
    ({"targets": {"*.qkv_proj": "fp8", "layers.1.attn.q_proj": "mxfp8"}},
     "layers.1.attn.q_proj.weight matches targets with different values: '*.qkv_proj', 'layers.1.attn.q_proj'"),
    ({"quantization": "fp8", "packed_modules_mapping": {"qkv_proj": []}, "ignore": ["layers.1.attn.qkv_proj"]},
     "ignore: the pattern 'layers.1.attn.qkv_proj' matches nothing; did you mean 'layers.0.attn.qkv_proj' or "
     "'layers.1.attn.v_proj' or 'layers.1.attn.q_proj'?"),
    # components
    ({"layers.0": "fp8", "layers.2": "fp8"},
     "components: 'layers.2' is no part of the model; did you mean 'layers.1' or 'layers.0' or 'layers'?"),
    ({"layers.0": "fp8", "lm_head": "fp8"},
     "components: nothing would be quantized in 'lm_head'; output embedding"),
    ({"layers.0": "fp8", "layers.0.norm": "fp8"},
     "components: nothing would be quantized in 'layers.0.norm'; no linear, expert or embedding weight lies in it "
     "alone"),
    ({"layers.0": {"quantization": "fp8", "ignore": ["mlp.up_porj"]}},
     "components['layers.0']: ignore: the pattern 'mlp.up_porj' matches nothing; did you mean 'mlp.up_proj' or "
     "'mlp.up_proj.weight' or 'mlp.gate_proj'?"),
    ({"default": {"quantization": "fp8", "ignore": ["layers.0.attn.o_proj"]}, "layers.0": "fp8"},
     "ignore: the pattern 'layers.0.attn.o_proj' matches nothing; it lies in the component 'layers.0', whose own "
     "configuration speaks of it"),
    # options
    ({"linear": {"weight": "mxfp8"}, "num_bf16_fallback_layers": 9},
     "nothing would be quantized; layers.0.attn.qkv_proj.weight and 8 more: one of the first 9 of 2 blocks in layers, "
     "which keep their precision (num_bf16_fallback_layers); layers.1.mlp.experts.0.gate_proj.weight and 5 more: no "
     "formats are given for moe layers; layers.0.adaLN_modulation.1.weight and 1 more: modulation layer; "
     "embed_tokens.weight: embedding; layers.1.mlp.gate.weight: router of a mixture of experts; and 1 more; 'include' "
     "opts in what is left alone by default"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return Model()


def formats(plan: Plan) -> dict[str, str]:
    return {row.module_path: row.formats for row in plan.rows if row.decision == "quantize"}


def test_there_are_many():
    assert len(PLANS) + len(ERRORS) >= 150


@pytest.mark.parametrize(("given", "dense", "experts", "others"), PLANS, ids=lambda value: str(value)[:70])
def test_a_configuration_has_its_plan(model, given, dense, experts, others):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan_for(given, model)
    assert not [w for w in caught if w.category is OlqFxWarning]
    expected = dict.fromkeys(DENSE, dense) | dict.fromkeys(EXPERTS, experts) | others
    assert formats(plan) == {path: value for path, value in expected.items() if value is not None}
    assert all(row.reason for row in plan.rows if row.decision == "leave")
    again = plan_for(plan.config.to_dict(), model)
    assert again == plan


@pytest.mark.parametrize(("given", "message"), ERRORS, ids=lambda value: str(value)[:70])
def test_a_configuration_that_does_not_fit_is_this_error(model, given, message):
    with pytest.raises(OlqFxError) as caught:
        plan_for(given, model)
    assert type(caught.value) is PlanError
    assert str(caught.value) == message


def test_what_is_no_part_of_a_small_model_offers_all_that_are():
    with pytest.raises(PlanError) as caught:
        plan_for({"components": {"transformer": "fp8"}}, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    assert str(caught.value) == "components: 'transformer' is no part of the model; valid: 0, 1"


def test_one_weight_in_two_components():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    with pytest.raises(PlanError) as caught:
        plan_for({"a": "fp8", "b": "mxfp8"}, model)
    assert str(caught.value) == (
        "a.weight and b.weight are one weight, in the components 'a' and 'b', which ask for different things"
    )
    assert list(formats(plan_for({"a": "fp8", "b": "fp8"}, model))) == ["a"]


def test_a_problem_of_a_component_is_a_warning_when_not_strict(model):
    with pytest.warns(OlqFxWarning, match="'layers.2' is no part of the model"):
        plan = plan_for({"layers.0": "fp8", "layers.2": "fp8"}, model, strict=False)
    assert set(formats(plan)) == set(FIRST)


def test_components_know_their_own_options(model):
    plan = plan_for(
        {"layers.0": {"quantization": "mxfp4", "mxfp4_scale": "floor", "allow_nonfinite": True}, "layers.1": "mxfp4"},
        model,
    )
    for row in plan.quantized:
        first = row.path.startswith("layers.0.")
        assert (row.weight_rule, row.activation_rule) == (("floor", "floor") if first else ("mse", "even"))
        assert row.allow_nonfinite == first
