"""Experts on every set of rows that a router can give: none, one, tiles and their edges, many experts, those of others.

Held to a loop in float64 over the dequantized weights; with quantized activations the forms are held to one another,
and to that loop within the noise of the activations.
"""

import copy
from typing import Any

import pytest
import torch
from moe_models import FORMS, built, experts_of
from torch import Tensor

import olq_fx
from olq_fx.integrations.transformers import use_experts
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits, assert_sqnr

ALL_FORMS = (*FORMS, "use_experts")
SHORT = ("fp8_per_tensor", "fp8_per_block", "mxfp4")
some_schemes = pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in SCHEMES]
)


def quantized(scheme: str, kind: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """A model with experts of some sizes (`experts`, `hidden`, `inner`), quantized."""
    count, inner = sizes.get("experts", 5), sizes.get("inner", 48)
    model = built(
        kind,
        dtype=dtype,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), inner),
        hidden_size=sizes.get("hidden", 64),
        num_experts_per_tok=1,
    )
    report = olq_fx.quantize_(model, {"moe": scheme})
    assert [path.split(".")[-1] for path in report.converted] == ["gate_up_proj", "down_proj"]
    return model


def chosen(model: Any, form: str) -> Any:
    """The module of experts, computed in a form."""
    if form == "use_experts":
        assert use_experts(model) == {}
    else:
        model.set_experts_implementation(form)
    return experts_of(model)


def called(model: Any, form: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = chosen(model, form)(x, ids, weights)
    return found


def defined(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A loop in float64 over the values of the weights."""
    gate_up, down = (
        w.dequantize().double() if hasattr(w, "dequantize") else w.double()
        for w in (module.gate_up_proj, module.down_proj)
    )
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    found = torch.zeros(x.shape, dtype=torch.float64)
    for index in range(len(gate_up)):
        tokens, slots = torch.where(ids == index)
        hidden = x[tokens].double() @ gate_up[index].T
        if module.has_bias:
            hidden = hidden + module.gate_up_proj_bias[index].double()
        y = module._apply_gate(hidden) @ down[index].T
        if module.has_bias:
            y = y + module.down_proj_bias[index].double()
        found.index_add_(0, tokens, weights[tokens, slots, None].double() * y)
    return found


def assert_right(model: Any, scheme: str, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """All forms are the definition, and one another."""
    found = {form: called(model, form, x, ids, weights) for form in ALL_FORMS}
    expected = defined(experts_of(model), x, ids, weights).to(x.dtype)
    exact = SCHEMES[scheme].moe.activation is None
    for form, y in found.items():
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        # Two layers of weights and activations at 30 dB each are 24 dB on average; of one token some more or less.
        assert_sqnr(y, expected, 110 if exact else 10 if "fp4" in scheme else 21, name=form)
        assert_sqnr(y, found["grouped_mm"], 110, name=form)


GROUPS = {
    "edges of tiles": (0, 1, 127, 128, 129),
    "all on one": (0, 0, 200, 0, 0),
    "one token": (0, 1, 0, 0, 0),
    "the last alone": (0, 0, 0, 0, 7),
}


@some_schemes
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_every_size(scheme: str, groups: str):
    ids = torch.arange(5).repeat_interleave(torch.tensor(GROUPS[groups]))
    ids = ids[torch.randperm(len(ids))][:, None]
    assert torch.bincount(ids[:, 0], minlength=5).tolist() == list(GROUPS[groups])
    assert_right(quantized(scheme), scheme, torch.randn(len(ids), 64), ids, torch.rand(len(ids), 1) + 0.1)


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_block", "mxfp4", "int8_per_channel_weight_only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tokens(form: str, scheme: str, dtype: torch.dtype):
    model = quantized(scheme, dtype=dtype)
    empty = torch.empty(0, 2)
    y = called(model, form, torch.empty(0, 64, dtype=dtype), empty.long(), empty.to(dtype))
    assert (y.shape, y.dtype) == ((0, 64), dtype)


@some_schemes
@pytest.mark.parametrize(("experts", "top"), [(1, 1), (8, 1), (8, 2), (8, 8), (128, 1), (128, 2), (128, 8)])
def test_numbers_of_experts_and_of_choices(scheme: str, experts: int, top: int):
    tokens = 9
    ids = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    model = quantized(scheme, experts=experts, inner=32)
    assert_right(model, scheme, torch.randn(tokens, 64), ids, torch.rand(tokens, top) + 0.1)


@some_schemes
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_sizes_that_are_no_multiple_of_a_group(scheme: str, kind: str):
    """2880 = 22.5 * 128 in the small: 90 = 2 * 32 + 26, and 72 along the other product."""
    model = quantized(scheme, kind, inner=90, hidden=72)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(13)])
    assert_right(model, scheme, torch.randn(13, 72), ids, torch.rand(13, 2) + 0.1)


def routed(tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of 64 features, two of five experts for each, what they count."""
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])
    return torch.randn(tokens, 64), ids, torch.rand(tokens, 2) + 0.1


