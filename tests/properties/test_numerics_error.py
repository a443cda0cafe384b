"""How far dequantized values may be from what was quantized, and what quantizing them again gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from olq_fx import elements
from olq_fx.formats import FORMATS, Format
from olq_fx.numerics import Parts, dequantize, quantize
from olq_fx.testing import assert_same_bits, half_step_bound, tensors

CASES = [(fmt, rule) for fmt in FORMATS.values() for rule in fmt.rules]
EVERY_RULE = pytest.mark.parametrize(("fmt", "rule"), CASES, ids=[f"{fmt.name}-{rule}" for fmt, rule in CASES])
MXFP4_FORMATS = pytest.mark.parametrize("fmt", [FORMATS["mxfp4"], FORMATS["mxfp4_dualscale"]], ids=lambda f: f.name)
FEW = settings(max_examples=settings().max_examples // 6)

# Values away from the ends of float32, where no intermediate of any format is subnormal or overflows.
NORMAL = tensors(
    rows=(1, 4),
    columns=(1, 700),
    dtypes=[torch.float32],
    kinds=["normal", "outlier", "constant"],
    layouts=["contiguous"],
)
ANY = tensors(rows=(1, 4), columns=(1, 700), layouts=["contiguous"])


def _error(x: Tensor, fmt: Format, rule: str) -> Tensor:
    """The squared error of each group of 32 in float64, (R, ceil(K / 32))."""
    k = x.shape[1]
    error = (dequantize(quantize(x, fmt, rule), fmt, k).double() - x.double()).square()
    return torch.nn.functional.pad(error, (0, -k % 32)).unflatten(1, (-1, 32)).sum(-1)


@EVERY_RULE
@FEW
@given(ANY)
def test_half_a_step_and_what_exceeds_the_range(fmt: Format, rule: str, x: Tensor) -> None:
    parts = quantize(x, fmt, rule)
    values = dequantize(parts, fmt, x.shape[1]).double()
    assert values.isfinite().all()
    assert ((values - x.double()).abs() <= half_step_bound(x, parts, fmt)).all()


def _comparable(parts: Parts, fmt: Format, values: Tensor) -> Tensor:
    """Which elements (R, K) lie in a block whose scale must be found again; all but those of two kinds of nvfp4 block.

    A subnormal e4m3 scale may be half as large again as the quotient that it stands for; the block's maximum then has
    a smaller code than 6, and quantizing again finds a smaller scale, which may be 0. And where a scale of 448 was
    chosen for 4, the quotient of the values may round to just above 448, where 6 is kept.
    """
    if fmt.scale != "e4m3":
        return torch.ones_like(values, dtype=torch.bool)
    k = values.shape[1]
    scale = parts[1].to(torch.float32)
    blocks = torch.nn.functional.pad(elements.unpack(parts[0], k) & 7, (0, -k % 16)).unflatten(1, (-1, 16))
    for_four = (scale == 448) & (blocks.amax(-1) == 6)
    found_again = ((scale == 0) | (scale >= 2.0**-6)) & ~for_four
    return found_again.repeat_interleave(16, 1)[:, :k]


@EVERY_RULE
@FEW
@given(ANY)
def test_quantizing_the_values_again_gives_the_same_values(fmt: Format, rule: str, x: Tensor) -> None:
    k = x.shape[1]
    parts = quantize(x, fmt, rule)
    values = dequantize(parts, fmt, k)
    again = quantize(values, fmt, rule)
    same = _comparable(parts, fmt, values)
    if fmt.name == "nvfp4":
        # Its global scale, kept as a reciprocal, may move by one unit in the last place.
        tolerance = values.abs() * 2.0**-22 + 2.0**-149
        assert ((dequantize(again, fmt, k) - values).abs() <= tolerance)[same].all()
        assert (again[2] / parts[2] - 1).abs() <= 2.0**-23
        return
    assert_same_bits(dequantize(again, fmt, k)[same], values[same])
    # The least power of two above a quotient, and the least one that holds 6, may fall: the maximum was rounded down.
    if rule not in ("ceil", "power_of_two") and bool(same.all()):
        assert_same_bits(again, parts)


@FEW
@given(NORMAL)
def test_quantizing_an_nvfp4_weight_again_gives_its_codes_and_block_scales(x: Tensor) -> None:
    fmt = FORMATS["nvfp4"]
    parts = quantize(x, fmt, "amax")
    values = dequantize(parts, fmt, x.shape[1])
    if bool(_comparable(parts, fmt, values).all()):
        assert_same_bits(quantize(values, fmt, "amax")[:2], parts[:2])


@EVERY_RULE
@FEW
@given(NORMAL, st.integers(-40, 40))
def test_powers_of_two_pass_through(fmt: Format, rule: str, x: Tensor, exponent: int) -> None:
    """Codes stay, float32 scales and values scale exactly, e8m0 bytes move by the exponent."""
    factor = 2.0**exponent
    parts, scaled = quantize(x, fmt, rule), quantize(x * factor, fmt, rule)
    assert_same_bits(scaled[0], parts[0], name="codes")
    k = x.shape[1]
    assert_same_bits(dequantize(scaled, fmt, k), dequantize(parts, fmt, k) * factor, name="values")
    if fmt.coarse is not None:
        assert_same_bits(scaled[1], parts[1], name="scale")
        assert_same_bits(scaled[2], parts[2] * (1 / factor if fmt.name == "nvfp4" else factor), name="coarse")
    elif fmt.scale == "float32":
        assert_same_bits(scaled[1], parts[1] * factor, name="scale")
    else:
        assert torch.equal(scaled[1].int(), parts[1].int() + exponent)


@MXFP4_FORMATS
@given(
    tensors(
        rows=(1, 4),
        columns=(1, 700),
        kinds=["normal", "zero", "outlier", "tiny", "subnormal", "constant", "power_of_two", "mixed"],
        layouts=["contiguous"],
    )
)
def test_mse_is_never_worse_than_any_single_rule(fmt: Format, x: Tensor) -> None:
    best = _error(x, fmt, "mse")
    # A value of mxfp4 is exact in float32; the coarse scale of the dual-scale format rounds it, 1/2^24 of itself.
    size = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).square().sum(-1)
    rounding = 0.0 if fmt.coarse is None else size * 2.0**-44
    for rule in ("floor", "even", "ceil"):
        assert (best <= _error(x, fmt, rule) * (1 + 1e-6) + rounding).all(), rule


@given(
    tensors(
        rows=(1, 4), columns=(1, 300), kinds=["normal", "outlier", "constant", "power_of_two"], layouts=["contiguous"]
    )
)
def test_four_over_six_is_never_worse_than_six(x: Tensor) -> None:
    fmt = FORMATS["nvfp4"]
    size = x.double().square().sum(1)

    def error(rule: str) -> Tensor:
        return (dequantize(quantize(x, fmt, rule), fmt, x.shape[1]).double() - x.double()).square().sum(1)

    assert (error("four_over_six") <= error("amax") * (1 + 1e-6) + size * 2.0**-44).all()
