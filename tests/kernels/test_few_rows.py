"""Products with few rows of x: unscaled codes where all is ordinary, else decoded ones; row by row the same bits."""

import pytest
import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import BLOCK_COLUMNS, FORMATS, Format, block_formats, get_format
from olq_fx.kernels import native
from olq_fx.testing import assert_product_close, assert_same_bits

OPS = torch.ops.olq_fx
WEIGHTS = [f for f in FORMATS.values() if f.weight]
BLOCKS = [get_format(block_formats(rows, columns)[0]) for rows in (32, 128) for columns in BLOCK_COLUMNS]
# Not one whole unit of 32, one and a part, one section of 512 and a unit, what a step of one row of x spans and a part.
DEPTHS = (31, 33, 543, 4130)
NAN = 0x7F


@pytest.fixture(autouse=True)
def _native() -> None:
    assert native.why_not() == "", "these tests need the native kernels"


def weight_of(n: int, k: int, fmt: Format) -> list[Tensor]:
    parts: list[Tensor] = OPS.quantize(torch.randn(n, k), fmt.name, fmt.weight_rule)
    return parts


def decoded(parts: list[Tensor], fmt: Format, k: int) -> Tensor:
    return numerics.dequantize(tuple(parts), fmt, k)


def product(x: Tensor, parts: list[Tensor], fmt: Format) -> Tensor:
    y: Tensor = OPS.quantized_linear([x], "", parts, fmt.name, x.shape[1], torch.float32, None, None)
    return y


def named(fmt: Format) -> str:
    return fmt.name


@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("fmt", [*WEIGHTS, *BLOCKS], ids=named)
def test_any_depth_and_number_of_rows(fmt: Format, k: int) -> None:
    parts = weight_of(19, k, fmt)
    x, w = torch.randn(8, k), decoded(parts, fmt, k)
    whole = product(x, parts, fmt)
    assert_product_close(whole, x, w)
    for m in range(1, 8):
        assert_same_bits(product(x[8 - m :], parts, fmt), whole[8 - m :])


@pytest.mark.parametrize("fmt", WEIGHTS, ids=named)
def test_every_code_in_every_place(fmt: Format) -> None:
    """A row of x that is one at one k picks that column of w: its exact values."""
    k = 512 if fmt.packed else 256
    parts = weight_of(32, k, fmt)
    codes = torch.stack([torch.arange(256, dtype=torch.uint8).roll(shift) for shift in range(32)])
    if fmt.element == "e4m3":
        codes = torch.where(codes & NAN == NAN, codes ^ 1, codes)
    parts[0] = codes.view(parts[0].dtype)
    if fmt.scale == "float32":
        parts[1] = torch.full_like(parts[1], 0.25)
    if fmt.coarse is not None:
        parts[2] = torch.full_like(parts[2], 0.25)
    w, ones = decoded(parts, fmt, k), torch.eye(k)
    for begin in range(0, k, 8):
        # + 0.0: a sum is not the negative zero that its only term may be.
        assert_same_bits(product(ones[begin : begin + 8], parts, fmt), w.T[begin : begin + 8].contiguous() + 0.0)


@pytest.mark.parametrize("code", [NAN, NAN | 0x80])
@pytest.mark.parametrize("fmt", [f for f in WEIGHTS if f.element == "e4m3"], ids=named)
def test_a_nan_code_anywhere_spoils_its_row_only(fmt: Format, code: int) -> None:
    k = 1056
    clean = weight_of(40, k, fmt)
    x = torch.randn(3, k)
    expected = product(x, clean, fmt)
    for place in (*range(32), 511, 512, 1055):
        spoiled = [clean[0].clone(), *clean[1:]]
        spoiled[0].view(torch.uint8)[17, place] = code
        for m in (1, 3):
            y = product(x[:m], spoiled, fmt)
            assert y[:, 17].isnan().all()
            y[:, 17] = expected[:m, 17]
            assert_same_bits(y, expected[:m])


RARE = (2.0**119, -(2.0**119), 2.0**-119, 0.0)


