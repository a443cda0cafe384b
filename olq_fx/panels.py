"""Conversion of one matrix in bounded memory: panel by panel, so that temporaries do not grow with the weight.

Statistics of the whole matrix (the scale of `fp8_per_tensor_static`, nvfp4's global one) take a pass of their own. Each
panel is then quantized with one row more, which holds that maximum: the panel's own statistics are the matrix's.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import Format
from olq_fx.kernels import native
from olq_fx.numerics import Parts, part_specs

PANEL_ELEMENTS = 1 << 19
"""Elements of a panel for the reference: with some 15 float32 temporaries of that size, far below 64 MiB."""

NATIVE_PANEL_ELEMENTS = 1 << 22
"""Elements of a panel where a kernel without temporaries converts it, and of one that is only read."""

_NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def empty_parts(format: Format, rows: int, k: int, device: torch.device) -> Parts:
    """Parts without values for an (rows, k) matrix."""
    return tuple(torch.empty(part.shape, dtype=part.dtype, device=device) for part in part_specs(format, rows, k))


def convert(source: Tensor, format: Format, rule: str, device: torch.device) -> Parts:
    """The parts of `source` (N, K), any floating dtype and strides, on `device`."""
    rows, k = source.shape
    if _runs_native(source, device) and source.dtype in _NATIVE_DTYPES and source.stride(1) == 1:
        with torch.no_grad():
            return tuple(torch.ops.olq_fx.quantize.default(source, format.name, rule))
    parts = empty_parts(format, rows, k, device)
    convert_into(parts, source, format, rule)
    return parts


Reduce = Callable[[Tensor], Tensor]
"""Combines the maxima of this process with those of the others, in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """That a matrix is a piece of a larger one; every process that has one reduces as often as the others.

    Attributes:
        of_all: reduces over all pieces; None if the matrix is the whole.
        of_rows: reduces over the pieces of the same rows; None if the rows are whole.
    """

    of_all: Reduce | None = None
    of_rows: Reduce | None = None


_WHOLE = Pieces()


@torch.no_grad()
def convert_into(parts: Parts, source: Tensor, format: Format, rule: str, pieces: Pieces = _WHOLE) -> None:
    """Quantize `source` (N, K) and write it into existing parts; the bytes equal those of quantizing at once.

    Args:
        parts: of (N, K).
        source: any floating dtype and strides.
        format, rule: how it is quantized.
        pieces: how `source` is a piece of a larger matrix: statistics of groups are those of the larger one.
    """
    n, k = source.shape
    device = parts[0].device
    if not source.numel():
        for part, found in zip(parts, numerics.quantize(source, format, rule), strict=True):
            part.copy_(found)
        return
    largest = None
    if (None, None) in (format.group, format.coarse):
        largest = _largest(source, finite_only=format.coarse is not None)
        largest = largest if pieces.of_all is None else _reduced(largest, pieces.of_all)
    if pieces.of_rows is not None and format.group == (1, None):
        _convert_rows_into(parts, source, format, rule, pieces.of_rows)
        return
    elements = NATIVE_PANEL_ELEMENTS if _runs_native(source, device) else PANEL_ELEMENTS
    for top, bottom, left, right in cut(n, k, elements, format):
        panel = source[top:bottom, left:right].to(device)
        if largest is not None:
            panel = _with_row_of(panel, largest)
        quantized = torch.ops.olq_fx.quantize.default(panel.contiguous(), format.name, rule)
        for part, found, (height, width) in zip(parts, quantized, _extents(format), strict=True):
            _write(part, found, top, bottom, left, right, height, width)


