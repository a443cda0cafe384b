"""What a layer of experts computes, in pure PyTorch: the definition that the kernels of `triton_experts` are held to.

T tokens choose k of E experts each. Their T x k pairs, in the order of their experts, make M = T x k rows: those of
expert e are the segment from `offsets[e]` to `offsets[e + 1]`. Rows from `offsets[E]` on belong to nobody here: to
experts of another device (index E), or to none.

    segments = route(ids, E)
    hidden = grouped_linear(x, ..., gate_up, ..., segments, gather=True)       (M, 2 I), in the order of experts
    rows = grouped_linear(gated(hidden), ..., down, ..., segments, scatter=True)    (M, H), in the order of tokens
    y = combine(rows, ids, weights)                                                  (T, H)

Every product is that of `reference.quantized_linear`, rounded once to the dtype; weights of tokens are applied in
float32, and the k products of a token are added in float32 in their order and rounded once.

A weight (N, K) of an expert is `shards` matrices (n, K), n = N / shards, one after the other: gate and up are two. Each
is quantized by itself, and its parts lie one after the other along their rows (`part_specs_of_stack`). So one that was
stored merged, split or interleaved has the same bytes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from olq_fx import numerics
from olq_fx.errors import ConversionError
from olq_fx.formats import Format, get_format
from olq_fx.kernels import reference

Kind = Literal["silu", "gelu", "gelu_tanh", "relu_squared", "clamped"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The activations between the two products of an expert: see `Gated`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """Which rows belong to which expert; all on the device.

    Attributes:
        offsets: (E + 1,) int32 or int64, from 0, not falling.
        order: (M,) int32 or int64, the pair (token x k + choice) of each row; None where rows are in their own order.
        top_k: k.
    """

    offsets: Tensor
    order: Tensor | None = None
    top_k: int = 1

    @property
    def experts(self) -> int:
        """E."""
        return self.offsets.shape[0] - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """One weight of each of E experts.

    Attributes:
        parts: those of `part_specs_of_stack`.
        format: its name.
        bias: (E, N) or None.
        shards: how many matrices a weight is made of, each quantized by itself.
    """

    parts: Sequence[Tensor]
    format: str
    bias: Tensor | None = None
    shards: int = 1

    @property
    def whole(self) -> bool:
        """Whether the parts of an expert are also those of one matrix (N, K): no scale begins anew with a shard."""
        found, n = get_format(self.format), self.parts[0].shape[1] // self.shards
        heights = [found.group[0], found.coarse[0]] if found.coarse else [found.group[0]]
        return self.shards == 1 or all(height is not None and n % height == 0 for height in heights)


@dataclasses.dataclass(frozen=True, slots=True)
class Gated:
    """The activation between the two products of an expert: act(gate) x up, or act(up) where there is no gate.

    Attributes:
        kind: `silu`, `gelu` (by erf), `gelu_tanh`, `relu_squared`, or `clamped`, which is that of gpt-oss and needs a
            gate: gate at most `limit`, up within +-`limit`, (up + 1) x gate x sigmoid(alpha x gate).
        alpha, limit: of `clamped`.
    """

    kind: Kind
    alpha: float = 1.702
    limit: float = 7.0


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """The experts of a layer.

    Attributes:
        gate_up: (E, 2 I, H) of two shards, gate and up; or (E, I, H) of one, where there is no gate.
        down: (E, H, I).
        gated: what is between them.
        activation_format: of what both products read; "" for original precision.
        rule: its scale rule.
    """

    gate_up: Stack
    down: Stack
    gated: Gated
    activation_format: str = ""
    rule: str = ""

    @property
    def inner(self) -> int:
        """I."""
        return self.gate_up.parts[0].shape[1] // self.gate_up.shards


@dataclasses.dataclass(frozen=True, slots=True)
class StackSpec:
    """What one part of a stack is: `codes`, `scale` or `coarse`, with its shape and dtype."""

    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype


def part_specs_of_stack(format: Format, experts: int, n: int, k: int, shards: int) -> tuple[StackSpec, ...]:
    """The parts of weights (E, shards x n, K): those of a shard (n, K) one after the other, with E in front.

    Args:
        format: how they are stored.
        experts: E.
        n: rows of one shard.
        k: K.
        shards: how many matrices a weight is made of.

    >>> from olq_fx.formats import FORMATS
    >>> [spec.shape for spec in part_specs_of_stack(FORMATS["fp8_per_block_static"], 8, 96, 256, 2)]
    [(8, 192, 256), (8, 2, 2)]
    """
    return tuple(
        StackSpec(spec.name, (experts, shards * spec.shape[0], spec.shape[1]), spec.dtype)
        for spec in numerics.part_specs(format, n, k)
    )


def route(ids: Tensor, experts: int) -> Segments:
    """Bring pairs in the order of their experts; those of one expert keep theirs.

    Args:
        ids: (T, k) integers; whatever is not from 0 to E - 1 belongs to nobody here, and comes last.
        experts: E.
    """
    flat = ids.reshape(-1).to(torch.int64)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    found, order = torch.sort(flat, stable=True)
    bounds = torch.arange(experts + 1, device=ids.device)
    return Segments(torch.searchsorted(found, bounds, out_int32=True), order.to(torch.int32), ids.shape[1])


def grouped_linear(
    x: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    k: int,
    dtype: torch.dtype,
    segments: Segments,
    *,
    gather: bool = False,
    scatter: bool = False,
    weights: Tensor | None = None,
    product: Callable[..., Tensor] = reference.quantized_linear,
) -> Tensor:
    """The product of each segment with the weight of its expert.

    Args:
        x: the parts of the activations, or a list of one tensor: (M, K), or with `gather` (T, K).
        activation_format: their format, "" for original precision.
        stack: (E, N, K).
        k: K.
        dtype: of the result.
        segments: which rows belong to which expert.
        gather: whether a row is read where its token lies, at `order // top_k`.
        scatter: whether it is written where its pair lies, at `order`.
        weights: (T, k) float32, or None: multiplied with the rounded products of their pairs, and rounded again.
        product: `reference.quantized_linear`, or what computes it faster, within the bound of its format.

    Returns:
        (M, N); rows that belong to nobody are 0.

    Raises:
        ConversionError: operands do not fit.
    """
    m = check_grouped(x, activation_format, stack, k, segments, gather, scatter, weights)
    y = torch.zeros((m, stack.parts[0].shape[1]), dtype=dtype, device=x[0].device)
    for expert, (start, stop) in enumerate(itertools.pairwise(segments.offsets.tolist())):
        if start == stop:
            continue
        positions = torch.arange(start, stop, device=y.device)
        pairs = positions if segments.order is None else segments.order[start:stop].to(torch.int64)
        rows = rows_at(x, activation_format, pairs // segments.top_k if gather else positions)
        found = _of_expert(rows, activation_format, stack, expert, k, dtype, product)
        if weights is not None:
            found = (found.to(torch.float32) * weights.reshape(-1)[pairs][:, None]).to(dtype)
        y[pairs if scatter else positions] = found
    return y


def rows_at(parts: Sequence[Tensor], format: str, rows: Tensor) -> list[Tensor]:
    """The parts of some rows of a quantized activation, or of a list of one tensor ("" for its format)."""
    if not format:
        return [parts[0][rows]]
    found = get_format(format)
    high = (1, found.group[0], found.coarse[0] if found.coarse else None)
    return [part if extent is None else part[rows] for part, extent in zip(parts, high, strict=False)]


def shard_of(stack: Stack, expert: int, shard: int) -> tuple[list[Tensor], slice]:
    """The parts of one shard of an expert's weight, as views, and which of its N rows they are."""
    found = []
    for part in stack.parts:
        height = part.shape[1] // stack.shards
        found.append(part[expert, shard * height : (shard + 1) * height])
    n = stack.parts[0].shape[1] // stack.shards
    return found, slice(shard * n, (shard + 1) * n)


