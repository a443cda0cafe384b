"""`olq_fx.compare`: a model against what a configuration makes of it."""

import copy
import io
import itertools
import json
import random
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.comparison_ignore import with_ignored
from olq_fx.comparison_metrics import Difference
from olq_fx.errors import (
    ComparisonError,
    ConfigurationError,
    ConfigurationTypeError,
    MissingPackageError,
    OlqFxWarning,
    PlanError,
)
from olq_fx.testing import MODELS, model_case


def stack(*sizes: int) -> nn.Sequential:
    """Linear layers with SiLU between them."""
    layers = [nn.Linear(k, n) for k, n in itertools.pairwise(sizes)]
    for layer in layers:  # values that do not shrink, and no biases that hide them
        nn.init.normal_(layer.weight, std=1.4 / layer.in_features**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.SiLU()) for layer in layers)).eval()


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is no strict JSON")


# Values


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_layers_are_those_of_quantize_(name: str, unchanged):
    case = model_case(name)
    options = case.quantize_arguments()
    with unchanged(case.model):
        found = olq_fx.compare(case.model, "mxfp8", case.args, repeat=0, **options)
    other = copy.deepcopy(case.model)
    report = olq_fx.quantize_(other, "mxfp8", **options)
    expected = Difference()
    with torch.no_grad():
        expected.add(case.model(*case.args), other(*case.args))
    assert found.outputs == {"output": expected.metrics()}
    assert found.steps == (found.outputs,)
    rows = [row for row in report.plan.quantized if row.module_path]
    assert sum(layer.bytes_after for layer in found.layers) == sum(row.bytes_after for row in rows)
    assert all(layer.calls == 1 and layer.metrics is not None for layer in found.layers)


def test_a_layer_is_compared_with_the_same_layer():
    model, x = stack(64, 96, 32), torch.randn(5, 64)
    found = olq_fx.compare(model, "mxfp4", x, repeat=0)
    other = copy.deepcopy(model)
    olq_fx.quantize_(other, "mxfp4")
    hidden = Difference()
    with torch.no_grad():
        hidden.add(model[2](model[:2](x)), other[2](other[:2](x)))
    assert [layer.path for layer in found.layers] == ["0", "2"]
    assert found.layers[1].metrics == hidden.metrics()


def test_several_calls_are_taken_together():
    model, calls = stack(64, 32), [torch.randn(5, 64), (torch.randn(2, 64),), {"input": torch.randn(1, 64)}]
    found = olq_fx.compare(model, "int8", calls, repeat=0)
    assert found.outputs["output"].count == 8 * 32
    assert found.layers[0].calls == 3


def test_nothing_quantized_is_exact():
    found = olq_fx.compare(stack(64, 32), None, torch.randn(2, 64), bounds="psnr_db=1000,cosine=1", repeat=1)
    assert found.outputs["output"].exact
    assert found.failures == ()
    assert found.layers == ()


class Several(nn.Module):
    """Outputs of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"logits": self.a(x), "pair": (self.b(x), [x]), "index": torch.arange(3), "name": "y", "none": None}


def test_outputs_have_names():
    found = olq_fx.compare(Several(), "mxfp4", torch.randn(4, 32), repeat=0)
    assert list(found.outputs) == ["logits", "pair.0", "pair.1.0"]
    assert found.outputs["logits"].kl is not None
    assert found.outputs["pair.0"].kl is None
    assert found.outputs["pair.1.0"].exact
    renamed = olq_fx.compare(Several(), "mxfp4", torch.randn(4, 32), repeat=0, logits=["pair.0"])
    assert renamed.outputs["pair.0"].kl is not None


# The same random numbers, inputs and states


class Noisy(nn.Module):
    """Draws, in its own way, from every source."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        self.calls += 1
        drawn = torch.randn(x.shape) + torch.randn(x.shape, generator=generator) + random.random()
        return self.proj(nn.functional.dropout(x, 0.5)) + drawn + self.calls