def _convert_rows_into(parts: Parts, source: Tensor, format: Format, rule: str, reduce: Reduce) -> None:
    """Quantize a piece of rows whose scales belong to the whole rows: one column more holds what is largest in them."""
    n, k = source.shape
    largest = _reduced(source.abs().amax(1) if k else source.new_zeros(n), reduce)
    for top, bottom, _, _ in cut(n, k, PANEL_ELEMENTS, format):
        panel = torch.cat([source[top:bottom], largest[top:bottom, None]], 1).to(parts[0].device)
        codes, scale = torch.ops.olq_fx.quantize.default(panel, format.name, rule)
        parts[0][top:bottom].copy_(codes[:, :k])
        parts[1][top:bottom].copy_(scale)


def _reduced(largest: Tensor, reduce: Reduce) -> Tensor:
    """Statistics of all processes; they travel in float32, which holds every narrower value exactly."""
    wide = largest.to(torch.promote_types(largest.dtype, torch.float32))
    return reduce(wide.contiguous()).to(largest.dtype)


def _runs_native(source: Tensor, device: torch.device) -> bool:
    """Whether conversion takes no temporaries: the native kernels encode CPU tensors row by row."""
    return source.device.type == device.type == "cpu" and not native.why_not()


def count_nonfinite(source: Tensor) -> int:
    """How many values of a matrix are NaN or Inf, reading it once and keeping nothing."""
    count = 0
    for top, bottom, left, right in cut(source.shape[0], source.shape[1], NATIVE_PANEL_ELEMENTS):
        panel = source[top:bottom, left:right]
        if panel.numel() and not bool(torch.isfinite(_extreme(panel))):
            count += int((~torch.isfinite(panel)).sum())
    return count


def cut(n: int, k: int, elements: int, format: Format | None = None) -> Iterator[tuple[int, int, int, int]]:
    """(top, bottom, left, right) of panels of about so many elements that cut no group of `format`.

    Rows are cut first, columns only where many rows share scales.
    """
    rows, columns = (1, None) if format is None or format.group == (None, None) else format.group
    rows = rows or 1
    width = k
    if rows > 1 and columns is not None and rows * k > elements:
        width = max(1, elements // (rows * columns)) * columns
    height = max(1, elements // max(1, width) // rows) * rows
    for top in range(0, n, height):
        for left in range(0, k, width) if k else (0,):
            yield top, min(top + height, n), left, min(left + width, k)


def _extents(format: Format) -> list[tuple[int | None, int | None]]:
    """Rows and columns of the matrix that one entry of each part stands for."""
    extents: list[tuple[int | None, int | None]] = [(1, 2 if format.packed else 1), format.group]
    return extents if format.coarse is None else [*extents, format.coarse]


def _write(
    part: Tensor, found: Tensor, top: int, bottom: int, left: int, right: int, height: int | None, width: int | None
) -> None:
    target = part
    if height is not None:
        target = target[top // height : math.ceil(bottom / height)]
    if width is not None:
        target = target[:, left // width : math.ceil(right / width)]
    target.copy_(found[: target.shape[0]])


def _with_row_of(panel: Tensor, largest: Tensor) -> Tensor:
    """The panel and one row more, of zeros but for `largest`."""
    extended = panel.new_zeros(panel.shape[0] + 1, panel.shape[1])
    extended[:-1] = panel
    extended[-1, :1] = largest
    return extended


def _largest(source: Tensor, *, finite_only: bool) -> Tensor:
    """The maximum of the absolute values, in the dtype of `source`; NaN if there is one and it is not left out."""
    found = source.new_zeros(())
    for top, bottom, left, right in cut(source.shape[0], source.shape[1], NATIVE_PANEL_ELEMENTS):
        panel = source[top:bottom, left:right]
        largest = _extreme(panel)
        if finite_only and not bool(torch.isfinite(largest)):
            largest = _extreme(torch.where(torch.isfinite(panel), panel, 0))
        found = torch.maximum(found, largest)
    return found


def _extreme(panel: Tensor) -> Tensor:
    """The maximum of the absolute values, without a copy of them; NaN and Inf pass on."""
    least, most = torch.aminmax(panel)
    return torch.maximum(-least, most)
