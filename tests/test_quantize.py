"""`quantize_` as users call it."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import olq_fx
from olq_fx import OlqFxWarning, QuantizedWeight, dequantize_, quantize_
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, ConversionError, PendingWeightError, PlanError
from olq_fx.schemes import SCHEMES
from olq_fx.testing import MODELS, assert_same_bits, assert_sqnr, model_case
from olq_fx.testing_layers import assert_layer_close

Unchanged = Callable[[nn.Module], Any]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(functional.gelu(self.up(x))) * scale


class WithFunction(Mlp):
    """Whose matrix `extra` no module names as the weight of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(48, 48))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(functional.linear(x, self.extra), scale)


LEAST_SQNR = {"mxfp4": 10.0, "mxfp4_dualscale": 10.0, "nvfp4_per_token": 11.0, "mxfp4_weight_only": 12.0}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_every_scheme_on_every_small_model(scheme: str, name: str):
    case = model_case(name)
    with torch.no_grad():
        expected = case.model(*case.args)
    report = quantize_(case.model, scheme, **case.quantize_arguments())
    assert report.converted == case.weights
    assert report.share > 0.99
    with torch.no_grad():
        y = case.model(*case.args)
    assert_sqnr(y, expected, LEAST_SQNR.get(scheme, 13.0 if "fp4" in scheme else 24.0))
    for path in case.weights:
        assert isinstance(case.model.get_parameter(path), QuantizedWeight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_models(name: str, dtype: torch.dtype):
    case = model_case(name, dtype)
    expected = case.model(*case.args)
    quantize_(case.model, "fp8_per_block", **case.quantize_arguments())
    y = case.model(*case.args)
    assert y.dtype == dtype
    assert_sqnr(y.float(), expected.float(), 24.0)


def test_the_report_lists_exactly_what_changed():
    model = nn.ModuleDict({"mlp": Mlp(), "lm_head": nn.Linear(48, 10), "embed": nn.Embedding(10, 48)})
    before = dict(model.named_parameters())
    report = quantize_(model, "int8", ignore=["mlp.down"])
    changed = [name for name, p in model.named_parameters() if p is not before[name]]
    assert report.converted == tuple(changed) == ("mlp.up.weight",)
    assert set(report.left_alone) == {"mlp.down.weight", "lm_head.weight", "embed.weight"}
    total = 96 * 48 * 2 + 10 * 48 * 2
    assert report.share == pytest.approx(96 * 48 / total)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ("fp8_per_block", {}),
        ("FP8-Per-Block", {}),
        ({"quantization": "fp8_per_block"}, {}),
        ({"linear": {"weight": "fp8_per_block_static"}}, {}),
        (olq_fx.QuantizationConfig("fp8_per_block"), {}),
        ({}, {"quantization": "fp8_per_block"}),
        ('{"quantization": "fp8_per_block"}', {}),
    ],
)
def test_forms_of_the_configuration(config: object, keys: dict[str, object]):
    model = Mlp()
    quantize_(model, config, **keys)
    assert model.up.weight.spec.weight == "fp8_per_block_static"
    assert model.up.weight.spec.activation == "fp8_per_block_dynamic"


def test_none_leaves_everything_alone(unchanged: Unchanged):
    model = Mlp()
    with unchanged(model):
        report = quantize_(model, None)
    assert report.converted == ()


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        ("fp8_per_blok", {}, ConfigurationError, "fp8_per_block"),
        ({"linaer": "fp8"}, {}, ConfigurationError, "linear"),
        (3, {}, ConfigurationTypeError, "int"),
        ("int8", {"ignore": ["upp"]}, PlanError, "up"),
        ("int8", {"ignore": ["*"]}, PlanError, "nothing"),
        ("int8", {"linear_backend": "nonsense"}, ConfigurationError, "linear_backend"),
    ],
)
def test_what_has_no_meaning_is_an_error_and_changes_nothing(
    config: object, options: dict[str, Any], error: type[Exception], message: str, unchanged: Unchanged
):
    model = Mlp()
    with unchanged(model), pytest.raises(error, match=message):
        quantize_(model, config, **options)


def test_not_strict_is_a_warning():
    model = Mlp()
    with pytest.warns(OlqFxWarning, match="upp"):
        report = quantize_(model, "int8", ignore=["upp"], strict=False)
    with pytest.raises(PlanError, match="upp"):
        report.check()
    assert len(report.converted) == 2


