"""Checkpoints that declare themselves quantized: what is agreed, refused, and quantized beside them."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import olq_fx
from olq_fx.candidates import candidates_of
from olq_fx.declared import declarations
from olq_fx.errors import PlanError
from olq_fx.module_uses import places
from olq_fx.plan import plan_for
from olq_fx.schemes import SCHEMES

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate", "lm_head"]}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": FP8_WEIGHTS, "input_activations": {"dynamic": True}}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["re:.*gate"]}


class Quantized(nn.Module):
    """A linear layer as others store it: codes beside their scales."""

    def __init__(self, n, k):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, k, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(n // 32, k // 32), requires_grad=False)


class Block(nn.Module):
    """An attention of one layer and an MLP of two."""

    def __init__(self, quantized=False):
        super().__init__()
        self.attn = nn.Linear(64, 64, bias=False)
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(64, 96, bias=False)
        self.mlp.down = Quantized(64, 96) if quantized else nn.Linear(96, 64, bias=False)


def model_with(declared, *, quantized=False, device=None, key="quantization_config"):
    """Two blocks; those of `quantized` hold a layer that others have quantized."""
    with torch.device(device or "cpu"):
        model = nn.Module()
        model.blocks = nn.ModuleList(Block(quantized) for _ in range(2))
    model.config = SimpleNamespace(**{key: declared})
    for module in model.modules():  # as the modules of transformers share it
        module.config = model.config
    return model


def declared_by(config):
    """What a model with this configuration declares, of its root."""
    model = nn.Linear(4, 4)
    model.config = config
    return declarations(places(model)).get("")


def decisions(plan):
    """The decision on each weight, by its path without `.weight`."""
    return {row.module_path: row.decision for row in plan.rows}


def mixed(weights, dynamic=True):
    """A declaration of compressed-tensors with one group."""
    activations = {"dynamic": True} if dynamic else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("declared", "schemes"),
    [
        (BLOCK_FP8, ("fp8_per_tensor", "fp8_per_block")),
        ({"quant_method": "fp8"}, ("fp8_per_tensor", "fp8_per_channel")),
        ({"quant_method": "fbgemm_fp8"}, ("fp8_per_channel",)),
        ({"quant_method": "mxfp4"}, ("mxfp4", "mxfp4_weight_only")),
        ({"quant_method": "mxfp8"}, ("mxfp8",)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ()),
        ({"quant_method": "gptq", "bits": 4}, ()),
        ({"bits": 4}, ()),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("nvfp4_per_token",)),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, ("fp8_per_tensor",)),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ()),
        (COMPRESSED, ("fp8_per_channel",)),
        (mixed({**FP8_WEIGHTS, "strategy": "block"}), ("fp8_per_block",)),
        (mixed(FP8_WEIGHTS, dynamic=False), ("fp8_weight_only",)),
        (mixed({"num_bits": 8, "type": "int", "strategy": "channel"}), ("int8",)),
        (mixed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, dynamic=False), ()),
        (mixed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}), ("mxfp4",)),
        (mixed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}), ("nvfp4_per_token",)),
        (
            {"quant_method": "compressed-tensors", "config_groups": {**GROUPS, "b": {"weights": {"num_bits": 4}}}},
            (),
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}},
            (),
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
                    "input_tensors": {"dtype": "fp4"},
                },
            },
            ("mxfp4",),
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
         ("int8_per_channel_weight_only",)),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, ()),
    ],
)  # fmt: skip
def test_what_the_methods_of_others_are_called_here(declared, schemes):
    assert declared_by(SimpleNamespace(quantization_config=declared)).schemes == schemes


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": BLOCK_FP8},
        SimpleNamespace(compression_config=BLOCK_FP8),
        SimpleNamespace(quantization_config=SimpleNamespace(to_dict=lambda: BLOCK_FP8)),
        SimpleNamespace(quantization_config=SimpleNamespace(**BLOCK_FP8)),
    ],
)
def test_where_a_declaration_may_stand(config):
    found = declared_by(config)
    assert (found.method, found.schemes) == ("fp8", ("fp8_per_tensor", "fp8_per_block"))
    assert found.skipped == ("mlp.gate", "lm_head")


class Failing:
    """A configuration, or a declaration, that cannot be read."""

    @property
    def quantization_config(self):
        raise RuntimeError("not loaded")

    def to_dict(self):
        raise RuntimeError("not loaded")


@pytest.mark.parametrize(
    "config",
    [
        *(None, {}, SimpleNamespace(), 7, "fp8", Failing()),
        *({"quantization_config": value} for value in (None, 7, "fp8", ["fp8"], True, {}, Failing())),
    ],
)
def test_no_declaration(config):
    assert declared_by(config) is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["float", "re:(", "*[", "Linear"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
WEIGHTS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(["type", "num_bits", "strategy", "group_size", "dtype", "qscheme"], JSON)
)
GROUP = st.fixed_dictionaries({}, optional={"targets": JSON, "weights": WEIGHTS | JSON, "input_activations": JSON})
OPTIONS = {
    "config_groups": st.dictionaries(st.text(max_size=3), GROUP | JSON, max_size=2) | JSON,
    "global_quant_config": st.fixed_dictionaries({"weight": WEIGHTS | JSON}) | JSON,
    "quant_type": st.fixed_dictionaries({"default": st.fixed_dictionaries({"_type": JSON}) | JSON}) | JSON,
} | dict.fromkeys(["quant_algo", "quantization", "quantized_layers", "ignore", "modules_to_not_convert"], JSON)
METHODS = ["fp8", "mxfp4", "compressed-tensors", "modelopt", "quark", "torchao"]


@given(st.fixed_dictionaries({"quant_method": st.sampled_from(METHODS) | JSON}, optional=OPTIONS))
def test_any_declaration_is_read(declared):
    found = declared_by({"quantization_config": declared})
    assert found.covers("linear", "blocks.0.attn") in (True, False)
    assert set(found.schemes) <= set(SCHEMES)
    assert found in {found}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_another_scheme_for_the_model_is_an_error(device):
    model = model_with(BLOCK_FP8, quantized=device == "cpu", device=device)
    with pytest.raises(PlanError) as error:
        plan_for("int8", model)
    assert str(error.value) == (
        "'int8' is asked for, but the checkpoint's configuration declares that it is quantized by 'fp8' "
        "(fp8_per_tensor or fp8_per_block here); to quantize the weights that it has in original precision, give "
        "formats for layers instead of a scheme for the model: {'linear': 'int8'}"
    )


def test_quantize_refuses_it_before_anything_is_changed():
    model = model_with(COMPRESSED, quantized=True)
    before = dict(model.named_parameters())
    with pytest.raises(PlanError, match=r"'mxfp8' is asked for, but .* 'compressed-tensors' \(fp8_per_channel here\)"):
        olq_fx.quantize_(model, "mxfp8")
    assert all(before[name] is tensor for name, tensor in model.named_parameters())


class Called(nn.Module):
    """Two layers, one of which others have quantized, that can be called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 96, bias=False)
        self.second = Quantized(64, 96)
        self.config = SimpleNamespace(quantization_config=BLOCK_FP8)

    def forward(self, x):
        return self.first(x) @ self.second.weight.to(x.dtype).T


