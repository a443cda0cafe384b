"""Bad input: each a clear error that names the path and the nearest valid name, and the model unchanged."""

import warnings

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import (
    BackendError,
    ConfigurationError,
    ConfigurationTypeError,
    ConversionError,
    OlqFxError,
    PendingWeightError,
    PlanError,
)
from olq_fx.testing import assert_layer_close, assert_same_bits, model_case


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("fp8_per_blok", ["fp8_per_blok", "fp8_per_block"]),
        ("mxfp", ["mxfp", "mxfp8", "mxfp4"]),
        ({"quantization": "int9"}, ["int9", "int8"]),
        ({"quantization": "fp8", "ignroe": ["q_proj"]}, ["ignroe", "ignore"]),
        ({"quantization": "fp8", "linear": {"wieght": "mxfp8"}}, ["wieght", "weight"]),
        ({"quantization": "fp8", "linear": "mxfp88"}, ["mxfp88", "mxfp8"]),
        ({"linear": {"weight": "fp8_per_token"}}, ["fp8_per_token"]),
        ({"linear": {"weight": "mxfp8", "activation": "nvfp4"}}, ["nvfp4"]),
        ({"linear": {"weight": None, "activation": "mxfp8"}}, ["activation", "weight"]),
        ({"targets": {"q_proj": "mxfp8"}, "linear": "mxfp8"}, ["targets", "linear"]),
        ({"targets": {"q_proj": "mxpf8"}}, ["mxpf8", "mxfp8"]),
        ({"quantization": "fp8", "ignore": ["re:("]}, ["re:("]),
        ("online", ["online"]),
        ("", [""]),
    ],
    ids=str,
)
def test_an_unknown_or_contradictory_word(route, unchanged, config, said):
    case = model_case("llama_block")
    with unchanged(case.model), pytest.raises(ConfigurationError) as caught:
        route(case.model, config, *case.args)
    for word in said:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "config", [3, 1.5, True, object(), b"fp8", ["fp8"], torch.float8_e4m3fn], ids=lambda value: type(value).__name__
)
def test_a_configuration_of_a_type_that_is_never_accepted(route, unchanged, config):
    case = model_case("llama_block")
    with unchanged(case.model), pytest.raises(TypeError) as caught:
        route(case.model, config, *case.args)
    assert isinstance(caught.value, OlqFxError)
    assert type(config).__name__ in str(caught.value)


def test_an_unknown_keyword(route, unchanged):
    case = model_case("llama_block")
    with unchanged(case.model), pytest.raises(ConfigurationError, match=r"(?s)ignroe.*ignore"):
        route(case.model, "fp8", *case.args, ignroe=["q_proj"])


@pytest.mark.parametrize("call", [olq_fx.quantize_, lambda model, **keys: olq_fx.backend(**keys)])
def test_a_configuration_that_is_not_given_at_all(unchanged, call):
    model = nn.Linear(8, 8)
    with unchanged(model):
        with pytest.raises(ConfigurationError, match="leaves nothing to quantize; name a scheme"):
            call(model)
        call(model, quantization=None)


def test_a_container_offers_its_contents(route, unchanged):
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
    model.forward = model["mlp"].forward
    with unchanged(model), pytest.raises(PlanError, match=r"mlp\.\*"):
        route(model, {"quantization": "fp8", "ignore": ["mlp"]}, torch.randn(2, 8))


@pytest.mark.parametrize("pattern", ["input_norm", "input_norm.weight"])
def test_a_norm_is_no_candidate(route, unchanged, pattern):
    case = model_case("llama_block")
    with unchanged(case.model), pytest.raises(PlanError, match="input_norm"):
        route(case.model, {"quantization": "fp8", "ignore": [pattern]}, *case.args)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Sequential(), nn.Identity()], ids=repr)
def test_a_module_without_parameters(route, module):
    # Dynamo hands no graph to a backend here, so the report is the first that can say so.
    with pytest.raises((PlanError, BackendError), match="nothing"):
        route(module, "fp8", torch.randn(2, 8))


