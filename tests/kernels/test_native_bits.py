"""The native kernels give the bits of `numerics`: codes, scales and decoded values, for whatever is put in."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import FORMATS, Format
from olq_fx.kernels import native
from olq_fx.testing import FLOAT_DTYPES, FormatRule, assert_same_bits, formats, tensors

ODD_SHAPES = ((24, 40), (17, 33), (1, 1), (130, 250), (32, 17), (5, 192), (3, 1030))
RULES = [FormatRule(fmt, rule) for fmt in FORMATS.values() for rule in fmt.rules]


def named(chosen: FormatRule) -> str:
    return f"{chosen.format.name}-{chosen.rule}"


@pytest.fixture(autouse=True)
def _native() -> None:
    assert native.why_not() == "", "these tests need the native kernels"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN (byte 0xFF): what a kernel leaves unwritten shows."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        if made.numel():
            made.view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(torch, "empty", filled)


def assert_same_quantization(x: Tensor, fmt: Format, rule: str) -> None:
    expected = numerics.quantize(x, fmt, rule)
    assert_same_bits(native.quantize(x, fmt.name, rule), list(expected), name=f"parts of {fmt.name} by {rule}")
    assert_same_values(expected, fmt, x.shape[1])


def assert_same_values(parts: Sequence[Tensor], fmt: Format, k: int) -> None:
    for dtype in FLOAT_DTYPES:
        expected = numerics.dequantize(tuple(parts), fmt, k, dtype)
        actual = native.dequantize(parts, fmt.name, k, dtype)
        # Which NaN comes out of an operation is up to the machine.
        assert_same_bits(actual.isnan(), expected.isnan(), name=f"NaN of {fmt.name}")
        kept = ~expected.isnan()
        assert_same_bits(actual[kept], expected[kept], name=f"values of {fmt.name}")


@given(x=tensors(rows=(0, 6), columns=(1, 150)), chosen=formats())
def test_any_finite_tensor(x: Tensor, chosen: FormatRule) -> None:
    assert_same_quantization(x, chosen.format, chosen.rule)


@given(x=tensors(rows=(1, 5), columns=(1, 150), nonfinite=True), chosen=formats())
def test_any_tensor_with_values_that_are_not_numbers(x: Tensor, chosen: FormatRule) -> None:
    assert_same_quantization(x, chosen.format, chosen.rule)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70), chosen=formats())
def test_any_bits(bits: list[int], chosen: FormatRule) -> None:
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)[None]
    assert_same_quantization(x, chosen.format, chosen.rule)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("chosen", RULES, ids=named)
def test_odd_shapes_leave_nothing_unwritten(chosen: FormatRule, dtype: torch.dtype) -> None:
    for shape in ODD_SHAPES:
        assert_same_quantization(torch.randn(shape).to(dtype), chosen.format, chosen.rule)


@pytest.mark.parametrize("chosen", RULES, ids=named)
def test_ties_and_their_neighbours(chosen: FormatRule) -> None:
    """Quotients on every threshold of e2m1 and e4m3, and one float32 to each side of it."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    away = [values, values.nextafter(torch.tensor(0.0)), values.nextafter(torch.tensor(1e9))]
    row = torch.cat([torch.cat(away), -torch.cat(away)])
    padded = torch.zeros(-(-len(row) // 15) * 16)
    for block, chunk in enumerate(row.split(15)):
        # The first of each 16 sets the scale of its group, whatever that is.
        padded[16 * block] = 448.0 if chosen.format.element == "e4m3" else 6.0
        padded[16 * block + 1 : 16 * block + 1 + len(chunk)] = chunk.clamp(-padded[16 * block], padded[16 * block])
    for scale in (1.0, 2.0**-100, 2.0**100, 1.3, 2.0**-126):
        assert_same_quantization((padded * scale)[None], chosen.format, chosen.rule)


@pytest.mark.parametrize("layout", ["rows apart", "expanded", "transposed"])
def test_strided_input(layout: str) -> None:
    x = torch.randn(6, 200)
    strided = {"rows apart": x[::2, :96], "expanded": x[:1].expand(5, 200), "transposed": x.T}[layout]
    for chosen in RULES:
        assert_same_quantization(strided, chosen.format, chosen.rule)


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.element != "int8"], ids=lambda f: f.name)
def test_every_code_is_decoded(fmt: Format) -> None:
    """All bytes as codes, the NaN of e4m3 and both zeros of e2m1 among them."""
    k = 512 if fmt.packed else 256
    parts = list(numerics.quantize(torch.randn(2, k), fmt, fmt.rules[0]))
    parts[0] = torch.arange(256, dtype=torch.uint8).expand(2, 256).contiguous().view(parts[0].dtype)
    assert_same_values(parts, fmt, k)


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.scale != "float32"], ids=lambda f: f.name)
def test_every_scale_byte_is_decoded(fmt: Format) -> None:
    """All bytes as scales: the NaNs, negative e4m3, e8m0's 2^-127, and those whose products leave float32."""
    group = fmt.group[1]
    assert group is not None
    k = 256 * group
    parts = list(numerics.quantize(torch.randn(2, k), fmt, fmt.rules[0]))
    parts[1] = torch.arange(256, dtype=torch.uint8).expand(2, 256).contiguous().view(parts[1].dtype)
    assert_same_values(parts, fmt, k)
    if fmt.coarse is not None:
        for coarse in (2.0**120, 2.0**-140, float("inf"), float("nan"), -1.5, 0.0):
            assert_same_values([*parts[:2], torch.full_like(parts[2], coarse)], fmt, k)


@pytest.mark.parametrize("scale", [2.0**120, 2.0**127, float("inf"), float("nan"), -(2.0**-149), 0.0])
def test_float32_scales_of_any_size(scale: float) -> None:
    for fmt in FORMATS.values():
        if fmt.scale == "float32":
            codes, scales = numerics.quantize(torch.randn(3, 160), fmt, fmt.rules[0])
            assert_same_values([codes, torch.full_like(scales, scale)], fmt, 160)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_threads", lambda work: threads)
    x = torch.randn(300, 130)
    for chosen in RULES:
        assert_same_quantization(x, chosen.format, chosen.rule)


def test_what_is_wider_than_float32() -> None:
    x = torch.randn(5, 40, dtype=torch.float64)
    for chosen in RULES:
        parts = native.quantize(x, chosen.format.name, chosen.rule)
        assert_same_bits(parts, list(numerics.quantize(x, chosen.format, chosen.rule)))
        decoded = native.dequantize(parts, chosen.format.name, 40, torch.float64)
        assert_same_bits(decoded, numerics.dequantize(tuple(parts), chosen.format, 40, torch.float64))
