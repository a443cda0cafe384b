"""Values on which other libraries fail, each with what must come out. Numbers 1 to 7 and 31.

The other numbers are in the neighbouring files; the list is public bug reports of people who do this job.
"""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import ConversionError
from olq_fx.formats import FORMATS
from olq_fx.numerics import quantize
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_layer_close, assert_product_close, assert_same_bits, operands, sqnr

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def layer(rows: int, columns: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias).eval().to(dtype)


@every_scheme
def test_01_zeros_give_exactly_zero_or_the_bias(route, scheme):
    for dtype in DTYPES:
        model = layer(24, 72, dtype)
        with torch.no_grad():
            model.weight[5] = 0
        x = torch.randn(6, 72, dtype=dtype)
        x[2] = 0
        y = route(model, scheme, x)(x)
        assert bool(y.isfinite().all())
        assert_same_bits(y[2], model.bias.detach(), name="row of zeros")
        assert_same_bits(y[:, 5], model.bias.detach()[5].expand(6), name="channel of zeros")


@every_scheme
@pytest.mark.parametrize("bias", [False, True])
def test_01_a_weight_of_zeros_gives_exactly_zero_or_the_bias(route, scheme, bias):
    model = layer(24, 72, bias=bias)
    nn.init.zeros_(model.weight)
    x = torch.randn(6, 72) * 100
    y = route(model, scheme, x)(x)
    assert_same_bits(y, model.bias.detach().expand(6, 24) if bias else torch.zeros(6, 24))
    assert_same_bits(model.weight.dequantize(), torch.zeros(24, 72))


class LoRA(nn.Module):
    """A low-rank addition to a frozen layer, which asks that layer for all that adapters usually ask."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.a = nn.Parameter(torch.randn(rank, base.in_features, **like))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return y


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_02_lora_with_zeros_is_finite_forward_and_backward(scheme, dtype):
    model = LoRA(layer(24, 72, dtype))
    olq_fx.quantize_(model.base, scheme)
    x = torch.randn(5, 72, dtype=dtype, requires_grad=True)
    y = model(x)
    assert_layer_close(y, x, model.base.weight, model.base.bias)
    y.square().mean().backward()
    for gradient in (x.grad, model.a.grad, model.b.grad):
        assert gradient is not None
        assert bool(gradient.isfinite().all())
    assert not bool(model.a.grad.any())
    assert bool(model.b.grad.any())
    assert model.base.weight.grad is None


@every_scheme
def test_02_lora_over_a_layer_that_the_backend_quantized(routes, scheme):
    """The adapter's own products are quantized neither by name nor in silence when they are ignored."""
    model = LoRA(layer(24, 72))
    x = torch.randn(5, 72)
    quantized = routes["backend"](model, {"quantization": scheme, "ignore": ["a", "b"]}, x)
    assert_layer_close(quantized(x), x, model.base.weight, model.base.bias)
    trained = x.clone().requires_grad_()
    quantized.run(trained).square().mean().backward()
    assert bool(trained.grad.isfinite().all())
    assert bool(model.b.grad.any())
    assert not bool(model.a.grad.any())


@every_scheme
def test_03_float16_overflows_only_where_the_dequantized_product_does(route, scheme):
    """Products just below 65520, sums of large terms that cancel, and inputs of 1e-7."""
    k = 4096
    model = layer(16, k, torch.float16, bias=False)
    near = 6e4 / k
    with torch.no_grad():
        model.weight.copy_(near * (1 + 0.02 * torch.randn(16, k)))
        model.weight[8:] *= torch.sign(torch.randn(8, k))
    x = torch.ones(4, k, dtype=torch.float16)
    x[1] = 1e-7
    x[2, ::2] = -300
    x[2, 1::2] = 300
    x[3] = torch.linspace(0.9, 1.1, k)
    y = route(model, scheme, x)(x)
    assert y.dtype == torch.float16
    left, right = operands(x, model.weight)
    assert_product_close(y, left, right)
    assert bool((y[1].abs() < 0.1).all())
    for name, part in zip(("scale", "coarse"), model.weight.parts[1:], strict=False):
        two_levels = FORMATS[SCHEMES[scheme].linear.weight].coarse is not None
        if FORMATS[SCHEMES[scheme].linear.weight].scale == "float32" or (two_levels and name == "coarse"):
            assert part.dtype == torch.float32


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_04_small_weights_have_the_same_relative_error(scheme, dtype):
    values = torch.randn(64, 512)
    errors = []
    for factor in (1.0, 1e-4, 1e-7):
        model = layer(64, 512, dtype, bias=False)
        with torch.no_grad():
            model.weight.copy_(values * factor)
        original = model.weight.detach().clone()
        olq_fx.quantize_(model, scheme)
        errors.append(sqnr(model.weight.dequantize(torch.float32), original))
    # 1e-4 and 1e-7 are no powers of two, so that values fall on other places of their steps.
    assert errors[1:] == pytest.approx([errors[0]] * 2, abs=0.2)


