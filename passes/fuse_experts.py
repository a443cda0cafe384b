"""Makes one call of the first product of experts and of the activation after it, on a GPU.

    %h : "bf16[M, 2I]" = olq_fx.quantized_grouped_linear(%x, format, %offs, [%codes, %scale], ...)
    %gate, %up = split(%h, I, 1)
    %y : "bf16[M, I]" = silu(%gate) * %up                     in whatever operations this is written
    %q = olq_fx.quantize(%y, format, rule)
->
    %q = olq_fx.grouped_gated(%x, format, %offs, [%codes, %scale], ..., "silu", ..., format, rule)

and likewise without a quantization, before a product of experts with activations in original precision. It runs on the
graph of aten operators. What the operations between are is found by trying them: on numbers they must do what an
activation of `kernels.experts` does, as it rounds.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from olq_fx import torch_private
from olq_fx.formats import get_format
from olq_fx.kernels import support
from olq_fx.kernels.experts import KINDS, Gated, gated, part_specs_of_stack
from olq_fx.passes.base import PassResult, Reject
from olq_fx.passes.fxtools import caller, tensor_of

_ops = torch.ops.olq_fx
_QUANTIZE = _ops.quantize.default
_QUANTIZED = _ops.quantized_grouped_linear.default
_PLAIN = _ops.grouped_linear.default
_ROWS = 64
_LIKE = 0.97
"""The share of results that must be equal for two functions to be one."""

_MOST = 1 << 22
"""Elements of a trial with as many rows as the graph has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """The first product of experts, with its operands as `grouped_gated` takes them."""

    node: Node
    operands: tuple[Any, ...]
    bias: Any
    shards: int


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Where what follows a product ends.

    Attributes:
        value: the tensor there.
        reader: what quantizes it, or multiplies it in original precision.
        format, rule: what it is quantized to, or "".
    """

    value: Node
    reader: Node
    format: str = ""
    rule: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class FuseExperts:
    """Fuses the first product of experts with the activation and quantization after it.

    Attributes:
        devices: kinds of devices for which it does.
    """

    devices: tuple[str, ...] = ("cuda",)
    name: ClassVar[str] = "fuse_experts"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Fuse what can be fused."""
        fused = 0
        rejects: list[Reject] = []
        notes: list[str] = []
        for node in list(gm.graph.nodes):
            product = _product(node)
            value = tensor_of(node)
            if product is None or value is None or value.device.type not in self.devices:
                continue
            end, where = _end(node), caller(node) or node.name
            if end is None:
                continue  # a second product, whose results nobody quantizes
            reason = _fuse(product, end)
            fused += not reason
            if reason:
                rejects.append(Reject(where, f"its activation is a kernel of its own: {reason}"))
            elif apart := support.between_refusal(end.format):
                notes.append(f"{where}: its activation and quantization are a kernel beside the first product: {apart}")
        if fused:
            torch_private.drop_dead_code(gm)
        return PassResult(fused, tuple(rejects), tuple(notes))


def _product(node: Node) -> Product | None:
    """A node as a first product of experts: one whose results are not read by another product as they are."""
    given: tuple[Any, ...] = node.args
    if node.target is _QUANTIZED:
        x, activation, offs, weight, format, k, dtype, bias, *rest = given
        operands = (x, activation, offs, weight, format, k, dtype)
    elif node.target is _PLAIN and given[4] == "":
        x, offs, weight, format, _, _, bias, *rest = given
        value = tensor_of(x)
        assert value is not None
        operands = ([x], "", offs, weight, format, int(value.shape[1]), value.dtype)
    else:
        return None
    return Product(node, operands, bias, int(rest[0]) if rest else 1)


def _fuse(product: Product, end: End) -> str:
    """Fuse a product with what follows; the reason why not, or ""."""
    between, last = end.value, end.reader
    try:
        steps = _steps(product.node, between)
        with torch_private.real_tensors():
            kind, shards = _recognised(product.node, steps, between)
    except _CannotSayError as refusal:
        return str(refusal)
    if kind is None:
        return f"it is none of {', '.join(KINDS)}"
    if not _has_shards(product, shards):
        return "gate and up share scales in its weight"
    graph = last.graph
    with graph.inserting_before(last):
        arguments = (*product.operands, product.bias, shards, kind.kind, kind.alpha, kind.limit, end.format, end.rule)
        call = graph.call_function(_ops.grouped_gated.default, arguments)
    call.meta = {key: value for key, value in product.node.meta.items() if key in ("nn_module_stack", "stack_trace")}
    call.meta["val"] = _values(last)
    if last.target is _QUANTIZE:
        last.replace_all_uses_with(call)
    else:
        with graph.inserting_before(last):
            inner = graph.call_function(operator.getitem, (call, 0))
        inner.meta = {**call.meta, "val": tensor_of(between)}
        last.replace_input_with(between, inner)
    return ""