def test_both_draw_the_same_and_the_process_notices_nothing():
    model = Noisy()
    call = (torch.randn(4, 32), torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    random.seed(1)
    found = olq_fx.compare(model, "none", [call, call], repeat=1)
    assert found.outputs["output"].exact
    assert model.calls == 0
    after = torch.randn(3), random.random()
    torch.manual_seed(1)
    random.seed(1)
    assert torch.equal(after[0], torch.randn(3))
    assert after[1] == random.random()
    torch.testing.assert_close(
        torch.rand(2, generator=call[1]), torch.rand(2, generator=torch.Generator().manual_seed(5))
    )


def test_a_seed_gives_the_same_numbers_again():
    def draw(model, call):
        yield model(torch.randn(4, 64))

    model = stack(64, 32)
    one, again, other = (olq_fx.compare(model, "mxfp4", ((),), loop=draw, seed=s, repeat=0) for s in (3, 3, 4))
    assert one.outputs == again.outputs
    assert one.outputs != other.outputs


@pytest.mark.slow
def test_the_time_of_compiled_models():
    model, x = stack(64, 32), torch.randn(2, 64)
    found = olq_fx.compare(model, "int8", x, compiled=True, repeat=2)
    assert found.latency_ms.candidate > 0
    assert found.outputs == olq_fx.compare(model, "int8", x, repeat=0).outputs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_progress_is_shown_on_terminals_only(monkeypatch, stream, shown):
    errors = stream()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("TERM", "xterm")
    olq_fx.compare(
        stack(64, 64, 32),
        "mxfp4",
        torch.randn(2, 64),
        bounds="sqnr_db=90",
        suggest_ignore=True,
        repeat=1,
        progress=True,
    )
    for what in ("quantize", "compare", "measure time and memory", "search an ignore list"):
        assert (what in errors.getvalue()) == shown


# Trajectories


def denoise(model, call):
    """A sampler of a diffusion model in small: each step adds noise."""
    x = call[0]
    for _ in range(4):
        x = x + 0.1 * model(x) + 0.01 * torch.randn(x.shape)
        yield x


def test_every_step_of_a_trajectory_is_compared():
    model, x = stack(48, 96, 48), torch.randn(2, 48)
    found = olq_fx.compare(model, "mxfp4", (x,), loop=denoise, seed=7, repeat=1)
    other = copy.deepcopy(model)
    olq_fx.quantize_(other, "mxfp4")
    trajectories = []
    for lane in (model, other):
        torch.manual_seed(7)
        with torch.no_grad():
            trajectories.append(list(denoise(lane, (x,))))
    assert len(found.steps) == 4
    whole = Difference()
    for step, pair in zip(found.steps, zip(*trajectories, strict=True), strict=True):
        expected = Difference()
        expected.add(*pair)
        whole.merge(expected)
        assert step == {"output": expected.metrics()}
    assert found.outputs == {"output": whole.metrics()}
    assert found.steps[3]["output"].rmse > found.steps[0]["output"].rmse > 0
    assert found.layers[0].calls == 4
    assert "step 3" in str(found)


def test_a_bound_holds_for_every_step():
    model, x = stack(48, 96, 48), torch.randn(2, 48)
    errors = [step["output"].rmse for step in olq_fx.compare(model, "mxfp4", (x,), loop=denoise, repeat=0).steps]
    found = olq_fx.compare(model, "mxfp4", (x,), loop=denoise, repeat=0, bounds={"rmse": (errors[1] + errors[2]) / 2})
    assert [failure.where for failure in found.failures] == ["'output', step 2", "'output', step 3"]


# Cost and perplexity


class Bigram(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embed(input_ids))}


