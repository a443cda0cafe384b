"""Wherever a frame finds its parameters (module trees, closures, globals, lists), they are replaced there and named."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import olq_fx
from olq_fx import OlqFxWarning, QuantizedWeight
from olq_fx.errors import PlanError

K = 16
X = torch.linspace(-1, 1, 4 * K).reshape(4, K)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


class Count:
    """An inner compiler that counts."""

    def __init__(self) -> None:
        self.compilations = 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.compilations += 1
        return gm.forward


@pytest.fixture
def inner() -> Count:
    return Count()


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(K, K))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() < 0.05 * expected.norm())


GLOBAL = parameter()


def test_function_over_closure_global_and_module(inner: Count, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "GLOBAL", parameter())
    net, w = nn.Sequential(nn.Linear(K, K)), parameter()

    def function(x: Tensor) -> Tensor:
        return net(x @ w) @ GLOBAL.T

    expected = function(X)
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(function, backend=backend)
    for _ in range(2):
        assert close(compiled(X), expected)
    assert inner.compilations == 1
    assert set(backend.report.converted) == {"w", "GLOBAL", "net.0.weight"}
    assert isinstance(w, QuantizedWeight)
    assert isinstance(GLOBAL, QuantizedWeight)
    assert isinstance(net[0].weight, QuantizedWeight)
    assert torch.equal(function(X), compiled(X))


def test_patterns_without_a_root_are_a_warning_and_an_error_of_check(inner: Count):
    net = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))
    backend = olq_fx.backend({"linear": "int8", "ignore": ["net.1", "net.2"]}, inner=inner)
    with pytest.warns(OlqFxWarning, match=r"net\.2"):
        torch.compile(lambda x: net(x), backend=backend)(X)
    assert backend.report.converted == ("net.0.weight",)
    with pytest.raises(PlanError, match=r"net\.2"):
        backend.report.check()


def test_graph_without_parameters_is_compiled_as_it_is(inner: Count):
    backend = olq_fx.backend("int8", inner=inner)
    assert torch.equal(torch.compile(lambda x: x.sin(), backend=backend)(X), X.sin())
    assert backend.reports == ()


def test_argument_is_nobodys_parameter(inner: Count):
    """Its caller would keep the original: it is left alone, and the reason says so."""
    w, net = parameter(), nn.Linear(K, K)
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(lambda x, w: net(x) @ w, backend=backend)
    compiled(X, w)
    assert not isinstance(w, QuantizedWeight)
    row = next(row for row in backend.report.plan.rows if row.path == "w")
    assert "argument of the compiled function" in row.reason


def test_object_that_is_no_module(inner: Count):
    class Pipeline:
        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Linear(K, K))
            self.table, self.items, self.fixed = {"k": parameter()}, [parameter()], (parameter(),)

        def __call__(self, x: Tensor) -> Tensor:
            return self.model(x) @ self.table["k"] @ self.items[0] @ self.fixed[0]

    pipeline = Pipeline()
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(pipeline.__call__, backend=backend)
    for _ in range(2):
        compiled(X)
    assert inner.compilations == 1
    assert set(backend.report.converted) == {"model.0.weight", "table.k", "items.0"}
    assert isinstance(pipeline.items[0], QuantizedWeight)
    reasons = {row.path: row.reason for row in backend.report.plan.rows if row.decision == "leave"}
    assert "held in a tuple" in reasons["fixed.0"]


def test_parameters_outside_the_tree_of_a_module(inner: Count):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)
            self.loose, self.hidden = [parameter()], [nn.Linear(K, K)]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](self.layer(x) @ self.loose[0])

    model = Model()
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(X)
    assert inner.compilations == 1
    assert set(backend.report.converted) == {"layer.weight", "loose.0", "hidden.0.weight"}


def test_two_closures_of_one_function(inner: Count):
    def make(w: nn.Parameter) -> Any:
        def function(x: Tensor) -> Tensor:
            return x @ w

        return function

    backend = olq_fx.backend("int8", inner=inner)
    for function in (make(parameter()), make(parameter())):
        expected = function(X)
        assert close(torch.compile(function, backend=backend)(X), expected)
        assert torch.equal(torch.compile(function, backend=backend)(X), function(X))


def test_decorated_method(inner: Count):
    backend = olq_fx.backend({"linear": "int8", "ignore": ["second"]}, inner=inner)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(K, K), nn.Linear(K, K)

        @functools.partial(torch.compile, backend=backend)
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Model()
    model(X)
    assert backend.report.converted == ("first.weight",)
    assert backend.report.check()


class Two(nn.Module):
    """Two layers, in a class that torch does not treat in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("model", "kept"), [(Two, "second"), (lambda: nn.Sequential(nn.Linear(K, K), Two()), "0")])
