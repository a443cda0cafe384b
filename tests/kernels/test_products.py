"""Products of quantized operands: within the derived bound of float64, in every scheme, dtype, shape and layout."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import FORMATS
from olq_fx.kernels import native, reference
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, assert_product_close, assert_same_bits, laid_out, schemes

OPS = torch.ops.olq_fx
SHAPES = ((24, 40), (17, 33), (1, 1), (130, 250), (32, 17), (50, 192), (7, 2), (9, 600))
# The ways that there are: one row, two, up to four, up to eight, tiles of sixteen, more than one block of tiles.
ROWS = (1, 2, 3, 8, 9, 40)


def quantized(w: Tensor, format: str) -> list[Tensor]:
    parts: list[Tensor] = OPS.quantize(w, format, FORMATS[format].weight_rule)
    return parts


def operands(x: Tensor, w: Tensor, scheme: str) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """The first arguments of `linear`, and what they stand for: x^ and w^ in float32."""
    slot = SCHEMES[scheme].linear
    weight, activation = quantized(w, slot.weight), slot.activation or ""
    rule = FORMATS[activation].activation_rule if activation else ""
    seen = x.float()
    if activation:
        fmt = FORMATS[activation]
        seen = numerics.dequantize(numerics.quantize(x, fmt, rule), fmt, x.shape[1])
    decoded = numerics.dequantize(tuple(weight), FORMATS[slot.weight], x.shape[1])
    return (x, weight, slot.weight, activation, rule), seen, decoded


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN: what a kernel leaves unwritten shows."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        if made.numel():
            made.view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_within_the_derived_bound(scheme: str, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        w = torch.randn(n, k).to(dtype)
        for m in ROWS:
            args, seen, decoded = operands(torch.randn(m, k).to(dtype), w, scheme)
            assert_product_close(OPS.linear(*args, None, None), seen, decoded)


@pytest.mark.parametrize("m", [0, 1, 4, 20])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reference_is_within_the_bound_too(scheme: str, m: int) -> None:
    for n, k in SHAPES:
        args, seen, decoded = operands(torch.randn(m, k), torch.randn(n, k), scheme)
        assert_product_close(reference.linear(*args, None, None), seen, decoded)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_already_quantized_activations_give_the_same_bits(scheme: str, dtype: torch.dtype) -> None:
    for m in ROWS:
        (x, weight, weight_format, activation, rule), _, _ = operands(
            torch.randn(m, 192).to(dtype), torch.randn(50, 192).to(dtype), scheme
        )
        parts = OPS.quantize(x, activation, rule) if activation else [x]
        bias = torch.randn(50, dtype=dtype)
        apart = OPS.quantized_linear(parts, activation, weight, weight_format, 192, dtype, bias, None)
        assert_same_bits(apart, OPS.linear(x, weight, weight_format, activation, rule, bias, None))


@pytest.mark.parametrize("added_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("m", [3, 20])
def test_bias_and_residual_round_as_the_separate_operations_do(
    m: int, dtype: torch.dtype, added_dtype: torch.dtype
) -> None:
    bias, residual = torch.randn(70, dtype=added_dtype), torch.randn(m, 70, dtype=added_dtype)
    args, seen, decoded = operands(torch.randn(m, 96).to(dtype), torch.randn(70, 96).to(dtype), "mxfp8")
    plain = OPS.linear(*(args[0].float(), *args[1:]), None, None)
    with_bias = OPS.linear(*args, bias, None)
    assert_product_close(with_bias, seen, decoded, bias=bias)
    # x is exact in float32 too, and so is what it becomes: the sums are those of the float32 product.
    assert_same_bits(with_bias, (plain + bias.float()).to(dtype))
    for each in (bias, None):
        fused = OPS.linear(*args, each, residual)
        apart = OPS.linear(*args, each, None)
        assert_same_bits(fused, (apart.float() + residual.float()).to(dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_independent(scheme: str) -> None:
    """Equal rows in equal batches: any two of the sizes that one way serves agree in every bit."""
    x, w = torch.randn(300, 160), torch.randn(90, 160)
    args, seen, decoded = operands(x, w, scheme)
    many = OPS.linear(*args, None, None)
    for m in (9, 16, 17, 100):
        assert_same_bits(OPS.linear(x[:m], *args[1:], None, None), many[:m])
    few = OPS.linear(x[:8], *args[1:], None, None)
    for m in range(1, 8):
        assert_same_bits(OPS.linear(x[:m], *args[1:], None, None), few[:m])
    assert_product_close(few, seen[:8], decoded)


def test_sums_of_integers_are_the_same_in_every_way() -> None:
    """int8 by int8 is accumulated exactly: rows agree across all batch sizes, and with the sums in float64."""
    x, w = torch.randn(40, 1000), torch.randn(90, 1000)
    args, _, _ = operands(x, w, "int8")
    codes, scale = OPS.quantize(x, "int8_per_token", "amax")
    many = OPS.linear(*args, None, None)
    exact = (codes.double() @ args[1][0].double().T) * scale.double() * args[1][1].double().T
    assert_same_bits(many, exact.float())
    for m in (1, 2, 3, 8, 9, 17):
        assert_same_bits(OPS.linear(x[:m], *args[1:], None, None), many[:m])


@pytest.mark.parametrize("m", [1, 4, 20])
def test_the_largest_sums_of_integers(m: int) -> None:
    """Imported codes may be -128; 2^17 and more products of those do not fit 32 bits."""
    for k in ((1 << 17) - 1, 1 << 17):
        codes, scale = torch.full((m, k), -128, dtype=torch.int8), torch.full((m, 1), 0.5)
        weight = [torch.full((3, k), -128, dtype=torch.int8), torch.tensor([[1.0], [2.0**100], [2.0**-100]])]
        y = OPS.quantized_linear(
            [codes, scale], "int8_per_token", weight, "int8_per_channel_static", k, torch.float32, None, None
        )
        expected = 8192.0 * k * torch.tensor([1.0, 2.0**100, 2.0**-100])
        torch.testing.assert_close(y, expected.expand(m, 3), rtol=2 * k * 2.0**-24, atol=0.0)


@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_at_both_ends_of_float32(scheme: str, m: int) -> None:
    """Neither scale alone, nor one of them times a sum, need be within the range of float32 for the product to be."""
    for up in (2.0**100, 2.0**-100):
        args, seen, decoded = operands(torch.randn(m, 96) * up, torch.randn(40, 96) / up, scheme)
        assert_product_close(OPS.linear(*args, None, None), seen, decoded)


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.linear.activation])
def test_a_row_that_is_not_finite_spoils_itself_only(scheme: str, m: int) -> None:
    x, w = torch.randn(m, 96), torch.randn(40, 96)
    args, _, _ = operands(x, w, scheme)
    clean = OPS.linear(*args, None, None)
    for value in (float("nan"), float("inf"), float("-inf")):
        x[1, 70] = value
        y = OPS.linear(x, *args[1:], None, None)
        assert y[1].isnan().all()
        assert_same_bits(torch.cat([y[:1], y[2:]]), torch.cat([clean[:1], clean[2:]]))


@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_float16_near_its_largest_value(scheme: str, m: int) -> None:
    """Finite wherever the product of the dequantized operands is, and Inf only beyond."""
    k = 4096
    x = torch.full((m, k), 60000.0 / k).half() * torch.linspace(0.2, 1.3, m)[:, None].half()
    x[0] = 1e-7
    w = torch.ones(24, k).half() * torch.linspace(-1.0, 1.0, 24)[:, None].half()
    args, seen, decoded = operands(x, w, scheme)
    assert_product_close(OPS.linear(*args, None, None), seen, decoded)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_give_exactly_the_bias(scheme: str) -> None:
    bias = torch.randn(24)
    for x, w in ((torch.zeros(4, 40), torch.randn(24, 40)), (torch.randn(9, 40), torch.zeros(24, 40))):
        args, _, _ = operands(x, w, scheme)
        assert_same_bits(OPS.linear(*args, bias, None), bias.expand(x.shape[0], 24).contiguous())


@given(scheme=schemes(), m=st.integers(0, 20), layout=st.sampled_from(["transposed", "strided", "offset", "expanded"]))
def test_layouts_change_nothing(scheme: str, m: int, layout: str) -> None:
    x, residual = (laid_out(torch.randn(m, size), layout) for size in (66, 20))
    args, _, _ = operands(x, torch.randn(20, 66), scheme)
    expected = OPS.linear(x.contiguous(), *args[1:], None, residual.contiguous())
    assert_same_bits(OPS.linear(*args, None, residual), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_may_be_a_slice(scheme: str) -> None:
    slot = SCHEMES[scheme].linear
    whole = quantized(torch.randn(300, 96), slot.weight)
    part = reference.rows_of(whole, FORMATS[slot.weight], 128, 256)
    x = torch.randn(3, 96)
    y = OPS.linear(x, whole, slot.weight, "", "", None, None)
    assert_same_bits(OPS.linear(x, list(part), slot.weight, "", "", None, None), y[:, 128:256].contiguous())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reference_decodes_panel_by_panel(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, _, _ = operands(torch.randn(5, 70), torch.randn(300, 70), scheme)
    whole = reference.linear(*args, None, None)
    monkeypatch.setattr(reference, "_PANEL_ELEMENTS", 128 * 70)
    panels: list[int] = []
    dequantize = numerics.dequantize

    def counted(parts: Any, fmt: Any, k: int, *dtype: torch.dtype) -> Tensor:
        panels.append(parts[0].shape[0])
        return dequantize(parts, fmt, k, *dtype)

    monkeypatch.setattr(numerics, "dequantize", counted)
    assert_same_bits(reference.linear(*args, None, None), whole)
    assert panels[-3:] == [128, 128, 44]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the weight has fewer panels than there are threads, and where x is more than one block of tiles."""
    wide, tall = torch.randn(700, 64), torch.randn(10, 64)
    cases = [(wide, tall), (tall, wide), (tall[:3], wide)]
    expected = [OPS.linear(*operands(x, w, "mxfp4")[0], None, None) for x, w in cases]
    monkeypatch.setattr(native, "_threads", lambda work: threads)
    for (x, w), y in zip(cases, expected, strict=True):
        assert_same_bits(OPS.linear(*operands(x, w, "mxfp4")[0], None, None), y)


def test_weights_with_imported_nan_codes() -> None:
    """A NaN among the codes of a checkpoint spoils its row of the weight, and only that."""
    weight = quantized(torch.randn(50, 96), "fp8_per_channel_static")
    weight[0].view(torch.uint8)[7, 40] = 0xFF
    for m in (1, 3, 20):
        y = OPS.linear(torch.randn(m, 96), weight, "fp8_per_channel_static", "", "", None, None)
        assert y[:, 7].isnan().all()
        assert y.isnan().sum() == m
