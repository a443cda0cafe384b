"""Experts, whose weights are most of a model and no `nn.Linear`. Numbers 19 to 24."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from moe_models import FORMS, built, experts_of, logits, stacks, words
from torch import Tensor, nn
from torch.nn import functional

import olq_fx
from olq_fx.formats import FORMATS
from olq_fx.integrations.transformers import use_experts
from olq_fx.numerics import quantized_bytes
from olq_fx.optional_packages import load_transformers
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_sqnr, live_bytes, record_allocations, storage_census
from olq_fx.weights import QuantizedStack

SHORT = ("fp8_per_block", "nvfp4_weight_only")
every_scheme = pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in SCHEMES]
)

# The contract allows 64 MiB of temporaries; a part of it keeps this test small.
TEMPORARIES = 22 * 2**20


@every_scheme
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_19_all_public_forms_are_quantized_and_agree(scheme: str, name: str):
    model = built(name)
    before = logits(model, words())
    olq_fx.quantize_(model, {"moe": scheme})
    assert all(isinstance(weight, QuantizedStack) for weight in stacks(model).values())
    found = {}
    for form in FORMS:
        model.set_experts_implementation(form)
        found[form] = logits(model, words())
    use_experts(model)
    found["use_experts"] = logits(model, words())
    for form, values in found.items():
        assert_sqnr(values, found["grouped_mm"], 100, name=form)
        assert not torch.equal(values, before)


@every_scheme
def test_20_the_share_of_bytes_counts_experts(scheme: str):
    """91% of this model are experts: left alone, the report says so; by default they are quantized."""
    sizes = {"num_experts": 16, "num_local_experts": 16, "intermediate_size": 128, "moe_intermediate_size": 128}
    model = built("qwen3_moe", **sizes)
    experts = sum(weight.nbytes for weight in stacks(model).values())
    everything = sum(parameter.nbytes for parameter in model.parameters())
    assert experts / everything > 0.9
    left = olq_fx.quantize_(copy.deepcopy(model), {"quantization": scheme, "ignore": ["*.experts"]})
    assert left.share < 1 - 0.9
    assert {row.path for row in left.rows("left alone")} >= stacks(model).keys()
    report = olq_fx.quantize_(model, scheme)
    assert report.share > 0.9
    assert report.share_of_parameters > 0.9
    assert sum(row.bytes_before for row in report.rows("converted") if row.kind == "moe") == experts


@every_scheme
@pytest.mark.parametrize("form", [*FORMS, "use_experts"])
@pytest.mark.parametrize("sizes", [(3, 0, 1), (0, 0, 9), (0, 0, 0)], ids=str)
def test_21_experts_with_no_tokens_with_all_and_none_at_all(scheme: str, form: str, sizes: tuple[int, ...]):
    model = built("qwen3_moe")
    olq_fx.quantize_(model, {"moe": scheme})
    use_experts(model) if form == "use_experts" else model.set_experts_implementation(form)
    module = experts_of(model)
    ids = torch.arange(3).repeat_interleave(torch.tensor(sizes))[:, None]
    x = torch.randn(len(ids), 64, requires_grad=True)
    weights = torch.ones(len(ids), 1)
    y = module(x, ids, weights)
    assert y.shape == x.shape
    for index in range(3):
        rows = ids[:, 0] == index
        if rows.any() and "per_tensor" not in scheme:
            alone = module(x[rows], ids[rows], weights[rows])
            assert_sqnr(y[rows].detach(), alone.detach(), 100)
    if len(ids):
        y.sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("form", FORMS)
def test_21_the_gradient_of_an_empty_expert_is_zero(form: str):
    model = built("gpt_oss", form)
    olq_fx.quantize_(model, {"moe": "int8", "ignore": ["*.down_proj"]})
    module = experts_of(model)
    trained = [module.gate_up_proj_bias, module.down_proj_bias, module.down_proj]
    for parameter in trained:
        parameter.requires_grad_()
    ids = torch.tensor([[0, 1], [1, 3], [0, 3]])
    module(torch.randn(3, 64), ids, torch.rand(3, 2)).sum().backward()
    for parameter in trained:
        assert (parameter.grad[2] == 0).all()
        assert (parameter.grad[1] != 0).any()


def non_gated() -> nn.Module:
    """A block as models without a gate have it: up, activation, down."""
    load_transformers()
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation(has_gate=False)
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = 4, nn.functional.relu
            self.up_proj = nn.Parameter(torch.randn(4, 96, 64) / 8)
            self.down_proj = nn.Parameter(torch.randn(4, 64, 96) / 8)

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            found = torch.zeros_like(x)
            for index in range(self.num_experts):
                rows, slots = torch.where(ids == index)
                y = functional.linear(functional.linear(x[rows], self.up_proj[index]).relu(), self.down_proj[index])
                found.index_add_(0, rows, y * weights[rows, slots, None])
            return found

    config = type("Config", (), {"_experts_implementation": "grouped_mm"})()
    return nn.ModuleDict({"experts": Experts(config)})


@every_scheme
def test_22_a_non_gated_block_has_no_doubled_allocation(scheme: str):
    model = non_gated()
    module: Any = model["experts"]
    report = olq_fx.quantize_(model, scheme)
    assert report.converted == ("experts.up_proj", "experts.down_proj")
    weight_format = FORMATS[SCHEMES[scheme].moe.weight]
    one = quantized_bytes(weight_format, 96, 64) + quantized_bytes(weight_format, 64, 96)
    assert live_bytes(model) == 4 * one
    assert {module.up_proj.spec.shards, module.down_proj.spec.shards} == {1}
    x, ids, weights = torch.randn(7, 64), torch.randint(4, (7, 2)), torch.rand(7, 2)
    found = {}
    for form in FORMS:
        module.config._experts_implementation = form
        with torch.no_grad():
            found[form] = module(x, ids, weights)
    for form, values in found.items():
        assert_sqnr(values, found["eager"], 100, name=form)


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_23_autocast_over_experts_with_float32_inputs(scheme: str, dtype: torch.dtype):
    model = built("qwen3_moe", dtype=dtype)
    olq_fx.quantize_(model, {"moe": scheme})
    module = experts_of(model)
    x, ids, weights = torch.randn(9, 64), torch.randint(4, (9, 2)), torch.rand(9, 2)
    found = {}
    for form in (*FORMS, "use_experts"):
        use_experts(model) if form == "use_experts" else model.set_experts_implementation(form)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found[form] = module(x, ids, weights)
        assert found[form].dtype == torch.float32
    for form, values in found.items():
        # The forms round to bfloat16 at other places, which moves single codes of activations by a step.
        coarse = "fp4" in (SCHEMES[scheme].moe.activation or "")
        assert_sqnr(values, found["grouped_mm"], 12 if coarse else 25, name=form)


@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
def test_24_peak_memory_is_one_converted_stack(scheme: str):
    """Of several layers, and never a second copy of an original one."""
    experts, n, k, layers = 8, 512, 1024, 8 if scheme == "int8" else 16

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_transposed = False
            self.up_proj = nn.Parameter(torch.randn(experts, n, k, dtype=torch.bfloat16))

    with record_allocations() as allocations:
        model = nn.ModuleList(nn.ModuleDict({"experts": Layer()}) for _ in range(layers))
        with allocations.mark("quantize"):
            report = olq_fx.quantize_(model, scheme)
    assert len(report.converted) == layers
    one = experts * quantized_bytes(FORMATS[SCHEMES[scheme].moe.weight], n, k)
    before = allocations.at_start("quantize")
    assert before >= layers * experts * n * k * 2
    assert layers * one > one + TEMPORARIES
    assert allocations.peak("quantize") - before <= one + TEMPORARIES
    assert allocations.at_end("quantize") - layers * one in range(2**20)
    assert live_bytes(model) == layers * one


@every_scheme
def test_24_no_original_stack_is_alive(route: Any, scheme: str):
    model = built("qwen3_moe", "batched_mm", torch.bfloat16)
    originals = {path: (weakref.ref(p), p.untyped_storage().data_ptr(), p.nbytes) for path, p in stacks(model).items()}
    block = nn.ModuleDict({"experts": experts_of(model)})
    module: Any = block["experts"]
    before = live_bytes(block)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    del model
    quantized = route(module, {"moe": scheme}, torch.randn(3, 64).bfloat16(), ids, torch.rand(3, 2).bfloat16())
    assert len(quantized.converted) == 2
    gc.collect()
    assert [path for path, (reference, _, _) in originals.items() if reference() is not None] == []
    census = storage_census()
    for path, (_, pointer, size) in originals.items():
        assert pointer not in census or census[pointer].bytes != size, path
    plan = quantized.report.plan
    saved = sum(plan.lookup(path).bytes_before - plan.lookup(path).bytes_after for path in quantized.converted)
    assert live_bytes(block) == before - saved
