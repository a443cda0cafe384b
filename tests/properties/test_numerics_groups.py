"""Groups are independent: rows of one another, shards of the whole, whatever holds a NaN of everything else."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from olq_fx.formats import FORMATS, Format
from olq_fx.numerics import dequantize, quantize
from olq_fx.testing import assert_same_bits, tensors

CASES = [(fmt, rule) for fmt in FORMATS.values() for rule in fmt.rules]
PER_ROW = [(fmt, rule) for fmt, rule in CASES if fmt.group[0] == 1 and fmt.coarse != (None, None)]
CUT = [(f, rule) for f, rule in CASES if f.group[0] is not None and f.coarse != (None, None)]
EVERY_RULE = pytest.mark.parametrize(("fmt", "rule"), CASES, ids=[f"{fmt.name}-{rule}" for fmt, rule in CASES])
EVERY_ROW_RULE = pytest.mark.parametrize(("fmt", "rule"), PER_ROW, ids=[f"{fmt.name}-{rule}" for fmt, rule in PER_ROW])
EVERY_CUT_RULE = pytest.mark.parametrize(("fmt", "rule"), CUT, ids=[f"{fmt.name}-{rule}" for fmt, rule in CUT])
FEW = settings(max_examples=settings().max_examples // 6)
ANY = tensors(rows=(1, 6), columns=(1, 600), nonfinite=False)
WITH_NONFINITE = tensors(rows=(1, 6), columns=(1, 600), nonfinite=True)


@EVERY_ROW_RULE
@FEW
@given(st.one_of(ANY, WITH_NONFINITE), st.data())
def test_a_row_has_the_same_codes_and_scales_in_any_batch(
    fmt: Format, rule: str, x: Tensor, data: st.DataObject
) -> None:
    parts = quantize(x, fmt, rule)
    order = data.draw(st.lists(st.integers(0, x.shape[0] - 1), min_size=1, max_size=8))
    assert_same_bits(quantize(x[order], fmt, rule), tuple(part[order] for part in parts))


@EVERY_ROW_RULE
@FEW
@given(WITH_NONFINITE)
def test_a_product_is_nan_in_the_rows_that_hold_a_nonfinite_value_and_in_no_other(
    fmt: Format, rule: str, x: Tensor
) -> None:
    values = dequantize(quantize(x, fmt, rule), fmt, x.shape[1]).double()
    product = values @ torch.zeros(x.shape[1], 2, dtype=torch.float64)
    assert torch.equal(product.isnan(), (~x.isfinite()).any(1, keepdim=True).expand(-1, 2))
    assert not values.isinf().any()


@pytest.mark.parametrize("name", ["fp8_per_tensor_static", "fp8_per_tensor_dynamic"])
@FEW
@given(WITH_NONFINITE)
def test_one_scale_for_all_is_nan_for_all(name: str, x: Tensor) -> None:
    assume(not bool(x.isfinite().all()))
    values = dequantize(quantize(x, FORMATS[name], "amax"), FORMATS[name], x.shape[1])
    assert values.isnan().all()


@EVERY_CUT_RULE
@FEW
@given(st.integers(1, 2), st.integers(1, 2), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9999))
def test_shards_cut_between_groups_are_slices_of_the_whole(
    fmt: Format, rule: str, high: int, wide: int, below: int, right: int, seed: int
) -> None:
    """Cut by rows, and along K where no scale spans the whole of it."""
    rows = (fmt.group[0] or 1) * high
    columns = fmt.coarse[1] if fmt.coarse else fmt.group[1]
    k = (columns or 1) * wide
    x = torch.randn(rows + below, k + right, generator=torch.Generator().manual_seed(seed))
    whole = quantize(x, fmt, rule)
    top, bottom = quantize(x[:rows], fmt, rule), quantize(x[rows:], fmt, rule)
    assert_same_bits(tuple(torch.cat(pair) for pair in zip(top, bottom, strict=True)), whole)
    if columns is not None:
        sides = zip(quantize(x[:, :k], fmt, rule), quantize(x[:, k:], fmt, rule), strict=True)
        assert_same_bits(tuple(torch.cat(pair, dim=1) for pair in sides), whole)


@EVERY_RULE
@FEW
@given(ANY)
def test_padding_by_hand_changes_nothing(fmt: Format, rule: str, x: Tensor) -> None:
    """A shape that is no multiple of the groups is quantized as if zeros followed."""
    k = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, -k % 512, 0, -x.shape[0] % (fmt.group[0] or 1)))
    parts, longer = quantize(x, fmt, rule), quantize(padded, fmt, rule)
    assert_same_bits(tuple(part[: p.shape[0], : p.shape[1]] for part, p in zip(longer, parts, strict=True)), parts)
    values = dequantize(longer, fmt, padded.shape[1])
    assert_same_bits(values[: x.shape[0], :k], dequantize(parts, fmt, k))
    assert (values[:, k:] == 0).all()


@EVERY_RULE
@FEW
@given(ANY)
def test_negating_negates(fmt: Format, rule: str, x: Tensor) -> None:
    parts, negated = quantize(x, fmt, rule), quantize(-x, fmt, rule)
    assert_same_bits(negated[1:], parts[1:])
    k = x.shape[1]
    assert torch.equal(dequantize(negated, fmt, k), -dequantize(parts, fmt, k))


@EVERY_RULE
@FEW
@given(WITH_NONFINITE)
def test_a_nonfinite_value_is_never_a_number_and_no_number_becomes_one_outside_its_group(
    fmt: Format, rule: str, x: Tensor
) -> None:
    values = dequantize(quantize(x, fmt, rule), fmt, x.shape[1])
    assert values[~x.isfinite()].isnan().all()
    width = fmt.group[1] or x.shape[1]
    bad = torch.nn.functional.pad(~x.isfinite(), (0, -x.shape[1] % width)).unflatten(1, (-1, width)).any(-1)
    if fmt.group[0] != 1:
        bad = bad.any(0, keepdim=True).expand(x.shape[0], -1)
    assert torch.equal(values.isnan(), bad.repeat_interleave(width, 1)[:, : x.shape[1]])
    assert not values.isinf().any()
