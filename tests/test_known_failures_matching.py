"""What is found, what is left alone, and what must not be silent. Numbers 13 to 18."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import olq_fx
from olq_fx.errors import ConfigurationError, PlanError
from olq_fx.schemes import SCHEMES
from olq_fx.testing import (
    MODELS,
    Conv1D,
    RecordingBackend,
    SelfAttention,
    assert_layer_close,
    assert_same_bits,
    live_bytes,
    model_case,
)

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


class Uses(nn.Module):
    """One bare parameter for each way of writing a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("f_linear", "times_t", "matmul", "einsum"):
            self.register_parameter(name, nn.Parameter(torch.randn(40, 72) / 8))
        self.addmm = nn.Parameter(torch.randn(72, 40) / 8)
        self.mm = nn.Parameter(torch.randn(72, 40) / 8)
        self.bias = nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "f_linear": linear(x, self.f_linear, self.bias),
            "times_t": x @ self.times_t.T,
            "matmul": torch.matmul(x, self.matmul.t()),
            "einsum": torch.einsum("bi,oi->bo", x, self.einsum),
            "addmm": torch.addmm(self.bias, x, self.addmm),
            "mm": x.mm(self.mm),
        }


@every_scheme
def test_13_every_way_of_writing_a_linear_layer_is_found(route, scheme):
    model = Uses()
    x = torch.randn(6, 72)
    quantized = route(model, scheme, x, functional=True)
    assert sorted(quantized.converted) == sorted(quantized(x))
    for name, y in quantized(x).items():
        bias = model.bias if name in ("f_linear", "addmm") else None
        assert_layer_close(y, x, model.get_parameter(name), bias)
        assert model.get_parameter(name).spec.transposed == (name in ("addmm", "mm"))


@every_scheme
@pytest.mark.parametrize("name", ["conv1d", "attention"])
def test_13_conv1d_and_attention_are_found_as_they_are(route, scheme, name):
    case = model_case(name)
    quantized = route(case.model, scheme, *case.args)
    assert quantized.converted == case.weights
    if name == "conv1d":
        hidden = torch.randn(2, 3, 48)
        first: nn.Module = case.model[0]
        with torch.no_grad():
            assert_layer_close(first(hidden), hidden, first.weight, first.bias)


def test_13_without_an_example_unknown_uses_are_listed_and_not_converted(unchanged):
    model = nn.ModuleDict({"known": nn.Linear(72, 40), "unknown": Uses()})
    report = olq_fx.quantize_(model, "mxfp8")
    assert report.converted == ("known.weight",)
    for name in ("f_linear", "times_t", "matmul", "einsum", "addmm", "mm"):
        row = report.plan.lookup(f"unknown.{name}")
        assert row.decision == "leave"
        assert row.reason == "use unknown; pass example_inputs or use backend()"


@pytest.mark.parametrize("pattern", ["times_t", "re:times", "times*"])
def test_13_a_pattern_that_names_an_unknown_use_is_an_error_that_says_so(unchanged, pattern):
    model = Uses()
    with (
        unchanged(model),
        pytest.raises(PlanError, match=r"times_t.*use unknown; pass example_inputs or use backend\(\)"),
    ):
        olq_fx.quantize_(model, {"targets": {pattern: "mxfp8"}})


@every_scheme
def test_14_two_layers_that_share_a_parameter(route, scheme):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    x = torch.randn(5, 64)
    quantized = route(model, scheme, x)
    assert model[1].weight is model[0].weight
    assert quantized.converted == ("0.weight",)
    assert set(quantized.report.plan.lookup("0.weight").names) == {"0.weight", "1.weight"}
    assert quantized.report.plan.lookup("1.weight") is quantized.report.plan.lookup("0.weight")
    with torch.no_grad():
        between = model[0](x)
    assert_layer_close(quantized(x), between, model[1].weight, model[1].bias)


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 64)
        self.proj = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lm_head(self.proj(self.embed_tokens(tokens)))
        return y


@every_scheme
def test_14_a_tied_embedding_is_left_alone_and_said_so(route, scheme):
    model = Tied()
    original = model.embed_tokens.weight
    quantized = route(model, scheme, torch.arange(8))
    assert quantized.converted == ("proj.weight",)
    assert model.lm_head.weight is model.embed_tokens.weight is original
    row = quantized.report.plan.lookup("lm_head.weight")
    assert row.decision == "leave"
    assert re.search("embedding|output", row.reason)
    assert "lm_head" in str(quantized.report)