@some_schemes
@pytest.mark.parametrize("form", ALL_FORMS)
def test_experts_of_another_device_count_nothing(scheme: str, form: str):
    """Index E with weight 0, as transformers gives it: what these rows hold does not matter either."""
    x, ids, weights = routed()
    model = quantized(scheme)
    mine = ids < 3
    theirs, counted = torch.where(mine, ids, 5), torch.where(mine, weights, 0)
    experts_of(model)._is_expert_parallel = True
    y = called(model, form, x, theirs, counted)
    experts_of(model)._is_expert_parallel = False
    expected = called(model, form, x, ids, counted)
    assert_sqnr(y, expected, 110)
    assert (y[~mine.any(1)] == 0).all()


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("scheme", ["int8", "nvfp4_weight_only"])
def test_devices_together_are_the_whole(scheme: str, form: str):
    """Each device has a slice of the converted stacks; what is another's is E of its own."""
    x, ids, weights = routed()
    model = quantized(scheme)
    expected = called(model, form, x, ids, weights)
    total = torch.zeros_like(x)
    for start, stop in ((0, 2), (2, 5)):
        part = copy.deepcopy(model)
        module = experts_of(part)
        for name in ("gate_up_proj", "down_proj"):
            setattr(module, name, torch.nn.Parameter(getattr(module, name)[start:stop], requires_grad=False))
        module.num_experts, module._is_expert_parallel = stop - start, True
        mine = (ids >= start) & (ids < stop)
        here = torch.where(mine, ids - start, stop - start)
        total += called(part, form, x, here, torch.where(mine, weights, 0))
    assert_sqnr(total, expected, 110)


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp4_weight_only"])
def test_autocast_over_float32_inputs(form: str, dtype: torch.dtype, scheme: str):
    x, ids, weights = routed()
    model = quantized(scheme, dtype=dtype)
    expected = defined(experts_of(model), x, ids, weights).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = called(model, form, x, ids, weights)
    assert y.dtype == torch.float32
    assert_sqnr(y, expected, 25)


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_gradients_are_those_of_the_values(form: str, kind: str):
    """Of the input and of what tokens count, with experts without a token."""
    x, ids, weights = routed()
    ids = ids % 4
    ids[:, 1] = (ids[:, 0] + 1) % 4
    model = quantized("nvfp4_weight_only", kind)
    module = chosen(model, form)
    given = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    values = [each.detach().double().requires_grad_() for each in given]
    seed = torch.randn(x.shape)
    module(given[0], ids, given[1]).backward(seed)
    gate_up, down = module.gate_up_proj.dequantize().double(), module.down_proj.dequantize().double()
    plain = copy.deepcopy(experts_of(built(kind, "eager", num_experts=5, num_local_experts=5)))
    plain.gate_up_proj, plain.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    plain.num_experts = 5
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        if plain.has_bias:
            setattr(plain, name, torch.nn.Parameter(getattr(module, name).double()))
    plain(values[0], ids, values[1]).backward(seed.double())
    for actual, expected in zip(given, values, strict=True):
        assert_sqnr(actual.grad, expected.grad.float(), 100)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_an_expert_without_tokens_are_zero(form: str):
    """Of its biases, and of its second matrix where that stays as it was."""
    model = built("gpt_oss", num_experts=5, num_local_experts=5)
    olq_fx.quantize_(model, {"moe": "int8", "ignore": ["*.down_proj"]})
    module = chosen(model, form)
    for name in ("gate_up_proj_bias", "down_proj_bias", "down_proj"):
        getattr(module, name).requires_grad_()
    x, ids, weights = routed()
    ids = torch.where(ids == 3, 0, ids)
    module(x, ids, weights).sum().backward()
    for name in ("gate_up_proj_bias", "down_proj_bias", "down_proj"):
        gradient = getattr(module, name).grad
        assert (gradient[3] == 0).all(), name
        assert (gradient[0] != 0).any(), name


def test_a_token_has_the_same_result_alone_and_among_others():
    """In schemes whose scales belong to a row."""
    x, ids, weights = routed(40)
    model = quantized("int8")
    for form in ALL_FORMS:
        together = called(model, form, x, ids, weights)
        alone = torch.cat([called(model, form, x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(40)])
        assert_same_bits(alone, together, name=form)