@pytest.mark.parametrize("masked", [False, True])
def test_perplexity_by_the_formula(masked: bool):
    model, ids = Bigram(), torch.randint(0, 11, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    call = {"input_ids": ids} | ({"attention_mask": mask} if masked else {})
    found = olq_fx.compare(model, {"linear": "mxfp4", "include": ["head"]}, call, perplexity="input_ids", repeat=0)
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(ids)["logits"][:, :-1].mT, ids[:, 1:], reduction="none")
    counted = losses[mask[:, 1:] == 1] if masked else losses
    assert found.perplexity.reference == pytest.approx(counted.mean().exp().item(), rel=1e-6)
    assert found.perplexity.candidate != found.perplexity.reference
    found = olq_fx.compare(
        model, "none", call, perplexity="input_ids", repeat=0, bounds="perplexity=1,perplexity_ratio=1"
    )
    assert [failure.metric for failure in found.failures] == ["perplexity"]


def test_cost_is_measured():
    model = stack(512, 512, 512)
    found = olq_fx.compare(model, "int8", torch.randn(2, 512), repeat=1)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size < found.peak_memory_bytes.reference < 1.1 * size
    assert found.peak_memory_bytes.ratio < 0.5
    assert found.latency_ms.reference > 0
    assert found.latency_ms.candidate > 0


# Bounds and the suggested list


@pytest.mark.parametrize("bounds", ["sqnr_db=12.5", "relative_l2=0.22,cosine=0.975", "max_abs=0.6"])
def test_the_suggested_list_meets_the_bounds_when_it_is_run(bounds: str):
    model = stack(64, 128, 96, 160, 32)
    x = torch.randn(16, 64)
    found = olq_fx.compare(model, {"linear": "mxfp4", "ignore": ["0"]}, x, bounds=bounds, suggest_ignore=True, repeat=0)
    assert found.failures
    suggestion = found.suggestion
    assert suggestion.ignore
    assert suggestion.failures == ()
    run = olq_fx.compare(model, {"linear": "mxfp4", "ignore": ["0", *suggestion.ignore]}, x, bounds=bounds, repeat=0)
    assert run.failures == ()
    assert run.config == suggestion.config
    given_back = sum(x.bytes_before - x.bytes_after for x in found.layers if x.path in suggestion.ignore)
    assert suggestion.bytes_given_back == given_back
    for dropped in suggestion.ignore:
        left = [path for path in suggestion.ignore if path != dropped]
        fewer = olq_fx.compare(model, {"linear": "mxfp4", "ignore": ["0", *left]}, x, bounds=bounds, repeat=0)
        assert fewer.failures, "each of them is needed"


@pytest.mark.parametrize("bound", [11, 12, 13])
@pytest.mark.parametrize("seed", range(3))
def test_the_suggested_list_is_the_cheapest_of_all(seed: int, bound: int):
    """Against every list there is, on models small enough to run them all."""
    torch.manual_seed(seed)
    model, x, bounds = stack(64, 128, 48, 96, 32), torch.randn(16, 64), f"sqnr_db={bound}"
    config = olq_fx.QuantizationConfig("mxfp4")
    found = olq_fx.compare(model, config, x, bounds=bounds, suggest_ignore=True, repeat=0)
    saved = {layer.path: layer.bytes_before - layer.bytes_after for layer in found.layers}
    costs = []
    for count in range(1, len(saved)):
        for paths in itertools.combinations(saved, count):
            run = olq_fx.compare(model, with_ignored(config, paths), x, bounds=bounds, layers=False, repeat=0)
            if not run.failures:
                costs.append(sum(saved[path] for path in paths))
    assert found.suggestion.bytes_given_back == min(costs)


def test_nothing_is_suggested_where_the_bounds_hold():
    found = olq_fx.compare(
        stack(64, 32), "int8", torch.randn(2, 64), bounds="cosine=0.5", suggest_ignore=True, repeat=0
    )
    assert found.suggestion.ignore == ()
    assert found.suggestion.bytes_given_back == 0
    assert "all bounds hold" in str(found)