def _has_shards(product: Product, shards: int) -> bool:
    """Whether a weight has the parts of so many matrices (where scales belong to rows, they are those of one too)."""
    _, _, _, weight, format, k, _ = product.operands
    shapes = [tuple(value.shape) for part in weight if (value := tensor_of(part)) is not None]
    experts, n = shapes[0][:2]
    expected = part_specs_of_stack(get_format(format), experts, n // shards, int(k), shards)
    return shapes == [spec.shape for spec in expected]


def _values(last: Node) -> Any:
    return last.meta.get("val") if last.target is _QUANTIZE else [tensor_of(last.args[0])]


class _CannotSayError(Exception):
    """What is between two products is not followed; the message says why."""


def _end(product: Node) -> End | None:
    """Where what follows a product ends."""
    seen, pending = {product}, [product]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.target is _QUANTIZE:
                return End(node, user, str(user.args[1]), str(user.args[2]))
            if user.target is _PLAIN and user.args[4] == "" and user.args[0] is node:
                return End(node, user)
            if user not in seen and user.op == "call_function" and not torch_private.schema_writes(user.target):
                seen.add(user)
                if _is_step(user):
                    pending.append(user)
    return None


def _is_step(node: Node) -> bool:
    """Whether a node computes each row of its result from that row alone: pointwise, or a view."""
    return node.target is operator.getitem or torch_private.is_pointwise(node.target) or node.target in _VIEWS


_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.slice.Tensor, _aten.select.int, _aten.view.default),
        *(_aten.reshape.default, _aten.permute.default, _aten.transpose.int, _aten.clone.default),
        *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.alias.default, _aten.unbind.int, _aten._to_copy.default),
        *(torch.ops.prims.convert_element_type.default, _aten._unsafe_view.default),
    }
)


def _steps(product: Node, between: Node) -> list[Node]:
    """The nodes from a product to what is between, in their order; each reads only those, and is read by those only."""
    steps: set[Node] = set()
    pending = [between]
    while pending:
        node = pending.pop()
        if node is product or node in steps:
            continue
        if node.op != "call_function" or not _is_step(node):
            raise _CannotSayError(f"it depends on {node.name}, which is not of its product")
        steps.add(node)
        pending.extend(node.all_input_nodes)
    if between is product:
        raise _CannotSayError("there is nothing between")
    for node in (product, *steps):
        others = [user for user in node.users if user not in steps]
        if node is not between and others:
            raise _CannotSayError(f"{node.name} is read by {others[0].name} too")
    if len(between.users) > 1:
        raise _CannotSayError(f"{between.name} is read by more than what quantizes it")
    return [node for node in product.graph.nodes if node in steps]


def _recognised(product: Node, steps: Sequence[Node], between: Node) -> tuple[Gated | None, int]:
    """The activation that the steps compute, None if it is another, and the shards of what they compute it from."""
    value, result = tensor_of(product), tensor_of(between)
    assert value is not None
    assert result is not None
    n, inner = int(value.shape[1]), int(result.shape[1])
    if inner * 2 != n and inner != n:
        raise _CannotSayError(f"{n} columns become {inner}")
    shards = n // inner
    probe, found = _tried(product, steps, between, value)
    if found.shape != (probe.shape[0], inner) or found.dtype != probe.dtype:
        raise _CannotSayError(f"its result is {found.dtype} {tuple(found.shape)}")
    numbers = {argument for node in steps for argument in node.args if isinstance(argument, (int, float))}
    likeness = {one: _likeness(gated(probe, one, shards), found) for one in _candidates(shards, numbers)}
    best = max(likeness, key=likeness.__getitem__)
    return (best if likeness[best] > _LIKE else None), shards


def _candidates(shards: int, numbers: set[Any]) -> list[Gated]:
    """Every activation; the numbers of one that has some are among those in the graph."""
    plain = [Gated(kind) for kind in KINDS if kind != "clamped"]
    positive = sorted({float(number) for number in numbers if number > 0})
    clamped = [Gated("clamped", alpha, limit) for alpha in positive for limit in positive]
    return plain + (clamped if shards == 2 else [])


def _tried(product: Node, steps: Sequence[Node], between: Node, value: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in the place of a product, and what the steps make of them: of few rows, or of as many as there are."""
    rows = [_ROWS]
    if isinstance(value.shape[0], int) and value.shape[0] * value.shape[1] <= _MOST:
        rows.append(value.shape[0])
    for count in rows:
        probe = _probe(count, int(value.shape[1]), value.dtype)
        try:
            return probe, _run(product, steps, between, probe)
        except (RuntimeError, TypeError, ValueError):
            continue
    raise _CannotSayError("it cannot be tried apart from its graph")


def _probe(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of which most are where activations differ, and some where they are clamped."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((rows, columns), generator=generator)
    values[:, ::8] *= 8
    return values.to(dtype)


def _run(product: Node, steps: Sequence[Node], between: Node, probe: Tensor) -> Tensor:
    values: dict[Node, Any] = {product: probe}
    with torch.no_grad():
        for node in steps:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Callable[..., Any] = node.target  # type: ignore[assignment]
            values[node] = target(*args, **{name: given for name, given in kwargs.items() if name != "device"})
    found: Tensor = values[between]
    return found


def _likeness(a: Tensor, b: Tensor) -> float:
    """Which share of two results is equal, where they differ in last bits only; else 0.

    One function computed in two ways differs so: sums with cancellation (1 + erf) by the last bits of float32, and by
    one of a narrower dtype where that decides on how it is rounded.
    """
    x, y = a.double(), b.double()
    bound = 2 * torch.finfo(a.dtype).eps * y.abs() + 1e-5 * y.abs().amax().clamp(min=1)
    if bool(((x - y).abs() > bound).any()):
        return 0.0
    equal = (x - y).abs() <= 1e-6 if a.dtype == torch.float32 else a == b
    return float(equal.double().mean())