@pytest.mark.parametrize("scheme", ["int8", "int8_per_channel_weight_only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_05_int8_of_normal_weights_has_42_1_db(route, scheme, dtype):
    model = layer(4096, 1024, dtype, bias=False)
    nn.init.normal_(model.weight)
    original = model.weight.detach().clone()
    route(model, scheme, torch.randn(1, 1024, dtype=dtype))
    assert round(sqnr(model.weight.dequantize(torch.float32), original), 1) == 42.1


@pytest.mark.parametrize("scheme", ["int8", "mxfp4", "fp8_weight_only"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_06_a_non_finite_weight_is_refused_by_name(route, unchanged, scheme, value):
    model = nn.Sequential(layer(24, 40), nn.Sequential(layer(17, 24), layer(8, 17)))
    with torch.no_grad():
        model[1][0].weight[3, 7] = value
        model[1][0].weight[4, 7] = value
    with unchanged(model), pytest.raises(ConversionError, match=r"1\.0\.weight.*\b2\b"):
        route(model, scheme, torch.randn(2, 40))


@every_scheme
def test_06_the_output_has_the_dtype_of_the_unquantized_module(route, scheme):
    """For every pair of dtypes, with and without autocast; a pair that the original refuses is refused as well."""
    seen = 0
    for weight_dtype in DTYPES:
        original = layer(24, 64, weight_dtype)
        model = copy.deepcopy(original)
        quantized = route(model, scheme, torch.randn(2, 64, dtype=weight_dtype))
        for input_dtype, cast in itertools.product(DTYPES, (None, torch.bfloat16, torch.float16)):
            x = torch.randn(5, 64).to(input_dtype)
            with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None), torch.no_grad():
                try:
                    expected = original(x)
                except RuntimeError:
                    with pytest.raises(RuntimeError, match=r"dtype|type"):
                        quantized(x)
                    continue
                actual = quantized(x)
            assert actual.dtype == expected.dtype, (weight_dtype, input_dtype, cast)
            assert sqnr(actual, expected) > 12
            seen += 1
    assert seen >= 3 + 2 * 9


@every_scheme
def test_07_two_runs_are_bit_equal(route, scheme):
    original = layer(40, 200)
    x = torch.randn(17, 200)
    outputs = []
    for _ in range(2):
        quantized = route(copy.deepcopy(original), scheme, x)
        outputs += [quantized(x), quantized(x)]
    for again in outputs[1:]:
        assert_same_bits(again, outputs[0])


@every_scheme
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_07_rows_do_not_depend_on_the_batch(scheme, dtype):
    model = layer(40, 200, dtype)
    olq_fx.quantize_(model, scheme)
    x = torch.randn(64, 200).to(dtype)
    spec = model.weight.spec
    for rows in (1, 2, 16, 17, 64):
        with torch.no_grad():
            y = model(x[:rows])
        assert_layer_close(y, x[:rows], model.weight, model.bias)
        if spec.activation:
            parts = torch.ops.olq_fx.quantize(x[:rows], spec.activation, spec.activation_rule)
            defined = quantize(x, FORMATS[spec.activation], spec.activation_rule)
            for part, whole in zip(parts, defined, strict=True):
                assert_same_bits(part, whole[:rows])


@every_scheme
def test_31_input_gradient_is_that_of_the_dequantized_product(route, scheme):
    for dtype in DTYPES:
        model = layer(24, 72, dtype)
        x = torch.randn(2, 3, 72).to(dtype)
        quantized = route(model, scheme, x)
        check_gradients(quantized.run, model, x, upstream=torch.randn(2, 3, 24).to(dtype))


def check_gradients(run, model: nn.Linear, x: torch.Tensor, upstream: torch.Tensor) -> None:
    """Of a given gradient of the output, and of `out.sum().backward()`, whose gradient is expanded from one element."""
    weight = model.weight.dequantize(torch.float32)
    for gradient in (upstream, None):
        inputs = x.clone().requires_grad_()
        y = run(inputs)
        if gradient is None:
            y.sum().backward()
        else:
            y.backward(gradient)
        used = torch.ones_like(upstream) if gradient is None else gradient
        assert inputs.grad is not None
        assert inputs.grad.shape == x.shape
        assert inputs.grad.dtype == x.dtype
        assert_product_close(inputs.grad.reshape(6, 72), used.reshape(6, 24).float(), weight.T)
    assert model.weight.grad is None
    assert not model.weight.requires_grad
    assert model.bias.grad is not None