def test_a_bad_weight_changes_nothing(unchanged: Unchanged):
    model = Mlp()
    with torch.no_grad():
        model.down.weight[0, 0] = float("nan")
    with unchanged(model), pytest.raises(ConversionError, match=r"down\.weight: 1 of 4608"):
        quantize_(model, "int8")
    quantize_(model, "int8", allow_nonfinite=True)
    y = model(torch.randn(2, 48))
    assert bool(y[:, 0].isnan().all())
    assert bool(y[:, 1:].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_dtypes_that_cannot_be_converted(dtype: torch.dtype, unchanged: Unchanged):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = nn.Parameter(torch.ones(8, 8, dtype=dtype), requires_grad=False)
    name = str(dtype).removeprefix("torch.")
    with unchanged(model), pytest.raises(ConversionError, match=rf"b\.weight \({name}\)"):
        quantize_(model, {"targets": {"b": "int8"}})


def test_models_without_linear_layers(unchanged: Unchanged):
    for model in (nn.ReLU(), nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))):
        with unchanged(model), pytest.raises(PlanError, match="nothing"):
            quantize_(model, "int8")


def test_parametrized_weights_are_refused_by_name(unchanged: Unchanged):
    model = Mlp()
    torch.nn.utils.parametrizations.weight_norm(model.up)
    with pytest.raises(PlanError, match=r"up\.weight.*parametrization"):
        quantize_(model, "int8", targets=None, include=["up"])
    report = quantize_(model, "int8")
    assert report.converted == ("down.weight",)
    assert "parametrization" in report.plan.lookup("up.weight").reason


def test_a_second_run_is_a_no_op_and_other_formats_are_an_error():
    model = Mlp()
    quantize_(model, "int8")
    codes = model.up.weight.codes
    report = quantize_(model, "int8")
    assert report.already == ("up.weight", "down.weight")
    assert "quantized before" in str(report)
    assert model.up.weight.codes is codes
    with pytest.raises(PlanError, match=r"dequantize_\(model\).*up\.weight"):
        quantize_(model, "mxfp8")
    dequantize_(model)
    quantize_(model, "mxfp8")
    assert model.up.weight.spec.weight == "mxfp8"


def test_a_second_run_takes_what_the_first_has_left():
    model = Mlp()
    quantize_(model, "int8", ignore="down")
    report = quantize_(model, "int8")
    assert (report.already, report.converted) == (("up.weight",), ("down.weight",))


def test_before_and_after_compilation_are_the_same():
    x = torch.randn(5, 48)
    model = Mlp()
    results = {}
    with torch.no_grad():
        for order in ("eager", "before", "after", "after a call"):
            torch.compiler.reset()
            copied = copy.deepcopy(model)
            run: nn.Module = copied
            if order == "before":
                quantize_(copied, "fp8_per_block")
            if order != "eager":
                run = torch.compile(copied, backend="aot_eager")
            if order == "after a call":
                run(x)
            if order != "before":
                report = quantize_(run, "fp8_per_block")
                assert report.converted == ("up.weight", "down.weight")
            assert isinstance(copied.up.weight, QuantizedWeight)
            results[order] = run(x)
    for order, y in results.items():
        assert_same_bits(y, results["eager"], name=order)


def test_dequantize_of_a_compiled_model():
    model = torch.compile(Mlp(), backend="eager")
    quantize_(model, "int8")
    dequantize_(model)
    assert type(model.up.weight) is nn.Parameter


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "tensor", "tuple and default"])
def test_example_inputs(form: str):
    model = WithFunction()
    x = torch.randn(2, 48)
    inputs = {
        "tuple": (x,),
        "list": [x],
        "dict": {"x": x, "scale": 2.0},
        "tensor": x,
        "tuple and default": (x, 3.0),
    }[form]
    report = quantize_(model, "int8", example_inputs=inputs)
    assert set(report.converted) == {"extra", "up.weight", "down.weight"}
    y = functional.linear(x, model.extra)
    assert_layer_close(y, x, model.extra)
    model(x)


def test_a_functional_weight_needs_example_inputs(unchanged: Unchanged):
    model = WithFunction()
    with unchanged(model), pytest.raises(PlanError, match=r"extra.*example_inputs"):
        quantize_(model, {"targets": {"extra": "int8"}})
    report = quantize_(model, "int8")
    assert "extra" in report.left_alone
    assert "example_inputs" in report.plan.lookup("extra").reason


def test_a_call_that_cannot_be_traced_is_an_error(unchanged: Unchanged):
    model = Mlp()
    with unchanged(model), pytest.raises(PlanError, match="example_inputs"):
        quantize_(model, "int8", example_inputs=(torch.randn(2, 47),))


