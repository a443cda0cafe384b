"""What compiled graphs look like, and that nothing global changes. Numbers 34 and 37."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import linear

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import RecordingBackend, assert_same_bits, model_case

with_activations = pytest.mark.parametrize(
    "scheme", [name for name, scheme in SCHEMES.items() if scheme.linear.activation]
)


class Final:
    """A compiler that keeps the inference graphs that it would turn into kernels."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.backend: Any = aot_autograd(fw_compiler=self.keep)

    def keep(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def activations(self) -> list[Any]:
        """The codes that each quantized product reads, in order."""
        target = torch.ops.olq_fx.quantized_linear.default
        return [
            node.args[0][0] for graph in self.graphs for node in graph.find_nodes(op="call_function", target=target)
        ]


@with_activations
def test_34_qkv_share_one_activation_quantization(route, scheme):
    case = model_case("llama_block")
    final = Final()
    quantized = route(case.model, scheme, *case.args, inner=final.backend)
    compiled = torch.compile(case.model, backend=final.backend) if route.name == "quantize_" else quantized
    with torch.no_grad():
        compiled(*case.args)
    codes = final.activations()
    assert len(codes) == 7
    q, k, v, o, gate, up, down = codes
    assert q is k is v
    assert gate is up
    assert len({q, o, gate, down}) == 4


@with_activations
def test_34_the_backend_emits_one_quantization_an_input(scheme):
    case = model_case("llama_block")
    recording = RecordingBackend(scheme)
    with torch.no_grad():
        torch.compile(case.model, backend=recording)(*case.args)
    recording.assert_replaced({linear: 7}, {torch.ops.olq_fx.quantize: 4, torch.ops.olq_fx.quantized_linear: 7})


def test_34_layers_of_different_formats_on_one_input_do_not_share():
    case = model_case("llama_block")
    recording = RecordingBackend({"targets": {"q_proj": "mxfp8", "k_proj": "mxfp8", "v_proj": "mxfp4"}})
    with torch.no_grad():
        torch.compile(case.model, backend=recording)(*case.args)
    recording.assert_replaced(None, {torch.ops.olq_fx.quantize: 2, torch.ops.olq_fx.quantized_linear: 3})
    assert recording.count_before(linear) == 7
    assert recording.count_after(linear) == 4


def test_34_an_input_written_in_place_between_is_quantized_twice():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            y = self.first(x)
            x.add_(100)
            z: torch.Tensor = y + self.second(x)
            return z

    model = Writes()
    x = torch.randn(3, 64)
    recording = RecordingBackend("int8")
    with torch.no_grad():
        y = torch.compile(model, backend=recording)(x)
        assert_same_bits(y, model(x))
    assert recording.count_after(torch.ops.olq_fx.quantize) == 2


SETTINGS = """
import json, sys, warnings
import torch
import torch._dynamo, torch._functorch.config, torch._inductor.config

def written(value):  # equal sets may list their members in different orders
    return repr(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)


def settings():
    return {
        "inductor": {k: written(v) for k, v in torch._inductor.config.get_config_copy().items()},
        "dynamo": {k: written(v) for k, v in torch._dynamo.config.get_config_copy().items()},
        "functorch": {k: written(v) for k, v in torch._functorch.config.get_config_copy().items()},
        "torch": repr([
            torch.get_default_dtype(), torch.get_num_threads(), torch.get_num_interop_threads(),
            torch.get_float32_matmul_precision(), torch.is_grad_enabled(), torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"), torch.get_flush_denormal()
            if hasattr(torch, "get_flush_denormal") else None, torch.backends.mkldnn.enabled,
            torch.initial_seed(), torch.random.get_rng_state().sum().item(),
        ]),
        "warnings": repr(warnings.filters),
    }

torch.compile(torch.relu)(torch.ones(3))  # what torch.compile itself sets on its first use
before = settings()
import olq_fx
states = {"import": settings()}

def quantized(use):
    # Initialization draws random numbers; what is looked at is whether the library does.
    with torch.random.fork_rng(), torch.no_grad():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        state = torch.random.get_rng_state()
        use(model, torch.ones(2, 64))
        assert torch.equal(state, torch.random.get_rng_state())
    return settings()

def with_error(model, x):
    try:
        olq_fx.quantize_(model, "fp8", ignore=["nothing"])
    except olq_fx.errors.PlanError:
        return
    raise SystemExit("no error")

states["backend"] = quantized(lambda model, x: torch.compile(model, backend=olq_fx.backend("fp8_per_block"))(x))
states["quantize_"] = quantized(lambda model, x: (olq_fx.quantize_(model, "mxfp4"), model(x)))
states["error"] = quantized(with_error)

def difference(old, new):
    if isinstance(old, dict):
        return {key: [old[key], new.get(key)] for key in old if old[key] != new.get(key)}
    return [old, new]

changed = {
    f"{when}: {where}": difference(old, after[where])
    for when, after in states.items() for where, old in before.items() if old != after[where]
}
print(json.dumps([sorted(states), changed]))
"""


def test_37_nothing_global_changes():
    done = subprocess.run([sys.executable, "-c", SETTINGS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    states, changed = json.loads(done.stdout.splitlines()[-1])
    assert states == ["backend", "error", "import", "quantize_"]
    assert changed == {}


def test_37_a_backend_object_changes_no_setting_until_used():
    before = torch._inductor.config.get_config_copy()
    olq_fx.backend("fp8_per_block")
    assert torch._inductor.config.get_config_copy() == before
