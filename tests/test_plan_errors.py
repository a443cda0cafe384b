"""Requests without effect, contradictions, and runs that would quantize nothing: each an error that names the layer."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from olq_fx.errors import ConfigurationError, ConversionError, OlqFxWarning, PlanError
from olq_fx.plan import Plan, plan_for


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(2, 16, 8))
        self.w2 = nn.Parameter(torch.zeros(2, 8, 8))


class Block(nn.Module):
    """A block with everything in it that is planned differently."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2)
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(8, 16), "down_proj": nn.Linear(16, 8)})
        self.moe = nn.ModuleDict({"gate": nn.Linear(8, 2, bias=False), "experts": Experts()})


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.own = nn.Parameter(torch.zeros(4, 8))
        self.lm_head = nn.Linear(8, 20, bias=False)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return Model()


def formats(plan: Plan) -> dict[str, str]:
    return {row.path: row.formats for row in plan.rows if row.decision == "quantize"}


def refused(config: object, model: nn.Module, kind: type[Exception] = PlanError, strict: bool = True) -> str:
    with pytest.raises(kind) as caught:
        plan_for(config, model, strict=strict)
    assert type(caught.value) is kind
    return str(caught.value)


# without effect


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization": "fp8", "ignore": ["layers.0.mlp.up_porj"]},
         ["ignore", "'layers.0.mlp.up_porj' matches nothing", "did you mean 'layers.0.mlp.up_proj'"]),
        ({"quantization": "fp8", "ignore": ["up_proj"]}, ["'up_proj' matches nothing"]),
        ({"quantization": "fp8", "ignore": ["*.up_porj"]}, ["no path has 'up_porj' in it; did you mean 'up_proj'"]),
        ({"quantization": "fp8", "ignore": ["re:.*up_porj"]}, ["did you mean 'up_proj'"]),
        ({"targets": {"*.down_proj": "fp8", "layers.1.mlp.up_proj.wieght": "fp8"}},
         ["did you mean 'layers.1.mlp.up_proj.weight'"]),
        ({"quantization": "fp8", "include": ["lm_haed"]}, ["include", "did you mean 'lm_head'"]),
        ({"quantization": "fp8", "ignore": ["layers.0.norm"]}, ["'layers.0.norm' is no linear, expert or embedding"]),
        ({"quantization": "fp8", "ignore": ["layers.0.norm.weight"]}, ["is no linear, expert or"]),
        ({"quantization": "fp8", "ignore": ["layers.0.mlp.up_proj.bias"]}, ["is no linear, expert or"]),
        ({"quantization": "fp8", "ignore": ["*.norm"]}, ["'*.norm' matches nothing"]),
        ({"targets": {"lm_*": "fp8", "*.up_proj": "fp8"}}, ["'lm_*' quantizes nothing", "only its exact path"]),
        ({"targets": {"*.experts": "fp8", "*.up_proj": "fp8"}}, ["'*.experts' quantizes nothing", "use unknown"]),
        ({"targets": {"ow?": "fp8", "*.up_proj": "fp8"}}, ["'ow?' quantizes nothing", "use unknown"]),
        ({"moe": "fp8", "linear": "fp8"}, ["moe: formats are given for experts, but none is quantized"]),
        ({"targets": {"*.up_proj": "fp8"}, "include": ["lm_head"]}, ["pattern 'lm_head' quantizes nothing"]),
    ],
)  # fmt: skip
def test_a_request_without_effect_is_an_error_or_a_warning(model, config, said):
    message = refused(config, model)
    for words in said:
        assert words in message
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan_for(config, model, strict=False)
    assert [str(w.message) for w in caught if w.category is OlqFxWarning] == list(plan.problems)
    assert len(plan.problems) == 1
    for words in said:
        assert words in plan.problems[0]
    assert f"warning: {plan.problems[0]}" in str(plan)


def test_all_problems_are_listed_at_once_but_not_hundreds(model):
    message = refused({"quantization": "fp8", "ignore": [f"a{n}" for n in range(300)]}, model)
    assert "'a0'" in message
    assert "'a4'" in message
    assert "and 295 more" in message
    assert "'a7'" not in message


# always errors


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("key", ["ignore", "include", "targets"])
def test_a_container_is_an_error_that_offers_its_contents(model, key, strict):
    for path in ("layers", "layers.0", "layers.0.mlp"):
        config: dict[str, Any] = (
            {"targets": {path: "fp8"}} if key == "targets" else {"quantization": "fp8", key: [path]}
        )
        message = refused(config, model, strict=strict)
        assert f"{key}: {path!r} is a container" in message
        assert f"{path + '.*'!r}" in message


def test_a_module_with_a_weight_and_layers_inside_is_a_container_too():
    model = nn.ModuleDict({"block": Model(1)})
    message = refused({"quantization": "fp8", "ignore": ["block"]}, model)
    assert "weights of its own (block.own)" in message
    assert formats(plan_for({"quantization": "fp8", "ignore": ["block.own"]}, model))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("order", [("ignore", "targets"), ("targets", "ignore")])
