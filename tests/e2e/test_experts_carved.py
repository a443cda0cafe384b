"""A dense MLP carved into a shared expert and routed ones, all of which every token takes, is the dense MLP.

The blocks of Qwen2-MoE with routers of zeros: each of E experts counts 1 / E and the shared one sigmoid(0) = 1 / 2, so
their second matrices are those of the dense MLP times E and 2, which loses nothing.
"""

import copy
import pathlib
from typing import Any

import pytest
import torch
from moe_models import FORMS, built, experts_of, logits, words
from torch import Tensor, nn

import olq_fx
from olq_fx.integrations.transformers import use_experts
from olq_fx.optional_packages import load_transformers
from olq_fx.testing import assert_same_bits, assert_sqnr

DENSE = pathlib.Path(__file__).parents[1] / "data" / "tiny-qwen3-wiki"
E, INNER, SHARED = 2, 128, 256

ALIGNED = ("fp8_per_block", "mxfp8", "mxfp4", "mxfp8_weight_only", "mxfp4_weight_only")
"""Schemes whose groups end where the carving cuts, along both axes of all matrices: at multiples of 128."""

BY_ROW = ("int8", "fp8_per_channel", "int8_per_channel_weight_only", "fp8_weight_only")
"""Schemes with a scale for each row: rows of gate and up are whole, those of down are cut."""


def dense() -> Any:
    model = load_transformers().Qwen3ForCausalLM.from_pretrained(str(DENSE), dtype=torch.float32)
    return model.eval().requires_grad_(False)


def carved_mlp(mlp: Any) -> Any:
    """The block of experts that computes what a dense MLP does."""
    sizes: dict[str, Any] = {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": SHARED}
    model = built("qwen2_moe", hidden_size=256, num_experts=E, num_experts_per_tok=E, **sizes)
    block = model.model.layers[0].mlp
    shared = block.shared_expert
    gate, up, down = (copy.deepcopy(getattr(mlp, f"{name}_proj")).weight for name in ("gate", "up", "down"))
    shared.gate_proj.weight.copy_(gate[:SHARED])
    shared.up_proj.weight.copy_(up[:SHARED])
    shared.down_proj.weight.copy_(2 * down[:, :SHARED])
    block.gate.weight.zero_()
    block.shared_expert_gate.weight.zero_()
    for index, rows in enumerate(pieces()):
        block.experts.gate_up_proj[index].copy_(torch.cat([gate[rows], up[rows]]))
        block.experts.down_proj[index].copy_(E * down[:, rows])
    return block


def pieces() -> list[slice]:
    """The neurons of each routed expert."""
    return [slice(SHARED + i * INNER, SHARED + (i + 1) * INNER) for i in range(E)]


def carved(model: Any) -> Any:
    """A copy whose layers have experts; implementations of them are chosen through `forms`."""
    result = copy.deepcopy(model)
    for layer in result.model.layers:
        layer.mlp = carved_mlp(layer.mlp)
    return result


def in_form(model: Any, form: str) -> Any:
    """The same model, whose experts are computed in a form."""
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module.config._experts_implementation = form
    return model


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """The dense model and the carved one; not to be changed."""
    with torch.no_grad():
        original = dense()
        return original, carved(original)


@pytest.mark.parametrize("form", FORMS)
def test_unquantized(pair: tuple[Any, Any], form: str):
    original, made = pair
    expected = logits(original, words(4, 32))
    assert_sqnr(logits(in_form(made, form), words(4, 32)), expected, 110)


def values(weight: Tensor) -> Tensor:
    return weight.dequantize()  # type: ignore[no-any-return, attr-defined]


@pytest.mark.parametrize("scheme", [*ALIGNED, *BY_ROW])
def test_bytes_are_those_of_the_dense_weights(pair: tuple[Any, Any], scheme: str):
    """Whatever the scales of which do not cross the cut; the factors 2 and E are powers of two, and go to scales."""
    mlp, block = (copy.deepcopy(model.model.layers[1].mlp) for model in pair)
    olq_fx.quantize_(mlp, scheme)
    olq_fx.quantize_(nn.ModuleDict({"mlp": block}), scheme)
    experts = experts_of(nn.ModuleDict({"mlp": block}))
    gate_up = experts.gate_up_proj
    for index, rows in enumerate(pieces()):
        for half, whole in zip(values(gate_up)[index].chunk(2), (mlp.gate_proj, mlp.up_proj), strict=True):
            assert_same_bits(half, values(whole.weight)[rows])
        codes = gate_up.codes[index].chunk(2)
        for half, whole in zip(codes, (mlp.gate_proj, mlp.up_proj), strict=True):
            assert_same_bits(half.contiguous(), whole.weight.codes[rows])
        found = values(experts.down_proj)[index] / E
        if scheme in ALIGNED:
            assert_same_bits(found, values(mlp.down_proj.weight)[:, rows])
        else:
            # A row that is cut has a scale of its own, which is none that is larger.
            errors = [
                (one - pair[0].model.layers[1].mlp.down_proj.weight[:, rows]).norm()
                for one in (found, values(mlp.down_proj.weight)[:, rows])
            ]
            assert errors[0] < 1.02 * errors[1]
    for name in ("gate_proj", "up_proj"):
        one, whole = getattr(block.shared_expert, name).weight, getattr(mlp, name).weight
        assert_same_bits(values(one), values(whole)[:SHARED])
    if scheme in ALIGNED:
        assert_same_bits(values(block.shared_expert.down_proj.weight) / 2, values(mlp.down_proj.weight)[:, :SHARED])


@pytest.mark.parametrize("form", [*FORMS, "use_experts"])
@pytest.mark.parametrize("scheme", ALIGNED)
def test_quantized_block_is_the_quantized_mlp(pair: tuple[Any, Any], scheme: str, form: str):
    """Equal groups of weights and of activations: what is left is the order of sums of 512 products in float32."""
    mlp = copy.deepcopy(pair[0].model.layers[2].mlp)
    model = copy.deepcopy(pair[1])
    model.model.layers = model.model.layers[2:3]
    olq_fx.quantize_(mlp, scheme)
    olq_fx.quantize_(model, scheme)
    if form == "use_experts":
        assert use_experts(model) == {}
    block = in_form(model, "olq_fx" if form == "use_experts" else form).model.layers[0].mlp
    x = torch.randn(3, 11, 256)
    with torch.no_grad():
        expected = mlp(x)
        hidden = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        bound = 3 * 512 * 2**-24 * (hidden.abs() @ values(mlp.down_proj.weight).abs().T)
        error = (block(x) - expected).abs()
    if "weight_only" in scheme:
        assert (error <= bound).all()
    assert_sqnr(block(x).detach(), expected, 90, name=form)


@pytest.mark.parametrize(
    "scheme",
    [
        *("fp8_per_block", "mxfp4_weight_only"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mxfp8", "mxfp4", "mxfp8_weight_only", *BY_ROW)),
    ],
)
def test_quantized_models_are_equal(pair: tuple[Any, Any], scheme: str):
    """All layers: where sums differ in their last bits, single codes of later activations move by a step."""
    found = []
    for model in pair:
        one = copy.deepcopy(model)
        olq_fx.quantize_(one, scheme)
        found.append(logits(one, words(4, 32)))
    least = 100 if scheme in ALIGNED and "weight_only" in scheme else 35 if scheme in ALIGNED else 25
    assert_sqnr(found[1], found[0], least)