def test_what_is_no_module():
    with pytest.raises(TypeError, match="Module"):
        olq_fx.quantize_(torch.randn(8, 8), "fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_unsupported_dtype_of_a_weight(unchanged, dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(torch.ones(8, 8).to(dtype), requires_grad=False)
    with unchanged(model), pytest.raises(ConversionError, match=r"1\.weight") as caught:
        olq_fx.quantize_(model, "fp8")
    assert str(dtype).removeprefix("torch.") in str(caught.value)


def test_an_unsupported_dtype_of_a_compiled_weight(routes, unchanged):
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8, dtype=torch.complex64))
    with unchanged(model), pytest.raises(OlqFxError, match=r"0\.weight"):
        routes["backend"](model, "fp8", torch.ones(2, 8, dtype=torch.complex64))


def test_every_refusal_comes_before_anything_is_converted(route, unchanged):
    """The last weight is the bad one, and all bad ones are named."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.inf
        model[3].weight[1, :3] = torch.nan
    with unchanged(model), pytest.raises(ConversionError, match=r"(?s)2\.weight.*3\.weight"):
        route(model, "mxfp8", torch.randn(2, 16))


def test_after_an_error_the_model_can_be_mended_and_quantized(route):
    model = nn.Sequential(nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    x = torch.randn(2, 16)
    with pytest.raises(ConversionError):
        route(model, "mxfp8", x)
    with torch.no_grad():
        model[0].weight[0, 0] = 1
    assert_layer_close(route(model, "mxfp8", x)(x), x, model[0].weight, model[0].bias)


def test_an_error_inside_a_compiled_call_is_ours_and_the_next_call_tries_again():
    model = nn.Sequential(nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
        compiled = torch.compile(model, backend=olq_fx.backend("mxfp8", inner="eager"))
        x = torch.randn(2, 16)
        for _ in range(2):
            with pytest.raises(ConversionError, match=r"0\.weight"):
                compiled(x)
        model[0].weight[0, 0] = 1
        assert_layer_close(compiled(x), x, model[0].weight, model[0].bias)


def test_a_meta_model_stays_pending_and_a_forward_is_an_error_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    report = olq_fx.quantize_(model, "mxfp8")
    assert "pending" in str(report)
    assert all(parameter.is_meta for parameter in model.parameters())
    model[0].bias = nn.Parameter(torch.zeros(32))
    with pytest.raises(PendingWeightError, match=r"0\.weight"):
        model(torch.randn(2, 64))


def test_a_partly_loaded_meta_model_names_what_is_missing():
    source = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    olq_fx.quantize_(model, "mxfp8")
    state = source.state_dict()
    missing = state.pop("1.weight")
    model.load_state_dict(state, strict=False, assign=True)
    x = torch.randn(2, 64)
    with torch.no_grad():
        with pytest.raises(PendingWeightError, match=r"1\.weight"):
            model(x)
        model.load_state_dict({"1.weight": missing}, strict=False, assign=True)
        olq_fx.quantize_(source, "mxfp8")
        assert_same_bits(model(x), source(x))


def test_other_formats_over_converted_layers_name_the_way_back(route, unchanged):
    model = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(2, 64)
    route(model, "mxfp8", x)
    with unchanged(model), pytest.raises(PlanError, match=r"dequantize_.*0\.weight"):
        route(model, "int8", x)


def test_the_same_formats_again_change_nothing_and_say_so(route, unchanged):
    model = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(2, 64)
    route(model, "mxfp8", x)
    with unchanged(model):
        report = route(model, "mxfp8", x).report
    assert report.converted == ()
    assert "already" in str(report)


def test_experts_whose_layout_is_unknown_are_left_alone_with_a_reason_and_never_in_silence(unchanged):
    """Three-dimensional expert weights that nothing tells the reduction axis of: listed, an error when asked for."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(4, 64, 32))
            self.down_proj = nn.Parameter(torch.randn(4, 32, 64))

    model = nn.ModuleDict({"experts": Experts(), "proj": nn.Linear(32, 32)})
    with unchanged(model), pytest.raises(PlanError, match=r"experts\.(up|down)_proj"):
        olq_fx.quantize_(model, {"quantization": "online", "moe": "mxfp4"})
    report = olq_fx.quantize_(model, "mxfp4")
    assert report.converted == ("proj.weight",)
    row = report.plan.lookup("experts.up_proj")
    assert (row.decision, row.reason) == ("leave", "use unknown; pass example_inputs or use backend()")
    assert report.share < 0.2


