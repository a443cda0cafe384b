"""The operators: what torch checks of any operator, shapes and dtypes, gradients, errors, decompositions."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from olq_fx.errors import ConfigurationError, ConversionError, OlqFxError, UnsupportedError
from olq_fx.formats import FORMATS
from olq_fx.kernels import ops, reference
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_product_close, assert_same_bits

OPS = torch.ops.olq_fx
# One scheme for each kind of scale and element; the others differ in the shape of a grid only.
KINDS = ("fp8_per_block", "mxfp4_dualscale", "nvfp4_per_token", "int8_per_channel_weight_only")


def rule_of(format: str) -> str:
    return FORMATS[format].activation_rule if format else ""


def quantized(w: Tensor, format: str) -> list[Tensor]:
    parts: list[Tensor] = OPS.quantize(w, format, FORMATS[format].weight_rule)
    return parts


def arguments(scheme: str, dtype: torch.dtype, m: int = 5, n: int = 24, k: int = 40) -> tuple[Any, ...]:
    """Arguments of `linear` for one scheme, with a bias and a residual."""
    slot = SCHEMES[scheme].linear
    activation = slot.activation or ""
    weight = quantized(torch.randn(n, k, dtype=dtype), slot.weight)
    x, bias, residual = (torch.randn(shape, dtype=dtype) for shape in ((m, k), (n,), (m, n)))
    return x, weight, slot.weight, activation, rule_of(activation), bias, residual


@pytest.fixture
def comparable_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """`opcheck` compares inputs by `torch.allclose`, which knows no float8: compare their bytes."""
    allclose = torch.allclose

    def by_bytes(a: Tensor, b: Tensor, **options: Any) -> bool:
        if a.dtype == torch.float8_e4m3fn:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", by_bytes)


# From torch 2.14 on `opcheck` hands on copies that are no leaves; it hides torch's warning where that is no error only.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("comparable_float8")
@pytest.mark.parametrize("scheme", KINDS)
def test_torch_accepts_the_operators(scheme: str) -> None:
    x, weight, weight_format, activation, rule, bias, residual = arguments(scheme, torch.float32)
    for each in (x, bias, residual):
        each.requires_grad_()
    opcheck(OPS.linear.default, (x, weight, weight_format, activation, rule, bias, residual))
    opcheck(OPS.quantize.default, (x.detach(), weight_format, FORMATS[weight_format].weight_rule))
    opcheck(OPS.dequantize.default, (weight, weight_format, 40, torch.bfloat16))
    if activation:
        parts = OPS.quantize(x.detach(), activation, rule)
        opcheck(
            OPS.quantized_linear.default,
            (parts, activation, weight, weight_format, 40, torch.float16, bias.detach(), None),
        )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 24, 40), (3, 17, 33), (6, 1, 1)])
def test_fake_results_look_like_real_ones(scheme: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    args = arguments(scheme, torch.bfloat16, m, n, k)
    x, weight, weight_format, activation, rule = args[:5]
    parts = OPS.quantize(x, activation or weight_format, rule or FORMATS[weight_format].weight_rule)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (OPS.linear, args),
        (OPS.quantize, (x, activation or weight_format, rule or FORMATS[weight_format].weight_rule)),
        (OPS.dequantize, (weight, weight_format, k, torch.float16)),
        (
            OPS.quantized_linear,
            (parts, activation or weight_format, weight, weight_format, k, torch.float16, None, None),
        ),
    ]
    for operator, given in calls:
        real, fake = operator(*given), operator(*on_meta(given))
        real, fake = (each if isinstance(each, list) else [each] for each in (real, fake))
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]


def on_meta(given: Sequence[Any]) -> list[Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta")
        return [moved(each) for each in value] if isinstance(value, list) else value

    return [moved(value) for value in given]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_dequantized_product(scheme: str, dtype: torch.dtype) -> None:
    x, weight, weight_format, activation, rule, bias, residual = arguments(scheme, dtype, 7, 17, 33)
    for each in (x, bias, residual):
        each.requires_grad_()
    y = OPS.linear(x, weight, weight_format, activation, rule, bias, residual)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    decoded = OPS.dequantize(weight, weight_format, 33, torch.float32)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert_product_close(x.grad, gradient.float(), decoded.T.contiguous())
    assert_same_bits(bias.grad, gradient.float().sum(0).to(dtype))
    assert_same_bits(residual.grad, gradient)


def test_second_derivatives_exist() -> None:
    x, weight, weight_format, activation, rule, _, _ = arguments("mxfp8", torch.float32)
    gradient = torch.randn(5, 24, requires_grad=True)
    x.requires_grad_()
    y = OPS.linear(x, weight, weight_format, activation, rule, None, None)
    (first,) = torch.autograd.grad(y, x, gradient, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), gradient)
    decoded = OPS.dequantize(weight, weight_format, 40, torch.float32)
    torch.testing.assert_close(second, decoded.sum(1).expand(5, 24))


@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("wanted", ["x", "bias", "residual"])
def test_the_product_of_codes_refuses_to_lose_a_gradient(wanted: str, m: int) -> None:
    x, weight, weight_format, _, _, bias, residual = arguments("mxfp4_weight_only", torch.bfloat16, m)
    {"x": x, "bias": bias, "residual": residual}[wanted].requires_grad_()
    args = ([x], "", weight, weight_format, 40, torch.bfloat16, bias, residual)
    with pytest.raises(UnsupportedError, match=r"olq_fx\.linear"):
        OPS.quantized_linear(*args)
    with torch.no_grad():
        assert_same_bits(OPS.quantized_linear(*args), OPS.linear(x, weight, weight_format, "", "", bias, residual))


def test_quantization_alone_says_that_it_has_no_gradient() -> None:
    x = torch.randn(2, 32, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"olq_fx\.linear"):
        OPS.quantize(x, "fp8_per_token", "amax")[1].sum().backward()


BAD: list[tuple[str, dict[str, Any], type[OlqFxError], str]] = [
    ("no such format", {"weight_format": "mxfp5"}, ConfigurationError, "mxfp4"),
    ("no such rule", {"rule": "evn"}, ConfigurationError, "'even'"),
    (
        "another format",
        {"weight_format": "int8_per_channel_static"},
        ConversionError,
        "int8_per_channel_static with K = 40",
    ),
    ("3-D", {"x": torch.zeros(1, 5, 40)}, ConversionError, "2-D"),
    ("integers", {"x": torch.zeros(5, 40, dtype=torch.int32)}, ConversionError, "torch.int32"),
    ("another K", {"x": torch.zeros(5, 48)}, ConversionError, r"K = 48 .* \(24, 24\)"),
    ("bias", {"bias": torch.zeros(23)}, ConversionError, r"N = 24 has shape \(24,\), not \(23,\)"),
    ("residual", {"residual": torch.zeros(4, 24)}, ConversionError, r"\(5, 24\), not \(4, 24\)"),
    ("no parts", {"weight": []}, ConversionError, "nothing"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("changed", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_errors_say_what_does_not_fit(
    changed: dict[str, Any], error: type[OlqFxError], message: str, device: str
) -> None:
    names = ("x", "weight", "weight_format", "activation_format", "rule", "bias", "residual")
    given = dict(zip(names, arguments("mxfp4", torch.float32), strict=True)) | changed
    with pytest.raises(error, match=message):
        OPS.linear(*(on_meta(list(given.values())) if device == "meta" else given.values()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decompositions_give_the_same_bits(scheme: str) -> None:
    x, weight, weight_format, activation, rule, bias, residual = arguments(scheme, torch.bfloat16)

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        y = OPS.linear(x, weight, weight_format, activation, rule, bias, residual)
        return y, OPS.dequantize(weight, weight_format, 40, torch.float32)

    traced = make_fx(layer, decomposition_table=ops.decompositions())(x)
    called = {str(node.target) for node in traced.graph.nodes if "olq_fx" in str(node.target)}
    assert called == {"olq_fx.quantized_linear.default"}
    assert_same_bits(traced(x), layer(x))


def test_a_traced_batch_size_stays_symbolic() -> None:
    x, weight, weight_format, activation, rule, bias, _ = arguments("nvfp4_per_token", torch.float32)

    def layer(x: Tensor, *weight: Tensor) -> Any:
        return OPS.linear(x, weight, weight_format, activation, rule, bias, None)

    trace = make_fx(
        layer, tracing_mode="symbolic", decomposition_table=ops.decompositions(), _allow_non_fake_inputs=True
    )
    traced = trace(x, *weight)
    for m in (1, 3, 40):
        other = torch.randn(m, 40)
        assert_same_bits(traced(other, *weight), layer(other, *weight))


def test_products_ignore_the_precision_that_models_may_use() -> None:
    a, b = torch.randn(16, 256), torch.randn(256, 16)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        exact = reference.product(a, b)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    # Only sums in float64 are correctly rounded in every element; in float32 they are not, and with bf16 far from it.
    assert_same_bits(exact, (a.double() @ b.double()).float())
