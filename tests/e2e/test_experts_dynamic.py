"""Numbers of tokens that change, and what code for a GPU waits for: how often experts are compiled, and into what."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moe_models import built, experts_of, logits, words
from torch import Tensor, nn
from torch.nn import functional

import olq_fx
from olq_fx.integrations.transformers import use_experts
from olq_fx.testing import Emitter, assert_same_bits
from olq_fx.testing_emitted import EmittedCode, emitted

LENGTHS = (12, 7, 30, 19)
without_caches = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")


class Counting:
    """An inner compiler that counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return gm.forward


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@without_caches
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)], ids=["by itself", "dynamic"])
@pytest.mark.parametrize(
    ("route", "form"),
    [
        *(("quantize_", "use_experts"), ("backend", "grouped_mm")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *(("quantize_", "grouped_mm"), ("quantize_", "batched_mm")),
                *(("backend", "batched_mm"), ("backend", "use_experts")),
            ]
        ),
    ],
)
def test_numbers_of_tokens_take_two_compilations_at_most(route: str, form: str, dynamic: bool | None):
    model = built("qwen3_moe", "" if form == "use_experts" else form)
    eager = copy.deepcopy(model)
    for one in (model, eager) if route == "quantize_" else (eager,):
        olq_fx.quantize_(one, "fp8_per_block")
    if form == "use_experts":
        use_experts(eager)
        # The other route sees experts that are not quantized yet, and computes them as grouped_mm does.
        use_experts(model) if route == "quantize_" else eager.set_experts_implementation("grouped_mm")
    counting = Counting()
    fast = torch.compile(
        model, backend=olq_fx.backend("fp8_per_block", inner=counting), dynamic=dynamic, fullgraph=True
    )
    for length in LENGTHS:
        ids = words(2, length)
        assert_same_bits(logits(fast, ids), logits(eager, ids), name=str(length))
    assert counting.graphs <= (1 if dynamic else 2)


class Block(nn.Module):
    """Experts with a router as simple as possible."""

    def __init__(self, experts: Any, *, grouped: bool) -> None:
        super().__init__()
        self.experts, self.router = experts, nn.Parameter(torch.randn(4, 128))
        self.run = self.grouped if grouped else experts

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk((x @ self.router.T).softmax(-1), 2)
        found: Tensor = self.run(x, ids, weights)
        return found

    def grouped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As transformers has it, without `inverse[order] = ...`, which needs a torch with support for a GPU."""
        sorted_ids, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(sorted_ids.float(), bins=4, min=0, max=3)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        hidden = functional.grouped_mm(x[order // 2], self.experts.gate_up_proj.mT, offs=ends)
        y = functional.grouped_mm(self.experts._apply_gate(hidden), self.experts.down_proj.mT, offs=ends)
        y = y * weights.reshape(-1, 1)[order]
        return y[torch.argsort(order)].view(len(x), 2, -1).sum(1)


def emit(form: str, scheme: str) -> EmittedCode:
    """Experts quantized in place, and what is emitted for them, by the backend."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    model = built("qwen3_moe", dtype=torch.bfloat16, **sizes)
    olq_fx.quantize_(model, {"moe": scheme})
    assert use_experts(model) == {}
    block = Block(experts_of(model), grouped=form == "grouped_mm").to(torch.bfloat16).requires_grad_(False)
    return emitted(block, [torch.randn(24, 128, dtype=torch.bfloat16)], scheme, 90)


SECOND = {"fp8_per_block": "quantized_grouped_linear", "mxfp4_weight_only": "grouped_linear"}

WAITS = re.compile(
    r"\.item\(|\.tolist\(|nonzero|_local_scalar_dense|\.cpu\(|masked_select|synchronize|device='cpu'|copy_\(.*cpu"
)
"""What a program does to wait for its GPU, or to compute elsewhere."""


@without_caches
@pytest.mark.parametrize("form", ["use_experts", pytest.param("grouped_mm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", ["fp8_per_block", pytest.param("mxfp4_weight_only", marks=pytest.mark.slow)])
def test_emitted_code_waits_for_no_device(form: str, scheme: str):
    with Emitter(timeout=600) as emitter:
        code = emitter.call(emit, form, scheme)
    program = code.source[code.source.index("def call(") :]
    assert not WAITS.findall(program)
    operators = [name for name in code.external if "olq_fx" in name]
    if form == "use_experts":
        assert sum("experts" in name for name in operators) == 1, code.external
    else:
        assert [name.split(".")[-2] for name in operators] == ["grouped_gated", SECOND[scheme]], code.external