@every_scheme
def test_14_a_tied_embedding_opted_in_keeps_the_tie_and_its_rows(route, scheme):
    model = Tied()
    tokens = torch.tensor([3, 0, 49, 3])
    quantized = route(model, {"quantization": scheme, "include": ["lm_head", "embed_tokens"]}, tokens)
    assert len(quantized.converted) == 2
    assert model.lm_head.weight is model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, olq_fx.QuantizedWeight)
    with torch.no_grad():
        assert_same_bits(model.embed_tokens(tokens), model.embed_tokens.weight.dequantize()[tokens])
        hidden = model.proj(model.embed_tokens(tokens))
    assert_layer_close(quantized(tokens), hidden, model.lm_head.weight)


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"quantization": "fp8", "ignore": ["q_prj"]}, "q_proj"),
        ({"quantization": "fp8", "ignore": ["re:.*gate_prj"]}, "gate_proj"),
        ({"quantization": "fp8", "ignore": ["gate_proj*x"]}, "gate_proj"),
        ({"targets": {"down_poj": "mxfp8"}}, "down_proj"),
        ({"targets": {"q_proj.wieght": "mxfp8"}}, "q_proj.weight"),
    ],
    ids=str,
)
def test_15_a_pattern_with_a_typo_is_an_error_with_the_nearest_path(route, unchanged, config, nearest):
    case = model_case("llama_block")
    pattern = config.get("ignore") or list(config["targets"])
    with unchanged(case.model), pytest.raises(PlanError) as caught:
        route(case.model, config, *case.args)
    assert pattern[0] in str(caught.value)
    assert nearest in str(caught.value)


def test_15_a_typo_is_a_warning_when_not_strict(route):
    case = model_case("llama_block")
    with pytest.warns(olq_fx.OlqFxWarning, match="q_prj"):
        quantized = route(case.model, {"quantization": "fp8", "ignore": ["q_prj"]}, *case.args, strict=False)
    assert len(quantized.converted) == 7


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {"quantization": "fp8", "ignore": ["*"]},
        {"quantization": "fp8", "linear": {"weight": None, "activation": None}},
        {"quantization": "online", "moe": "mxfp4"},
    ],
    ids=str,
)
def test_15_a_run_that_quantizes_nothing_is_an_error(route, unchanged, config, strict):
    case = model_case("llama_block")
    with unchanged(case.model), pytest.raises(PlanError, match="nothing"):
        route(case.model, config, *case.args, strict=strict)


def test_15_none_quantizes_nothing_and_that_is_no_error(route, unchanged):
    case = model_case("llama_block")
    with unchanged(case.model):
        quantized = route(case.model, None, *case.args)
        assert quantized.converted == ()
        with torch.no_grad():
            assert_same_bits(quantized(*case.args), case.model(*case.args))


def test_15_a_model_without_candidates_is_an_error(route, unchanged):
    model = nn.Sequential(nn.ReLU(), nn.LayerNorm(8))
    with unchanged(model), pytest.raises(PlanError, match="nothing"):
        route(model, "fp8", torch.randn(2, 8))


@pytest.mark.parametrize("keys", list(itertools.permutations(["ignore", "targets"])), ids=str)
@pytest.mark.parametrize("ignored", ["q_proj", "q_proj.weight", "re:q_", "q_*"])
@pytest.mark.parametrize("target", ["q_proj", "[qo]_proj"])
def test_16_ignore_and_targets_naming_one_layer_is_an_error(route, unchanged, keys, ignored, target):
    """Also where the target has other layers beside it, so that it is not without effect."""
    case = model_case("llama_block")
    values = {"ignore": [ignored], "targets": {target: "mxfp8", "o_proj": "mxfp8"}}
    with unchanged(case.model), pytest.raises(PlanError) as caught:
        route(case.model, {key: values[key] for key in keys}, *case.args)
    assert f"q_proj.weight matches both ignore {ignored!r} and targets {target!r}" in str(caught.value)


