"""Plans: what becomes of every weight, with a reason; requests without effect and contradictions are errors."""

import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

from olq_fx.candidates import candidates_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import PlanError
from olq_fx.formats import FORMATS
from olq_fx.numerics import part_specs
from olq_fx.plan import Plan, make_plan, plan_for
from olq_fx.schemes import SCHEMES, Slot


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


DENSE = [
    f"layers.{n}.{name}"
    for n in range(2)
    for name in ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
]


def test_every_weight_has_a_row_and_every_row_left_a_reason(model):
    plan = plan_for("fp8_per_block", model)
    assert [row.path for row in plan.rows if row.decision == "quantize"] == DENSE
    reasons = {row.path: row.reason for row in plan.rows if row.decision == "leave"}
    assert reasons == {
        "own": "use unknown; pass example_inputs or use backend()",
        "embed_tokens.weight": "embedding",
        **{
            f"layers.{n}.moe.{path}": reason
            for n in range(2)
            for path, reason in {
                "gate.weight": "router of a mixture of experts",
                "experts.w1": "use unknown; pass example_inputs or use backend()",
                "experts.w2": "use unknown; pass example_inputs or use backend()",
            }.items()
        },
        "lm_head.weight": "output embedding",
    }
    assert len(plan.rows) == len(DENSE) + len(reasons)


def test_a_row(model):
    row = plan_for("nvfp4_per_token", model).lookup("layers.1.mlp.up_proj.weight")
    assert (row.kind, row.shape, row.dtype, row.transposed) == ("linear", (16, 8), torch.float32, False)
    assert row.slot == Slot("nvfp4", "nvfp4_per_token")
    assert (row.weight_rule, row.activation_rule) == ("four_over_six", "amax")
    assert row.formats == "nvfp4 / nvfp4_per_token"
    assert (row.reason, row.warning, row.asked, row.trainable) == ("", "", True, True)
    assert (row.bytes_before, row.bytes_after) == (16 * 8 * 4, 16 * 4 + 16 + 4)
    assert row.kernel


def test_the_options_reach_the_rows(model):
    config = {"quantization": "mxfp4", "mxfp4_scale": {"weight": "floor", "activation": "ceil"}}
    rows = plan_for(config, model).quantized
    assert {(row.weight_rule, row.activation_rule) for row in rows} == {("floor", "ceil")}
    weight_only = plan_for({"linear": {"weight": "mxfp4", "activation": None}}, model).quantized
    assert {(row.weight_rule, row.activation_rule) for row in weight_only} == {("mse", "")}


@pytest.mark.parametrize("weight", [f.name for f in FORMATS.values() if f.weight])
@pytest.mark.parametrize("shape", [(3, 5), (128, 128), (130, 250), (1, 1)])
def test_sizes_are_those_of_the_parts(weight, shape):
    model = nn.Sequential(nn.Linear(shape[1], shape[0], dtype=torch.bfloat16))
    plan = plan_for({"linear": weight}, model)
    row = plan.rows[0]
    assert row.bytes_before == plan.bytes_before == shape[0] * shape[1] * 2
    assert row.bytes_after == plan.bytes_after == sum(part.bytes for part in part_specs(FORMATS[weight], *shape))
    larger = row.bytes_after > row.bytes_before
    assert row.warning.startswith(
        "takes more bytes than before" if larger else "expected to be slower than in bfloat16"
    )


def test_shares_and_totals():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)), nn.LayerNorm(8))
    plan = plan_for({"quantization": "int8", "ignore": ["2"]}, model)
    assert plan.share == 0.75
    assert plan.share_of_parameters == pytest.approx(0.75 * 1024 / (1024 + 64))
    assert plan.bytes_before == 4 * 256
    assert plan.bytes_after == 256 + 3 * (64 + 32)
    assert plan.parameter_bytes == 1024 + 64


def test_names_of_shared_weights_lead_to_one_row():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    plan = plan_for("fp8", model)
    assert plan.lookup("1.weight") is plan.lookup("0.weight") is plan.rows[0]
    assert plan.get("2.weight") is None
    with pytest.raises(PlanError, match=r"'0\.wieght'.*'0\.weight'"):
        plan.lookup("0.wieght")


@pytest.mark.parametrize("pattern", ["0", "1", "0.weight", "1.weight", "*", "re:[01]$"])
def test_a_shared_weight_is_named_by_each_of_its_names(pattern):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    assert next(iter(formats(plan_for({"targets": {pattern: "fp8"}}, model)))) == "0.weight"
    refused({"quantization": "fp8", "ignore": [pattern, "2*"]}, model)