def test_a_bound_that_no_list_meets():
    found = olq_fx.compare(
        stack(64, 64, 32), "mxfp4", torch.randn(4, 64), bounds="sqnr_db=150", suggest_ignore=True, repeat=0
    )
    assert found.suggestion.ignore == ()
    assert found.suggestion.failures
    assert "no ignore list meets the bounds" in str(found)


def test_the_candidate_is_whole_again_after_the_search_of_tied_weights():
    model = stack(64, 64, 64, 32)
    model[2].weight = model[0].weight
    found = olq_fx.compare(model, "mxfp4", torch.randn(4, 64), bounds="sqnr_db=16", suggest_ignore=True, repeat=0)
    assert found.suggestion.failures == ()
    assert model[2].weight is model[0].weight
    assert type(model[0].weight) is nn.Parameter


def test_values_that_no_number_tells_of():
    """NaN in both models is no agreement, and an empty batch is no comparison."""
    model, x = stack(64, 32), torch.randn(2, 64)
    found = olq_fx.compare(model, "int8", x * torch.nan, bounds={"cosine": 0.5}, repeat=0)
    assert [failure.metric for failure in found.failures] == ["cosine"]
    assert "64 of 64 elements of 'output' are NaN" in str(found)
    x[0, 0] = torch.nan
    assert "32 of 64 elements of 'output' are NaN" in str(olq_fx.compare(model, "int8", x, repeat=0))
    with pytest.raises(ComparisonError, match="no elements"):
        olq_fx.compare(model, "int8", torch.zeros(0, 64), repeat=0)


# What is said


def test_strict_json_and_text():
    model, x = stack(64, 32), torch.randn(2, 64)
    found = olq_fx.compare(model, "none", x, bounds="psnr_db=3", repeat=0)
    data = json.loads(found.to_json(), parse_constant=refuse)
    assert data["outputs"]["output"]["psnr_db"] is None
    assert data["outputs"]["output"]["exact"] is True
    assert data["latency_ms"] is None
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken[0].bias[0] = torch.nan
    found = olq_fx.compare(broken, "int8", x, bounds="psnr_db=3", repeat=1)
    assert json.loads(found.to_json(), parse_constant=refuse)["layers"][0]["path"] == "0"