def test_one_bad_value_of_one_expert_stops_all(unchanged):
    """The refusal names the parameter and comes before anything is converted."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 16))
            self.down_proj = nn.Parameter(torch.randn(4, 16, 32))

    model = nn.ModuleDict({"proj": nn.Linear(32, 32), "experts": Experts()})
    model["experts"].down_proj.data[3, 5, 7] = torch.nan
    with unchanged(model), pytest.raises(ConversionError, match=r"experts\.down_proj: 1 of 2048 values are NaN"):
        olq_fx.quantize_(model, "mxfp4")


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "cdua", "cuda:4096", 3.5], ids=str)
def test_a_device_that_takes_no_weights(unchanged, device):
    """Asked before anything is converted, not on the way."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    with unchanged(model), pytest.raises(ConfigurationError, match="device: "):
        olq_fx.quantize_(model, "int8", device=device)


@pytest.mark.parametrize("device", ["cdua", 3.5], ids=str)
def test_a_device_that_no_plan_can_be_for(device):
    with pytest.raises(ConfigurationError, match=f"device: there is no '?{device}"):
        olq_fx.plan_for("int8", nn.Linear(64, 32), device=device)


def test_a_root_that_is_no_module():
    with pytest.raises(ConfigurationTypeError, match=r"root is a torch\.nn\.Module, not int"):
        olq_fx.backend("int8", root=3)


def test_only_plans_have_a_difference():
    report = olq_fx.quantize_(nn.Linear(64, 32), "int8")
    assert not olq_fx.diff_plans(report.plan, report.plan)
    for pair in ((report, report.plan), (report.plan, report)):
        with pytest.raises(ConfigurationTypeError, match=r"not Report; its plan is `report\.plan`"):
            olq_fx.diff_plans(*pair)
    with pytest.raises(ConfigurationTypeError, match="not int"):
        olq_fx.diff_plans(report.plan, 3)


@pytest.mark.parametrize("model", [None, 3, torch.zeros(2), nn.Linear], ids=str)
def test_dequantize_of_no_module(model):
    with pytest.raises(ConfigurationTypeError, match=type(model).__name__):
        olq_fx.dequantize_(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_left_alone(unchanged):
    """Its modules hold their parameters in other containers, and its code takes no converted ones."""
    scripted = torch.jit.trace(nn.Linear(64, 32), torch.randn(2, 64))
    with unchanged(scripted), pytest.raises(PlanError, match=r"weight: its module is TorchScript"):
        olq_fx.quantize_(scripted, "int8")
    model = nn.Sequential(scripted, nn.Linear(32, 32))
    report = olq_fx.quantize_(model, "int8")
    assert report.converted == ("1.weight",)
    assert "TorchScript" in report.plan.rows[0].reason
    model(torch.randn(2, 64))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scheme", ["int8", "mxfp4_weight_only"])
def test_a_bias_that_was_never_loaded(scheme: str, compiled: bool):
    """`load_state_dict` without `assign` gives converted weights their data, but leaves plain parameters on meta."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32))
    olq_fx.quantize_(model, scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that copying to meta does nothing
        model.load_state_dict({"0.weight": torch.randn(32, 64), "0.bias": torch.randn(32)})
    assert model[0].weight.device.type == "cpu"
    called = torch.compile(model, backend=olq_fx.backend(scheme, inner="aot_eager")) if compiled else model
    with torch.no_grad(), pytest.raises(Exception, match=r"(?s)meta.*cpu|cpu.*meta"):
        called(torch.randn(2, 64))
