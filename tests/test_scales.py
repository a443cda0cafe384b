"""The scale rules beside every power of two, against exact rational arithmetic and ml_dtypes."""

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from olq_fx import scales

LARGEST = float(np.finfo(np.float32).max)
NAN, INF = float("nan"), float("inf")


def _beside_powers_of_two(*mantissas: float) -> np.ndarray:
    """`m x 2^e` for every exponent of float32, subnormal ones too, each with its two neighbours; finite and > 0."""
    exact = np.array([math.ldexp(m, e) for m in mantissas for e in range(-149, 128)])
    values = exact[(exact >= 2.0**-149) & (exact <= LARGEST)].astype(np.float32)
    around = np.concatenate([np.nextafter(values, np.float32(0)), values, np.nextafter(values, np.float32(INF))])
    return np.unique(around[(around > 0) & np.isfinite(around)])


def _least_exponent(holds: Callable[[int], bool], near: int) -> int:
    """The least e for which a condition holds that is false far below `near` and true far above."""
    return next(e for e in range(near - 6, near + 7) if holds(e))


def _frexp_exponent(value: float) -> int:
    """floor(log2 value), exactly."""
    return math.frexp(value)[1] - 1


def _as_byte(exponent: int) -> int:
    return max(exponent + 127, 1)


def test_every_e8m0_byte_is_its_power_of_two() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    decoded = scales.decode_e8m0(byte).numpy()
    assert decoded.dtype == np.float32
    assert [float(v) for v in decoded[:255]] == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert math.isnan(decoded[255])
    theirs = byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(decoded, theirs, equal_nan=True)


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_the_power_of_two_above_a_quotient(largest: float) -> None:
    values = _beside_powers_of_two(1.0, largest / 256, 1.5, 1.9)
    amax = torch.from_numpy(values)
    found = scales.e8m0(scales.exponent_above(amax, largest), amax).tolist()
    quotients = [float(value / np.float32(largest)) for value in values]
    expected = [
        0 if q == 0 else _least_exponent(lambda e, q=q: Fraction(2) ** e >= Fraction(q), _frexp_exponent(q))
        for q in quotients
    ]
    assert found == [1 if q == 0 else _as_byte(e) for q, e in zip(quotients, expected, strict=True)]
    as_float = scales.power_of_two_scale(amax, largest).tolist()
    assert as_float == [math.ldexp(1.0, byte - 127) for byte in found]


def _mxfp4_by_definition(amax: float, rule: str) -> int:
    exponent = _frexp_exponent(amax) - 2
    if rule == "ceil":
        return _least_exponent(lambda e: Fraction(amax) <= 6 * Fraction(2) ** e, exponent)
    mantissa = Fraction(amax) / Fraction(2) ** (exponent + 2)
    return exponent + (rule == "even" and mantissa >= Fraction(7, 4))


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_mxfp4_rules_beside_their_thresholds(rule: str) -> None:
    values = _beside_powers_of_two(1.0, 1.25, 1.5, 1.75)
    amax = torch.from_numpy(values)
    found = scales.e8m0(scales.mxfp4_exponent(amax, rule), amax).tolist()
    assert found == [_as_byte(_mxfp4_by_definition(float(value), rule)) for value in values]


def test_mse_starts_from_the_exponent_of_floor() -> None:
    amax = torch.from_numpy(_beside_powers_of_two(1.0, 1.75))
    assert torch.equal(scales.mxfp4_exponent(amax, "mse"), scales.mxfp4_exponent(amax, "floor"))


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_zero_is_written_as_byte_1_and_only_nonfinite_as_255(rule: str) -> None:
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, LARGEST, INF, NAN])
    found = scales.e8m0(scales.mxfp4_exponent(amax, rule), amax).tolist()
    assert found[:3] == [1, 1, 1]
    assert 252 <= found[3] < 254
    assert found[4:] == [255, 255]
    assert scales.e8m0(scales.exponent_above(amax, 448.0), amax).tolist() == [1, 1, 1, 127 + 120, 255, 255]


@pytest.mark.parametrize("largest", [448.0, 127.0, 6.0, 2688.0])
def test_float32_scales_are_true_quotients_with_a_floor(largest: float) -> None:
    generator = np.random.RandomState(3)
    values = np.ldexp(generator.uniform(1, 2, 20000), generator.randint(-140, 127, 20000)).astype(np.float32)
    found = scales.float32_scale(torch.from_numpy(values), largest).numpy()
    quotient = values / np.float32(largest)
    assert np.array_equal(found, np.maximum(quotient, np.float32(2.0**-126)))
    sample = [(float(v), float(f)) for v, f in zip(values, found, strict=True) if f > 2.0**-126][:200]
    for value, scale in sample:
        # Nearest to the rational quotient: no neighbour of the scale is nearer.
        exact, step = Fraction(value) / Fraction(largest), Fraction(float(np.spacing(np.float32(scale))))
        assert abs(Fraction(scale) - exact) <= step / 2


def test_float32_scales_of_special_groups() -> None:
    amax = torch.tensor([0.0, 1e-45, INF, NAN])
    found = scales.float32_scale(amax, 448.0)
    assert found[:2].tolist() == [2.0**-126] * 2
    assert found[2:].isnan().all()
    above = scales.power_of_two_scale(amax, 448.0)
    assert above[:2].tolist() == [2.0**-126] * 2
    assert above[2:].isnan().all()


def test_e4m3_block_scales_have_no_floor_and_saturate() -> None:
    amax = torch.tensor([0.0, 2.0**-10, 1.001 * 2.0**-10, 1.0, 447.0, 464.0, 1e30, INF, NAN])
    found = scales.e4m3_scale(amax, torch.tensor(1.0))
    assert found.dtype == torch.float8_e4m3fn
    assert found[:7].to(torch.float32).tolist() == [0.0, 0.0, 2.0**-9, 1.0, 448.0, 448.0, 448.0]
    assert found[7:].view(torch.uint8).tolist() == [0x7F, 0x7F]


def test_nvfp4_keeps_the_reciprocal_of_its_global_scale() -> None:
    generator = np.random.RandomState(4)
    values = np.ldexp(generator.uniform(1, 2, 20000), generator.randint(-149, 128, 20000)).astype(np.float32)
    values = np.concatenate([values, np.array([0.0, 1e-45, LARGEST, 2688.0], dtype=np.float32)])
    with np.errstate(divide="ignore", over="ignore"):
        exact = np.float32(2688) / values
    expected = np.where(np.isfinite(exact), exact, np.float32(1))
    assert np.array_equal(scales.nvfp4_reciprocal(torch.from_numpy(values)).numpy(), expected)
    assert float((1.0 / torch.from_numpy(expected)).min()) >= 2.0**-128
