"""Quantization traces whole, for any number of rows, to the same bits; on Inductor it is one kernel with a norm."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from olq_fx.formats import FORMATS, Format
from olq_fx.numerics import Parts, dequantize, quantize
from olq_fx.testing import assert_same_bits

CASES = [(fmt, rule) for fmt in FORMATS.values() for rule in fmt.rules]
EVERY_RULE = pytest.mark.parametrize(("fmt", "rule"), CASES, ids=[f"{fmt.name}-{rule}" for fmt, rule in CASES])
DEFAULTS = [(fmt, rule) for fmt, rule in CASES if rule in ((fmt.weight and fmt.weight_rule), fmt.activation_rule)]
DEFAULT_RULES = pytest.mark.parametrize(
    ("fmt", "rule"),
    [
        pytest.param(*case, marks=() if case in DEFAULTS else pytest.mark.slow, id=f"{case[0].name}-{case[1]}")
        for case in CASES
    ],
)
ACTIVATIONS = [fmt for fmt in FORMATS.values() if fmt.activation]
K = 544


def _there_and_back(fmt: Format, rule: str) -> Callable[[Tensor], Parts]:
    def there_and_back(x: Tensor) -> Parts:
        parts = quantize(x, fmt, rule)
        return *parts, dequantize(parts, fmt, x.shape[1])

    return there_and_back


def _rows(count: int) -> Tensor:
    """(count, K) in bfloat16 with the rows that differ most: zero, subnormal, huge, non-finite, a far outlier."""
    x = torch.randn(count, K)
    for row, factor in enumerate((0.0, 1e-39, 2e37, 1.0, 1.0)[:count]):
        x[row] *= factor
    if count > 4:
        x[3, 7], x[3, 500] = float("nan"), float("inf")
        x[4, 9] = 1e6
    return x.to(torch.bfloat16)


@DEFAULT_RULES
def test_a_traced_graph_holds_for_every_number_of_rows(fmt: Format, rule: str) -> None:
    eager = _there_and_back(fmt, rule)
    graph = make_fx(eager, tracing_mode="symbolic")(_rows(300))
    for count in (300, 5, 1, 0) if fmt.group[0] != 128 else (300, 256, 129):
        x = _rows(count)
        assert_same_bits(graph(x), eager(x), name=f"{count} rows")


@EVERY_RULE
def test_a_traced_graph_pads_nothing_where_groups_are_whole(fmt: Format, rule: str) -> None:
    graph = make_fx(lambda x: quantize(x, fmt, rule), tracing_mode="fake")(torch.randn(128, 512))
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    # The maximum over all rows of a tensor is padded by a row of zeros, the tensor is not.
    of_all_rows = fmt.group[0] is None or fmt.coarse == (None, None)
    assert ("aten.constant_pad_nd.default" in targets) == of_all_rows
    assert not any("copy_" in target or "scatter" in target or "index_put" in target for target in targets)


@pytest.mark.parametrize(
    "fmt", [FORMATS["fp8_per_token"], FORMATS["mxfp4"], FORMATS["nvfp4_per_token"]], ids=lambda fmt: fmt.name
)
def test_dynamo_compiles_once_for_all_batches(fmt: Format) -> None:
    eager = _there_and_back(fmt, fmt.activation_rule)
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(eager, backend=counter, fullgraph=True)
    for count in (5, 3, 130):
        x = _rows(count)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same_bits(compiled(x), eager(x), name=f"{count} rows")
    assert counter.frame_count == 1


@pytest.fixture
def as_eager_rounds() -> Iterator[None]:
    """Inductor rounds the intermediates of a kernel as eager does, and takes nothing from its caches."""
    with torch._inductor.config.patch(emulate_precision_casts=True, fx_graph_cache=False):
        yield


def _compiled(function: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, int]:
    """The result of a function compiled for the CPU, and of how many C++ kernels it consists."""
    from torch._inductor.utils import run_and_get_code

    result, sources = run_and_get_code(torch.compile(function, fullgraph=True), x)
    return result, sum(source.count("async_compile.cpp_pybinding") for source in sources)


@pytest.mark.usefixtures("as_eager_rounds")
@pytest.mark.parametrize("fmt", ACTIVATIONS, ids=lambda fmt: fmt.name)
def test_a_norm_and_quantization_are_one_kernel_with_the_bits_of_eager(fmt: Format) -> None:
    weight = torch.randn(1024).to(torch.bfloat16)

    def norm_and_quantize(x: Tensor) -> Parts:
        return quantize(functional.rms_norm(x, (1024,), weight, 1e-6), fmt, fmt.activation_rule)

    x = torch.randn(9, 1024)
    x[0], x[1, 7], x[2, 9] = 0.0, float("nan"), 1e30
    found, kernels = _compiled(norm_and_quantize, x.to(torch.bfloat16))
    assert kernels == 1
    assert_same_bits(found, norm_and_quantize(x.to(torch.bfloat16)))


@pytest.mark.usefixtures("as_eager_rounds")
@pytest.mark.parametrize("fmt", [FORMATS["fp8_per_block_dynamic"], FORMATS["mxfp4_dualscale"]], ids=lambda f: f.name)
def test_the_last_columns_are_written_where_they_fill_no_group(fmt: Format) -> None:
    """A slice of the padded codes would be split by Inductor into whole groups only (pytorch issue 195582)."""
    x = torch.randn(5, 544)
    found, _ = _compiled(lambda values: quantize(values, fmt, fmt.activation_rule), x)
    assert_same_bits(found, quantize(x, fmt, fmt.activation_rule))


@pytest.mark.slow
@pytest.mark.usefixtures("as_eager_rounds")
@EVERY_RULE
def test_inductor_gives_the_bits_of_eager(fmt: Format, rule: str) -> None:
    eager = _there_and_back(fmt, rule)
    for count in (5, 130):
        x = _rows(count)
        found, _ = _compiled(eager, x)
        *parts, values = eager(x)
        assert_same_bits(found[:-1], tuple(parts), name=f"{count} rows")
        # Which NaN a product with NaN is differs.
        torch.testing.assert_close(found[-1], values, rtol=0, atol=0, equal_nan=True)
