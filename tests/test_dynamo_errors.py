"""Mistakes reach the caller as our own errors, the model stays as it was, and the next call starts anew."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import olq_fx
from olq_fx import QuantizedWeight
from olq_fx.errors import BackendError, ConfigurationError, ConfigurationTypeError, ConversionError, PlanError

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


def stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "pattern": ({"linear": "int8", "ignore": ["0.wieght"]}, PlanError, "0.weight"),
    "contradiction": ({"targets": {"0": "int8"}, "ignore": ["0"]}, PlanError, "ignore"),
    "nothing": ({"linear": "int8", "ignore": ["*"]}, PlanError, "nothing would be quantized"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("suppress", [False, True])
def test_mistake_of_a_plan_is_raised_as_it_is_at_every_call(unchanged, name: str, suppress: bool):
    config, error, text = MISTAKES[name]
    model = stack()
    compiled = torch.compile(model, backend=olq_fx.backend(config, inner="eager"))
    with unchanged(model), torch._dynamo.config.patch(suppress_errors=suppress):
        for _ in range(12):  # more often than Dynamo would compile one frame
            with pytest.raises(error, match=text) as caught:
                compiled(X)
            assert type(caught.value) is error


def test_refused_weight_leaves_the_model_and_works_once_it_is_mended(unchanged):
    model = stack()
    model[2].weight[3, 3] = torch.nan
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner="eager"))
    with unchanged(model):
        for _ in range(2):
            with pytest.raises(ConversionError, match=r"2\.weight"):
                compiled(X)
    model[2].weight[3, 3] = 0
    assert compiled(X).isfinite().all()
    assert isinstance(model[2].weight, QuantizedWeight)


def test_error_in_one_model_does_not_compile_another_anew():
    compilations: list[int] = []

    def inner(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compilations.append(len(inputs))
        return gm.forward

    class Own(nn.Sequential):
        """A class of its own, since error and success would share the code of torch's."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    good = torch.compile(stack(), backend=olq_fx.backend("int8", inner=inner))
    good(X)
    bad = torch.compile(Own(nn.Linear(16, 16)), backend=olq_fx.backend({"linear": "int8", "ignore": "x"}, inner=inner))
    with pytest.raises(PlanError):
        bad(X)
    good(X)
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"config": "fp8_per_blok"}, ConfigurationError, "fp8_per_block"),
        ({"config": "int8", "inner": "indoctor"}, ConfigurationError, "inductor"),
        ({"config": "int8", "inner": "olq_fx"}, ConfigurationError, "olq_fx"),
        ({"config": "int8", "inner": 3}, ConfigurationTypeError, "not a int"),
        ({"config": "int8", "ignroe": ["a"]}, ConfigurationError, "ignore"),
        ({"config": 3.5}, TypeError, "float"),
    ],
)
def test_mistake_of_a_configuration_is_raised_where_it_is_made(arguments: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        olq_fx.backend(**arguments)


def test_failure_of_the_inner_compiler_is_chained_and_the_model_is_whole():
    def failing(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise ValueError("no code today")

    model = stack()
    reference = stack()
    reference.load_state_dict(model.state_dict())
    olq_fx.quantize_(reference, "int8")
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=failing))
    for _ in range(2):
        with pytest.raises(BackendError, match=r"'failing' failed .*no code today") as caught:
            compiled(X)
        assert type(caught.value.__cause__) is ValueError
    assert torch.equal(model(X), reference(X))
    assert torch.equal(torch.compile(model, backend=olq_fx.backend("int8", inner="eager"))(X), reference(X))


def test_messages_to_dynamo_pass_through():
    def skips(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise torch._dynamo.exc.SkipFrame("not this one")

    model = stack()
    found = torch.compile(model, backend=olq_fx.backend("int8", inner=skips))(X)
    assert torch.equal(found, model(X))
    assert isinstance(model[0].weight, QuantizedWeight)


def test_warning_that_is_an_error_is_raised_as_it_is(unchanged):
    """With `-W error`, as in these tests."""
    model = stack()
    backend = olq_fx.backend({"linear": "int8", "ignore": ["nowhere"]}, inner="eager", strict=False)
    compiled = torch.compile(model, backend=backend)
    with unchanged(model), pytest.raises(olq_fx.OlqFxWarning, match="nowhere"):
        compiled(X)


# The registered name


def test_backend_by_name():
    model = stack()
    options = {"scheme": "mxfp8", "inner": "eager", "ignore": ["1"]}
    torch.compile(model, backend="olq_fx", options=options)(X)
    assert [isinstance(layer.weight, QuantizedWeight) for layer in model] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheme": "mxfp9", "inner": "eager"}, "mxfp"),
        ({"inner": "eager"}, "name a scheme"),
        (None, "name a scheme"),
        ({"scheme": "int8", "config": "int8"}, "two names of the same"),
        ({"scheme": "int8", "inner": "eager", "ignroe": "0"}, "ignore"),
    ],
)
def test_mistake_in_options_is_raised_at_the_call(unchanged, options: dict[str, Any] | None, text: str):
    model = stack()
    compiled = torch.compile(model, backend="olq_fx", options=options)
    with unchanged(model):
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=text):
                compiled(X)


def test_equal_options_are_one_backend():
    """Or recompilations would take weights that the first compilation converted for another run's."""
    model = stack()
    compiled = torch.compile(model, backend="olq_fx", options={"scheme": "int8", "inner": "eager"})
    for rows in (2, 3, 4):
        compiled(torch.ones(rows, 16))
    assert isinstance(model[0].weight, QuantizedWeight)


def test_named_backends_of_two_roots_that_look_alike_are_two():
    roots = [nn.Sequential(stack()) for _ in range(2)]
    for root in roots:
        options = {"scheme": "int8", "inner": "eager", "ignore": ["0.1"], "root": root}
        torch.compile(root[0], backend="olq_fx", options=options)(X)
        assert [isinstance(layer.weight, QuantizedWeight) for layer in root[0]] == [True, False, True]


def test_dumps_hold_every_graph(tmp_path):
    backend = olq_fx.backend("int8", inner="eager", dump_dir=tmp_path)
    torch.compile(stack(), backend=backend)(X)
    torch.compile(nn.Linear(16, 16), backend=backend)(X)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph_001", "graph_002"]
    assert "quantized_linear" in (tmp_path / "graph_002" / "08_clean_up.txt").read_text()