def test_a_picture(tmp_path, monkeypatch):
    found = olq_fx.compare(stack(48, 96, 48), "mxfp4", (torch.randn(2, 48),), loop=denoise, repeat=0)
    found.plot(tmp_path / "error.png", metric="sqnr_db")
    assert (tmp_path / "error.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigurationError, match="relative_l2"):
        found.plot(tmp_path / "error.png", metric="relative_l1")
    for name in ("error.nothing", "no/such/folder.png"):
        with pytest.raises(ConfigurationError, match="cannot draw"):
            found.plot(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'olq-fx\[plot\]'"):
        found.plot(tmp_path / "error.png")


class Growing(nn.Module):
    """Calls its layer more often, or with other shapes, after the first time that it ran quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized = type(self.proj.weight) is not nn.Parameter
        return self.proj(x[:1]).sum() + self.proj(x).sum() if quantized else self.proj(x).sum()


def test_layers_that_cannot_be_compared_are_named():
    found = olq_fx.compare(Growing(), "int8", torch.randn(4, 32), repeat=0)
    [layer] = found.layers
    assert (layer.calls, layer.metrics) == (2, None)
    assert any("proj" in note for note in found.notes)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"inputs": 3}, ConfigurationTypeError, "inputs are"),
        ({"inputs": "x"}, ConfigurationTypeError, "inputs are"),
        ({"inputs": [3]}, ConfigurationTypeError, "one of the list"),
        ({"inputs": []}, ComparisonError, "no inputs"),
        ({"bounds": "psnr=3"}, ConfigurationError, "psnr_db"),
        ({"bounds": "kl=3"}, ConfigurationError, "logits"),
        ({"bounds": "perplexity=3"}, ConfigurationError, "text"),
        ({"bounds": "latency_ratio=3", "repeat": 0}, ConfigurationError, "repeat"),
        ({"repeat": -1}, ConfigurationError, "repeat"),
        ({"suggest_ignore": True}, ConfigurationError, "bounds"),
        ({"suggest_ignore": True, "bounds": "latency_ratio=3", "repeat": 1}, ConfigurationError, "sqnr_db=20"),
        ({"perplexity": "input_ids"}, ConfigurationError, "input_ids"),
        ({"loop": lambda model, call: model(call)}, ConfigurationTypeError, "yield"),
        ({"config": "fp9"}, ConfigurationError, "fp8"),
        ({"config": {"linear": "int8", "ignore": ["nothing"]}}, PlanError, "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else getattr(value, "__name__", str(value)),
)
def test_what_has_no_meaning(arguments, error, said, unchanged):
    model = stack(32, 16)
    given = {"config": "int8", "inputs": torch.randn(2, 32), "repeat": 0} | arguments
    with unchanged(model), pytest.raises(error, match=said):
        olq_fx.compare(model, **given)


def test_a_suggested_list_for_components():
    model = nn.Sequential(OrderedDict({"a": stack(64, 96, 64), "a_2": stack(64, 96, 48, 32)}))
    config = {"components": {"a": "mxfp4", "a_2": {"linear": "mxfp4", "ignore": ["a_2.0"]}}}
    x = torch.randn(8, 64)
    bound = 0.3 + olq_fx.compare(model, config, x, repeat=0).outputs["output"].sqnr_db
    found = olq_fx.compare(model, config, x, bounds={"sqnr_db": bound}, suggest_ignore=True, repeat=0)
    assert found.suggestion.ignore
    assert found.suggestion.failures == ()
    assert found.suggestion.config.components != found.config.components
    assert not found.suggestion.config.ignore


def test_a_list_beside_targets_cannot_be_suggested():
    config = {"targets": {"0": "mxfp4"}}
    with pytest.raises(ConfigurationError, match="targets"):
        olq_fx.compare(stack(32, 16), config, torch.randn(2, 32), bounds="sqnr_db=90", suggest_ignore=True, repeat=0)


def test_what_is_no_module_or_returns_no_tensor():
    with pytest.raises(ConfigurationTypeError, match="Module"):
        olq_fx.compare(3, "int8", torch.randn(2, 32))  # type: ignore[arg-type]
    silent = stack(32, 16)
    silent.forward = lambda x: "text"
    with pytest.raises(ComparisonError, match="str"):
        olq_fx.compare(silent, "int8", torch.randn(2, 32), repeat=0)


def test_a_forward_that_runs_another_model():
    model = nn.ModuleDict({"proj": nn.Linear(32, 16)})
    model.forward = lambda x: model["proj"](x)
    with pytest.raises(ComparisonError, match=r"no quantized layer was called.*proj"):
        olq_fx.compare(model, "int8", torch.randn(2, 32), repeat=0)


def test_lanes_that_part():
    def longer(model, call):
        for _ in range(2 if type(model[0].weight) is nn.Parameter else 3):
            yield model(call)

    def renamed(model, call):
        yield {type(model[0].weight).__name__: model(call)}

    for loop, said in ((longer, "candidate makes more than 2 steps"), (renamed, "outputs differ")):
        with pytest.raises(ComparisonError, match=said):
            olq_fx.compare(stack(32, 16), "int8", torch.randn(2, 32), loop=loop, repeat=0)


def test_warnings_of_the_plan_reach_the_caller():
    with pytest.warns(OlqFxWarning, match="typo"):
        olq_fx.compare(
            stack(32, 16), {"linear": "int8", "ignore": ["typo"]}, torch.randn(2, 32), strict=False, repeat=0
        )


def test_there_is_no_other_name():
    assert callable(olq_fx.compare)
    with pytest.raises(AttributeError, match="comparee"):
        olq_fx.comparee  # noqa: B018
