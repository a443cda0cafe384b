"""Other activations over weights that are quantized already: the weights stay what and where they are."""

import copy

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, OlqFxWarning, PlanError
from olq_fx.formats import FORMATS
from olq_fx.plan import plan_for
from olq_fx.schemes import KEPT, Slot
from olq_fx.testing import assert_same_bits

ACTIVATIONS = [None, *(format.name for format in FORMATS.values() if format.activation)]


class Experts(nn.Module):
    """A block with two experts that are layers of their own, beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 96)
        self.experts = nn.ModuleList(nn.Linear(96, 40) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return self.experts[0](hidden) + self.experts[1](hidden)


def converted(config: object) -> Experts:
    model = Experts()
    olq_fx.quantize_(model, config)
    return model


X = torch.linspace(-2, 3, 5 * 64).view(5, 64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_outcome_is_that_of_both_formats_at_once(route, activation):
    expected = converted({"linear": "fp8_per_block", "moe": {"weight": "mxfp4", "activation": activation}})(X)
    model = converted({"linear": "fp8_per_block", "moe": "mxfp4"})
    before = {name: weight for name, weight in model.named_parameters() if name.endswith("weight")}
    parts = {name: [part.data_ptr() for part in weight.parts] for name, weight in before.items()}
    done = route(model, {"moe": {"activation": activation}}, X)
    assert_same_bits(done(X), expected)
    assert_same_bits(model(X), expected)
    for name, weight in model.named_parameters():
        if name.endswith("weight"):
            assert weight is before[name]
            assert [part.data_ptr() for part in weight.parts] == parts[name]
    names = ("experts.0.weight", "experts.1.weight")
    same = activation == "mxfp4"
    assert done.report.overridden == (() if same else names)
    assert done.report.already == (("up.weight", *names) if same else ("up.weight",))
    assert done.report.share == 1
    slots = {row.path: row.slot for row in done.report.plan.rows}
    assert slots["experts.1.weight"] == Slot("mxfp4", activation)
    assert slots["up.weight"] == Slot("fp8_per_block_static", "fp8_per_block_dynamic")
    assert done.report.check() is done.report


def test_a_second_run_has_nothing_to_do(route):
    model = converted("mxfp4")
    route(model, {"linear": {"activation": "mxfp8"}}, X)
    again = route(model, {"linear": {"activation": "mxfp8"}}, X)
    assert (again.report.overridden, "up.weight" in again.report.already) == ((), True)
    assert plan_for({"linear": {"weight": "mxfp4", "activation": "mxfp8"}, "ignore": "experts.*"}, model)


def test_the_plan_says_it_before(route):
    model = converted("mxfp4")
    plan = plan_for({"linear": {"activation": "mxfp8"}, "ignore": ["experts.0"]}, model)
    assert [(row.path, row.decision, row.formats) for row in plan.rows] == [
        ("up.weight", "override", "mxfp4 / mxfp8"),
        ("experts.0.weight", "already", "mxfp4 / mxfp4"),
        ("experts.1.weight", "already", "mxfp4 / mxfp4"),
    ]
    row = plan.rows[0]
    assert row.reason == "its weight stays as it is; activations are mxfp4 so far"
    assert (row.weight_rule, row.activation_rule) == ("mse", "ceil")
    assert row.bytes_after < row.bytes_before
    done = route(model, {"linear": {"activation": "mxfp8"}, "ignore": ["experts.0"]}, X)
    assert [row.slot for row in done.report.plan.rows] == [row.slot for row in plan.rows]
    assert "overridden" in str(done.report)
    assert done.report.to_dict()["rows"][0]["status"] == "overridden"


def test_only_the_scale_rule_of_activations_may_change_too():
    model = converted("fp8_per_block")
    report = olq_fx.quantize_(model, {"linear": {"activation": "fp8_per_block_dynamic"}, "power_of_two_scales": True})
    assert report.overridden == ("up.weight",)
    assert model.up.weight.spec.activation_rule == "power_of_two"
    assert model.up.weight.spec.weight_rule == "amax"


def test_ties_copies_state_and_the_way_back(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(64, 32)})
    model["b"].weight = model["a"].weight
    olq_fx.quantize_(model, "int8")
    values = model["a"].weight.dequantize()
    olq_fx.quantize_(model, {"linear": {"activation": None}})
    assert model["b"].weight is model["a"].weight
    assert model["b"].weight.spec.activation == ""
    twin = copy.deepcopy(model)
    assert_same_bits(twin["a"](X), model["a"](X))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(64, 32)})
    olq_fx.quantize_(fresh, "int8_per_channel_weight_only")
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same_bits(fresh["a"](X), model["a"](X))
    olq_fx.dequantize_(model)
    assert_same_bits(model["a"].weight.detach(), values)


def test_a_weight_that_waits_for_its_data_takes_them_afterwards():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32))
    olq_fx.quantize_(model, "mxfp4")
    report = olq_fx.quantize_(model, {"linear": {"activation": "mxfp8"}})
    assert report.overridden == ("0.weight",)
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(64, 32))
    model.load_state_dict(source.state_dict(), assign=True)
    olq_fx.quantize_(source, {"linear": {"weight": "mxfp4", "activation": "mxfp8"}})
    assert_same_bits(model(X), source(X))


@pytest.mark.parametrize("compiled_by", ["aot_eager", "olq_fx"])
def test_code_that_was_compiled_before_follows(compiled_by):
    model = Experts()
    if compiled_by == "olq_fx":
        run = torch.compile(model, backend=olq_fx.backend("mxfp4", inner="eager"))
    else:
        olq_fx.quantize_(model, "mxfp4")
        run = torch.compile(model, backend=compiled_by)
    with torch.no_grad():
        before = run(X)
        for activation in ("mxfp8", None, "int8_per_token", "mxfp4"):
            olq_fx.quantize_(model, {"linear": {"activation": activation}, "moe": {"activation": activation}})
            both = {"weight": "mxfp4", "activation": activation}
            expected = converted({"linear": both, "moe": both})
            assert_same_bits(run(X), expected(X))
            assert_same_bits(run(X[:3]), expected(X[:3]))
        assert_same_bits(run(X), before)


@pytest.mark.parametrize(
    ("config", "model", "said"),
    [
        (
            {"linear": {"activation": "mxfp8"}},
            Experts,
            "linear: an activation format without a weight format is for weights that are quantized already, and none "
            "of these is; name a weight format too",
        ),
        (
            {"linear": {"activation": None}, "moe": {"activation": None}},
            Experts,
            "moe: an activation format without a weight format",
        ),
        (
            {"linear": "fp8", "moe": {"activation": "mxfp8"}},
            Experts,
            "moe: an activation format without a weight format",
        ),
        ({"moe": {"activation": "mxfp8"}}, lambda: nn.Sequential(nn.Linear(4, 4)), "nothing would be quantized"),
        (
            {"linear": {"activation": "mxfp8"}, "ignore": ["up"]},
            lambda: converted("mxfp4"),
            "linear: an activation format without a weight format",
        ),
        (
            {"linear": {"weight": "mxfp4", "activation": "mxfp8"}},
            lambda: converted("mxfp4"),
            "give an activation alone",
        ),
    ],
)
def test_where_it_makes_no_sense_it_is_an_error(route, config, model, said):
    made = model()
    with pytest.raises(PlanError, match=said):
        route(made, config, X if isinstance(made, Experts) else torch.randn(2, 4))


def test_a_kernel_that_cannot_run_the_pair_is_refused():
    config = {"linear": {"activation": "mxfp8"}, "linear_backend": "native_cpu"}
    assert plan_for(config, converted("mxfp4")).rows[0].requested_kernel == "native_cpu"
    with pytest.raises(PlanError, match=r"up\.weight: native_cpu: runs on cpu, not on cuda"):
        plan_for(config, converted("mxfp4"), device="cuda")


def test_weights_that_others_have_quantized_say_so():
    class Float8(nn.Parameter):
        pass

    Float8.__module__ = "torchao.quantization"
    model = nn.ModuleDict({"a": nn.Linear(8, 8)})
    model["a"].weight = Float8(torch.zeros(8, 8), requires_grad=False)
    with pytest.raises(PlanError) as caught:
        plan_for({"linear": {"activation": "mxfp8"}}, model)
    assert str(caught.value).endswith(
        "and none of these is; already quantized by torchao (Float8), which takes its activations as it does"
    )


def test_an_embedding_has_no_activations():
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(50, 64), "a": nn.Linear(64, 64)})
    olq_fx.quantize_(model, {"linear": "mxfp8", "include": ["embed_tokens"]})
    with pytest.warns(OlqFxWarning, match="'embed_tokens' quantizes nothing; .*: converted before; a lookup has no"):
        plan = plan_for({"linear": {"activation": None}, "include": ["embed_tokens"]}, model, strict=False)
    assert [row.decision for row in plan.rows] == ["already", "override"]
    assert plan.rows[0].reason == "converted before; a lookup has no activations"


def test_in_components_and_after_a_scheme():
    model = nn.ModuleDict({"one": converted("mxfp4"), "two": converted("mxfp4"), "three": Experts()})
    config = {"one": {"linear": {"activation": None}}, "two": None, "three": "fp8"}
    decisions = [row.decision for row in plan_for(config, model).rows]
    assert decisions == ["override", "already", "already"] + ["already"] * 3 + ["quantize"] * 3


@pytest.mark.parametrize(
    ("given", "linear"),
    [
        ({"linear": {"activation": "MXFP8"}}, Slot(KEPT, "mxfp8")),
        ({"linear": {"activation": "none"}}, Slot(KEPT, None)),
        ({"quantization": "online", "linear": {"activation": None}}, Slot(KEPT, None)),
        ({"quantization": "mxfp4", "linear": {"activation": "mxfp8"}}, Slot("mxfp4", "mxfp8")),
        ({"linear": {"activation": "fp8_per_block_dynamic"}}, Slot(KEPT, "fp8_per_block_dynamic")),
    ],
)
def test_what_the_configuration_says(given, linear):
    config = QuantizationConfig.parse(given)
    assert config.linear == linear
    assert not config.nothing
    assert QuantizationConfig.from_dict(config.to_dict()) == config
    assert hash(QuantizationConfig.from_dict(config.to_dict())) == hash(config)
    if linear.keeps_weight:
        assert config.to_dict()["linear"] == {"activation": linear.activation}


def test_a_target_names_its_weight_format():
    with pytest.raises(ConfigurationError, match="an activation alone, for weights that are quantized already, stands"):
        QuantizationConfig.parse({"targets": {"up": {"activation": "mxfp8"}}})