def test_the_backend_refuses_it_too_and_goes_on_beside_it():
    torch.compiler.reset()
    x = torch.randn(3, 64)
    with pytest.raises(PlanError, match="'int8' is asked for, but the checkpoint's configuration declares"):
        torch.compile(Called(), backend=olq_fx.backend("int8", inner="eager"))(x)
    torch.compiler.reset()
    backend = olq_fx.backend({"linear": "int8"}, inner="eager")
    torch.compile(Called(), backend=backend)(x)
    assert backend.report.converted == ("first.weight",)
    torch.compiler.reset()


def test_formats_for_layers_go_to_the_rest():
    model = model_with(BLOCK_FP8, quantized=True)
    report = olq_fx.quantize_(model, {"linear": "int8"})
    assert set(report.converted) == {f"blocks.{i}.{leaf}.weight" for i in range(2) for leaf in ("attn", "mlp.gate")}
    assert "already quantized: it is stored as float8_e4m3fn" in report.plan.lookup("blocks.1.mlp.down.weight").reason


@pytest.mark.parametrize("scheme", ["fp8", "fp8_per_block"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_same_scheme_changes_nothing(scheme, device):
    model = model_with(BLOCK_FP8, quantized=device == "cpu", device=device)
    before = dict(model.named_parameters())
    report = olq_fx.quantize_(model, scheme)
    assert not report.converted
    assert not report.pending
    assert all(before[name] is tensor for name, tensor in model.named_parameters())
    assert report.plan.lookup("blocks.0.mlp.gate.weight").reason == (
        "kept in original precision by the checkpoint, which decides: the checkpoint's configuration declares that it "
        "is quantized by 'fp8' (fp8_per_tensor or fp8_per_block here)"
    )
    assert report.plan.lookup("blocks.0.mlp.down.weight").reason.startswith("already quantized: ")


def test_what_is_included_by_name_is_quantized_all_the_same():
    model = model_with(BLOCK_FP8, quantized=True)
    plan = plan_for({"quantization": "fp8_per_block", "include": ["blocks.0.mlp.gate"]}, model)
    assert [row.path for row in plan.quantized] == ["blocks.0.mlp.gate.weight"]


def test_without_weights_the_declaration_says_which_come_quantized():
    plan = plan_for({"linear": "mxfp8"}, model_with(BLOCK_FP8, device="meta"))
    assert [row.module_path for row in plan.quantized] == ["blocks.0.mlp.gate", "blocks.1.mlp.gate"]
    with pytest.raises(PlanError, match=r"names blocks\.0\.attn\.weight, which cannot be quantized: already quantized"):
        plan_for({"targets": {"blocks.0.attn": "mxfp8"}}, model_with(BLOCK_FP8, device="meta"))


@pytest.mark.parametrize(
    ("skipped", "kept"),
    [
        (["re:.*gate"], {"mlp.gate"}),
        (["blocks.*.mlp"], {"mlp.gate", "mlp.down"}),
        (["attn"], {"attn"}),
        (["att"], set()),
        (["re:(", "gate"], {"mlp.gate"}),
        ("mlp.gate", {"mlp.gate"}),
        (None, set()),
    ],
)
def test_names_that_a_method_skips(skipped, kept):
    model = model_with({**BLOCK_FP8, "modules_to_not_convert": skipped}, device="meta")
    come = {c.module_path for c in candidates_of(model) if c.blocked}
    assert come == {f"blocks.{i}.{name}" for i in range(2) for name in {"attn", "mlp.gate", "mlp.down"} - kept}


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


@pytest.mark.parametrize(
    ("declared", "come"),
    [
        (COMPRESSED, {"attn", "mlp.down"}),
        ({**COMPRESSED, "config_groups": {"a": {**GROUPS["group_0"], "targets": ["re:.*attn"]}}}, {"attn"}),
        ({**COMPRESSED, "config_groups": {"a": {"targets": ["attn"]}, "b": {"targets": ["re:.*(gate|down)"]}}},
         {"attn", "mlp.down"}),
        ({**COMPRESSED, "config_groups": {"a": {"targets": ["attn"]}, "b": {}}}, {"attn", "mlp.down"}),
        ({**MIXED, "quantized_layers": {"mlp.gate": {"quant_algo": "FP8"}}}, {"mlp.gate"}),
        (MIXED, {"attn", "mlp.gate", "mlp.down"}),
    ],
)  # fmt: skip
def test_names_of_all_that_a_method_quantized(declared, come):
    model = model_with(declared, device="meta")
    found = {c.module_path for c in candidates_of(model) if c.blocked}
    assert found == {f"blocks.{i}.{name}" for i in range(2) for name in come}


@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp8"])
def test_formats_beside_a_scheme_are_for_layers_too(scheme):
    """What is said of linear layers themselves is no part of the scheme, which the checkpoint has or has not."""
    model = model_with(BLOCK_FP8, quantized=True)
    report = olq_fx.quantize_(model, {"quantization": scheme, "linear": "int8"})
    assert set(report.converted) == {f"blocks.{i}.{leaf}.weight" for i in range(2) for leaf in ("attn", "mlp.gate")}


def test_dequantized_weights_are_like_any_others():
    assert set(decisions(plan_for("int8", model_with(BLOCK_FP8))).values()) == {"quantize"}


def test_weights_that_wait_elsewhere_are_not_taken_for_quantized():
    """Offloaded layers are on meta beside others that are stored in quantized form: both speak for themselves."""
    model = model_with(BLOCK_FP8, quantized=True)
    model.blocks[1].attn.to("meta")
    assert decisions(plan_for({"linear": "int8"}, model))["blocks.1.attn"] == "quantize"
    dequantized = model_with(BLOCK_FP8)
    dequantized.blocks[1].to("meta")
    assert set(decisions(plan_for("int8", dequantized)).values()) == {"quantize"}


def test_each_part_of_a_pipeline_declares_for_itself():
    pipeline = nn.Module()
    pipeline.encoder, pipeline.transformer = model_with(BLOCK_FP8, quantized=True), model_with(None)
    with pytest.raises(PlanError, match=r"configuration of encoder declares"):
        plan_for("int8", pipeline)
    plan = plan_for({"components": {"transformer": "int8"}}, pipeline)
    assert {row.module_path.partition(".")[0] for row in plan.quantized} == {"transformer"}
    plan = plan_for({"components": {"transformer": "int8", "encoder": "fp8_per_block"}}, pipeline)
    assert {row.module_path.partition(".")[0] for row in plan.quantized} == {"transformer"}


def test_converted_weights_are_judged_as_such():
    """A model of ours that declares what it was before: asking again for the same is no error."""
    model = model_with(None)
    olq_fx.quantize_(model, "int8")
    model.config.quantization_config = BLOCK_FP8
    assert all(candidate.checkpoint is None for candidate in candidates_of(model))
    assert olq_fx.quantize_(model, "int8").already


def test_experts_of_gpt_oss_come_quantized_and_the_rest_goes_online(olq, tmp_path):
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64}
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    ended = olq("plan", ".", "--quantization-config", '{"linear": "fp8_per_block"}', "--json")
    rows = {row["module_path"]: row for row in ended.data["rows"]}
    assert rows["model.layers.0.self_attn.q_proj"]["decision"] == "quantize"
    assert rows["model.layers.0.mlp.experts"]["decision"] == "leave"
    ended = olq("plan", ".", "--quantization-config", '{"linear": "fp8_per_block", "moe": "mxfp8"}')
    assert "already quantized: the checkpoint's configuration declares" in ended.err.replace("\n", " ")
    ended = olq("plan", ".", "-q", "fp8_per_block")
    assert (ended.code, ended.out) == (2, "")
    assert "'fp8_per_block' is asked for, but the checkpoint's configuration declares" in ended.err.replace("\n", " ")
