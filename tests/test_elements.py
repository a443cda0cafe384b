"""Every code of every element type, against the types' definitions and ml_dtypes' casts."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from olq_fx import elements
from olq_fx.formats import Element

ELEMENTS: tuple[Element, ...] = ("e4m3", "e2m1", "int8")


def _e4m3_magnitudes() -> list[float]:
    """Codes 0 to 126: four bits of exponent with bias 7, three of mantissa; 127 is NaN."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))
    return values


MAGNITUDES: dict[Element, list[float]] = {
    "e4m3": _e4m3_magnitudes(),
    "e2m1": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "int8": [float(value) for value in range(128)],
}
"""The values >= 0 of each element type in the order of their codes."""


def _codes(values: np.ndarray, element: Element) -> list[int]:
    """The codes of float32 values as magnitude and sign: int8 as numbers, others as bits."""
    encoded = elements.encode(torch.from_numpy(np.asarray(values, dtype=np.float32)), element)
    return (encoded if element == "int8" else encoded.view(torch.uint8)).tolist()


def _negative(code: int, element: Element) -> int:
    if element == "int8":
        return -code
    return code | (0x80 if element == "e4m3" else (8 if code else 0))


def _check(values: np.ndarray, expected: list[int], element: Element) -> None:
    """Values > 0 have the expected codes, and their negatives the expected codes' negatives."""
    assert _codes(values, element) == expected
    assert _codes(-values, element) == [_negative(code, element) for code in expected]


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_value_is_its_own_code(element: Element) -> None:
    values = np.array(MAGNITUDES[element], dtype=np.float32)
    _check(values, list(range(len(values))), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_is_its_value(element: Element) -> None:
    magnitudes = MAGNITUDES[element]
    if element == "int8":
        codes = torch.arange(-127, 128, dtype=torch.int8)
        expected = [-m for m in magnitudes[:0:-1]] + magnitudes
    else:
        sign = 128 if element == "e4m3" else 8
        codes = torch.tensor([s + c for s in (0, sign) for c in range(len(magnitudes))], dtype=torch.uint8)
        expected = magnitudes + [-m for m in magnitudes]
    stored = codes.view(elements.CODE_DTYPE[element])
    decoded = elements.decode(stored, element)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == expected
    assert decoded.signbit().tolist() == [math.copysign(1, value) < 0 for value in expected]


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_theirs(element: Element) -> None:
    values = np.array(MAGNITUDES[element], dtype=np.float64)
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    assert np.array_equal(middle.astype(np.float64) * 2, values[:-1] + values[1:]), "midpoints are float32 numbers"
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    codes = range(len(values) - 1)
    _check(middle, [code + code % 2 for code in codes], element)
    _check(below, list(codes), element)
    _check(above, [code + 1 for code in codes], element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_neighbours_of_every_value_have_its_code(element: Element) -> None:
    values = np.array(MAGNITUDES[element][1:], dtype=np.float32)
    codes = list(range(1, len(values) + 1))
    _check(np.nextafter(values, np.float32(0)), codes, element)
    _check(np.nextafter(values, np.float32(np.inf)), codes, element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_what_is_out_of_range_saturates(element: Element) -> None:
    largest = len(MAGNITUDES[element]) - 1
    assert MAGNITUDES[element][-1] == elements.ELEMENT_MAX[element]
    beyond = np.array([elements.ELEMENT_MAX[element] * 1.001, 464.0, 480.0, 1e9, 3.4e38, np.inf], dtype=np.float32)
    _check(beyond, [largest] * len(beyond), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_sign_of_zero(element: Element) -> None:
    """e4m3 keeps it as the hardware's cast does, int8 has none, e2m1 is written without."""
    zeros = np.array([0.0, -0.0, 1e-45, -1e-45], dtype=np.float32)
    assert _codes(zeros, element) == ([0, 0x80, 0, 0x80] if element == "e4m3" else [0, 0, 0, 0])


def _all_16_bit_floats(kind: torch.dtype) -> torch.Tensor:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind).to(torch.float32)
    return every[every.isfinite()]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_all_16_bit_floats_against_ml_dtypes(kind: torch.dtype, element: Element) -> None:
    """An independent cast, from every bfloat16 and float16 number within the element's range."""
    limit = elements.ELEMENT_MAX[element]
    values = _all_16_bit_floats(kind)
    values = values[values.abs() <= limit]
    other = ml_dtypes.float8_e4m3fn if element == "e4m3" else ml_dtypes.float4_e2m1fn
    expected = values.numpy().astype(other).view(np.uint8)
    codes = np.array(_codes(values.numpy(), element))
    if element == "e2m1":
        expected = np.where(expected == 8, 0, expected)
    assert np.array_equal(codes, expected)


def test_rounding_to_e2m1_is_decoding_the_code() -> None:
    values = _all_16_bit_floats(torch.float16)
    rounded = elements.round_e2m1(values)
    assert torch.equal(rounded, elements.decode_e2m1(elements.encode_e2m1(values)))
    assert torch.equal(rounded.signbit(), values.signbit())


def test_packing_puts_even_elements_in_low_nibbles() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = torch.cartesian_prod(codes, codes).reshape(1, -1)
    packed = elements.pack(pairs)
    assert packed.tolist() == [[low + 16 * high for low in range(16) for high in range(16)]]
    assert torch.equal(elements.unpack(packed, pairs.shape[1]), pairs)


def test_every_byte_unpacks_and_packs_to_itself() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    assert torch.equal(elements.pack(elements.unpack(packed, 256)), packed)


@pytest.mark.parametrize("k", [1, 3, 33])
def test_an_odd_length_leaves_the_last_high_nibble_zero(k: int) -> None:
    codes = torch.full((2, k), 15, dtype=torch.uint8)
    packed = elements.pack(codes)
    assert packed.shape == (2, (k + 1) // 2)
    assert packed[:, -1].tolist() == [15, 15]
    assert torch.equal(elements.unpack(packed, k), codes)
