"""The backend route: what the first call converts, what later calls read, and how often anything is compiled."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import olq_fx
from olq_fx import QuantizedWeight
from olq_fx.errors import BackendError, ConversionError, PlanError
from olq_fx.testing import assert_same_bits

K = 32


class Inner:
    """An inner compiler that counts and runs graphs as they are."""

    def __init__(self) -> None:
        self.compilations = 0

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compilations += 1
        return gm.forward


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def stack(layers: int = 3, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(K, K, bias=bias) for _ in range(layers)])


class Block(nn.Module):
    """A block of a model whose blocks are compiled one by one."""

    def __init__(self, hidden: int = K) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, hidden, bias=False), nn.Linear(hidden, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def quantized(model: nn.Module, config: Any) -> nn.Module:
    copied = copy.deepcopy(model)
    olq_fx.quantize_(copied, config)
    return copied


def is_converted(*parameters: Tensor) -> list[bool]:
    return [isinstance(parameter, QuantizedWeight) for parameter in parameters]


def test_first_call_converts_and_frees(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    expected = quantized(model, "mxfp8")(x)
    originals = [weakref.ref(layer.weight) for layer in model]
    compiled = torch.compile(model, backend=olq_fx.backend("mxfp8", inner=inner))
    first = compiled(x)
    gc.collect()
    assert [reference() for reference in originals] == [None] * 3
    assert_same_bits(first, expected)
    assert_same_bits(compiled(x), expected)
    assert_same_bits(model(x), expected)
    assert inner.compilations == 1


def test_what_is_freed_is_freed_with_the_graph_still_there(inner: Inner):
    """Neither a later compilation nor the copy of the graph that is kept for it holds an original."""
    model = stack()
    originals = [weakref.ref(layer.weight) for layer in model]
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    for rows in (4, 5, 6):
        compiled(torch.randn(rows, K))
    gc.collect()
    assert [reference() for reference in originals] == [None] * 3
    assert inner.compilations == 2


def test_report_says_what_was_done(inner: Inner):
    model = stack()
    backend = olq_fx.backend({"linear": "int8", "ignore": "1"}, inner=inner)
    with pytest.raises(BackendError, match="nothing has been compiled yet"):
        _ = backend.report
    torch.compile(model, backend=backend)(torch.randn(2, K))
    assert backend.report.converted == backend.report.frozen == ("0.weight", "2.weight")
    assert backend.report.left_alone == ("1.weight",)
    assert backend.report.check() is backend.report
    slot = '{"weight": "int8_per_channel_static", "activation": "int8_per_token"}'
    assert repr(backend) == f'olq_fx.backend({{"linear": {slot}, "ignore": ["1"]}}, inner=\'Inner\')'


def test_report_keeps_what_was_converted_over_recompilations(inner: Inner):
    model, backend = stack(), olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(model, backend=backend)
    for rows in (2, 3):
        compiled(torch.randn(rows, K))
    assert backend.report.converted == backend.report.frozen == ("0.weight", "1.weight", "2.weight")
    assert len(backend.reports) == 1


def test_refused_passes_are_in_the_report(inner: Inner):
    layer = nn.Linear(K, K)
    backend = olq_fx.backend("int8", inner=inner)
    torch.compile(nn.Sequential(layer), backend=backend)(torch.randn(2, K))
    assert backend.report.refusals == []

    class TwoReaders(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return (y + x) * y

    torch.compile(TwoReaders(), backend=backend)(torch.randn(2, K))
    (refusal,) = backend.report.refusals
    assert (refusal.what, refusal.where) == ("fuse_residual", "layer.weight")
    assert "read by others" in refusal.reason


# What later calls read


def test_refresh_is_read_at_the_next_call(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    compiled(x)
    for assign in (False, True):
        new = stack()
        model.load_state_dict(new.state_dict(), assign=assign)
        assert_same_bits(compiled(x), quantized(new, "int8")(x))
    model[1].weight.copy_(torch.ones(K, K))
    assert_same_bits(compiled(x), model(x))
    assert inner.compilations == 1


def test_replaced_parameter_is_converted(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    compiled(x)
    new = stack()
    model[1].weight = nn.Parameter(new[1].weight.clone())
    original = weakref.ref(model[1].weight)
    found = compiled(x)
    assert is_converted(model[1].weight) == [True]
    assert_same_bits(model[1].weight.dequantize(), quantized(new, "int8")[1].weight.dequantize())
    assert_same_bits(found, model(x))
    assert inner.compilations == 1
    gc.collect()
    assert original() is None


def test_replaced_parameter_with_a_nan_is_refused_by_name(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    compiled(x)
    model[1].weight = nn.Parameter(torch.full((K, K), torch.nan))
    with pytest.raises(ConversionError, match=r"1\.weight"):
        compiled(x)
    model[1].weight = nn.Parameter(torch.ones(K, K))
    assert_same_bits(compiled(x), model(x))


def test_plain_tensor_in_the_place_of_a_parameter_is_an_error_by_name(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    compiled(x)
    with pytest.raises(BackendError, match=r"1\.weight: a plain Tensor stands where"):
        torch.func.functional_call(compiled, {"_orig_mod.1.weight": torch.ones(K, K)}, (x,))
    assert_same_bits(compiled(x), model(x))


def test_replaced_parameter_of_another_shape_is_traced_anew(inner: Inner):
    model = nn.Sequential(nn.Linear(K, K, bias=False), nn.ReLU())
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    compiled(torch.randn(4, K))
    model[0].weight = nn.Parameter(torch.randn(8, K))
    x = torch.randn(4, K)
    found = compiled(x)
    assert found.shape == (4, 8)
    assert_same_bits(found, model(x))
    assert inner.compilations == 2


def test_other_formats_over_converted_layers_are_an_error(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    expected = compiled(x)
    with pytest.raises(PlanError, match="dequantize_"):
        torch.compile(model, backend=olq_fx.backend("mxfp8", inner=inner))(x)
    assert_same_bits(compiled(x), expected)


def test_dequantized_model_is_converted_again(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    compiled(x)
    olq_fx.dequantize_(model)
    expected = quantized(model, "int8")(x)
    assert_same_bits(compiled(x), expected)
    assert inner.compilations == 1


def test_quantized_model_is_taken_as_it_is(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    olq_fx.quantize_(model, "int8")
    weights = [layer.weight for layer in model]
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(model, backend=backend)
    assert_same_bits(compiled(x), model(x))
    compiled(x)
    assert inner.compilations == 1
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))
    assert backend.report.already == ("0.weight", "1.weight", "2.weight")


# How often it compiles


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_batches_in_turn_compile_as_often_as_unquantized(inner: Inner, dynamic: bool | None):
    plain = Inner()
    for backend in (plain, olq_fx.backend("int8", inner=inner)):
        torch.compiler.reset()
        compiled = torch.compile(stack(), backend=backend, dynamic=dynamic)
        for rows in (8, 5, 1, 3, 17):
            assert compiled(torch.randn(rows, K)).shape == (rows, K)
    assert inner.compilations == plain.compilations


def test_marked_size_is_one_graph(inner: Inner):
    compiled = torch.compile(stack(), backend=olq_fx.backend("int8", inner=inner))
    x = torch.randn(8, K)
    torch._dynamo.mark_dynamic(x, 0)
    for value in (x, torch.randn(5, K), torch.randn(17, K)):
        compiled(value)
    assert inner.compilations == 1


@pytest.mark.parametrize("named_root", [True, False])
def test_blocks_share_one_graph(inner: Inner, named_root: bool):
    model, x = nn.Sequential(*[Block() for _ in range(10)]), torch.randn(4, K)
    expected = quantized(model, "int8")(x)
    backend = olq_fx.backend("int8", inner=inner, root=model if named_root else None)
    for block in model:
        block.compile(backend=backend)
    for _ in range(2):
        assert_same_bits(model(x), expected)
    assert inner.compilations == 1
    assert all(is_converted(*(parameter for block in model for parameter in block.parameters())))
    assert len(backend.reports) == (1 if named_root else 10)
    model(torch.randn(9, K))
    assert inner.compilations == 2


def test_blocks_whose_rows_differ_have_a_graph_for_each_distinct_row(inner: Inner):
    config = {"linear": "int8", "ignore": ["0.up", "3.down", "5.up"]}
    model, x = nn.Sequential(*[Block() for _ in range(7)]), torch.randn(4, K)
    expected = quantized(model, config)(x)
    backend = olq_fx.backend(config, inner=inner, root=model)
    for block in model:
        block.compile(backend=backend)
    for _ in range(3):
        assert_same_bits(model(x), expected)
    assert inner.compilations == 3
    assert backend.report.left_alone == ("0.up.weight", "3.down.weight", "5.up.weight")


def test_blocks_of_other_shapes_have_graphs_of_their_own(inner: Inner):
    """Without biases, only the weights tell them apart."""
    model, x = nn.Sequential(*[Block(hidden) for hidden in (16, 48, 16, 48)]), torch.randn(4, K)
    expected = quantized(model, "int8")(x)
    backend = olq_fx.backend("int8", inner=inner)
    for block in model:
        block.compile(backend=backend)
    assert_same_bits(model(x), expected)
    assert_same_bits(model(x), expected)
    assert inner.compilations <= 3


def test_two_schemes_in_one_process_do_not_meet():
    inners = Inner(), Inner()
    models = stack(), stack()
    x = torch.randn(4, K)
    expected = [quantized(model, name)(x) for model, name in zip(models, ("int8", "mxfp8"), strict=True)]
    compiled = [
        torch.compile(model, backend=olq_fx.backend(name, inner=inner))
        for model, name, inner in zip(models, ("int8", "mxfp8"), inners, strict=True)
    ]
    for _ in range(2):
        for call, value in zip(compiled, expected, strict=True):
            assert_same_bits(call(x), value)
    assert [inner.compilations for inner in inners] == [1, 1]


def test_one_backend_serves_several_models(inner: Inner):
    backend, x = olq_fx.backend("int8", inner=inner), torch.randn(4, K)
    models = [stack(), Block(), stack(2)]
    for model in models:
        expected = quantized(model, "int8")(x)
        assert_same_bits(torch.compile(model, backend=backend)(x), expected)
    assert [len(report.converted) for report in backend.reports] == [3, 2, 2]
    del models, model
    torch.compiler.reset()
    gc.collect()
    assert backend.reports == ()


def test_threads_convert_each_weight_once(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    expected = quantized(model, "int8")(x)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    found: list[Tensor] = []
    weights: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            found.append(compiled(x))
        weights.append([layer.weight for layer in model])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for value in found:
        assert_same_bits(value, expected)
    assert all(a is b for held in weights for a, b in zip(held, weights[0], strict=True))


def test_copies_of_a_compiled_model_work(inner: Inner):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    expected = compiled(x)
    assert_same_bits(copy.deepcopy(compiled)(x), expected)


# Modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_converted_weights_are_ordinary_tensors_whatever_the_mode(inner: Inner, mode: Callable[[], Any]):
    model, x = stack(), torch.randn(4, K)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    with mode():
        compiled(x)
        compiled(x)
    assert inner.compilations == 1
    assert not any(part.is_inference() for layer in model for part in layer.weight.parts)
    assert torch.is_grad_enabled() is False


def test_gradients_of_inputs_and_biases(inner: Inner):
    model = stack()
    reference = quantized(model, "int8")
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    found, expected = torch.randn(4, K, requires_grad=True), torch.zeros(4, K, requires_grad=True)
    expected.data.copy_(found)
    with torch.enable_grad():
        for _ in range(2):
            compiled(found).square().sum().backward()
            reference(expected).square().sum().backward()
    assert inner.compilations == 1
    assert_same_bits(found.grad, expected.grad)
    for layer, other in zip(model, reference, strict=True):
        assert_same_bits(layer.bias.grad, other.bias.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_autocast_is_what_it_is_without_the_backend(inner: Inner, dtype: torch.dtype, place: str):
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype, enabled=place == "inside"):
                return self.layers(x)

    model, x = Inside(), torch.randn(2, 3, K)
    reference = quantized(model, "int8")
    compiled = torch.compile(model, backend=olq_fx.backend("int8", inner=inner))
    with torch.autocast("cpu", dtype, enabled=place == "around"):
        found, expected = compiled(x), reference(x)
    assert found.dtype == expected.dtype
    assert_same_bits(found, expected)


def test_fake_and_meta_inputs_convert_nothing(inner: Inner, unchanged):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, mode = stack(), FakeTensorMode(allow_non_fake_inputs=True)
    backend = olq_fx.backend("int8", inner=inner)
    compiled = torch.compile(model, backend=backend)
    fakes = {f"_orig_mod.{name}": mode.from_tensor(value) for name, value in model.named_parameters()}
    with unchanged(model):
        torch.func.functional_call(compiled, fakes, (mode.from_tensor(torch.randn(4, K)),))
    meta = stack().to("meta")
    with unchanged(meta):
        torch.compile(meta, backend=backend)(torch.randn(4, K, device="meta"))
    assert backend.report.pending == ("0.weight", "1.weight", "2.weight")
    x = torch.randn(4, K)
    expected = quantized(model, "int8")(x)
    assert_same_bits(compiled(x), expected)
    assert all(is_converted(*(layer.weight for layer in model)))


def test_none_leaves_everything_alone(inner: Inner, unchanged):
    model, x = stack(), torch.randn(4, K)
    expected = model(x)
    backend = olq_fx.backend(None, inner=inner)
    with unchanged(model):
        assert_same_bits(torch.compile(model, backend=backend)(x), expected)
    assert backend.report.converted == ()


def test_warnings_come_once_a_compilation(inner: Inner):
    backend = olq_fx.backend({"linear": "int8", "ignore": "nothing"}, inner=inner, strict=False)
    compiled = torch.compile(stack(), backend=backend)
    with pytest.warns(olq_fx.OlqFxWarning, match="nothing"):
        compiled(torch.randn(4, K))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.randn(4, K))
    with pytest.raises(PlanError, match="nothing"):
        backend.report.check()
