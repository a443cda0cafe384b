"""The body of a `fused_quantize` as what a template inlines: graphs on scalars, one for each thing that is computed.

In a body every tensor stands for one element of its row and column, but for reductions over the columns. It is cut
there: each reduction is a stage of its own, whose result later stages take as one more scalar.

The names of a body's inputs say what they are:

    product_0   a product, (M, K)
    full_0      a tensor (M, K)
    column_0    (K,), the same in every row
    row_0       (M, 1), the same in every column
    scalar_0    one number
"""

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from olq_fx.kernels.fused_quantize import Body, Stage

KINDS = ("product", "full", "column", "row", "scalar")

_REPEAT = torch.ops.aten.repeat_interleave.self_int
_CAST = torch.ops.prims.convert_element_type.default
_NARROW = (torch.bfloat16, torch.float16)
_MOMENTS = torch.ops.aten.var_mean.correction
REDUCTIONS = {
    torch.ops.aten.mean.dim: "mean",
    torch.ops.aten.sum.dim_IntList: "sum",
    torch.ops.aten.amax.default: "amax",
    _MOMENTS: "moments",
}
"""Reductions over columns, with the names that the template of rows gives them."""


def kind_of(placeholder: Node) -> str:
    """What an input of a body is, of `KINDS`."""
    return str(placeholder.target).rpartition("_")[0]


def name_of(body: GraphModule) -> str:
    """A name for what a body computes, whatever the number of its rows."""
    lines = [str((node.name, node.op, node.target, node.args, node.kwargs, _kinds(node))) for node in body.graph.nodes]
    return f"body_{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:24]}"


def _kinds(node: Node) -> list[str]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [f"{each.dtype}{tuple(each.shape[1:])}" for each in values if isinstance(each, Tensor)]


def cut(body: GraphModule) -> Body:
    """A body with its stages."""
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    reductions = [node for node in body.graph.nodes if node.target in REDUCTIONS]
    repeats = tuple(sorted({node.args[1] for node in body.graph.nodes if node.target is _REPEAT}))
    names = _names(placeholders, reductions)
    inputs = (*_names_of(names, "y"), "m", "n", *(f"m_{count}" for count in repeats))
    inputs += (*_names_of(names, "r"), *_names_of(names, "t"))
    [results] = body.graph.output_node().args
    assert isinstance(results, (tuple, list))
    stages = [
        Stage(_scalar(body, node.args[0], inputs, names), REDUCTIONS[node.target], dtype_of(node))
        for node in reductions
    ]
    stages += [Stage(_scalar(body, result, inputs, names), "", torch.float32) for result in results]
    whole, *kept = (result.meta["val"] for result in results)  # type: ignore[union-attr]
    return Body(
        *(body, tuple(stages), inputs, int(whole.shape[1]), tuple(value.dtype for value in kept), _tall(placeholders)),
        dtype=whole.dtype,
    )


def _tall(placeholders: Sequence[Node]) -> int:
    """The number of a tensor that has a row for each of the matrix."""
    tensors = [node for node in placeholders if kind_of(node) != "product"]
    if len(tensors) < len(placeholders):
        return -1
    for i, node in enumerate(tensors):
        if kind_of(node) in ("full", "row") and all(user.target is not _REPEAT for user in node.users):
            return i
    raise AssertionError("a body of rows reads them from somewhere")


def dtype_of(node: Node) -> torch.dtype:
    """What a node computes has this dtype, its first result if there are several."""
    value = node.meta["val"]
    dtype: torch.dtype = (value[0] if isinstance(value, (tuple, list)) else value).dtype
    return dtype


Names = dict[Node, tuple[str, ...]]


def _names(placeholders: Sequence[Node], reductions: Sequence[Node]) -> Names:
    """What comes into a stage for each input and each reduction of a body."""
    products = [node for node in placeholders if kind_of(node) == "product"]
    tensors = [node for node in placeholders if kind_of(node) != "product"]
    found: Names = {node: (f"y{i}",) for i, node in enumerate(products)}
    for i, node in enumerate(reductions):
        found[node] = (f"r{i}", f"r{i}_mean") if node.target is _MOMENTS else (f"r{i}",)
    return found | {node: (f"t{i}",) for i, node in enumerate(tensors)}