@pytest.mark.parametrize("ignore", ["layers.0.mlp.up_proj", "layers.0.*", "re:layers", "layers.0.mlp.up_proj.weight"])
def test_ignore_and_targets_on_one_layer(model, strict, order, ignore):
    values: dict[str, Any] = {"ignore": [ignore], "targets": {"*.up_proj": "fp8", "*.down_proj": "mxfp8"}}
    message = refused({key: values[key] for key in order}, model, strict=strict)
    for words in ("layers.0.mlp.up_proj.weight", repr(ignore), "'*.up_proj'", "ignore", "targets"):
        assert words in message


@pytest.mark.parametrize("order", [("*.up_proj", "layers.0.*"), ("layers.0.*", "*.up_proj")])
def test_two_targets_with_different_values(model, order):
    values = {"*.up_proj": "mxfp8", "layers.0.*": "fp8"}
    message = refused({"targets": {key: values[key] for key in order}}, model)
    for words in ("layers.0.mlp.up_proj.weight", "'*.up_proj'", "'layers.0.*'", "different values"):
        assert words in message


def test_what_cannot_be_quantized_is_an_error_when_it_is_named(model):
    assert "'own' names own, which cannot be quantized: use unknown" in refused({"targets": {"own": "fp8"}}, model)
    path = "layers.0.moe.experts.w2"
    assert f"names {path}, which cannot be quantized: use unknown" in refused({"targets": {path: "fp8"}}, model)
    assert "cannot be quantized" in refused({"targets": {"layers.0.moe.experts": "fp8"}}, model)
    tree = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert "computed by a parametrization" in refused({"targets": {"0": "fp8"}}, tree)
    assert "computed by a parametrization" in refused({"targets": {"0.weight": "fp8"}}, tree)
    bag = nn.ModuleList([nn.EmbeddingBag(4, 4), nn.Linear(4, 4)])
    assert "EmbeddingBag" in refused({"quantization": "fp8", "include": ["0"]}, bag)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization": "fp8", "ignore": ["*"]}, "ignored by '*'"),
        ({"moe": "mxfp4"}, "no formats are given for linear layers|use unknown"),
        ({"targets": {"*.experts": "mxfp4"}}, "no target matches|use unknown"),
        ({"targets": {"*_head": "mxfp4"}}, "no target matches|quantizes nothing"),
        ({"quantization": "fp8", "ignore": ["layers.*"]}, "use unknown"),
    ],
)
def test_a_run_that_quantizes_nothing_is_an_error_whatever_strict(model, config, said, strict):
    with pytest.raises(PlanError, match=said):
        plan_for(config, model, strict=strict)


def test_a_model_of_protected_layers_only_says_how_to_include_them():
    message = refused("fp8", nn.ModuleDict({"lm_head": nn.Linear(4, 4)}))
    assert message == (
        "nothing would be quantized; lm_head.weight: output embedding; 'include' opts in what is left alone by default"
    )


@pytest.mark.parametrize("empty", [nn.ReLU(), nn.Sequential(), nn.LayerNorm(4), nn.Conv2d(3, 4, 3)], ids=repr)
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_without_weights_to_quantize(empty, strict):
    assert "nothing to quantize: the model has no linear" in refused("fp8", empty, strict=strict)
    assert plan_for(None, empty).rows == ()


@pytest.mark.parametrize(
    "config", [None, "none", {"quantization": None}, {"quantization": "none", "ignore": ["lm_head"]}]
)
def test_none_leaves_everything_alone(model, config):
    plan = plan_for(config, model)
    assert {row.decision for row in plan.rows} == {"leave"}
    assert all(row.reason for row in plan.rows)
    assert (plan.share, plan.bytes_before) == (0, plan.bytes_after)
    assert "nothing is asked for" in str(plan)


def test_even_none_checks_its_patterns(model):
    refused({"quantization": "none", "ignore": ["typo"]}, model)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_other_dtypes(dtype, strict):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    name = str(dtype).removeprefix("torch.")
    for config in ("fp8", {"targets": {"*": "fp8"}}, {"targets": {"1": "fp8"}}):
        message = refused(config, model, ConversionError, strict)
        for words in ("1.weight", name, "bfloat16", "'ignore'"):
            assert words in message
    assert list(formats(plan_for({"quantization": "fp8", "ignore": ["1"]}, model))) == ["0.weight"]
    assert list(formats(plan_for({"targets": {"0": "fp8"}}, model))) == ["0.weight"]


def test_layers_of_quantized_checkpoints_keep_their_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model[1].register_buffer("weight_scale", torch.ones(1))
    plan = plan_for("fp8", model)
    assert list(formats(plan)) == ["0.weight"]
    assert "already quantized" in plan.lookup("1.weight").reason
    assert "already quantized" in refused({"targets": {"1": "mxfp8"}}, model)


def test_a_catastrophic_expression_ends():
    model = nn.ModuleDict({"q_projection_of_the_first_attention_layer_of_all": nn.Linear(4, 4)})
    pattern = "re:(?:a|[a-z._0-9]|[a-z]{2})+[A-Z]"
    message = refused({"quantization": "fp8", "ignore": [pattern]}, model, ConfigurationError)
    assert pattern in message
    assert "100 ms" in message