class Block(nn.Module):
    """A block with what must not be quantized in silence: a router, an expert gate, and an AdaLN modulation."""

    def __init__(self) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(64, 128))
        self.norm = nn.LayerNorm(64, elementwise_affine=False)
        self.mlp = nn.ModuleDict(
            {
                "gate": nn.Linear(64, 4, bias=False),
                "shared_expert_gate": nn.Linear(64, 1, bias=False),
                "up_proj": nn.Linear(64, 96),
                "down_proj": nn.Linear(96, 64),
            }
        )
        self.router = nn.Linear(64, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale = self.adaLN_modulation(x).chunk(2, -1)
        x = self.norm(x) * (1 + scale) + shift
        weight = (self.mlp.gate(x) + self.router(x)).softmax(-1).amax(-1, keepdim=True)
        weight = weight * self.mlp.shared_expert_gate(x).sigmoid()
        y: torch.Tensor = self.mlp.down_proj(torch.relu(self.mlp.up_proj(x))) * weight
        return y


LEFT_ALONE = {
    "adaLN_modulation.1.weight": "modulation",
    "mlp.gate.weight": "router|gate",
    "mlp.shared_expert_gate.weight": "router|gate",
    "router.weight": "router|gate",
}


@every_scheme
def test_17_routers_gates_and_modulation_are_left_alone_and_said_so(route, scheme):
    model = nn.Sequential(Block(), Block())
    kept = {name: parameter for name, parameter in model.named_parameters() if name.split(".", 1)[1] in LEFT_ALONE}
    quantized = route(model, scheme, torch.randn(3, 64))
    assert len(quantized.converted) == 4
    for name, parameter in kept.items():
        assert model.get_parameter(name) is parameter
        row = quantized.report.plan.lookup(name)
        assert row.decision == "leave"
        assert re.search(LEFT_ALONE[name.split(".", 1)[1]], row.reason), row.reason
        assert name.removesuffix(".weight") in quantized.report.text(folded=False)
        assert "{0,1}." + name.removesuffix(".weight").partition(".")[2] in str(quantized.report)


def test_17_an_exact_path_opts_a_router_in(route):
    model = nn.Sequential(Block(), Block())
    quantized = route(model, {"targets": {"0.mlp.gate": "mxfp8", "*.up_proj": "mxfp8"}}, torch.randn(3, 64))
    assert sorted(quantized.converted) == [
        "0.mlp.gate.weight",
        "0.mlp.up_proj.weight",
        "1.mlp.up_proj.weight",
    ]


@pytest.mark.parametrize("scheme", ["int8", "mxfp4", "nvfp4_weight_only"])
@pytest.mark.parametrize("name", MODELS)
def test_18_the_report_lists_exactly_what_changed(route, scheme, name):
    case = model_case(name)
    before = dict(case.model.named_parameters())
    sizes = {path: parameter.nbytes for path, parameter in before.items()}
    quantized = route(case.model, scheme, *case.args, functional=case.functional)
    after = dict(case.model.named_parameters())
    changed = tuple(path for path, parameter in after.items() if parameter is not before[path])
    assert list(after) == list(before)
    assert quantized.converted == changed == case.weights
    for path in changed:
        assert isinstance(after[path], olq_fx.QuantizedWeight)
        row = quantized.report.plan.lookup(path)
        assert row.bytes_before == sizes[path]
        assert row.bytes_after == sum(part.nbytes for part in after[path].parts)


def test_18_the_share_of_bytes(route):
    """Three quarters of the weights' bytes are quantized, the fourth is ignored: the report says 75 %."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    quantized = route(model, {"quantization": "int8", "ignore": ["2"]}, torch.randn(2, 64))
    assert quantized.report.share == pytest.approx(0.75)
    assert "75" in str(quantized.report)
    assert live_bytes(model) == 3 * (64 * 64 + 64 * 4) + 64 * 64 * 4


def test_18_the_two_routes_report_the_same(routes):
    for name in MODELS:
        case = model_case(name)
        options = {"functional": case.functional}
        reports = [each(copy.deepcopy(case.model), "mxfp4", *case.args, **options).report for each in routes.values()]
        assert reports[0].converted == reports[1].converted
        first, second = (
            {row.path: (row.decision, row.slot, row.transposed, row.bytes_after) for row in report.plan.rows}
            for report in reports
        )
        assert first == second


def test_13_the_graph_has_no_product_left_that_could_be_quantized():
    model = Uses()
    recording = RecordingBackend("int8")
    with torch.no_grad():
        torch.compile(model, backend=recording)(torch.randn(6, 72))
    assert recording.count_after(torch.ops.olq_fx.quantized_linear) == 6
    for name in ("linear", "torch.nn.functional.linear", "*matmul", "*einsum", "*addmm", ".mm"):
        assert recording.count_before(name) >= recording.count_after(name) == 0, name


def test_13_a_weight_computed_in_the_graph_is_left_alone(route):
    """Weight norm and other parametrizations: the parameter is no linear weight, its function is."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 16)), nn.Linear(16, 16))
    quantized = route(model, "mxfp8", torch.randn(2, 32))
    assert quantized.converted == ("1.weight",)
    with pytest.raises((PlanError, ConfigurationError)):
        route(nn.Sequential(copy.deepcopy(model[0])), "mxfp8", torch.randn(2, 32))


def test_13_classes_stay_what_they_were(route):
    model = nn.Sequential(Conv1D(48, 48), SelfAttention(48, 4), nn.Linear(48, 48))
    types = [type(module) for module in model.modules()]
    route(model, "fp8", torch.randn(2, 5, 48))
    assert [type(module) for module in model.modules()] == types
