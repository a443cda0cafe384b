"""What all tests share: a deterministic Hypothesis profile, seeds, and the two routes to a quantized model."""

import contextlib
import dataclasses
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