@pytest.mark.parametrize("scale", RARE)
@pytest.mark.parametrize("fmt", [*WEIGHTS, *BLOCKS], ids=named)
def test_scales_that_are_not_ordinary(fmt: Format, scale: float) -> None:
    """In one place of a weight: exact there, the same bits everywhere else, and in every number of rows."""
    k = 1100
    clean = weight_of(300, k, fmt)
    spoiled = [part.clone() for part in clean]
    if fmt.scale == "e8m0":
        spoiled[1].view(torch.uint8)[11, 1] = {0.0: 0, 2.0**-119: 8}.get(scale, 246)
    elif fmt.scale == "float32":
        spoiled[1].view(-1)[1 if spoiled[1].numel() > 1 else 0] = scale
    else:
        spoiled[2].fill_(1.0 / scale if scale else float("inf"))
    # Small, for the sums to stay within float32.
    x, w = torch.randn(8, k) * 2.0**-30, decoded(spoiled, fmt, k)
    y = product(x, spoiled, fmt)
    assert_product_close(y, x, w)
    same = (w == decoded(clean, fmt, k)).all(1)
    assert_same_bits(y[:, same], product(x, clean, fmt)[:, same])
    for m in range(1, 8):
        assert_same_bits(product(x[:m], spoiled, fmt), y[:m])


@pytest.mark.parametrize("byte", [0, 1, 27, 28, 226, 227, 228, 254, 255])
@pytest.mark.parametrize("fmt", [f for f in WEIGHTS if f.scale == "e8m0"], ids=named)
def test_powers_of_two_at_the_limits(fmt: Format, byte: int) -> None:
    parts = weight_of(20, 600, fmt)
    parts[1].view(torch.uint8)[3, 2] = byte
    # Columns of that group, which nothing else hides, and of the next one.
    x = torch.eye(600)[[64, 80, 95, 96]] * 2.0**-3
    assert_product_close(product(x, parts, fmt), x, decoded(parts, fmt, 600))


@pytest.mark.parametrize("value", [2.0**-149, 2.0**-101, 2.0**101, 1e38, float("inf"), float("nan")])
@pytest.mark.parametrize("fmt", WEIGHTS, ids=named)
def test_a_row_of_x_that_is_not_ordinary(fmt: Format, value: float) -> None:
    """Its own outputs are exact; all others keep their bits, and so does it without the others."""
    k = 700
    parts = weight_of(30, k, fmt)
    w, x = decoded(parts, fmt, k), torch.randn(6, k)
    clean = product(x, parts, fmt)
    x[2, 40] = value
    y = product(x, parts, fmt)
    assert_product_close(y, x, w)
    others = torch.arange(6) != 2
    assert_same_bits(y[others], clean[others])
    assert_same_bits(product(x[2:3], parts, fmt)[0].nan_to_num(), y[2].nan_to_num())


@pytest.mark.parametrize("fmt", WEIGHTS, ids=named)
def test_tiny_inputs_alone(fmt: Format) -> None:
    """Where products with unscaled codes would lose bits below the normal numbers, but those with weights do not."""
    parts = weight_of(30, 600, fmt)
    w = decoded(parts, fmt, 600)
    for size in (2.0**-97, 2.0**-103, 2.0**-120):
        scaled = OPS.quantize(w * 2.0**60, fmt.name, fmt.weight_rule)
        x = torch.randn(2, 600) * size
        assert_product_close(product(x, scaled, fmt), x, decoded(scaled, fmt, 600))


@pytest.mark.parametrize("fmt", WEIGHTS, ids=named)
def test_rows_and_groups_of_zeros(fmt: Format) -> None:
    w = torch.randn(20, 640)
    w[3], w[5, 32:64], w[6, :512] = 0.0, 0.0, 0.0
    parts = OPS.quantize(w, fmt.name, fmt.weight_rule)
    x = torch.randn(3, 640)
    y = product(x, parts, fmt)
    assert_product_close(y, x, decoded(parts, fmt, 640))
    assert_same_bits(y[:, 3], torch.zeros(3))


@pytest.mark.parametrize("fmt", WEIGHTS, ids=named)
def test_threads_change_nothing(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, x = weight_of(701, 130, fmt), torch.randn(2, 130)
    x[1, 3] = 1e-38
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(native, "_threads", lambda work, threads=threads: threads)
        found.append(product(x, parts, fmt))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
