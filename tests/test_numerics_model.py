"""Every format and rule against a second implementation: numpy, group by group, written from the formats' definitions.

It shares no code with the library. Float32 operations are numpy's, codes are found by searching the nearest value in
float64, exponents by `frexp`, and the errors by which a scale is chosen are sums in float64.
"""

import dataclasses
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch

from olq_fx.formats import FORMATS, Format
from olq_fx.numerics import dequantize, quantize

F32 = np.float32
FLOOR = F32(2.0**-126)
NAN_BYTE = 255
GRIDS = {
    "e4m3": np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "e2m1": np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
    "int8": np.arange(128.0),
}
CLOSE_CALL = 1e-6
"""Relative difference of two errors under which float32 sums may choose either scale."""


@dataclasses.dataclass
class Model:
    """One quantized tensor: signed values of the codes, scales as stored (float32 numbers or bytes), the values."""

    codes: np.ndarray
    scale: np.ndarray
    coarse: np.ndarray | None
    values: np.ndarray


def nearest(quotient: np.ndarray, element: str) -> np.ndarray:
    """The signed value nearest to each float32 quotient, the even code on a tie."""
    grid = GRIDS[element]
    size = np.minimum(np.abs(quotient.astype(np.float64)), grid[-1])
    upper = np.minimum(np.searchsorted(grid, size), len(grid) - 1)
    lower = np.maximum(upper - 1, 0)
    to_upper, to_lower = grid[upper] - size, size - grid[lower]
    even = np.where(upper % 2 == 0, upper, lower)
    code = np.where(to_upper < to_lower, upper, np.where(to_lower < to_upper, lower, even))
    return np.copysign(grid[code], quotient).astype(F32)


def spans(length: int, size: int | None) -> Iterator[slice]:
    """The slices of the groups along an axis: one of the whole axis, or as many as it has, the last one shorter."""
    if size is None:
        return iter([slice(0, length)])
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def amax_of(x: np.ndarray) -> np.float32:
    """The largest magnitude, 0 of nothing; NaN if any value is not finite."""
    return F32(np.abs(x).max(initial=0.0)) if np.isfinite(x).all() else F32(np.nan)


def finite_amax(x: np.ndarray) -> np.float32:
    return amax_of(x[np.isfinite(x)])


def power_byte(exponent: int) -> int:
    return max(exponent + 127, 1)


def power(byte: int) -> np.float32:
    return F32(np.nan) if byte == NAN_BYTE else F32(math.ldexp(1.0, byte - 127))


def byte_above(quotient: np.float32) -> int:
    mantissa, exponent = math.frexp(float(quotient))
    return 1 if quotient == 0 else power_byte(exponent - 1 if mantissa == 0.5 else exponent)


def squared_error(values: np.ndarray, scale: float) -> float:
    """Of rounding e2m1 multiples of a power of two, in float64."""
    scaled = values.astype(np.float64) / scale
    return float(np.square((scaled - nearest(scaled.astype(F32), "e2m1").astype(np.float64)) * scale).sum())


def byte_of(values: np.ndarray, amax: np.float32, fmt: Format, rule: str, chosen: int) -> int:
    """The e8m0 byte of a group; `chosen` decides between two that are equally good for float32 sums."""
    if not np.isfinite(amax):
        return NAN_BYTE
    if fmt.element == "e4m3":
        return byte_above(F32(amax / F32(448)))
    mantissa, exponent = math.frexp(float(amax))
    floor = exponent - 3
    if amax == 0:
        return 1
    if rule == "ceil":
        return power_byte(floor + (mantissa > 0.75))
    if rule == "even":
        return power_byte(floor + (mantissa >= 0.875))
    if rule == "floor":
        return power_byte(floor)
    low, high = power_byte(floor), power_byte(floor + 1)
    first, second = squared_error(values, float(power(low))), squared_error(values, float(power(high)))
    if first != second and abs(first - second) <= CLOSE_CALL * max(first, second):
        assert chosen in (low, high)
        return chosen
    return high if second < first else low


def saturated(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -np.finfo(F32).max, np.finfo(F32).max)


