"""Quantization that is expanded after AOTAutograd: traced once for calls alike, and nothing of it is left."""

import uuid
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import olq_fx
from olq_fx import late_decomposition, torch_private
from olq_fx.formats import FORMATS
from olq_fx.kernels import ops
from olq_fx.late_decomposition import LateDecompositions
from olq_fx.testing import assert_same_bits

QUANTIZE = torch.ops.olq_fx.quantize.default
ACTIVATIONS = [name for name, found in FORMATS.items() if found.activation]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was traced, call by call."""
    seen: list[Any] = []

    def counting(function: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(args)
            return make_fx(function, **options)(*args)

        return run

    monkeypatch.setattr(late_decomposition, "make_fx", counting)
    return seen


def late() -> LateDecompositions:
    return LateDecompositions(ops.quantization(), torch_private.inductor_decompositions())


def graph_of(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*inputs)


def targets(gm: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def expanded(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    gm = graph_of(function, *inputs)
    assert QUANTIZE in targets(gm)
    late().expand(gm)
    gm.recompile()
    assert QUANTIZE not in targets(gm)
    gm.graph.lint()
    return gm


@pytest.mark.parametrize("format", ACTIVATIONS)
def test_what_is_put_in_its_place_has_the_same_bits(format):
    rule, x = FORMATS[format].activation_rule, torch.randn(5, 96).bfloat16()
    gm = expanded(lambda x: QUANTIZE(x.relu(), format, rule), x)
    assert_same_bits(list(gm(x)), QUANTIZE(x.relu(), format, rule))


def test_calls_alike_are_traced_once(traced):
    def layers(x, y):
        return [QUANTIZE(each, "mxfp8", "ceil") for each in (x, x + 1, y, y.t().contiguous().t())]

    x, y = torch.randn(4, 64), torch.randn(4, 32)
    gm = expanded(layers, x, y)
    assert len(traced) == 3  # of (4, 64) twice, of (4, 32) in two layouts
    assert_same_bits([list(parts) for parts in gm(x, y)], [list(parts) for parts in layers(x, y)])


@pytest.mark.parametrize("other", [("mxfp4", "even"), ("mxfp4", "floor")])
def test_formats_and_rules_are_not_confused(traced, other):
    def both(x):
        return [QUANTIZE(x, "mxfp4", "ceil"), QUANTIZE(x, *other), QUANTIZE(x, "mxfp8", "ceil")]

    x = torch.randn(4, 64)
    gm = expanded(both, x)
    assert len(traced) == 3
    assert_same_bits([list(parts) for parts in gm(x)], [list(parts) for parts in both(x)])


def test_a_result_that_nobody_reads_and_one_that_two_read():
    x = torch.randn(4, 64)

    def reads(x):
        codes, _ = QUANTIZE(x, "int8_per_token", "amax")
        return codes.float() + 1, codes.float() * 2

    assert_same_bits(list(expanded(reads, x)(x)), list(reads(x)))


def repeated(gm: torch.fx.GraphModule) -> float:
    """How many operations Inductor generates for each one of a graph: it repeats what it does not store."""
    sizes: dict[torch.fx.Node, int] = {}
    total = 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        sizes[node] = 1 + sum(sizes.get(each, 0) for each in node.all_input_nodes)
        stored = node.meta.get("inductor_realize_to_strides") or node.target is torch.ops.aten.amax.default
        if stored or any(user.op == "output" for user in node.users):
            total += sizes[node]
            sizes[node] = 0
    return total / len(sizes)


@pytest.mark.parametrize("format", ACTIVATIONS)
def test_what_is_long_and_read_often_is_computed_once(format):
    """Or Inductor generates it anew for every use: of mxfp4 eight times all operations, which took it long."""
    rule = FORMATS[format].activation_rule
    gm = expanded(lambda x: QUANTIZE(x, format, rule), torch.randn(32, 1024))
    assert repeated(gm) < 2.5


def test_every_call_is_left_for_later():
    [decline] = late().table().values()
    assert decline(torch.randn(2, 32), "mxfp8", "ceil") is NotImplemented


def test_symbolic_extents_are_expanded_too(monkeypatch: pytest.MonkeyPatch):
    """Also where columns are padded: one graph serves every batch."""
    left = []
    expand = LateDecompositions.expand

    def watched(self: LateDecompositions, gm: torch.fx.GraphModule) -> None:
        before = targets(gm).count(QUANTIZE)
        expand(self, gm)
        left.append((before, targets(gm).count(QUANTIZE)))

    monkeypatch.setattr(LateDecompositions, "expand", watched)
    torch.manual_seed(0)
    eager, compiled = (nn.Sequential(nn.Linear(40, 72), nn.SiLU(), nn.Linear(72, 64)) for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    olq_fx.quantize_(eager, "fp8_per_block")
    fast = torch.compile(compiled, backend=olq_fx.backend("fp8_per_block"), dynamic=True)
    with torch.no_grad(), torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        for rows in (5, 9, 130):
            x = torch.randn(rows, 40)
            assert_same_bits(fast(x), eager(x))
    assert left == [(2, 0)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_has_the_bits_of_the_eager_one(dynamic):
    """Two layers that read one input, in two formats."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 32), nn.Linear(64, 48)

        def forward(self, x):
            return self.up(x), self.down(x)

    config = {"targets": {"up": "mxfp8", "down": "int8"}}
    torch.manual_seed(0)
    eager, compiled = Two(), Two()
    compiled.load_state_dict(eager.state_dict())
    olq_fx.quantize_(eager, config)
    fast = torch.compile(compiled, backend=olq_fx.backend(config), dynamic=dynamic)
    with torch.no_grad():
        for rows in (3, 5):
            x = torch.randn(rows, 64)
            assert_same_bits(list(fast(x)), list(eager(x)))


@pytest.mark.parametrize(
    ("options", "forms"),
    [({}, True), ({"max_autotune": True}, False), ({"max_autotune_pointwise": True}, False)],
)
def test_one_form_of_a_reduction_is_compiled_where_nobody_asks_for_tuning(options, forms):
    assert torch_private._settings(options).get("test_configs.force_filter_reduction_configs", False) == forms


def test_settings_of_the_user_win():
    name = "test_configs.force_filter_reduction_configs"
    assert torch_private._settings({name: False})[name] is False
    assert torch_private._settings({"emulate_precision_casts": False})["emulate_precision_casts"] is False
