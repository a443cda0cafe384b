"""A pending weight whose values come in pieces, in any order: each matrix converts when its last element is there.

    arrive(weight, view, source)      a copy into a view of a pending weight
    fill(weight, source, dtype=None)  all values at once
    become(weight, other)             the content of another weight, for everyone who holds this one

A matrix waits for its last element in the dtype in which it arrives, and is converted then, so that the bytes are those
of quantizing it at once. The matrices of experts convert one by one, and their rows by themselves where they arrive in
whole groups (as all gates before all ups); so no more than what has begun to arrive is ever held in original precision.
"""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from olq_fx import panels
from olq_fx.errors import PendingWeightError, UnsupportedError
from olq_fx.kernels.reference import rows_of
from olq_fx.numerics import Parts
from olq_fx.weights_encoding import check_values, empty_parts_of, encode, of_shard
from olq_fx.weights_regions import Missing, Ranges, every, regions, within
from olq_fx.weights_tensor import OWN_ATTRIBUTES, QuantizedWeight, WeightSpec, as_bytes, root_of

_ONE_AT_A_TIME = threading.RLock()
"""Loaders may copy from several threads."""


class _Matrix:
    """One matrix (n, k) with scales of its own.

    Attributes:
        n, k: its size.
        missing: what has not arrived; None once it is converted.
        staged: the values that have arrived, where they cannot be converted yet.
        rows: rows that are converted by themselves, while others are missing.
    """

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.missing: Missing | None = Missing(n, k)
        self.staged: Tensor | None = None
        self.rows: list[range] = []

    def is_whole(self, rows: range, columns: range) -> bool:
        return rows == range(self.n) and columns == range(self.k)

    def stage(self, rows: range, columns: range, values: Tensor, device: torch.device) -> None:
        """Keep values, in a dtype that holds all there are exactly."""
        if self.staged is None:
            self.staged = torch.empty(self.n, self.k, dtype=values.dtype, device=device)
        dtype = torch.promote_types(self.staged.dtype, values.dtype)
        if dtype != self.staged.dtype or self.staged.device != device:
            self.staged = self.staged.to(device, dtype)
        self.staged[rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step] = values

    def waiting(self) -> Iterator[range]:
        """The runs of rows that are staged."""
        top = 0
        for rows in [*sorted(self.rows, key=lambda rows: rows.start), range(self.n, self.n)]:
            if rows.start > top:
                yield range(top, rows.start)
            top = max(top, rows.stop)


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """What arrives of one matrix: its key, where in it, and the values (rows, columns)."""

    key: tuple[int, int]
    rows: range
    columns: range
    values: Tensor