def one_level(x: np.ndarray, fmt: Format, rule: str, chosen: np.ndarray) -> Model:
    rows, columns = list(spans(x.shape[0], fmt.group[0])), list(spans(x.shape[1], fmt.group[1]))
    codes, values = np.zeros_like(x), np.zeros_like(x)
    scale = np.zeros((len(rows), len(columns)), dtype=F32 if fmt.scale == "float32" else np.uint8)
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            group = x[r, c]
            amax = amax_of(group)
            if fmt.scale == "e8m0":
                scale[i, j] = byte_of(group, amax, fmt, rule, int(chosen[i, j]))
                factor = power(int(scale[i, j]))
            elif rule == "power_of_two":
                factor = power(byte_above(F32(amax / F32(448)))) if np.isfinite(amax) else F32(np.nan)
            else:
                factor = np.maximum(F32(amax / F32(GRIDS[fmt.element][-1])), FLOOR)
            if fmt.scale == "float32":
                scale[i, j] = factor
            if np.isfinite(amax):
                codes[r, c] = nearest(group / factor, fmt.element)
            values[r, c] = saturated(codes[r, c] * factor)
    return Model(codes, scale, None, values)


def dualscale(x: np.ndarray, fmt: Format, rule: str, chosen: np.ndarray) -> Model:
    codes, values = np.zeros_like(x), np.zeros_like(x)
    scale = np.zeros((x.shape[0], -(-x.shape[1] // 32)), dtype=np.uint8)
    coarse = np.zeros((x.shape[0], -(-x.shape[1] // 512)), dtype=F32)
    for i in range(x.shape[0]):
        for j, wide in enumerate(spans(x.shape[1], 512)):
            coarse[i, j] = np.maximum(finite_amax(x[i, wide]) / F32(6), FLOOR)
            for start in range(wide.start, wide.stop, 32):
                c = slice(start, min(start + 32, wide.stop))
                t = x[i, c] / coarse[i, j]
                byte = byte_of(t, amax_of(t), fmt, rule, int(chosen[i, start // 32]))
                scale[i, start // 32] = byte
                if byte != NAN_BYTE:
                    codes[i, c] = nearest(t / power(byte), "e2m1")
                values[i, c] = saturated(codes[i, c] * power(byte) * coarse[i, j])
    return Model(codes, scale, coarse, values)


def block_scale(block: np.ndarray, g: np.float32, rule: str, chosen: np.float32) -> np.float32:
    """The e4m3 scale of a block of finite values."""
    amax = amax_of(block)
    six, four = (np.minimum(amax / F32(F32(m) * g), F32(449)) for m in (6, 4))
    s6, s4 = (nearest(np.array(s), "e4m3") for s in (six, four))
    if rule != "four_over_six" or four > 448:
        return F32(s6)

    def error(s: np.float32) -> float:
        if s == 0:
            return float(np.square(block.astype(np.float64)).sum())
        code = nearest(block / F32(s * g), "e2m1").astype(np.float64)
        return float(np.square(block.astype(np.float64) - code * float(s) * float(g)).sum())

    first, second = error(s6), error(s4)
    if abs(first - second) <= CLOSE_CALL * max(first, second):
        assert chosen in (s6, s4)
        return chosen
    return F32(s4 if second < first else s6)


def nvfp4(x: np.ndarray, fmt: Format, rule: str, chosen: np.ndarray) -> Model:
    codes, values = np.zeros_like(x), np.zeros_like(x)
    scale = np.zeros((x.shape[0], -(-x.shape[1] // 16)), dtype=F32)
    per_row = fmt.name == "nvfp4_per_token"
    coarse = np.zeros((x.shape[0] if per_row else 1, 1), dtype=F32)
    for i, r in enumerate(spans(x.shape[0], 1 if per_row else None)):
        amax = finite_amax(x[r])
        if per_row:
            g = np.maximum(amax / F32(2688), FLOOR)
            coarse[i] = g
        else:
            with np.errstate(divide="ignore", over="ignore"):
                reciprocal = F32(2688) / amax
            coarse[i] = reciprocal if np.isfinite(reciprocal) else 1
            g = F32(1) / coarse[i, 0]
        for row in range(r.start, r.stop):
            for j, c in enumerate(spans(x.shape[1], 16)):
                block = x[row, c]
                marked = not np.isfinite(block).all()
                s = F32(np.nan) if marked else block_scale(block, g, rule, chosen[row, j])
                scale[row, j] = s
                if s > 0:
                    codes[row, c] = nearest(block / F32(s * g), "e2m1")
                values[row, c] = saturated(codes[row, c] * s * g)
    return Model(codes, scale, coarse, values)


def model_of(x: np.ndarray, fmt: Format, rule: str, chosen: np.ndarray) -> Model:
    with np.errstate(invalid="ignore", over="ignore"):
        if fmt.coarse is None:
            return one_level(x, fmt, rule, chosen)
        return (nvfp4 if fmt.scale == "e4m3" else dualscale)(x, fmt, rule, chosen)


def code_values(codes: torch.Tensor, fmt: Format, k: int) -> np.ndarray:
    """The numbers that the library's codes stand for, by ml_dtypes."""
    if fmt.element == "int8":
        return codes.numpy().astype(F32)
    raw = codes.view(torch.uint8).numpy()
    if fmt.element == "e4m3":
        return raw.view(ml_dtypes.float8_e4m3fn).astype(F32)
    nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(raw.shape[0], 2 * raw.shape[1])
    assert not (nibbles[:, k:]).any(), "the nibble beyond an odd K is 0"
    assert not (nibbles == 8).any(), "no negative zero is written"
    return nibbles[:, :k].view(ml_dtypes.float4_e2m1fn).astype(F32)


SHAPES = [(3, 1024), (3, 33), (1, 1), (2, 560), (0, 40), (17, 16)]
SHAPE_OF_BLOCKS = (130, 250)
KINDS = ["normal", "wide", "tiny", "huge", "sparse", "nonfinite", "16 bit"]


def data(kind: str, shape: tuple[int, int]) -> np.ndarray:
    generator = np.random.RandomState(shape[0] * 1000 + shape[1])
    x = generator.standard_normal(shape)
    if kind == "wide":
        x = np.ldexp(x, generator.randint(-30, 30, shape))
    elif kind == "tiny":
        x = np.ldexp(x, generator.randint(-150, -120, (shape[0], 1)))
    elif kind == "huge":
        x = np.clip(x * 2e38, -3.4028234e38, 3.4028234e38)
    elif kind == "sparse":
        x = np.where(generator.uniform(size=shape) < 0.03, np.round(x * 4), 0.0)
    elif kind == "nonfinite":
        x = np.where(generator.uniform(size=shape) < 0.004, np.nan, x)
        x = np.where(generator.uniform(size=shape) < 0.004, -np.inf, x)
    elif kind == "16 bit":
        x = x.astype(ml_dtypes.bfloat16)
    return x.astype(F32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "rule"), [(f.name, rule) for f in FORMATS.values() for rule in f.rules])
def test_codes_scales_and_values_are_those_of_the_model(name: str, rule: str, kind: str) -> None:
    fmt = FORMATS[name]
    for shape in [*SHAPES, SHAPE_OF_BLOCKS] if fmt.group == (128, 128) else SHAPES:
        x = data(kind, shape)
        parts = quantize(torch.from_numpy(x), fmt, rule)
        scale = (parts[1].to(torch.float32) if fmt.scale == "e4m3" else parts[1]).numpy()
        expected = model_of(x, fmt, rule, scale)
        np.testing.assert_array_equal(scale, expected.scale, err_msg=f"scales of {shape}")
        np.testing.assert_array_equal(code_values(parts[0], fmt, shape[1]), expected.codes, err_msg=f"codes of {shape}")
        if expected.coarse is not None:
            np.testing.assert_array_equal(parts[2].numpy(), expected.coarse, err_msg=f"coarse scales of {shape}")
        values = dequantize(parts, fmt, shape[1]).numpy()
        np.testing.assert_array_equal(values, expected.values, err_msg=f"values of {shape}")