def values_of(stack: Stack, expert: int, k: int) -> Tensor:
    """(N, K) float32: the dequantized weight of an expert."""
    values = torch.empty((stack.parts[0].shape[1], k), dtype=torch.float32, device=stack.parts[0].device)
    for shard in range(stack.shards):
        parts, rows = shard_of(stack, expert, shard)
        values[rows] = numerics.dequantize(tuple(parts), get_format(stack.format), k)
    return values


def _of_expert(
    rows: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    expert: int,
    k: int,
    dtype: torch.dtype,
    product: Callable[..., Tensor],
) -> Tensor:
    bias = None if stack.bias is None else stack.bias[expert]
    if stack.whole:
        parts = [part[expert] for part in stack.parts]
        return product(rows, activation_format, parts, stack.format, k, dtype, bias, None)
    y = torch.empty((rows[0].shape[0], stack.parts[0].shape[1]), dtype=dtype, device=rows[0].device)
    for shard in range(stack.shards):
        parts, columns = shard_of(stack, expert, shard)
        of_shard = None if bias is None else bias[columns]
        y[:, columns] = product(rows, activation_format, parts, stack.format, k, dtype, of_shard, None)
    return y


def gated(hidden: Tensor, activation: Gated, shards: int = 2) -> Tensor:
    """(M, shards x I) to (M, I) of its dtype, rounded to it wherever PyTorch rounds in eager mode."""
    dtype = hidden.dtype
    gate, *others = hidden.chunk(shards, 1)
    if activation.kind == "clamped":
        gate, up = gate.clamp(max=activation.limit), others[0].clamp(-activation.limit, activation.limit)
        factor = torch.sigmoid((gate.to(torch.float32) * activation.alpha).to(dtype).to(torch.float32)).to(dtype)
        return (up + 1) * (gate * factor)
    wide = gate.to(torch.float32)
    if activation.kind == "silu":
        value = functional.silu(wide)
    elif activation.kind == "relu_squared":
        value = functional.relu(wide).square()
    else:
        value = functional.gelu(wide, approximate="tanh" if activation.kind == "gelu_tanh" else "none")
    return value.to(dtype) * others[0] if others else value.to(dtype)