def test_method_is_of_its_module(model: Callable[[], nn.Module], kept: str, partial: bool, inner: Count):
    """Also where torch wraps it, as it does with methods of its own classes."""
    module = model()
    function = functools.partial(module.forward) if partial else module.forward
    backend = olq_fx.backend({"linear": "int8", "ignore": [kept]}, inner=inner)
    expected = module(X)
    assert close(torch.compile(function, backend=backend)(X), expected)
    linear = {path for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    assert set(backend.report.converted) == {f"{path}.weight" for path in linear - {kept}}
    assert backend.report.check()


# Several graphs of one root


class Broken(nn.Module):
    """A graph break between uses that no layer names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, K), nn.Linear(K, K)
        self.first, self.second, self.table = parameter(), parameter(), parameter()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) @ self.first
        torch._dynamo.graph_break()
        return F.linear(self.b(x), self.second) + self.table.sum()


def test_plan_is_of_the_tree_and_not_of_a_graph(inner: Count):
    model = Broken()
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(X)
    assert inner.compilations == 2
    assert set(backend.report.converted) == {"a.weight", "first", "b.weight", "second"}
    assert "Tensor.sum" in backend.report.plan.lookup("table").reason


@pytest.mark.parametrize("path", ["first", "second"])
def test_pattern_may_name_what_only_a_later_graph_shows(inner: Count, path: str):
    model = Broken()
    backend = olq_fx.backend({"targets": {path: "int8"}}, inner=inner)
    torch.compile(model, backend=backend)(X)
    assert backend.report.converted == (path,)
    assert backend.report.check()


def test_named_weight_that_no_graph_uses_as_a_linear_layer_waits_and_says_why(inner: Count):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.doubled = nn.Linear(K, K), parameter()

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.layer(x), self.doubled * 2)

    backend = olq_fx.backend({"linear": "int8", "include": ["doubled"]}, inner=inner)
    torch.compile(Model(), backend=backend)(X)
    assert backend.report.converted == ("layer.weight",)
    why = "waits for a graph that uses it as a linear layer; used by operator.mul, which is no linear layer"
    assert backend.report.plan.lookup("doubled").reason == why
    with pytest.raises(PlanError) as error:
        backend.report.check()
    assert str(error.value) == f"doubled is not converted: it {why}"


def test_break_in_a_loop_keeps_full_paths(inner: Count):
    """Dynamo gives the frame up and compiles each layer; the root is still what torch.compile was given."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    model = Looped()
    backend = olq_fx.backend({"linear": "int8", "ignore": ["layers.2.inside"]}, inner=inner)
    compiled = torch.compile(model, backend=backend)
    expected = compiled(X)
    assert torch.equal(compiled(X), expected)
    assert torch.equal(model(X), expected)
    assert backend.report.left_alone == ("layers.2.inside.weight",)
    assert len(backend.report.converted) == 3


def test_whole_tree_is_converted_by_the_first_graph(inner: Count):
    """As by quantize_: a layer that this call does not reach is converted too."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x: Tensor, more: bool = False) -> Tensor:
            x = self.always(x)
            return self.sometimes(x) if more else x

    model = Branch()
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(model, backend=backend)
    compiled(X)
    assert backend.report.converted == ("always.weight", "sometimes.weight")
    assert torch.equal(compiled(X, True), model(X, True))


def test_weight_that_is_not_only_linear_stays_and_says_why(inner: Count):
    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(self.a(x)), self.a.weight.square().sum()

    model = Penalized()
    backend = olq_fx.backend("int8", inner=inner)
    _, penalty = torch.compile(model, backend=backend)(X)
    assert torch.equal(penalty, model.a.weight.square().sum())
    assert backend.report.left_alone == ("a.weight",)
    assert "Tensor.square, which is no linear layer" in backend.report.plan.lookup("a.weight").reason


def test_kernels_are_not_compiled_where_dynamo_gives_up(inner: Count):
    """It then tries what the frame calls, and converted weights run our Python kernels."""

    class Skipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = F.linear(x, self.layer.weight)
                torch._dynamo.graph_break()
            return x

    model = Skipped()
    olq_fx.quantize_(model, "int8")
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    assert torch.equal(compiled(X), model(X))
    assert inner.compilations == 0


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda layer, x: torch.vmap(layer)(x),
    "vmap of vmap": lambda layer, x: torch.vmap(torch.vmap(layer))(x[:, None])[:, 0],
    "vmap of an attention": lambda layer, x: torch.vmap(lambda row: layer(row, row, row)[0])(x[:, None])[:, 0],
    "grad": lambda layer, x: torch.func.grad(lambda row: layer(row).sum())(x),
    "vmap of grad": lambda layer, x: torch.vmap(torch.func.grad(lambda row: layer(row).sum()))(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x)[1](x)[0],
}


@pytest.mark.parametrize("first", [False, True], ids=["backend", "quantize_ first"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions_leave_their_weights_alone(name: str, first: bool, inner: Count):
    """A captured graph enters and leaves a level of torch.vmap; what was converted before stays converted and works."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.MultiheadAttention(K, 2) if "attention" in name else nn.Linear(K, K)
            self.outside = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.outside(TRANSFORMS[name](self.inside, x))

    model = Model().eval()
    if first:
        olq_fx.quantize_(model, "int8")
    backend = olq_fx.backend("int8", inner=inner)
    y = torch.compile(model, backend=backend)(X)
    torch.testing.assert_close(y, model(X))
    inside = [row for row in backend.report.plan.rows if row.path.startswith("inside")]
    assert first or all("torch.vmap or torch.func" in row.reason for row in inside)
    assert isinstance(model.outside.weight, QuantizedWeight)
    assert any(isinstance(weight, QuantizedWeight) for weight in model.inside.parameters()) == first