def _names_of(names: Names, letter: str) -> tuple[str, ...]:
    return tuple(name for given in names.values() for name in given if name.startswith(letter))


def _scalar(body: GraphModule, result: Any, inputs: Sequence[str], names: Names) -> GraphModule:
    """A graph on scalars that computes one node of a body."""
    graph = Graph()
    given = {name: graph.placeholder(name) for name in inputs}
    copies: dict[Node, Any] = {}
    for node in body.graph.nodes:
        if node in names:
            copies[node] = _given(graph, node, [given[name] for name in names[node]], given)
        elif node.target is _REPEAT:
            source, count, _ = node.args
            copies[node] = _element(graph, source, given[names[source][0]], given[f"m_{count}"], given["n"])
        elif node.op == "call_function":
            copies[node] = _copied(graph, node, copies)
    graph.output(copies[result])
    graph.eliminate_dead_code()
    return GraphModule(torch.nn.Module(), graph)


def _given(graph: Graph, node: Node, values: Sequence[Node], given: Mapping[str, Node]) -> Any:
    """What stands for an input or a reduction: a scalar."""
    if node.op != "placeholder":
        return tuple(values) if len(values) > 1 else values[0]
    if kind_of(node) == "product":  # rounded to its dtype already
        return values[0]
    return _element(graph, node, values[0], given["m"], given["n"])


def _element(graph: Graph, placeholder: Node, tensor: Node, m: Node, n: Node) -> Node:
    """The element of a tensor at a row and a column; in float32 if its dtype is a narrow one."""
    kind = kind_of(placeholder)
    index = {"full": [m, n], "column": [n], "row": [m], "scalar": []}[kind]
    found = graph.call_function(torch.ops.aten.index.Tensor, (tensor, index)) if index else tensor
    if kind == "row":  # Inductor has no selection from a tensor in memory that is a view of another.
        found = graph.call_function(torch.ops.aten.select.int, (found, -1, 0))
    return _wide(graph, found) if dtype_of(placeholder) in _NARROW else found


def _wide(graph: Graph, value: Any) -> Node:
    return graph.call_function(_CAST, (value, torch.float32))


def _rounded(graph: Graph, value: Any, dtype: torch.dtype) -> Node:
    """A float32 value after a cast to a narrow dtype and back.

    A cast of aten's would do, but Inductor leaves it out in some versions, because it computes in float32 anyway.
    """
    return graph.call_function(torch.ops.olq_fx.rounded.default, (value, dtype))


def _is_integer(node: Node) -> bool:
    dtype = dtype_of(node)
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _copied(graph: Graph, node: Node, copies: Mapping[Node, Any]) -> Any:
    """A pointwise operation on scalars.

    What has a narrow dtype is a float32 number here that this dtype has too: narrow operations are computed in float32
    and rounded, as eager mode does it.
    """
    if node.target is operator.getitem:
        source, number = node.args
        assert isinstance(source, Node)
        return copies[source][number]
    dtype = dtype_of(node)
    if node.target is _CAST:
        [source] = node.all_input_nodes
        return _cast(graph, copies[source], dtype_of(source), dtype)

    def operand(each: Node) -> Any:
        # Eager mode rounds integers to the dtype of a narrow result first.
        if dtype in _NARROW and _is_integer(each):
            return _rounded(graph, _wide(graph, copies[each]), dtype)
        return copies[each]

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
    assert callable(node.target)
    found = graph.call_function(node.target, args, kwargs)
    return _rounded(graph, found, dtype) if dtype in _NARROW else found


def _cast(graph: Graph, value: Any, source: torch.dtype, target: torch.dtype) -> Node:
    """A cast between any two dtypes, of which narrow ones are float32 here."""
    if target in _NARROW:
        return _rounded(graph, value if source in (torch.float32, *_NARROW) else _wide(graph, value), target)
    if target == torch.float32 and source in _NARROW:
        found: Node = value
        return found
    return graph.call_function(_CAST, (value, target))