# patterns and what they select of DENSE


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ("layers.0.mlp.up_proj", ["layers.0.mlp.up_proj.weight"]),
        ("layers.0.mlp.up_proj.weight", ["layers.0.mlp.up_proj.weight"]),
        ("*.up_proj", ["layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"]),
        ("layers.0.*", DENSE[:4]),
        ("re:layers.1", DENSE[4:]),
        (r"re:.*\.mlp\.", [path for path in DENSE if ".mlp." in path]),
        ("layers.0.attn", DENSE[:2]),
        ("layers.0.attn.out_proj", DENSE[1:2]),
        (["layers.0.attn", "layers.1.attn"], DENSE[:2] + DENSE[4:6]),
        ("lm_head", []),
        ("embed_tokens", []),
        ("own", []),
        (["*.gate", "*.experts", "lm_head"], []),
    ],
)
def test_ignore(model, ignore, left):
    plan = plan_for({"quantization": "fp8", "ignore": ignore}, model)
    assert sorted(formats(plan)) == sorted(set(DENSE) - set(left))
    for path in left:
        assert plan.lookup(path).reason.startswith("ignored by ")


@pytest.mark.parametrize(
    ("targets", "quantized"),
    [
        ({"layers.0.mlp.up_proj": "fp8"}, ["layers.0.mlp.up_proj.weight"]),
        ({"*.mlp.*": "fp8"}, [path for path in DENSE if ".mlp." in path]),
        ({"layers.0.attn": "fp8"}, DENSE[:2]),
        ({"lm_head": "fp8"}, ["lm_head.weight"]),
        ({"lm_head.weight": "fp8"}, ["lm_head.weight"]),
        ({"embed_tokens": "fp8"}, ["embed_tokens.weight"]),
        ({"layers.0.moe.gate": "fp8"}, ["layers.0.moe.gate.weight"]),
        ({"*": "fp8"}, DENSE),
        ({"*": "fp8", "lm_head": "mxfp8"}, [*DENSE, "lm_head.weight"]),
        (
            {"*.up_proj": "fp8", "*.mlp.up*": "fp8_per_tensor"},
            ["layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"],
        ),
    ],
)
def test_targets(model, targets, quantized):
    plan = plan_for({"targets": targets}, model)
    assert sorted(formats(plan)) == sorted(quantized)
    for row in plan.rows:
        if row.decision == "leave" and row.path in DENSE:
            assert row.reason == "no target matches"


def test_targets_give_each_layer_its_own_formats(model):
    plan = plan_for({"targets": {"*.up_proj": "mxfp4", "*.down_proj": {"weight": "mxfp8", "activation": None}}}, model)
    assert formats(plan) == {
        f"layers.{n}.mlp.{name}.weight": written
        for n in range(2)
        for name, written in (("up_proj", "mxfp4 / mxfp4"), ("down_proj", "mxfp8 / none"))
    }


def test_a_wildcard_target_skips_what_is_left_alone_and_the_reason_says_so(model):
    row = plan_for({"targets": {"*": "fp8"}}, model).lookup("lm_head.weight")
    assert row.reason == "output embedding; only its exact path opts it in, not '*'"


@pytest.mark.parametrize(
    ("include", "added"),
    [
        ("lm_head", ["lm_head.weight"]),
        ("embed_tokens", ["embed_tokens.weight"]),
        (["lm_head", "embed_*"], ["embed_tokens.weight", "lm_head.weight"]),
        ("gate", ["layers.0.moe.gate.weight", "layers.1.moe.gate.weight"]),
        ("layers.1.moe.gate", ["layers.1.moe.gate.weight"]),
        ("*.gate", ["layers.0.moe.gate.weight", "layers.1.moe.gate.weight"]),
        ("*", ["embed_tokens.weight", "layers.0.moe.gate.weight", "layers.1.moe.gate.weight", "lm_head.weight"]),
        ("*.up_proj", []),
    ],
)
def test_include(model, include, added):
    plan = plan_for({"quantization": "fp8", "include": include}, model)
    assert sorted(formats(plan)) == sorted([*DENSE, *added])


def test_include_opens_a_layer_to_wildcard_targets(model):
    plan = plan_for({"targets": {"*_head": "mxfp8", "*.up_proj": "fp8"}, "include": "lm_head"}, model)
    assert plan.lookup("lm_head.weight").slot == Slot("mxfp8", "mxfp8")


def test_ignore_is_stronger_than_include(model):
    plan = plan_for({"quantization": "fp8", "include": ["*.gate"], "ignore": ["layers.0.moe.gate"]}, model)
    assert plan.lookup("layers.0.moe.gate.weight").reason == "ignored by 'layers.0.moe.gate'"
    assert plan.lookup("layers.1.moe.gate.weight").decision == "quantize"
    said = refused({"quantization": "fp8", "include": ["lm_head"], "ignore": ["lm_head"]}, model)
    assert "include: the pattern 'lm_head' quantizes nothing; lm_head.weight: ignored by 'lm_head'" in said


def test_an_embedding_has_no_activations(model):
    plan = plan_for({"quantization": "fp8", "include": ["embed_tokens"]}, model)
    row = plan.lookup("embed_tokens.weight")
    assert (row.kind, row.slot, row.activation_rule) == ("embedding", Slot("fp8_per_tensor_static", None), "")


