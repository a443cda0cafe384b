"""Which elements of a weight a view of it has, and which elements of a matrix are still missing.

    regions(view, like, source)     a view of a tensor `like`, as ranges along its dimensions, with the values for them
    Missing(n, k)                   the elements of a matrix that have not arrived
        .take(rows, columns), .count, .has_all(rows, columns)

Views are told by their offset and strides, whatever functions have made them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from olq_fx.errors import UnsupportedError

Ranges = tuple[range, ...]


def regions(view: Tensor, like: Tensor, source: Tensor) -> Iterator[tuple[Ranges, Tensor]]:
    """The elements of `like` that a view of it has, and what a copy of `source` into the view would write there.

    Args:
        view: shares the storage of `like`, on meta.
        like: without gaps or overlaps, in any order of its dimensions, beginning where its storage does; on meta.
        source: of the view's shape, or one that is broadcast to it.

    Yields:
        Ranges along the dimensions of `like`, and the values for them in that order. A view that takes no ranges (of a
        flattened tensor, say) is cut into such that do.

    Raises:
        UnsupportedError: elements of the view share memory (it is expanded).
    """
    if any(stride == 0 and size > 1 for size, stride in zip(view.shape, view.stride(), strict=True)):
        raise UnsupportedError("an expanded view is no place for values: copy_ into what it was expanded from")
    if view.numel():
        yield from _regions(view, like, source.expand(view.shape))


def _regions(view: Tensor, like: Tensor, source: Tensor) -> Iterator[tuple[Ranges, Tensor]]:
    found = _ranges(view, like)
    if found is not None:
        ranges, axes = found
        yield ranges, _in_order(source, axes)
        return
    cut = max(range(view.dim()), key=lambda dim: (view.shape[dim] > 1, view.stride(dim)))
    for index in range(view.shape[cut]):
        yield from _regions(view.select(cut, index), like, source.select(cut, index))


def _ranges(view: Tensor, like: Tensor) -> tuple[Ranges, list[int | None]] | None:
    """Of each dimension of `like` the range that the view has, and the view's dimension along it; None if it has none.

    A stride belongs to the dimension with the largest stride that is not larger.
    """
    starts = [0] * like.dim()
    rest = int(view.storage_offset())
    for dim in sorted(range(like.dim()), key=lambda dim: (like.stride(dim), like.shape[dim]), reverse=True):
        starts[dim], rest = divmod(rest, like.stride(dim))
    ranges = [range(start, start + 1) for start in starts]
    axes: list[int | None] = [None] * like.dim()
    for axis, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size == 1:
            continue
        owners = [dim for dim in range(like.dim()) if like.shape[dim] > 1 and like.stride(dim) <= stride]
        dim = max(owners, key=like.stride)
        step, uneven = divmod(stride, like.stride(dim))
        last = starts[dim] + (size - 1) * step
        if uneven or axes[dim] is not None or last >= like.shape[dim]:
            return None
        axes[dim], ranges[dim] = axis, range(starts[dim], last + 1, step)
    return tuple(ranges), axes


def _in_order(source: Tensor, axes: Sequence[int | None]) -> Tensor:
    """Bring the dimensions of `source` into the order of `axes`, with one of length 1 for each None."""
    used = [axis for axis in axes if axis is not None]
    for axis in sorted(set(range(source.dim())) - set(used), reverse=True):
        source = source.select(axis, 0)
    ranks = {axis: rank for rank, axis in enumerate(sorted(used))}
    source = source.permute([ranks[axis] for axis in used])
    for dim in (dim for dim, axis in enumerate(axes) if axis is None):
        source = source.unsqueeze(dim)
    return source


def every(chosen: range, step: int, first: int) -> tuple[slice, range]:
    """The numbers of a range that are `first` and whole multiples of `step` from it.

    Returns:
        Their positions in the range, and the multiples: both may be empty.

    >>> every(range(4, 10), 2, 1)
    (slice(1, None, 2), range(2, 5))
    """
    for position in range(min(step, len(chosen))):
        if (chosen[position] - first) % step == 0:
            apart = next(count for count in range(1, step + 1) if count * chosen.step % step == 0)
            found = chosen[position::apart]
            multiples = range((found[0] - first) // step, (found[-1] - first) // step + 1, found.step // step)
            return slice(position, None, apart), multiples
    return slice(0, 0), range(0)


def within(chosen: range, start: int, stop: int) -> tuple[slice, range]:
    """The numbers of a range from `start` to `stop`: their positions in it, and how far they are from `start`.

    >>> within(range(0, 10, 3), 4, 10)
    (slice(2, 4, None), range(2, 6, 3))
    """
    first = max(0, -((chosen.start - start) // chosen.step))
    last = min(len(chosen), -((chosen.start - stop) // chosen.step))
    found = chosen[first:last] if last > first else range(0)
    return slice(first, max(first, last)), range(
        found.start - start, found.stop - start, found.step
    ) if found else found


class Missing:
    """The elements of a matrix (n, k) that have not arrived, each counted once however often it does.

    They are kept as boxes; a range with gaps, which would leave one box for each gap, makes a mask of them: by rows,
    as long as whole rows arrive.
    """

    def __init__(self, n: int, k: int) -> None:
        """All are missing."""
        self._size = (n, k)
        self._boxes: list[tuple[int, int, int, int]] = [(0, n, 0, k)] if n and k else []
        self._mask: Tensor | None = None

    @property
    def count(self) -> int:
        """How many are missing."""
        if self._mask is not None:
            return int(self._mask.sum()) * (self._size[1] // self._mask.shape[1])
        return sum((bottom - top) * (right - left) for top, bottom, left, right in self._boxes)

    def take(self, rows: range, columns: range) -> None:
        """These have arrived."""
        if self._mask is None and rows.step == columns.step == 1:
            box = (rows.start, rows.stop, columns.start, columns.stop)
            self._boxes = [rest for known in self._boxes for rest in _without(known, box)]
            return
        mask = self._masked(by_rows=columns == range(self._size[1]))
        if mask.shape[1] == 1:
            columns = range(1)
        mask[rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step] = False

    def _masked(self, *, by_rows: bool) -> Tensor:
        n, k = self._size
        if self._mask is None:
            by_rows = by_rows and all((left, right) == (0, k) for _, _, left, right in self._boxes)
            self._mask = torch.zeros(n, 1 if by_rows else k, dtype=torch.bool)
            for top, bottom, left, right in self._boxes:
                self._mask[top:bottom, left:right] = True
            self._boxes = []
        elif not by_rows and self._mask.shape[1] != k:
            self._mask = self._mask.expand(n, k).contiguous()
        return self._mask


def _without(box: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> Iterator[tuple[int, int, int, int]]:
    """What is left of a box (top, bottom, left, right) without another one: up to four boxes."""
    top, bottom, left, right = box
    above, below = max(top, other[0]), min(bottom, other[1])
    before, after = max(left, other[2]), min(right, other[3])
    if above >= below or before >= after:
        yield box
        return
    rows = [(top, above, left, right), (below, bottom, left, right)]
    columns = [(above, below, left, before), (above, below, after, right)]
    yield from (part for part in rows + columns if part[0] < part[1] and part[2] < part[3])
