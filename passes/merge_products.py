"""Makes one kernel of the products of sibling layers on a GPU: q, k and v, and whatever else reads one input.

    %y : "bf16[M, N]" = olq_fx.quantized_linear([%codes, %scale], "mxfp8", [%q_codes, %q_scale], "mxfp8", K, ...)
    %z : "bf16[M, L]" = olq_fx.quantized_linear([%codes, %scale], "mxfp8", [%k_codes, %k_scale], "mxfp8", K, ...)
->
    %both = olq_fx_linear_products([%codes, %scale], "mxfp8", [([%q_codes, %q_scale], ...), ...], "mxfp8", K, ...)
    %y = %both[0];  %z = %both[1]

A layer without siblings becomes a call with one result. The weights stay where they are: each tile of the kernel reads
those of its own layer, and has the bits that it has alone. It runs on the graph of aten operators, after the passes
that make products part of other kernels.
"""

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from olq_fx import torch_private
from olq_fx.kernels import support
from olq_fx.kernels.linear_products import Layer, linear_products
from olq_fx.passes.base import PassResult, Reject
from olq_fx.passes.fxtools import caller, tensor_of

_PRODUCT = torch.ops.olq_fx.quantized_linear.default
_OURS = ("", "triton")

MOST = 8
"""Layers of one kernel: the pointers of each are arguments of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MergeProducts:
    """Merges products of one input.

    Attributes:
        devices: kinds of devices whose compiler makes one kernel of the call.
        capability: of the GPU, 90 for sm_90; 0 for that of the device.
    """

    devices: tuple[str, ...] = ("cuda",)
    capability: int = 0
    name: ClassVar[str] = "merge_products"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Merge what can be merged."""
        changed = 0
        rejects: list[Reject] = []
        notes: list[str] = []
        for siblings in self._siblings(gm):
            reasons: list[tuple[Node, str]] = []
            for group in _groups(siblings, self.capability, reasons):
                changed += 1
                if len(group) > 1:
                    notes.append(f"{', '.join(map(_where, group))} are one kernel")
                _rewrite(group)
            # What is alone has no choice but the form of its kernel, which is no refusal.
            rejects += [Reject(_where(node), reason) for node, reason in reasons if len(siblings) > 1]
        if changed:
            gm.recompile()
        return PassResult(changed, tuple(rejects), tuple(notes))

    def _siblings(self, gm: GraphModule) -> Iterable[list[Node]]:
        """Products of one input, in the order of the graph."""
        found: dict[Any, list[Node]] = {}
        for node in gm.graph.find_nodes(op="call_function", target=_PRODUCT):
            value = tensor_of(node)
            if value is not None and value.device.type in self.devices:
                x, activation_format = node.args[:2]
                found.setdefault((tuple(x), activation_format), []).append(node)
        return found.values()


def _where(node: Node) -> str:
    return caller(node) or node.name


# What can be one kernel


def _groups(siblings: Sequence[Node], capability: int, reasons: list[tuple[Node, str]]) -> Iterator[list[Node]]:
    """The calls that can be made of some products, one by one: each as the graph is after the one before was made.

    The reasons against others are added to `reasons`.
    """
    alike: dict[Any, list[Node]] = {}
    for node in siblings:
        reason = _why_apart(node, capability)
        if reason:
            reasons.append((node, f"its product is a kernel of its own: {reason}"))
        else:
            alike.setdefault(tuple(_formula(node).values()), []).append(node)
    heads = [nodes[0] for nodes in alike.values()]
    for node in heads[1:]:
        reasons.append((node, f"its product is not merged with that of {_other(heads[0], node)}"))
    for nodes in alike.values():
        rest = nodes
        while rest:
            group, rest, reason = _independent(rest)
            if rest:
                reasons.append((rest[0], f"its product is not merged with siblings {reason}"))
            yield group


def _why_apart(node: Node, capability: int) -> str:
    """Why a template does not serve a product as well as its operator; "" if it does."""
    named = torch_private.arguments_of(node)
    x, y = tensor_of(named["x"][0]), tensor_of(node)
    assert x is not None
    assert y is not None
    if named["kernel"] not in _OURS:
        return "another kernel must run it"
    capability = capability or _capability(x.device)
    kind = None if named["activation_format"] else x.dtype
    taken = support.product(
        *(named["weight_format"], named["activation_format"]),
        dtype=y.dtype,
        activation_dtype=kind,
        capability=capability,
    )
    if not taken:
        return taken.reason
    if not all(isinstance(extent, int) for extent in y.shape):
        return "its number of rows is a symbol, and which form is best is known when it runs"
    from olq_fx.kernels.product_forms import why_operator

    sizes = y.shape[0], y.shape[1], named["k"]
    formats = named["activation_format"], named["weight_format"]
    return why_operator(*formats, kind or y.dtype, sizes, capability, x.device)


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _formula(node: Node) -> dict[str, Any]:
    """What products in one kernel have in common."""
    named = torch_private.arguments_of(node)
    return {
        "weights in": named["weight_format"],
        "a K of": named["k"],
        "results in": str(named["dtype"]).removeprefix("torch."),
        "bias:": "no" if named["bias"] is None else "yes",
        "residual:": "no" if named["residual"] is None else "yes",
    }


def _other(first: Node, node: Node) -> str:
    """The first of other siblings, and how it differs."""
    theirs, own = _formula(first), _formula(node)
    [name, *_] = [name for name in own if own[name] != theirs[name]]
    return f"{_where(first)}: {name} {own[name]}, there {theirs[name]}"


def _independent(nodes: Sequence[Node]) -> tuple[list[Node], list[Node], str]:
    """Those of which none needs another's result, as many as a kernel takes; the rest; why the first of it is rest."""
    group: list[Node] = []
    rest: list[Node] = []
    reason = ""
    for node in nodes:
        why = "that it needs the results of" if group and _needs(node, group) else ""
        if len(group) == MOST:
            why = why or f"of which there are {MOST}, as many as one kernel has arguments for"
        (rest if why else group).append(node)
        reason = reason or why
    return group, rest, reason


def _needs(node: Node, others: Sequence[Node]) -> bool:
    """Whether one of `others`, which stand before, is computed on the way to a node."""
    first, sought, seen = min(others), set(others), set()
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop()
        if each in sought:
            return True
        if each not in seen and not each < first:
            seen.add(each)
            waiting += each.all_input_nodes
    return False


# The call


def _rewrite(group: Sequence[Node]) -> None:
    """Put one call in the place of products; the first of them is where it stands."""
    first = group[0]
    named = torch_private.arguments_of(first)
    shared = named["x"], named["activation_format"]
    layers = []
    for node in group:
        own = torch_private.arguments_of(node)
        layers.append(Layer(own["weight"], own["bias"], own["residual"]).plain)
    with first.graph.inserting_before(first):
        args = (*shared, layers, named["weight_format"], named["k"], named["dtype"])
        made = first.graph.call_function(linear_products, args)
        values: list[Tensor] = [node.meta["val"] for node in group]
        made.meta = {**first.meta, "val": values}
        for i, node in enumerate(group):
            result = first.graph.call_function(operator.getitem, (made, i))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
    for node in group:
        node.graph.erase_node(node)
    if any(made < each for each in made.all_input_nodes):
        # The bias of a later one may be computed after the first; what follows asks what stands before what.
        torch_private.sort_graph(made.graph)
