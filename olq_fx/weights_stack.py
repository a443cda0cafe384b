"""The type of the converted weights of experts: one tensor for all of them, as models hold it.

    QuantizedStack(parts, spec, dtype, size, stride=None, pending=None, ids=None)

A stack reads (E, N, K), or (E, K, N) if it is transposed. Its parts are those of matrices (N, K) with E in front, laid
out shard by shard (`kernels.experts.Stack`), whatever the tensor says: where gate and up are one parameter, each of
them has scales of its own, so that checkpoints that store them merged, apart, interleaved or transposed give the same
bytes.

`weight[ids]` copies nothing: it is a stack that remembers which experts it has. Its leading dimensions are those of
`ids`; with none it is the matrix of one expert.

    chosen(weight, ids), expert(weight, index), of_experts(weight, start, stop), of_rows(weight, start, stop, step)
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor

from olq_fx.errors import UnsupportedError
from olq_fx.kernels.experts import Stack, values_of
from olq_fx.weights_tensor import Handler, Pending, QuantizedWeight, UnflattenedWeight, WeightSpec

STACK_ATEN: dict[Any, Handler] = {}
"""What each aten operator does on a stack; filled by `implements_stack`."""


class QuantizedStack(QuantizedWeight):
    """The quantized weights of experts, where the original parameter stood.

    Attributes:
        ids: integers of any shape, which of the experts in the parts this is, in which order; None: all of them. With
            or without, everything else is as in `QuantizedWeight`.
    """

    _table: ClassVar[dict[Any, Handler]] = STACK_ATEN

    ids: Tensor | None

    @staticmethod
    def __new__(
        cls: type["QuantizedStack"],
        parts: Sequence[Tensor],
        spec: WeightSpec | None = None,
        dtype: torch.dtype | None = None,
        size: Sequence[int] = (),
        stride: Sequence[int] | None = None,
        pending: Pending | None = None,
        ids: Tensor | None = None,
        *,
        requires_grad: bool = False,
    ) -> "QuantizedStack":
        """Wrap `parts`: see `QuantizedWeight`. `size` has the leading dimensions of `ids`, or E, or none if E is 1."""
        self: Any = QuantizedWeight.__new__(cls, parts, spec, dtype, size, stride, pending, requires_grad=requires_grad)
        self.ids = self.ids if isinstance(parts, Tensor) else ids
        found: QuantizedStack = self
        return found

    def _wrapped(
        self,
        parts: Sequence[Tensor],
        spec: WeightSpec,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int] | None,
        pending: Pending | None,
    ) -> "QuantizedStack":
        ids = None if self.ids is None else self.ids.to(parts[0].device)
        return QuantizedStack(parts, spec, dtype, size, stride, pending, ids)

    @property
    def unflattened(self) -> type[QuantizedWeight]:
        """The class of weights of this kind that cannot be flattened."""
        return UnflattenedStack

    @property
    def experts(self) -> int:
        """How many experts the parts have."""
        return self.codes.shape[0]

    @property
    def output_size(self) -> int:
        """N: how many features a product has."""
        return int(self.shape[-1] if self.spec.transposed else self.shape[-2])

    @property
    def shard_rows(self) -> list[slice]:
        """Which of the N rows of the tensor each shard is."""
        n, shards = self.output_size, self.spec.shards
        if self.spec.interleaved:
            return [slice(shard, n, shards) for shard in range(shards)]
        size = n // shards
        return [slice(shard * size, (shard + 1) * size) for shard in range(shards)]

    def choosing(self, ids: Tensor, size: Sequence[int]) -> "QuantizedStack":
        """This stack with other `ids`."""
        result = self.view_like(size=size)
        assert isinstance(result, QuantizedStack)
        result.ids = ids
        return result

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of this shape; of chosen experts each as often as it is chosen."""
        self.ready()
        with torch._C.DisableTorchFunctionSubclass():
            stack = Stack(self.parts, self.spec.weight, None, self.spec.shards)
            found = range(self.experts) if self.ids is None else self.ids.reshape(-1).tolist()
            n, k = self.output_size, self.reduction_size
            values = torch.empty((len(found), n, k), dtype=dtype or self.dtype, device=self.codes.device)
            for position, index in enumerate(found):
                values[position] = in_tensor_order(values_of(stack, index, k), self.spec, 0)
            return (values.mT if self.spec.transposed else values).reshape(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the parts, and metadata that is equal for equal layers."""
        names, metadata = super().__tensor_flatten__()
        return names if self.ids is None else [*names, "ids"], metadata

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        metadata: tuple[WeightSpec, torch.dtype, Pending | None],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> "QuantizedStack":
        """The inverse of `__tensor_flatten__`."""
        spec, dtype, pending = metadata
        parts = [part for name, part in inner.items() if name != "ids"]
        return QuantizedStack(parts, spec, dtype, outer_size, outer_stride, pending, inner.get("ids"))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """As every converted weight.

        Raises:
            UnsupportedError: only some experts are chosen, which the parts would not say.
        """
        if self.ids is not None:
            raise UnsupportedError(f"chosen experts of {self.label} cannot be pickled; pickle the weight itself")
        return super().__reduce_ex__(protocol)


class UnflattenedStack(UnflattenedWeight, QuantizedStack):
    """A stack for the time of `parameter.data = ...`: see `UnflattenedWeight`."""


def implements_stack(*operators: Any) -> Callable[[Handler], Handler]:
    """Register the handler of aten operators on stacks."""

    def register(handler: Handler) -> Handler:
        STACK_ATEN.update(dict.fromkeys(operators, handler))
        return handler

    return register


def in_tensor_order(values: Tensor, spec: WeightSpec, dim: int) -> Tensor:
    """Bring N, which lies shard by shard along dimension 0 or 1, into the order of the tensor."""
    if not spec.interleaved:
        return values
    pattern = "(shard n) k -> (n shard) k" if dim == 0 else "m (shard n) -> m (n shard)"
    return rearrange(values, pattern, shard=spec.shards)


def chosen(weight: QuantizedStack, ids: Tensor) -> QuantizedStack:
    """`weight[ids]`: nothing is copied."""
    return weight.choosing(_absolute(weight, ids), [*ids.shape, *weight.shape[-2:]])


def _absolute(weight: QuantizedStack, ids: Tensor) -> Tensor:
    """Numbers of experts in the parts for numbers along the first dimension of the tensor."""
    counted = torch.where(ids < 0, ids + weight.shape[0], ids)
    return counted if weight.ids is None else weight.ids[counted]


def expert(weight: QuantizedStack, index: int) -> QuantizedWeight:
    """The matrix of one expert: an ordinary converted weight where its parts are those of one."""
    if weight.ids is not None:
        return weight.choosing(weight.ids[index], weight.shape[1:])
    size, strides = weight.shape[1:], weight.stride()[1:]
    if weight.spec.shards == 1:
        parts = [part[index] for part in weight.parts]
        one = QuantizedWeight(parts, weight.spec, weight.dtype, size, strides, weight.pending)
        return _named(one, weight)
    parts = [part[index : index + 1] for part in weight.parts]
    return weight.view_like(parts=parts, size=size, stride=strides)


def _named(view: QuantizedWeight, weight: QuantizedWeight) -> QuantizedWeight:
    """A view of another type with what `view_like` hands on."""
    view.path, view.was_trainable = weight.path, weight.was_trainable
    if weight.pending is not None:
        view.root = weight if weight.root is None else weight.root
    return view


def of_experts(weight: QuantizedStack, start: int, stop: int) -> QuantizedStack:
    """Experts `start` to `stop`, as a slice along the first dimension."""
    size = [stop - start, *weight.shape[1:]]
    if weight.ids is not None:
        return weight.choosing(weight.ids[start:stop], size)
    parts = [part[start:stop] for part in weight.parts]
    result = weight.view_like(parts=parts, size=size, stride=weight.stride())
    assert isinstance(result, QuantizedStack)
    return result


def of_rows(weight: QuantizedStack, start: int, stop: int, step: int) -> QuantizedStack | None:
    """Rows of N of every expert, where they have scales of their own; None where they share them with others.

    That is: whole shards; and any rows without gaps where a scale belongs to one row, or whole blocks of them.
    """
    spec, n = weight.spec, weight.output_size
    wanted = slice(start, stop, step)
    for shard, rows in enumerate(weight.shard_rows):
        if range(*wanted.indices(n)) == range(*rows.indices(n)):
            return _rows_of_parts(weight, shard, shard + 1, spec.shards, n // spec.shards)
    height = 1 if (spec.format.coarse or (1,))[0] is not None else None
    height = None if spec.format.group[0] is None or height is None else spec.format.group[0]
    if spec.shards > 1 or height is None or step != 1 or start % height or (stop % height and stop != n):
        return None
    return _cut(weight, start, stop, height)


def _rows_of_parts(weight: QuantizedStack, start: int, stop: int, shards: int, n: int) -> QuantizedStack:
    """One of the shards, as a stack without shards."""
    parts = []
    for part in weight.parts:
        rows = part.shape[1] // shards
        parts.append(part[:, start * rows : stop * rows])
    return _with_rows(weight, parts, n)


def _cut(weight: QuantizedStack, start: int, stop: int, height: int) -> QuantizedStack:
    heights = (1, height, weight.spec.format.coarse[0] if weight.spec.format.coarse else 1)
    parts = [
        part[:, start // high : math.ceil(stop / high)]
        for part, high in zip(weight.parts, [one or 1 for one in heights], strict=False)
    ]
    return _with_rows(weight, parts, stop - start)


def _with_rows(weight: QuantizedStack, parts: Sequence[Tensor], n: int) -> QuantizedStack:
    spec = dataclasses.replace(weight.spec, shards=1, interleaved=False, rows_of_larger=True)
    k = weight.reduction_size
    size = [*weight.shape[:-2], *((k, n) if spec.transposed else (n, k))]
    result = weight.view_like(parts=parts, spec=spec, size=size, stride=weight.stride())
    assert isinstance(result, QuantizedStack)
    return result