class Arrival:
    """The values of a pending weight that have arrived; nothing of it is the weight's until all have."""

    def __init__(self, spec: WeightSpec, size: tuple[int, ...], device: torch.device) -> None:
        """Nothing has arrived.

        Args:
            spec: how the weight is stored.
            size: of the weight: that of a matrix, or (E, N, K) or (E, K, N) of experts.
            device: where it is converted.
        """
        self._spec, self._size, self.device = spec, size, device
        n, k = reversed(size[-2:]) if spec.transposed else size[-2:]
        self._experts = size[0] if len(size) == 3 else 1
        self._shards = spec.shards if len(size) == 3 else 1
        self._height = spec.format.group[0] if spec.format.coarse is None or spec.format.coarse[0] is not None else None
        keys = [(expert, shard) for expert in range(self._experts) for shard in range(self._shards)]
        self._matrices = {key: _Matrix(n // self._shards, k) for key in keys}
        self._parts = empty_parts_of(spec, size, device) if len(size) == 3 else None

    @property
    def missing(self) -> int:
        """How many elements have not arrived."""
        return sum(matrix.missing.count for matrix in self._matrices.values() if matrix.missing is not None)

    def parts(self) -> Parts:
        """The parts of the whole weight, once nothing is missing."""
        assert self._parts is not None
        return self._parts

    def move(self, device: torch.device) -> None:
        """Go on on another device."""
        if device != self.device:
            self.device = device
            if self._parts is not None:
                self._parts = tuple(part.to(device) for part in self._parts)

    def __getstate__(self) -> dict[str, Any]:
        """Plain pickle of float8 fails in some versions of torch."""
        parts = None if self._parts is None else tuple(map(as_bytes, self._parts))
        return {**self.__dict__, "_parts": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse of `__getstate__`."""
        parts = state["_parts"]
        self.__dict__.update(state)
        self._parts = None if parts is None else tuple(part.view(dtype) for part, dtype in parts)

    def take(self, found: list[tuple[Ranges, Tensor]], label: str) -> None:
        """Keep or convert what arrives.

        Args:
            found: ranges along the dimensions of the weight, with the values for them.
            label: of the weight, for messages.

        Raises:
            UnsupportedError: some of it is for matrices or rows that are converted, and not for the whole of them.
        """
        pieces = [piece for ranges, values in found for piece in self._pieces(ranges, values)]
        for piece in pieces:
            self._refuse_parts_of_converted(piece, label)
        for piece in pieces:
            self._take(piece)

    def take_parts(self, ranges: Ranges, source: QuantizedWeight) -> bool:
        """Take codes and scales as they are: of rows of one matrix, in its own format, that share none with others.

        Returns:
            Whether these are such rows; else nothing was taken.
        """
        whole = torch.empty(source.shape, device="meta")
        if source.spec.weight != self._spec.weight or source.spec.skip or source.dim() != 2 or source.spec.transposed:
            return False
        pieces = list(self._pieces(ranges, whole.reshape([len(one) for one in ranges])))
        if len(pieces) != 1:
            return False
        (piece,) = pieces
        matrix = self._matrices[piece.key]
        alone = matrix.is_whole(piece.rows, piece.columns) or (self._stands_alone(piece) and matrix.staged is None)
        if not alone or len(piece.rows) != source.shape[0]:
            return False
        for own, part in zip(self._rows_of(piece.key, piece.rows), source.parts, strict=True):
            own.copy_(part)
        self._has_arrived(piece, converted=True)
        return True

    def _pieces(self, ranges: Ranges, values: Tensor) -> Iterator[_Piece]:
        """Cut what arrives by matrices."""
        *experts, first, second = ranges
        if self._spec.transposed:
            first, second, values = second, first, values.mT
        for shard, (slot, rows) in enumerate(self._by_shards(first)):
            for position, expert in enumerate(experts[0] if experts else range(1)):
                if rows:
                    matrix = values[position] if experts else values
                    yield _Piece((expert, shard), rows, second, matrix[slot])

    def _by_shards(self, rows: range) -> Iterator[tuple[slice, range]]:
        """Of each shard the positions in `rows` of those that it has, and their numbers in it."""
        n = self._matrices[0, 0].n
        for shard in range(self._shards):
            if self._spec.interleaved:
                yield every(rows, self._shards, shard)
            else:
                yield within(rows, shard * n, (shard + 1) * n)

    def _refuse_parts_of_converted(self, piece: _Piece, label: str) -> None:
        matrix = self._matrices[piece.key]
        if matrix.is_whole(piece.rows, piece.columns) or (self._stands_alone(piece) and matrix.staged is None):
            return
        overlaps = any(_overlap(piece.rows, rows) for rows in matrix.rows)
        if matrix.missing is None or overlaps:
            raise UnsupportedError(
                f"values for rows {piece.rows.start} to {piece.rows[-1]} of matrix {piece.key[0]} of {label} came "
                f"before and are converted to {self._spec.weight}: copy_ the whole matrix"
            )

    def _stands_alone(self, piece: _Piece) -> bool:
        """Whether rows of experts can be converted by themselves: whole groups of them along all of K."""
        matrix, height = self._matrices[piece.key], self._height
        return (
            len(self._size) == 3
            and height is not None
            and piece.rows.step == 1
            and piece.columns == range(matrix.k)
            and piece.rows.start % height == 0
            and (piece.rows.stop % height == 0 or piece.rows.stop == matrix.n)
        )

    def _take(self, piece: _Piece) -> None:
        matrix = self._matrices[piece.key]
        whole = matrix.is_whole(piece.rows, piece.columns)
        converted = whole or (matrix.staged is None and self._stands_alone(piece))
        if converted:
            self._convert(piece.key, piece.rows, piece.values)
        else:
            matrix.stage(piece.rows, piece.columns, piece.values, self.device)
        self._has_arrived(piece, converted=converted)

    def _has_arrived(self, piece: _Piece, *, converted: bool) -> None:
        """Note it; with the last of a matrix convert what is staged."""
        matrix = self._matrices[piece.key]
        if matrix.is_whole(piece.rows, piece.columns):
            matrix.missing, matrix.staged, matrix.rows = None, None, []
            return
        if matrix.missing is None:
            return
        if converted:
            matrix.rows.append(piece.rows)
        matrix.missing.take(piece.rows, piece.columns)
        if not matrix.missing.count:
            self._finish(piece.key, matrix)

    def _finish(self, key: tuple[int, int], matrix: _Matrix) -> None:
        """Convert what has waited for the last element."""
        if matrix.staged is not None:
            for rows in matrix.waiting():
                self._convert(key, rows, matrix.staged[rows.start : rows.stop])
        matrix.missing, matrix.staged, matrix.rows = None, None, []

    def _convert(self, key: tuple[int, int], rows: range, values: Tensor) -> None:
        """Convert rows of a matrix of experts into the parts of all, or a whole matrix into its own."""
        spec, format = self._spec, self._spec.format
        if self._parts is None or len(self._size) == 2:
            self._parts = encode(values.t() if spec.transposed else values, spec, self.device)
            return
        panels.convert_into(self._rows_of(key, rows), values, format, spec.weight_rule)

    def _rows_of(self, key: tuple[int, int], rows: range) -> Parts:
        """Where the parts of rows of a matrix go, among those of all."""
        expert, shard = key
        if self._parts is None:
            self._parts = empty_parts_of(self._spec, self._size, self.device)
        experts = self._parts if len(self._size) == 2 else tuple(part[expert] for part in self._parts)
        parts = tuple(of_shard(part, shard, self._shards) for part in experts)
        whole = rows == range(self._matrices[key].n)
        return parts if whole else rows_of(parts, self._spec.format, rows.start, rows.stop)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def settle(weight: QuantizedWeight) -> None:
    """Give a weight its data if all have arrived and somebody used it just then.

    Raises:
        PendingWeightError: somebody still does.
    """
    arrival = weight.arrival
    if weight.pending is not None and isinstance(arrival, Arrival) and not arrival.missing:
        with _ONE_AT_A_TIME, torch.no_grad(), torch.inference_mode(False):
            become(weight, weight.like(parts=arrival.parts(), pending=None))


def missing(weight: QuantizedWeight) -> int:
    """How many elements of a weight have not arrived: 0 once it has data."""
    if weight.pending is None:
        return 0
    arrival = root_of(weight).arrival
    return weight.numel() if arrival is None else arrival.missing


def arrive(weight: QuantizedWeight, view: Tensor, source: Tensor) -> None:
    """Take the values for a view of a pending weight; with the last of them it has data.

    Args:
        weight: a pending weight.
        view: of a tensor on meta with its shape and strides.
        source: values of any floating dtype and device, of the view's shape or broadcast to it; what is on meta changes
            nothing.

    Raises:
        ConversionError: see `olq_fx.weights_encoding.check_values`.
        UnsupportedError: the values do not fit the view; it is expanded; it has parts of matrices that are converted.
        PendingWeightError: see `become`.
    """
    if source.is_meta:
        return
    pending = weight.pending
    assert pending is not None
    label = f"'{pending.path}'"
    _check_shape(source, view, label)
    like = torch.empty_strided(weight.shape, weight.stride(), device="meta")
    if isinstance(source, QuantizedWeight) and _arrives_quantized(weight, view, like, source):
        return
    values = source.dequantize() if isinstance(source, QuantizedWeight) else source.detach()
    check_values(values, label)
    with _ONE_AT_A_TIME, torch.no_grad(), torch.inference_mode(False):
        found = list(regions(view, like, values))
        _arrival(weight, source.device).take(found, label)
        settle(weight)


def _arrives_quantized(weight: QuantizedWeight, view: Tensor, like: Tensor, source: QuantizedWeight) -> bool:
    """Whether values that are quantized in the format of the weight could be taken without quantizing them anew."""
    with _ONE_AT_A_TIME, torch.no_grad(), torch.inference_mode(False):
        found = [ranges for ranges, _ in regions(view, like, torch.empty(view.shape, device="meta"))]
        taken = len(found) == 1 and _arrival(weight, source.device).take_parts(found[0], source)
        settle(weight)
        return taken


def _check_shape(source: Tensor, view: Tensor, label: str) -> None:
    """Refuse what `copy_` could not broadcast."""
    sizes = zip(reversed(source.shape), reversed(view.shape), strict=False)
    if source.dim() > view.dim() or any(given not in (1, wanted) for given, wanted in sizes):
        raise UnsupportedError(
            f"{label} takes no values of shape {tuple(source.shape)} where it has {tuple(view.shape)}"
        )


def _arrival(weight: QuantizedWeight, device: torch.device) -> Arrival:
    """What has arrived of a weight. It is converted where the weight is; if on meta, where its first values are."""
    arrival = weight.arrival
    if not isinstance(arrival, Arrival):
        arrival = Arrival(weight.spec, tuple(weight.shape), device if weight.is_meta else weight.device)
        weight.arrival = arrival
    elif not weight.is_meta:
        arrival.move(weight.device)
    return arrival


def fill(weight: QuantizedWeight, source: Tensor, dtype: torch.dtype | None = None) -> None:
    """Convert `source` into a pending weight, which from then on has data.

    The tensor object stays the same, so every module that holds it sees the data.

    Args:
        weight: a pending weight, or an alias of one (`parameter.data`).
        source: the whole matrix, or those of all experts; what is on meta changes nothing.
        dtype: nominal dtype from then on; by default unchanged.

    Raises:
        ConversionError: see `olq_fx.weights_encoding.check_values`.
        UnsupportedError: `source` is not the whole weight.
    """
    pending, root = weight.pending, root_of(weight)
    assert pending is not None
    if source.is_meta:
        return
    if weight.spec != root.spec or source.shape != root.shape:
        raise UnsupportedError(
            f"'{pending.path}' has shape {tuple(root.shape)} and takes no values of shape {tuple(source.shape)}"
        )
    if root.pending is None:
        root.copy_(source)
        return
    device = source.device if root.device.type == "meta" else root.device
    if isinstance(source, QuantizedWeight):
        target = root.like(
            parts=[torch.empty_like(part, device=device) for part in source.parts], dtype=dtype, pending=None
        )
        target.copy_(source)
    else:
        check_values(source, f"'{pending.path}'")
        parts = encode(source.detach(), root.spec, device)
        target = root.like(parts=parts, dtype=dtype, pending=None)
    become(root, target)


_swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors


def become(weight: QuantizedWeight, other: QuantizedWeight) -> None:
    """Give the object `weight` the content of `other`, for everyone who holds it.

    Raises:
        PendingWeightError: somebody holds a weak reference to it or a graph of autograd refers to it, so that torch
            refuses.
    """
    other.requires_grad_(weight.requires_grad)
    kept = OWN_ATTRIBUTES | {"arrival"}
    other.__dict__.update({k: v for k, v in weight.__dict__.items() if k not in kept})
    try:
        if weakref.getweakrefs(weight):
            gc.collect()  # what a failed or finished compilation has left behind
        _swap(weight, other)
    except RuntimeError as error:
        raise PendingWeightError(f"{weight.label} cannot be given data while it is in use: {error}") from error
