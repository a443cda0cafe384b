"""Conversion in bounded memory: the same bytes as quantizing at once, whatever the panels."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from olq_fx import panels
from olq_fx.formats import FORMATS
from olq_fx.numerics import part_specs, quantize
from olq_fx.testing import assert_same_bits, record_allocations

WEIGHT_FORMATS = [name for name, format in FORMATS.items() if format.weight]
RULES = [(name, rule) for name in WEIGHT_FORMATS for rule in FORMATS[name].rules]
CPU = torch.device("cpu")


def outliers(n: int, k: int) -> Tensor:
    """Rows of very different sizes, the largest value in the last row: no panel alone knows the statistics."""
    values = torch.randn(n, k) * torch.logspace(-6, 2, n)[:, None]
    values[n // 2] = 0
    return values


@pytest.fixture
def small_panels(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Panels of so many elements, of the reference's path and of the native one."""

    def cut(elements: int) -> None:
        monkeypatch.setattr(panels, "PANEL_ELEMENTS", elements)
        monkeypatch.setattr(panels, "NATIVE_PANEL_ELEMENTS", elements)

    return cut


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "_runs_native", lambda source, device: False)


@pytest.mark.parametrize(("name", "rule"), RULES)
@pytest.mark.parametrize("elements", [1, 9_000])
@pytest.mark.usefixtures("without_native")
def test_panels_change_no_byte(name: str, rule: str, elements: int, small_panels: Callable[[int], None]):
    small_panels(elements)
    format = FORMATS[name]
    rows = 20 if elements == 1 else 200
    for k, dtype in ((193, torch.float32), (288, torch.bfloat16)):
        source = outliers(rows, k).to(dtype)
        expected = quantize(source, format, rule)
        for part, other in zip(panels.convert(source, format, rule, CPU), expected, strict=True):
            assert_same_bits(part, other, name=f"{name} {rule}")


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_strides_and_dtypes_of_the_source(name: str, small_panels: Callable[[int], None]):
    """By the native kernels at once or in panels, as it comes."""
    small_panels(3_000)
    format = FORMATS[name]
    rule = format.weight_rule
    wide = outliers(140, 70)
    for source in (wide.t(), wide[::2], wide[:, 3:60], wide.double(), wide.half(), wide[:1], wide[:, :1], wide[:0]):
        expected = quantize(source.contiguous(), format, rule)
        for part, other in zip(panels.convert(source, format, rule, CPU), expected, strict=True):
            assert_same_bits(part, other)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.usefixtures("without_native")
def test_non_finite_values_mark_their_group_only(name: str, small_panels: Callable[[int], None]):
    small_panels(4_000)
    format = FORMATS[name]
    for bad in (float("nan"), float("inf"), float("-inf")):
        source = outliers(140, 96)
        source[7, 5] = bad
        expected = quantize(source, format, format.weight_rule)
        for part, other in zip(panels.convert(source, format, format.weight_rule, CPU), expected, strict=True):
            assert_same_bits(part, other)


def test_conversion_into_existing_parts_keeps_them():
    format = FORMATS["nvfp4"]
    parts = panels.empty_parts(format, 40, 96, CPU)
    pointers = [part.data_ptr() for part in parts]
    source = outliers(40, 96)
    panels.convert_into(parts, source, format, format.weight_rule)
    for part, other in zip(parts, quantize(source, format, format.weight_rule), strict=True):
        assert_same_bits(part, other)
    assert [part.data_ptr() for part in parts] == pointers


@pytest.mark.parametrize(
    ("name", "n", "k"),
    [
        ("fp8_per_tensor_static", 1536, 1024),
        ("fp8_per_block_static", 136, 12_000),
        ("mxfp4_dualscale", 136, 12_000),
        ("nvfp4", 1536, 1024),
    ],
)
@pytest.mark.parametrize("native", [False, True])
def test_temporaries_are_bounded(name: str, n: int, k: int, native: bool, monkeypatch: pytest.MonkeyPatch):
    """Peak: the parts and 64 MiB, where the reference takes hundreds at once; strides and dtype as bad as they get."""
    if not native:
        monkeypatch.setattr(panels, "_runs_native", lambda source, device: False)
    format = FORMATS[name]
    source = torch.randn(k, n).t().double() if native else torch.randn(n, k).bfloat16()
    with record_allocations() as allocations:
        keep = torch.empty(1)
        with allocations.mark("convert"):
            parts = panels.convert(source, format, format.weight_rule, CPU)
    final = sum(part.nbytes for part in parts)
    extra = allocations.peak("convert") - allocations.at_start("convert") - final
    assert keep is not None
    assert extra <= 64 * 2**20


def test_counting_reads_in_bounded_memory():
    source = torch.randn(4096, 1024)
    with record_allocations() as allocations:
        keep = torch.empty(1)
        with allocations.mark("count"):
            assert panels.count_nonfinite(source) == 0
    assert allocations.peak("count") - allocations.at_start("count") <= 8 * 2**20
    assert keep is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_non_finite_values_are_counted(dtype: torch.dtype):
    source = torch.randn(700, 1000).to(dtype)
    assert panels.count_nonfinite(source) == 0
    source[0, 0], source[699, 999], source[350, 3] = float("nan"), float("inf"), float("-inf")
    assert panels.count_nonfinite(source) == 3
    assert panels.count_nonfinite(source.t()) == 3
    assert panels.count_nonfinite(source[:0]) == 0
    # The largest finite values are values.
    source = torch.full((4, 4), torch.finfo(dtype).max, dtype=dtype)
    assert panels.count_nonfinite(source) == 0


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_panels_tile_the_matrix_and_cut_no_group(name: str):
    format = FORMATS[name]
    for elements, n, k in itertools.product((1, 1000, 100_000), (0, 1, 127, 300), (1, 130, 5000)):
        covered = torch.zeros(n, k, dtype=torch.int32)
        for top, bottom, left, right in panels.cut(n, k, elements, format):
            covered[top:bottom, left:right] += 1
            height, width = format.group
            if height is not None:
                assert top % height == 0
                assert bottom % height == 0 or bottom == n
                assert left % (width or max(k, 1)) == 0
        assert bool((covered == 1).all())


def test_empty_parts_are_what_the_format_says():
    for name in WEIGHT_FORMATS:
        for part, spec in zip(
            panels.empty_parts(FORMATS[name], 33, 65, CPU), part_specs(FORMATS[name], 33, 65), strict=True
        ):
            assert (tuple(part.shape), part.dtype) == (spec.shape, spec.dtype)
