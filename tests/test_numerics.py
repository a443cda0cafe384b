"""What quantize and dequantize promise beside the numbers: shapes, dtypes, special values, errors."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from olq_fx.errors import ConfigurationError, ConversionError
from olq_fx.formats import FORMATS, Format
from olq_fx.numerics import Parts, dequantize, part_specs, quantize, quantized_bytes
from olq_fx.testing import assert_same_bits

CASES = [(fmt, rule) for fmt in FORMATS.values() for rule in fmt.rules]
EVERY_RULE = pytest.mark.parametrize(("fmt", "rule"), CASES, ids=[f"{fmt.name}-{rule}" for fmt, rule in CASES])
EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
LARGEST = torch.finfo(torch.float32).max


def _values(parts: Parts, fmt: Format, k: int) -> Tensor:
    return dequantize(parts, fmt, k)


@EVERY_RULE
@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (130, 250), (32, 17), (40, 24), (3, 192), (0, 64), (5, 0), (0, 0)])
def test_parts_have_the_shapes_and_dtypes_that_are_announced(fmt: Format, rule: str, shape: tuple[int, int]) -> None:
    parts = quantize(torch.randn(shape), fmt, rule)
    specs = part_specs(fmt, *shape)
    assert [(part.shape, part.dtype) for part in parts] == [(spec.shape, spec.dtype) for spec in specs]
    assert [spec.name for spec in specs] == ["codes", "scale", "coarse"][: 1 + fmt.levels]
    assert all(part.is_contiguous() for part in parts)
    assert quantized_bytes(fmt, *shape) == sum(part.numel() * part.element_size() for part in parts)
    values = _values(parts, fmt, shape[1])
    assert values.shape == shape
    assert values.dtype == torch.float32


def test_bytes_of_a_large_weight() -> None:
    """4096 x 14336, from the definitions: 8 or 4 bits an element and a scale of 8 or 32 bits a group."""
    n, k = 4096, 14336
    assert {name: quantized_bytes(fmt, n, k) for name, fmt in FORMATS.items() if fmt.weight} == {
        "fp8_per_tensor_static": n * k + 4,
        "fp8_per_channel_static": n * k + 4 * n,
        "fp8_per_block_static": n * k + 4 * 32 * 112,
        "mxfp8": n * k + n * k // 32,
        "mxfp4": n * k // 2 + n * k // 32,
        "mxfp4_dualscale": n * k // 2 + n * k // 32 + 4 * n * k // 512,
        "nvfp4": n * k // 2 + n * k // 16 + 4,
        "int8_per_channel_static": n * k + 4 * n,
    }


@EVERY_RULE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_is_read_as_its_float32_value(fmt: Format, rule: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 96).to(dtype)
    assert_same_bits(quantize(x, fmt, rule), quantize(x.to(torch.float32), fmt, rule))


@EVERY_RULE
def test_the_input_may_be_strided_and_is_not_changed(fmt: Format, rule: str) -> None:
    plain = torch.randn(6, 80)
    strided = plain.t().contiguous().t()
    before = strided.clone()
    assert not strided.is_contiguous()
    assert_same_bits(quantize(strided, fmt, rule), quantize(plain, fmt, rule))
    assert_same_bits(strided, before)


@EVERY_RULE
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_have_codes_of_zero_and_the_least_scales(fmt: Format, rule: str, zero: float) -> None:
    parts = quantize(torch.full((3, 40), zero), fmt, rule)
    codes = parts[0].view(torch.uint8)
    signed = fmt.element == "e4m3" and math.copysign(1, zero) < 0
    assert (codes == (0x80 if signed else 0)).all()
    least = {"float32": 2.0**-126, "e8m0": 1, "e4m3": 0}[fmt.scale]
    assert (parts[1].to(torch.float32) == least).all()
    if fmt.coarse is not None:
        assert (parts[2] == (1.0 if fmt.name == "nvfp4" else 2.0**-126)).all()
    values = _values(parts, fmt, 40)
    assert (values == 0).all()
    assert signed or not values.signbit().any()


@EVERY_RULE
def test_a_row_of_zeros_beside_others_is_zero(fmt: Format, rule: str) -> None:
    x = torch.randn(4, 96)
    x[2] = 0
    values = _values(quantize(x, fmt, rule), fmt, 96)
    assert (values[2] == 0).all()
    assert (values[[0, 1, 3]] != 0).any(dim=1).all()


@EVERY_RULE
@pytest.mark.parametrize("value", [3e38, LARGEST, 2.0**127, 1e-45, 2.0**-126, 1e-38, 65504.0])
def test_extremes_stay_finite_and_near(fmt: Format, rule: str, value: float) -> None:
    x = torch.tensor([[value, -value, 0.0, value / 2]]).repeat(2, 12)
    values = _values(quantize(x, fmt, rule), fmt, 48)
    assert values.isfinite().all()
    # A quarter at most: one e2m1 code beside the next. Less than half the least scale is 0, and so is a whole nvfp4
    # weight where the reciprocal of its scale overflows.
    lost = 2.0**-113 if fmt.name == "nvfp4" else 2.0**-127
    assert ((values - x).abs() <= x.abs() / 4 + lost).all()


@EVERY_RULE
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_value_marks_its_group_and_no_other(fmt: Format, rule: str, value: float) -> None:
    x = torch.randn(3, 600)
    x[0] *= 3
    clean = quantize(x, fmt, rule)
    x[1, 70] = value
    codes, scale, *coarse = quantize(x, fmt, rule)
    marked = scale == 255 if fmt.scale == "e8m0" else scale.to(torch.float32).isnan()
    row, column = (0 if fmt.group[0] != 1 else 1), 70 // (fmt.group[1] or 600)
    expected = torch.zeros_like(marked)
    expected[row, column] = True
    assert torch.equal(marked, expected)
    if fmt.scale == "e4m3":
        assert scale.view(torch.uint8)[row, column] == 0x7F
    assert all(part.isfinite().all() for part in coarse)
    values = _values((codes, scale, *coarse), fmt, 600)
    span = slice(column * (fmt.group[1] or 600), (column + 1) * (fmt.group[1] or 600))
    in_group = torch.zeros_like(x, dtype=torch.bool)
    in_group[slice(None) if fmt.group[0] != 1 else 1, span] = True
    assert torch.equal(values.isnan(), in_group)
    if not fmt.packed:
        assert (codes.view(torch.uint8)[in_group] == 0).all()
    if fmt.group[0] == 1:
        others = [0, 2]
        assert_same_bits(tuple(p[others] for p in (codes, scale)), tuple(p[others] for p in clean[:2]))


def test_two_level_formats_scale_by_their_finite_values() -> None:
    """The group is marked, everything else is as if the value had been 0: its group's finite values count too."""
    x = torch.randn(2, 1024)
    x[0, 5], x[0, 6] = 100.0, math.nan
    without = torch.where(x.isnan(), 0.0, x)
    for name in ("mxfp4_dualscale", "nvfp4", "nvfp4_per_token"):
        fmt = FORMATS[name]
        parts, expected = quantize(x, fmt, fmt.rules[0]), quantize(without, fmt, fmt.rules[0])
        assert_same_bits(parts[2], expected[2], name=name)
        assert_same_bits(parts[1][:, 1:], expected[1][:, 1:], name=name)
        assert_same_bits(parts[0][:, 16:], expected[0][:, 16:], name=name)
        assert (parts[0][0, : fmt.group[1] // 2] == 0).all()


def test_a_row_with_nothing_finite() -> None:
    for fmt, rule in CASES:
        x = torch.full((2, 64), math.inf)
        x[1] = math.nan
        values = _values(quantize(x, fmt, rule), fmt, 64)
        assert values.isnan().all(), fmt.name


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_once_to_the_wanted_dtype(fmt: Format, dtype: torch.dtype) -> None:
    parts = quantize(torch.randn(5, 96), fmt, fmt.rules[-1])
    assert_same_bits(dequantize(parts, fmt, 96, dtype), dequantize(parts, fmt, 96).to(dtype))


def test_e8m0_byte_0_and_negative_zeros_of_imported_bytes_are_understood() -> None:
    """2^-127 is a subnormal float32 that we never write; the sign of an e2m1 zero is kept on reading."""
    codes = torch.tensor([[0x27, 0x08]], dtype=torch.uint8)
    values = dequantize((codes, torch.zeros(1, 1, dtype=torch.uint8)), FORMATS["mxfp4"], 4)
    assert values.tolist() == [[6.0 * 2.0**-127, 1.0 * 2.0**-127, -0.0, 0.0]]
    assert values.signbit().tolist() == [[False, False, True, False]]
    fp8 = torch.tensor([[1.5, -448.0]]).to(torch.float8_e4m3fn)
    values = dequantize((fp8, torch.zeros(1, 1, dtype=torch.uint8)), FORMATS["mxfp8"], 2)
    assert values.tolist() == [[1.5 * 2.0**-127, -448.0 * 2.0**-127]]


def test_a_block_whose_scale_for_4_exceeds_448_keeps_6() -> None:
    """The first block holds the tensor's maximum: for 4 it would need 672. The second one's 448 is in range."""
    fours = torch.tensor([4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -4.0] * 2)
    x = torch.cat([fours * 5.25 / 4, fours * 3.5 / 4])[None]
    codes, scale, reciprocal = quantize(x, FORMATS["nvfp4"], "four_over_six")
    assert reciprocal.item() == 512.0
    assert scale.to(torch.float32).tolist() == [[448.0, 448.0]]
    assert codes[0, 8:12].tolist() == [0x56, 0x34, 0x12, 0xE0]
    assert codes[0, :4].tolist() == [0x67, 0x45, 0x23, 0xF0]


def test_a_tie_of_errors_keeps_6_and_the_lower_exponent() -> None:
    single = torch.zeros(1, 32)
    single[0, 3] = 1.0  # representable with every scale
    scale = quantize(single, FORMATS["nvfp4"], "four_over_six")[1].to(torch.float32)
    assert scale[0, 0].item() == 448.0
    assert quantize(single, FORMATS["mxfp4"], "mse")[1].item() == 127 - 2


def test_mse_of_sizes_on_both_sides_of_its_decision() -> None:
    """At 7 the step from 6 to 8 is undecided between the exponents: the other values decide."""
    x = torch.zeros(3, 32)
    x[:, 0] = 7.0
    x[0, 1:] = 0.5  # lost with the higher exponent
    x[2, 0] = 7.9
    assert quantize(x, FORMATS["mxfp4"], "mse")[1].flatten().tolist() == [127, 127, 128]


@pytest.mark.parametrize(
    ("rule", "expected"), [("floor", 18.8), ("even", 19.05), ("ceil", 18.75), ("mse", 19.05)], ids=str
)
def test_signal_to_noise_of_mxfp4_on_normal_data(rule: str, expected: float) -> None:
    x = torch.from_numpy(np.random.RandomState(1).standard_normal((1024, 1024)).astype(np.float32))
    error = _values(quantize(x, FORMATS["mxfp4"], rule), FORMATS["mxfp4"], 1024).double() - x.double()
    decibel = 10 * math.log10(x.double().square().sum() / error.square().sum())
    assert decibel == pytest.approx(expected, abs=0.05)


def test_signal_to_noise_of_int8_with_scales_in_float32() -> None:
    """A scale rounded to bfloat16 would lose half a decibel."""
    x = torch.from_numpy(np.random.RandomState(2).standard_normal((4096, 1024))).to(torch.bfloat16)
    fmt = FORMATS["int8_per_channel_static"]
    error = _values(quantize(x, fmt, "amax"), fmt, 1024).double() - x.double()
    assert 10 * math.log10(x.double().square().sum() / error.square().sum()) == pytest.approx(42.1, abs=0.05)


@EVERY_FORMAT
def test_small_weights_keep_their_relative_error(fmt: Format) -> None:
    x = torch.from_numpy(np.random.RandomState(5).standard_normal((16, 512)).astype(np.float32))

    def relative(factor: float) -> float:
        scaled = x * factor
        values = _values(quantize(scaled, fmt, fmt.weight_rule), fmt, 512)
        return float((values - scaled).double().norm() / scaled.double().norm())

    for factor in (1e-4, 1e-7):
        assert relative(factor) == pytest.approx(relative(1.0), rel=0.1)


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"mxfp4 has no scale rule 'flor'; did you mean 'floor'\?"):
        quantize(torch.zeros(1, 32), FORMATS["mxfp4"], "flor")
    with pytest.raises(ConfigurationError, match=r"fp8_per_token has no scale rule 'mse'; valid: amax"):
        quantize(torch.zeros(1, 32), FORMATS["fp8_per_token"], "mse")


@pytest.mark.parametrize(
    "x", [torch.zeros(32), torch.zeros(2, 2, 32), torch.zeros(2, 32, dtype=torch.int32), torch.zeros(2, 2) + 1j]
)
def test_only_2d_floating_tensors_are_quantized(x: Tensor) -> None:
    with pytest.raises(ConversionError, match="fp8_per_token quantizes a 2-D floating tensor, not torch"):
        quantize(x, FORMATS["fp8_per_token"], "amax")
