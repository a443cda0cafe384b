"""What all tests share: a deterministic Hypothesis profile, seeds, and the two routes to a quantized model."""

import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import nn

# Busy machines draw slowly: that says nothing about a test.
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261129)


@pytest.fixture(autouse=True)
def _own_compilations() -> Iterator[None]:
    """Let no test find what another has compiled: graphs of one class are counted together, up to a limit."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@dataclasses.dataclass
class Quantized:
    """A model that went one of the two routes: called like the model itself."""

    model: nn.Module
    run: Callable[..., Any]
    report: Any

    @property
    def converted(self) -> tuple[str, ...]:
        """The paths of what was converted, in the order of the model."""
        paths: tuple[str, ...] = self.report.converted
        return paths

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self.run(*args)


@dataclasses.dataclass(frozen=True)
class Route:
    """`quantize_` or `backend`."""

    name: str

    def __call__(
        self, model: nn.Module, config: Any, *args: Any, functional: bool = False, inner: str = "eager", **options: Any
    ) -> Quantized:
        """Quantize `model` by this route.

        Args:
            model: changed in place.
            config: any configuration.
            *args: arguments of one call, which the backend needs to compile.
            functional: whether `quantize_` needs them too.
            inner: what the backend hands the rewritten graph to.
            **options: further arguments of `quantize_` or `backend`.
        """
        import olq_fx

        if self.name == "quantize_":
            extra = {"example_inputs": args} if functional else {}
            report = olq_fx.quantize_(model, config, **extra, **options)
            return Quantized(model, model, report)
        torch.compiler.reset()
        backend = olq_fx.backend(config, inner=inner, **options)
        quantized = Quantized(model, torch.compile(model, backend=backend), None)
        quantized(*args)
        quantized.report = backend.report
        return quantized


@pytest.fixture(params=["quantize_", "backend"])
def route(request: pytest.FixtureRequest) -> Route:
    """Both routes, one after the other."""
    return Route(request.param)


@pytest.fixture
def routes() -> dict[str, Route]:
    """Both routes by name, for a test that compares them."""
    return {name: Route(name) for name in ("quantize_", "backend")}


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    from olq_fx.testing import assert_same_bits

    def state() -> dict[str, Any]:
        found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        return found | dict(model.named_buffers(remove_duplicate=False))

    before = state()
    meta = {name for name, tensor in before.items() if tensor.is_meta}
    copies = {name: tensor.detach().clone() for name, tensor in before.items() if name not in meta}
    modules = {name: type(module) for name, module in model.named_modules()}
    yield
    assert {name: type(module) for name, module in model.named_modules()} == modules
    after = state()
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor is before[name], f"{name} was replaced"
        assert tensor.requires_grad == before[name].requires_grad
        if name not in meta:
            assert_same_bits(tensor.detach(), copies[name], name=name)


@pytest.fixture
def unchanged() -> Callable[[nn.Module], contextlib.AbstractContextManager[None]]:
    """A context that asserts that a model leaves it with the same tensors, bits and module classes."""
    return _unchanged


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a command line left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The output, which must be strict JSON."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} is no strict JSON")


MODELS_ON_THE_COMMAND_LINE = """
import torch
from torch import nn
from torch.nn.functional import linear

torch.manual_seed(0)


def stack():
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32))


def long_names():
    return nn.ModuleDict({"self_attention_query_projection": nn.ModuleDict({"inner_matrix_of_it": nn.Linear(8, 8)})})


def inputs():
    return [torch.randn(4, 64, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def wide():
    return (torch.zeros(2, 65),)


def loop(model, call):
    for step in range(3):
        yield model(call + torch.randn(call.shape))


class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.known = nn.Linear(64, 32)
        for name in ("f_linear", "times_t"):
            self.register_parameter(name, nn.Parameter(torch.randn(32, 64) / 8))
        self.mm = nn.Parameter(torch.randn(64, 32) / 8)

    def forward(self, x):
        return self.known(x) + linear(x, self.f_linear) + x @ self.times_t.T + x.mm(self.mm)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.proj, self.twin = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.twin.weight, self.lm_head.weight = self.proj.weight, self.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(self.twin(self.proj(self.embed_tokens(ids))))


class AdaLayerNormZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 384)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.ModuleDict({"gate": nn.Linear(64, 4, bias=False)})
        self.mlp["experts"] = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm1 = AdaLayerNormZero()


def broken():
    raise RuntimeError("no luck\\ntoday")


def stopped():
    raise KeyboardInterrupt


def leaves():
    raise SystemExit(7)


def nan():
    model = stack()
    model[0].weight.data[0, 0] = float("nan")
    return model


def speaks():
    print("a model that prints while it is built")
    return stack()


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 32)

    def forward(self, x):
        raise ValueError("cannot do this")


number = 3
ready = stack()
"""


@pytest.fixture
def olq(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ended]]:
    """Runs `olq-fx` in this process, in a folder of its own where the module `cases` holds models."""
    from olq_fx.cli import main

    (tmp_path / "cases.py").write_text(MODELS_ON_THE_COMMAND_LINE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        before = list(sys.path)
        code = main(arguments)
        assert sys.path == before
        streams = capsys.readouterr()
        return Ended(code, streams.out, streams.err)

    yield run
    sys.modules.pop("cases", None)