class Doubled(nn.Module):
    """A layer, a weight that is used in another way, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.doubled, self.unused = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layer(x), self.doubled * 2)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("doubled", "used by operator.mul, which is no linear layer"),
        ("unused", "the traced call does not use it"),
    ],
)
def test_what_an_example_shows_is_the_reason(path: str, why: str, unchanged: Unchanged):
    x = (torch.randn(2, 16),)
    for key in ("include", "targets"):
        model = Doubled()
        config = {"linear": "int8", "include": [path]} if key == "include" else {"targets": {path: "int8"}}
        with unchanged(model), pytest.raises(PlanError) as error:
            quantize_(model, config, example_inputs=x)
        assert str(error.value) == f"{key}: {path!r} names {path}, which cannot be quantized: {why}"
    report = quantize_(model, "int8", example_inputs=x)
    assert (report.converted, report.plan.lookup(path).reason) == (("layer.weight",), why)
    with pytest.raises(PlanError, match="nothing would be quantized") as error:
        quantize_(Doubled(), {"linear": "int8", "ignore": ["layer"]}, example_inputs=x)
    assert "opts in" not in str(error.value)


def test_example_inputs_of_a_model_on_meta_and_of_a_compiled_one():
    with torch.device("meta"):
        model = Mlp()
    report = quantize_(model, "int8", example_inputs=(torch.randn(2, 48, device="meta"),))
    assert report.pending == ("up.weight", "down.weight")
    compiled = torch.compile(Mlp(), backend="eager")
    assert quantize_(compiled, "int8", example_inputs=(torch.randn(2, 48),)).converted == ("up.weight", "down.weight")


def test_a_model_on_meta_is_pending_until_it_is_loaded():
    with torch.device("meta"):
        model = Mlp()
    report = quantize_(model, "fp8_per_block")
    assert report.pending == ("up.weight", "down.weight")
    with pytest.raises(PlanError, match=r"up\.weight"):
        report.check()
    for x in (torch.randn(2, 48, device="meta"), torch.randn(2, 48)):
        with pytest.raises(PendingWeightError, match=r"'up\.weight'"):
            model(x)
    assert quantize_(model, "fp8_per_block").already == ("up.weight", "down.weight")
    source = Mlp()
    model.load_state_dict(source.state_dict(), assign=True)
    quantize_(source, "fp8_per_block")
    x = torch.randn(2, 48)
    assert_same_bits(model(x).detach(), source(x).detach())


def test_a_tie_of_embedding_and_head():
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 64)
            self.middle = nn.Linear(64, 64)
            self.lm_head = nn.Linear(64, 50, bias=False)
            self.lm_head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.lm_head(self.middle(self.embed(ids)))

    ids = torch.tensor([[1, 2, 49]])
    model = Language()
    report = quantize_(model, "int8")
    assert report.converted == ("middle.weight",)
    assert "tied" in report.plan.lookup("lm_head.weight").reason
    assert model.lm_head.weight is model.embed.weight
    model = Language()
    expected = model(ids)
    report = quantize_(model, "int8", include=["lm_head", "embed"])
    assert model.lm_head.weight is model.embed.weight
    assert isinstance(model.embed.weight, QuantizedWeight)
    assert_same_bits(model.embed(ids), model.embed.weight.dequantize()[ids])
    assert_sqnr(model(ids), expected, 25.0)
    assert len(report.converted) == 2


def test_progress_shows_a_bar(capsys: pytest.CaptureFixture[str]):
    quantize_(Mlp(), "int8", progress=True)
    shown = capsys.readouterr().out
    assert "quantizing" in shown
    assert re.search(r"100%", shown)
    quantize_(Mlp(), "int8")
    assert capsys.readouterr().out == ""


def test_module_classes_stay_what_they_were():
    model = Mlp()
    text, classes = repr(model), [type(module) for module in model.modules()]
    quantize_(model, "int8")
    assert repr(model) == text
    assert [type(module) for module in model.modules()] == classes
    assert model.up.in_features == 48
    assert model.up.weight.shape == (96, 48)


def test_two_runs_give_equal_bits():
    x, model = torch.randn(17, 48), Mlp()
    a, b = copy.deepcopy(model), copy.deepcopy(model)
    for each in (a, b):
        quantize_(each, "mxfp4")
    assert_same_bits(a.up.weight.codes, b.up.weight.codes)
    with torch.no_grad():
        assert_same_bits(a(x), b(x))
        assert_same_bits(a(x), a(x))


def test_deepcopy_of_a_quantized_model_is_independent():
    model = Mlp()
    quantize_(model, "int8")
    other = copy.deepcopy(model)
    dequantize_(other)
    assert isinstance(model.up.weight, QuantizedWeight)
    assert type(other.up.weight) is nn.Parameter
    assert list(other.state_dict()) == list(Mlp().state_dict())
    assert "up.weight_scale" in model.state_dict()
