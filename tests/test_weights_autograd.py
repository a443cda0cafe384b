"""What training and function transforms do with a frozen converted weight."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits
from olq_fx.weights import WeightSpec, quantize_weight


def layer(scheme: str = "fp8_per_block") -> nn.Linear:
    slot = SCHEMES[scheme].linear
    spec = WeightSpec(
        weight=slot.weight,
        activation=slot.activation or "",
        weight_rule=FORMATS[slot.weight].weight_rule,
        activation_rule=FORMATS[slot.activation].activation_rule if slot.activation else "",
    )
    made = nn.Linear(96, 40)
    made.weight = nn.Parameter(quantize_weight(made.weight, spec), requires_grad=False)
    return made


def gradient_of(run, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    run(x).sin().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool):
    """The recomputation runs within the backward pass, and is a forward nevertheless."""
    model, x = nn.Sequential(layer(), nn.GELU(), nn.Linear(40, 96), layer("int8")), torch.randn(2, 3, 96)
    expected = gradient_of(model, x)
    assert_same_bits(gradient_of(lambda x: checkpoint(model, x, use_reentrant=reentrant), x), expected)
    # Inputs that torch takes apart by itself.
    strided = torch.randn(3, 2, 96).transpose(0, 1)
    attention = nn.MultiheadAttention(96, 4, batch_first=True)
    attention.in_proj_weight = nn.Parameter(
        quantize_weight(attention.in_proj_weight, layer().weight.spec), requires_grad=False
    )

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x)[0]

    expected = gradient_of(attend, strided)
    torch.testing.assert_close(gradient_of(lambda x: checkpoint(attend, x, use_reentrant=reentrant), strided), expected)


def test_saved_tensors_on_the_cpu():
    model, x = layer(), torch.randn(2, 96)
    expected = gradient_of(model, x)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(gradient_of(model, x), expected)


def test_second_derivatives_are_those_of_the_dequantized_product():
    model, x = layer(), torch.randn(2, 96, requires_grad=True)
    weight = model.weight.dequantize()
    (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    y = model(x).detach()
    torch.testing.assert_close(first.detach(), 3 * y**2 @ weight)
    torch.testing.assert_close(second, (6 * y * weight.sum(1)) @ weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", ["fp8_per_block", "fp8_weight_only"])
def test_function_transforms(scheme: str):
    model, x = layer(scheme), torch.randn(2, 96)
    weight = model.weight.dequantize()
    assert_same_bits(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), model(x))
    gradient = torch.func.grad(lambda x: model(x).sum())(x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(2, 96))
    torch.testing.assert_close(torch.autograd.functional.jacobian(model, x[0]), weight)
    assert_same_bits(torch.func.vmap(model)(x[None].expand(3, 2, 96))[1], model(x))


def test_new_values_between_forward_and_backward_are_noticed():
    """As of any tensor that a gradient needs."""
    model, x = layer(), torch.randn(2, 96).requires_grad_()
    for run in (model, lambda x: x @ model.weight.T):
        for source in (torch.randn(40, 96), layer().weight):
            y = run(x)
            with torch.no_grad():
                model.weight.copy_(source)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_a_hook_on_the_input_sees_the_gradient():
    model, x = layer(), torch.randn(2, 96, requires_grad=True)
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    model(x).sum().backward()
    assert seen[0].shape == (2, 96)
