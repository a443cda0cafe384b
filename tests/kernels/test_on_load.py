"""Maxima that tiles share, what is quantized by them on load, and when that is worth its cost."""

import on_load_kernels
import pytest
import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import FORMATS, get_format
from olq_fx.kernels import on_load
from olq_fx.kernels.on_load import maxima_of
from olq_fx.kernels.on_load_cost import Handover
from olq_fx.testing import Interpreter, assert_same_bits

WIDE = [name for name, format in FORMATS.items() if format.activation and maxima_of(format) is not None]
DOTS = {"e4m3": ("fp8", "bf16"), "int8": ("int8", "bf16"), "e2m1": ("bf16",)}
K = 1120


def values(*, finite: bool = False) -> Tensor:
    """Rows of every size, with zeros and (unless they are to be finite) with NaN and Inf in one column."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(21, K, generator=generator) * torch.logspace(-36, 36, 21)[:, None]
    x[3] = 0.0
    x[4, 5:] = 0.0
    x[5] *= torch.randint(0, 2, (K,), generator=generator)
    if not finite:
        x[7, 700], x[8, 0], x[9, -1] = torch.nan, torch.inf, -torch.inf
        x[10, 20], x[10, 30] = torch.nan, torch.inf
    return x.to(torch.bfloat16).float()


def test_which_formats_are_wider_than_a_tile():
    assert WIDE == ["fp8_per_token", "mxfp4_dualscale", "nvfp4_per_token", "int8_per_token"]


@pytest.mark.parametrize("format", WIDE)
def test_tiles_raise_the_maxima_of_the_definition(interpreter: Interpreter, format: str):
    x, wanted = values(), maxima_of(get_format(format))
    assert wanted is not None
    found = interpreter.call(on_load_kernels.raised, x, format)
    assert_same_bits(found, on_load.maxima(x, wanted.wide, wanted.finite))
    for row, column in ((0, 0), (7, 0), (20, 0)):
        part = x[row, : wanted.wide or K]
        sizes = part[part.isfinite()].abs() if wanted.finite else part.abs()
        assert_same_bits(found[row, column].view(torch.float32), sizes.max(), any_nan=True)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("format", "dot"), [(name, dot) for name in WIDE for dot in DOTS[get_format(name).element]])
def test_what_is_quantized_on_load_has_the_bits_of_stored_codes(
    interpreter: Interpreter, format: str, dot: str, native: bool
):
    """Of rows with NaN and Inf only that their products are NaN counts, which a scale sees to."""
    x, found = values(), get_format(format)
    operand, _ = interpreter.call(
        on_load_kernels.operand, x, interpreter.call(on_load_kernels.raised, x, format), format, dot, native
    )
    parts = numerics.quantize(x, found, found.activation_rule)
    if found.coarse is not None:
        # But for the coarse scales, which are applied to sums.
        parts = parts[0], parts[1], torch.ones_like(parts[2])
    else:
        parts = parts[0], torch.ones_like(parts[1])
    expected = numerics.dequantize(parts, found, K).to(torch.bfloat16).float()
    rows = slice(None) if found.coarse is not None else x.isfinite().all(1)
    assert_same_bits(operand[rows] + 0.0, expected[rows] + 0.0)


def test_packed_codes_and_scales_are_those_that_are_stored(interpreter: Interpreter):
    x, format = values(), get_format("nvfp4_per_token")
    maxima = interpreter.call(on_load_kernels.raised, x, format.name)
    codes, scales = interpreter.call(on_load_kernels.operand, x, maxima, format.name, "scaled")
    expected = numerics.quantize(x, format, format.activation_rule)
    assert_same_bits(codes, expected[0])
    assert_same_bits(scales, expected[1].view(torch.uint8))


def test_quotients_are_those_of_a_true_division(interpreter: Interpreter):
    """Where a code can depend on them: bfloat16 and float32 numbers over the scales of their rows."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(256, generator=generator) + 0.5
    scale = (scale * torch.exp2(torch.linspace(-126, 115, 256))).clamp(min=2.0**-126)
    x = scale[:, None] * torch.rand(256, 512, generator=generator) * 448
    x[:, ::2] = x[:, ::2].to(torch.bfloat16).float()
    # Ties between codes, as near as float32 comes to them.
    ties = (torch.arange(1, 33) + 0.5) * scale[:, None]
    x[:, 1:65:2] = ties
    x[:, 65:129:2] = torch.nextafter(ties, torch.tensor(torch.inf))
    found = interpreter.call(on_load_kernels.quotients, x, scale)
    exact = x / scale[:, None]
    counts = exact.abs() >= 2.0**-11
    assert counts.float().mean() > 0.95
    assert_same_bits(found[counts], exact[counts])
    assert (found[~counts].abs() < 2.0**-10).all()


# When


def handover(**changes: object) -> Handover:
    given = {
        "format": get_format("fp8_per_token"),
        "products": 2,
        "pieces": 2,
        "columns": (256,),
        "k": 384,
        "size": 2,
        "zeroed": True,
    }
    return Handover(**(given | changes))  # type: ignore[arg-type]


def test_short_rows_are_quantized_on_load_and_long_ones_apart():
    assert handover().compare(18, 90).on_load
    assert not handover(k=14336, columns=(4096,)).compare(18, 90).on_load
    assert not handover(k=14336, columns=(4096,)).compare(4096, 90).on_load


def test_every_reader_quantizes_anew():
    one, three = handover().compare(18, 90), handover(columns=(256, 256, 256)).compare(18, 90)
    assert three.more == pytest.approx(3 * one.more)
    assert three.tiles == 3 * one.tiles


def test_a_kernel_that_sets_maxima_to_zero_counts():
    assert handover(products=1, pieces=1).compare(18, 90).on_load
    assert not handover(products=1, pieces=1, zeroed=False).compare(18, 90).on_load


def test_rows_that_may_be_many_decide_where_their_number_may_change():
    few = handover(columns=(2048,))
    assert few.compare(18, 90).on_load
    assert few.decide(18, 90, fixed=True).rows == 18
    for_all = few.decide(18, 90, fixed=False)
    assert (for_all.rows, for_all.on_load) == (4096, False)
    assert handover().decide(18, 90, fixed=False).on_load


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("format", WIDE)
def test_every_gpu_has_an_answer_in_words(format: str, capability: int):
    found = handover(format=get_format(format), columns=(4096,), k=14336).compare(4096, capability)
    assert not found.on_load
    assert str(found).startswith(f"quantizing on load, in {found.tiles} tiles of what reads it, takes ")
    assert str(found).endswith(" us (cost model, 4096 rows)")
