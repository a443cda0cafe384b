"""Converted weights under torch.compile and torch.export, without our backend: what is recorded, and how often."""

import collections
import copy
import dataclasses
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from olq_fx import torch_private
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits, assert_sqnr, sqnr
from olq_fx.weights import QuantizedWeight, WeightSpec, quantize_weight


def convert_all(model: nn.Module, scheme: str) -> nn.Module:
    """Convert every matrix of `model`; a Conv1D's by its class."""
    slot = SCHEMES[scheme].linear
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dim() == 2:
                spec = WeightSpec(
                    weight=slot.weight,
                    activation=slot.activation or "",
                    weight_rule=FORMATS[slot.weight].weight_rule,
                    activation_rule=FORMATS[slot.activation].activation_rule if slot.activation else "",
                    transposed=type(module).__name__ == "Conv1D",
                )
                module._parameters[name] = nn.Parameter(quantize_weight(parameter, spec), requires_grad=False)
    return model.eval()


class Block(nn.Module):
    """Three projections of one normed input and a fourth of what they make, with a residual."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim // 2) for _ in range(3))
        self.o = nn.Linear(dim // 2, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.o(functional.silu(self.q(h)) * self.k(h) + self.v(h))


@dataclasses.dataclass
class Recorded:
    """A backend that keeps the graphs of AOTAutograd."""

    graphs: list[torch.fx.GraphModule] = dataclasses.field(default_factory=list)
    compilations: int = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: torch.fx.GraphModule, _: list[Tensor]):
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        self.compilations += 1
        return aot_autograd(fw_compiler=keep)(gm, inputs)

    def calls(self, position: int = 0) -> collections.Counter[str]:
        nodes = self.graphs[position].graph.nodes
        return collections.Counter(str(node.target) for node in nodes if node.op == "call_function")


@pytest.mark.parametrize(
    "scheme", ["fp8_per_tensor", "fp8_per_block", "mxfp4_dualscale", "nvfp4_per_token", "fp8_weight_only"]
)
@torch.no_grad()
def test_siblings_share_one_quantization(scheme: str):
    """q, k and v of one input: one quantization in the graph; written in aten, so that Inductor can fuse it."""
    model, x = convert_all(nn.Sequential(Block(), Block()), scheme), torch.randn(2, 5, 64)
    recorded = Recorded()
    compiled = torch.compile(model, backend=recorded, fullgraph=True)
    assert_same_bits(compiled(x), model(x))
    calls = recorded.calls()
    if SCHEMES[scheme].linear.activation:
        assert calls["olq_fx.quantized_linear.default"] == 8
        assert calls["olq_fx.linear.default"] == 0
        products = [node for node in recorded.graphs[0].graph.nodes if "quantized_linear" in str(node.target)]
        quantized = {tuple(node.args[0]) for node in products}
        assert len(quantized) == 4, "two of each block: one for q, k and v, one for o"
    else:
        assert calls["olq_fx.linear.default"] == 8
    assert calls["aten.t.default"] == 0


@torch.no_grad()
def test_values_that_changed_in_between_are_quantized_again():
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            first = self.a(y)
            y.mul_(3.0)
            return first + self.b(y)

    model, x = convert_all(Changing(), "fp8_per_block"), torch.randn(4, 64)
    recorded = Recorded()
    assert_same_bits(torch.compile(model, backend=recorded, fullgraph=True)(x), model(x))
    products = [node for node in recorded.graphs[0].graph.nodes if "quantized_linear" in str(node.target)]
    assert products[0].args[0] != products[1].args[0]


@torch.no_grad()
def test_reshapes_between_siblings_do_not_hide_the_input():
    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).flatten(0, 1) + self.b(x.reshape(-1, 64)) + self.c(x.view(10, 64))

    model, x = convert_all(Reshaped(), "mxfp8"), torch.randn(2, 5, 64)
    recorded = Recorded()
    assert_same_bits(torch.compile(model, backend=recorded, fullgraph=True)(x), model(x))
    products = [node for node in recorded.graphs[0].graph.nodes if "quantized_linear" in str(node.target)]
    assert len({tuple(node.args[0]) for node in products}) == 1


@pytest.mark.parametrize("dynamic", [True, None])
@torch.no_grad()
def test_new_batches_compile_as_often_as_unquantized(dynamic: bool | None):
    counts = []
    for scheme in (None, "fp8_per_block"):
        torch.compiler.reset()
        model = nn.Sequential(Block())
        if scheme:
            convert_all(model, scheme)
        recorded = Recorded()
        compiled = torch.compile(model, backend=recorded, dynamic=dynamic, fullgraph=True)
        for batch in (8, 5, 1, 3, 17) if dynamic is None else (8, 17):
            x = torch.randn(batch, 3, 64)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        counts.append(recorded.compilations)
    assert counts[0] == counts[1]


@torch.no_grad()
def test_repeated_blocks_are_compiled_once():
    blocks = [convert_all(Block(), "int8") for _ in range(5)]
    for i, block in enumerate(blocks):
        block.q.weight.path = f"blocks.{i}.q.weight"
    recorded = Recorded()
    for block in blocks:
        block.compile(backend=recorded, fullgraph=True)
    x = torch.randn(2, 3, 64)
    for block in blocks:
        x = block(x)
    assert recorded.compilations == 1
    other = convert_all(Block(), "mxfp8")
    other.compile(backend=recorded, fullgraph=True)
    other(x)
    assert recorded.compilations == 2


@torch.no_grad()
def test_a_refresh_needs_no_recompilation():
    model, x = convert_all(Block(), "fp8_per_block"), torch.randn(2, 3, 64)
    recorded = Recorded()
    compiled = torch.compile(model, backend=recorded, fullgraph=True)
    compiled(x)
    for parameter in (model.q.weight, model.o.weight):
        parameter.copy_(torch.randn(parameter.shape))
        assert_same_bits(compiled(x), model(x))
    assert recorded.compilations == 1


@torch.no_grad()
def test_dtype_after_compilation():
    """torch exchanges the content of subclasses, which weak references of the compiler could forbid."""
    model = convert_all(Block(), "fp8_per_block")
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(2, 3, 64))
    model.bfloat16()
    x = torch.randn(2, 3, 64).bfloat16()
    y = compiled(x)
    assert y.dtype == torch.bfloat16
    assert_same_bits(y, model(x))
    other = copy.deepcopy(model)
    assert_same_bits(torch.compile(other, backend="aot_eager")(x), y)


def test_moving_a_model_after_a_compiled_training_step():
    """The compiler keeps weak references then; `.to` works all the same, ties and identities included."""
    model = convert_all(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), "int8")
    model[1].weight = model[0].weight

    def run(x: Tensor) -> Tensor:
        return model[1](model[0](x))

    compiled = torch.compile(run, backend="aot_eager")
    compiled(torch.randn(2, 64)).sum().backward()
    weight, codes = model[0].weight, model[0].weight.codes
    reference = weakref.ref(weight)  # here it is ours; with dynamic shapes the compiler's
    for move, dtype in (("half", torch.float16), ("cpu", torch.float16), ("float", torch.float32)):
        getattr(model, move)()
        assert model[0].weight is model[1].weight is weight
        assert type(weight) is QuantizedWeight
        assert isinstance(weight, nn.Parameter)
        assert weight.dtype == dtype
        assert weight.codes is codes
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert_same_bits(compiled(x), run(x))
    assert reference() is weight
    # What users keep of it themselves is the ordinary type.
    assert type(weight.to(torch.bfloat16)) is QuantizedWeight


@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp4_weight_only"])
def test_training_graph(scheme: str):
    """Forward fused as in inference; the backward is the gradient of the dequantized product."""
    model, recorded = convert_all(Block(), scheme), Recorded()
    compiled = torch.compile(model, backend=recorded, fullgraph=True)
    grads = []
    for run in (model, compiled):
        x = torch.ones(2, 3, 64).cumsum(-1).sin().requires_grad_()
        model.zero_grad()
        run(x).sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert recorded.compilations == 1
    assert len(grads[0]) == len(grads[1]) == 7
    for eager, traced in zip(*grads, strict=True):
        torch.testing.assert_close(traced, eager)
    if SCHEMES[scheme].linear.activation:
        assert recorded.calls()["olq_fx.quantized_linear.default"] == 4


def test_devices_of_fake_weights():
    """What `.to("cuda")` does, seen without a device."""
    layer = convert_all(nn.Linear(96, 40), "nvfp4_per_token")
    mode = torch_private.new_fake_mode()
    fake = torch_private.to_fake(mode, layer.weight)
    with mode:
        moved = fake.to("cuda:0", torch.bfloat16, non_blocking=True)
        y = functional.linear(torch.empty(2, 3, 96, dtype=torch.bfloat16, device="cuda:0"), moved)
    assert {str(part.device) for part in (*moved.parts, moved, y)} == {"cuda:0"}
    assert (moved.dtype, moved.scale.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert y.shape == (2, 3, 40)


@pytest.mark.parametrize("mode", ["inference_mode", "autocast", "inference and autocast"])
def test_modes_under_compilation(mode: str):
    model, x = convert_all(Block(), "fp8_per_block"), torch.randn(2, 3, 64)
    inference = torch.inference_mode("inference" in mode)
    with inference, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled="autocast" in mode):
        expected = model(x)
        recorded = Recorded()
        y = torch.compile(model, backend=recorded, fullgraph=True)(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)
    products = [node for node in recorded.graphs[0].graph.nodes if "quantized_linear" in str(node.target)]
    assert len(products) == 4
    # autocast casts the input of each layer anew: it is one value all the same.
    assert len({tuple(node.args[0]) for node in products}) == 2


@torch.no_grad()
def test_attention_and_strided_inputs_are_recorded_with_one_rounding():
    attention = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.bfloat16)
    nn.init.normal_(attention.in_proj_bias)
    model, x = convert_all(attention, "fp8_per_block"), torch.randn(2, 5, 64).bfloat16()
    recorded = Recorded()

    def run(x: Tensor) -> Tensor:
        return model(x, x, x, need_weights=False)[0]

    y = torch.compile(run, backend=recorded, fullgraph=True)(x)
    torch.testing.assert_close(y, run(x))
    assert recorded.calls()["olq_fx.quantized_linear.default"] == 2
    first = next(node for node in recorded.graphs[0].graph.nodes if "quantized_linear" in str(node.target))
    assert first.args[6] is not None, "the bias is added inside the product"


def test_the_key_of_caches_is_the_same_in_every_process():
    """Nothing in it depends on an address or on the seed of Python's hashes."""
    program = (
        "import torch, olq_fx; m = torch.nn.Linear(8, 8); olq_fx.quantize_(m, 'nvfp4_per_token');"
        "print(m.weight._stable_hash_for_caching())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert "0x" not in told.pop()


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_export(strict: bool):
    model, x = convert_all(nn.Sequential(Block()), "mxfp8"), torch.randn(2, 3, 64)
    program = torch.export.export(model, (x,), strict=strict)
    assert_same_bits(program.module()(x), model(x))


@pytest.mark.slow
@torch.no_grad()
def test_ahead_of_time_compilation(tmp_path: Path):
    """AOTInductor: a package of a quantized model, which needs no Python to run."""
    model, x = convert_all(nn.Sequential(Block()), "mxfp8"), torch.randn(2, 3, 64)
    program = torch.export.export(model, (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    found = torch._inductor.aoti_load_package(package)(x)
    assert sqnr(found, model(x)) > 60


def test_graphs_do_not_keep_what_was_quantized_for_them():
    """The memory of shared quantizations ends with the recording."""
    import gc

    from olq_fx import weights_recording

    model = convert_all(Block(), "int8")
    with torch.no_grad():
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(2, 3, 64))
    torch.compiler.reset()
    gc.collect()
    assert len(weights_recording._QUANTIZED) == 0


def test_recorded_value_looks_through_reshapes_only():
    from torch.fx.experimental.proxy_tensor import make_fx

    found = []

    def record(x: Tensor) -> Tensor:
        recording = torch_private.current_recording()
        views = [x, x.view(6, 4), x.reshape(2, 3, 4).clone(), x.flatten(), x.view(3, 8), x * 1.0, x.detach()]
        found.extend(torch_private.recorded_value(view, recording) for view in views)
        return x

    make_fx(record)(torch.randn(6, 4))
    same, other = [found[i] for i in (0, 1, 2, 6)], [found[i] for i in (3, 4, 5)]
    assert len(set(same)) == 1
    assert len(set(other)) == 3
    assert same[0] not in other
    assert torch_private.current_recording() is None


@pytest.mark.parametrize("scheme", ["fp8_per_block"])
def test_inductor(scheme: str):
    """Values are those of eager up to the order of sums."""
    model, x = convert_all(Block(), scheme), torch.randn(2, 5, 64)
    with torch.no_grad():
        y, expected = torch.compile(model, fullgraph=True)(x), model(x)
    assert_sqnr(y, expected, 30.0)