def combine(rows: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The weighted sum of the products of each token.

    Args:
        rows: (T x k, H).
        ids: (T, k): rows of pairs that belong to nobody are not read.
        weights: (T, k), taken as float32.
        experts: E.

    Returns:
        (T, H) of the dtype of `rows`.
    """
    by_token = rows.reshape(*ids.shape, rows.shape[1])
    mine = (ids >= 0) & (ids < experts)
    total = torch.zeros((ids.shape[0], rows.shape[1]), dtype=torch.float32, device=rows.device)
    for choice in range(ids.shape[1]):
        term = by_token[:, choice].to(torch.float32) * weights[:, choice, None].to(torch.float32)
        total = total + torch.where(mine[:, choice, None], term, 0.0)
    return total.to(rows.dtype)


def layer(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Layer,
    multiply: Callable[..., Tensor] = grouped_linear,
    quantize: Callable[[Tensor, str, str], Sequence[Tensor]] = reference.quantize,
) -> Tensor:
    """All experts of a layer.

    A statistic of a whole tensor is that of `x` for the first product, and that of the rows of all segments for the
    second.

    Args:
        x: (T, H) of a floating dtype.
        ids: (T, k).
        weights: (T, k), taken as float32.
        experts: the weights.
        multiply, quantize: `grouped_linear` and `reference.quantize`, or what computes the same faster.

    Returns:
        (T, H) of the dtype of `x`.

    Raises:
        ConversionError: operands do not fit.
    """
    check_layer(x, ids, weights, experts)
    segments, name = route(ids, experts.gate_up.parts[0].shape[0]), experts.activation_format

    def activations(values: Tensor) -> Sequence[Tensor]:
        return quantize(values, name, experts.rule) if name else [values]

    hidden = multiply(activations(x), name, experts.gate_up, x.shape[1], x.dtype, segments, gather=True)
    inner = gated(hidden[: int(segments.offsets[-1])], experts.gated, experts.gate_up.shards)
    missing = hidden.shape[0] - inner.shape[0]
    parts = [
        functional.pad(part, (0, 0, 0, missing)) if part.shape[0] == inner.shape[0] else part
        for part in activations(inner)
    ]
    rows = multiply(parts, name, experts.down, inner.shape[1], x.dtype, segments, scatter=True)
    return combine(rows, ids, weights, segments.experts)


def check_grouped(
    x: Sequence[Tensor],
    activation_format: str,
    stack: Stack,
    k: int,
    segments: Segments,
    gather: bool,
    scatter: bool,
    weights: Tensor | None,
) -> int:
    """Hold the operands of `grouped_linear` to each other by their shapes.

    Returns:
        M.

    Raises:
        ConversionError: one of them does not fit.
        ConfigurationError: no format has that name.
    """
    rows = reference.check_quantized_activation(x, activation_format, k)
    check_stack(stack, segments.experts, stack.parts[0].shape[1], k)
    m = rows if segments.order is None else segments.order.shape[0]
    if (gather or scatter) and segments.order is None:
        raise ConversionError("rows can be gathered and scattered only with an order")
    if rows != (m // segments.top_k if gather else m):
        raise ConversionError(f"{m} rows of segments need {m} rows, or {m // segments.top_k} gathered, not {rows}")
    if weights is not None and (weights.numel() != m or weights.dtype != torch.float32):
        raise ConversionError(f"the weights of {m} rows are float32, not {weights.dtype} {tuple(weights.shape)}")
    return m


def check_stack(stack: Stack, experts: int, n: int, k: int) -> None:
    """Hold the weights (n, k) of `experts` experts, with the rows of all shards, to their format.

    Raises:
        ConversionError: number, shapes or dtypes of the parts are others, the bias has another shape, or the rows
            cannot be so many shards.
        ConfigurationError: no format has that name.
    """
    shards = stack.shards
    if shards < 1 or n % shards:
        raise ConversionError(f"{n} rows of a weight cannot be {shards} shards")
    specs = part_specs_of_stack(get_format(stack.format), experts, n // shards, k, shards)
    for part, spec in itertools.zip_longest(stack.parts, specs):
        if part is None or spec is None or tuple(part.shape) != spec.shape or part.dtype != spec.dtype:
            wanted = "nothing more" if spec is None else f"{spec.name} {spec.dtype} {spec.shape}"
            given = "nothing" if part is None else f"{part.dtype} {tuple(part.shape)}"
            of_shards = f", {shards} shards each," if shards > 1 else ""
            raise ConversionError(
                f"weights ({n}, {k}) of {experts} experts{of_shards} in {stack.format} have {wanted}; given: {given}"
            )
    if stack.bias is not None and tuple(stack.bias.shape) != (experts, n):
        raise ConversionError(
            f"the bias of {experts} experts has shape ({experts}, {n}), not {tuple(stack.bias.shape)}"
        )


def check_layer(x: Tensor, ids: Tensor, weights: Tensor, experts: Layer) -> None:
    """Hold the operands of `layer` to each other by their shapes.

    Raises:
        ConversionError: one of them does not fit.
        ConfigurationError: no format has that name.
    """
    h = reference.check_activation(x)[1]
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0] or ids.is_floating_point():
        raise ConversionError(
            f"{x.shape[0]} tokens choose by integers ({x.shape[0]}, k) and as many weights, not by {ids.dtype} "
            f"{tuple(ids.shape)} and {tuple(weights.shape)}"
        )
    shards = experts.gate_up.shards
    if shards not in (1, 2) or experts.down.shards != 1:
        raise ConversionError(
            f"gate and up are 2 shards, up alone is 1, and down is 1, not {shards} and {experts.down.shards}"
        )
    if shards == 1 and experts.gated.kind == "clamped":
        raise ConversionError("the activation 'clamped' between experts needs a gate: 2 shards of gate and up")
    count, n = experts.gate_up.parts[0].shape[:2]
    check_stack(experts.gate_up, count, n, h)
    check_stack(experts.down, count, h, n // shards)