def test_a_tied_output_embedding_is_one_linear_row():
    model = Model(1)
    model.lm_head.weight = model.embed_tokens.weight
    left = plan_for("fp8", model).lookup("lm_head.weight")
    assert left.reason == "output embedding (lm_head.weight), tied to the embedding embed_tokens.weight"
    for name in ("lm_head", "embed_tokens"):
        row = plan_for({"quantization": "fp8", "include": [name]}, model).lookup("lm_head.weight")
        assert (row.kind, row.decision) == ("linear", "quantize")
        assert row.names == ("embed_tokens.weight", "lm_head.weight")
        assert row.slot == Slot("fp8_per_tensor_static", "fp8_per_token")


# lists of experts


def listed() -> nn.Module:
    experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8, bias=False)}) for _ in range(2))
    return nn.ModuleDict({"proj": nn.Linear(8, 8, bias=False), "mlp": nn.ModuleDict({"experts": experts})})


def test_experts_that_are_layers_take_the_formats_of_experts():
    paths = ["mlp.experts.0.up.weight", "mlp.experts.1.up.weight"]
    assert formats(plan_for({"moe": "mxfp4"}, listed())) == dict.fromkeys(paths, "mxfp4 / mxfp4")
    both = formats(plan_for({"linear": "mxfp8", "moe": "mxfp4"}, listed()))
    assert both == {"proj.weight": "mxfp8 / mxfp8", **dict.fromkeys(paths, "mxfp4 / mxfp4")}
    dense = plan_for({"linear": "mxfp8"}, listed())
    assert list(formats(dense)) == ["proj.weight"]
    assert dense.lookup(paths[0]).reason == "no formats are given for moe layers"
    assert "experts in original precision: 512 B, 66.7% of all parameters" in str(dense)


def test_stacked_experts_are_never_silent(model):
    plan = plan_for("mxfp4", model)
    rows = [row for row in plan.rows if row.kind == "moe"]
    assert {row.decision for row in rows} == {"leave"}
    assert all(row.warning == f"{row.bytes_before} bytes of experts stay in original precision" for row in rows)
    total = sum(row.bytes_before for row in rows)
    assert f"{total / plan.parameter_bytes:.1%} of all parameters" in str(plan).splitlines()[-1]
    assert plan.share < 0.5


# the plan as a value, as text, as JSON


def test_a_plan_does_not_depend_on_the_order_of_keys(model):
    config = {"quantization": "fp8", "ignore": ["*.up_proj"], "include": ["lm_head"], "four_over_six": False}
    plans = [plan_for({key: config[key] for key in order}, model) for order in itertools.permutations(config)]
    assert all(plan == plans[0] for plan in plans)
    assert len({hash(plan) for plan in plans}) == 1


def test_json_is_strict_and_complete(model):
    plan = plan_for({"quantization": "fp8", "include": ["lm_head"]}, model)
    read = json.loads(plan.to_json(), parse_constant=lambda token: pytest.fail(token))
    assert read == plan.to_dict()
    assert read["config"] == {"quantization": "fp8_per_tensor", "include": ["lm_head"]}
    assert [row["path"] for row in read["rows"]] == [row.path for row in plan.rows]
    row = next(row for row in read["rows"] if row["path"] == "lm_head.weight")
    assert row["slot"] == {"weight": "fp8_per_tensor_static", "activation": "fp8_per_token"}
    assert (row["dtype"], row["shape"], row["decision"]) == ("float32", [20, 8], "quantize")
    assert QuantizationConfig.from_dict(read["config"]) == plan.config


def test_the_table_says_it_all(model):
    text = str(plan_for({"quantization": "nvfp4_per_token", "ignore": ["layers.0.attn"]}, model))
    for words in (
        "layers.{0,1}.mlp.up_proj.weight",
        "16 x 8",
        "float32",
        "nvfp4_per_token",
        "ignored by",
        "embed_tokens",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 220
    assert "\x1b" not in text


def test_paths_with_markup_are_shown_as_they_are():
    model = nn.ModuleDict({"[bold]x[/bold]": nn.Linear(4, 4), ":smile:": nn.Linear(4, 4)})
    text = str(plan_for("fp8", model))
    assert "[bold]x[/bold].weight" in text
    assert ":smile:.weight" in text


def test_a_plan_of_candidates_alone(model):
    config = QuantizationConfig("fp8")
    plan = make_plan(config, candidates_of(model))
    assert plan.rows == plan_for(config, model).rows
    assert plan.parameter_bytes == plan.bytes_before
    assert plan_for(config, model, candidates=candidates_of(model)[:3]).rows == plan.rows[:3]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_scheme_plans_every_dense_layer_on_every_device(scheme, device):
    with torch.device(device):
        plan = plan_for(scheme, Model(1))
    assert len(formats(plan)) == 4
    assert all(row.kernel for row in plan.quantized)


def test_patterns_need_not_know_of_torch_compile():
    model: Any = nn.Module()
    model.block = torch.compile(nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)}))
    plan = plan_for({"targets": {"block.up": "fp8"}}, model)
    assert list(formats(plan)) == ["block._orig_mod.up.weight"]
    assert list(formats(plan_for({"targets": {"block._orig_mod.up": "fp8"}}, model))) == list(formats(plan))
