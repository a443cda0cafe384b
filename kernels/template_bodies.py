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

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

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


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Something that is computed of every element.

    Attributes:
        graph: on scalars, with one result: see `Body.inputs` for what it takes.
        reduction: of `REDUCTIONS`, which is taken of it along its row; "" for what is quantized or kept.
        dtype: that the reduction has; of others float32.
    """

    graph: GraphModule
    reduction: str
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A body as stages: its reductions in order, then what is quantized, then what is kept.

    Attributes:
        stages: each takes the same inputs.
        inputs: their names: `y0` (a product), `m` and `n` (row and column), `m_8` (the row divided by 8), `r0` (what
            a stage was reduced to), `r0_mean` (its mean, where its variance is r0), `t0` (a tensor of the body).
        repeats: by how much the row of a tensor is divided.
    """

    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    repeats: tuple[int, ...]


def kind_of(placeholder: Node) -> str:
    """What an input of a body is, of `KINDS`."""
    return str(placeholder.target).rpartition("_")[0]


def cut(body: GraphModule) -> Body:
    """The stages of a body."""
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
    return Body(tuple(stages), inputs, repeats)


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
            copies[node] = _element(graph, kind_of(source), given[names[source][0]], given[f"m_{count}"], given["n"])
        elif node.op == "call_function":
            copies[node] = _copied(graph, node, copies)
    graph.output(copies[result])
    graph.eliminate_dead_code()
    return GraphModule(torch.nn.Module(), graph)


def _given(graph: Graph, node: Node, values: Sequence[Node], given: Mapping[str, Node]) -> Any:
    """What stands for an input or a reduction: a scalar of its dtype."""
    if node.op != "placeholder":
        return tuple(values) if len(values) > 1 else values[0]
    if kind_of(node) == "product":
        return graph.call_function(_CAST, (values[0], dtype_of(node)))
    return _element(graph, kind_of(node), values[0], given["m"], given["n"])


def _element(graph: Graph, kind: str, tensor: Node, m: Node, n: Node) -> Node:
    """The element of a tensor at a row and a column."""
    index = {"full": [m, n], "column": [n], "row": [m], "scalar": []}[kind]
    if kind == "row":
        tensor = graph.call_function(torch.ops.aten.select.int, (tensor, 1, 0))
    return graph.call_function(torch.ops.aten.index.Tensor, (tensor, index)) if index else tensor


def _copied(graph: Graph, node: Node, copies: Mapping[Node, Any]) -> Any:
    """A pointwise operation on scalars, rounded where its result is: computed in float32 and cast, as eager does it."""
    if node.target is operator.getitem:
        source, number = node.args
        assert isinstance(source, Node)
        return copies[source][number]
    narrow = node.target is not _CAST and dtype_of(node) in _NARROW

    def operand(each: Node) -> Any:
        if narrow and dtype_of(each) in _NARROW:
            return graph.call_function(_CAST, (copies[each], torch.float32))
        return copies[each]

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
    found = graph.call_function(node.target, args, kwargs)
    return graph.call_function(_CAST, (found, dtype_of(node))) if narrow else found
