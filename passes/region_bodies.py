"""The body of a fused quantization: a region of a graph said once more, of matrices only, as a graph of its own.

    body = RegionBody(region, pieces, residuals)
    body.graph_module()    of products and tensors to the matrix that is quantized and what is kept
    body.tensors(emit)     what it reads, as matrices

See `body_stages` for the names of its inputs.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from olq_fx import torch_private
from olq_fx.passes.fxtools import tensor_of
from olq_fx.passes.row_regions import DTYPES, REDUCTIONS, VIEWS, Piece, Region, Shape, same

aten = torch.ops.aten
_REPEAT = aten.repeat_interleave.self_int


class CannotSay(Exception):  # noqa: N818
    """Something that a body has no word for; the message is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that a body reads.

    Attributes:
        node: in the outer graph.
        kind: of `body_stages.KINDS`.
        shape: of the matrix, the row or the number that the body sees; -1 for the number of rows.
        repeats: how many rows of the region share one of it.
    """

    node: Node
    kind: str
    shape: Shape
    repeats: int = 1


def leaf_of(region: Region, node: Node, rows: Shape) -> Leaf:
    """How a body reads a tensor that is broadcast against rows of these extents.

    Raises:
        CannotSay: it is broadcast in another way.
    """
    value = tensor_of(node)
    if value is None:
        raise CannotSay(f"{node.name} is no tensor")
    if (root := tensor_of(region.root)) is not None and value.device != root.device:
        raise CannotSay(f"{node.name} is on {value.device}, where its kernel cannot read it")
    columns, shape = region.shape[1], tuple(value.shape)
    if all(same(extent, 1) for extent in shape):
        return Leaf(node, "scalar", ())
    if region.is_full(value):
        return Leaf(node, "full", (-1, columns))
    leading, last = shape[:-1], shape[-1]
    if same(last, columns) and all(same(extent, 1) for extent in leading):
        return Leaf(node, "column", (columns,))
    if not (same(last, columns) or same(last, 1)) or len(leading) > len(rows):
        raise CannotSay(f"{node.name} of shape {shape} has no value for each row or column of {region.shape}")
    leading = (1,) * (len(rows) - len(leading)) + leading
    kind = "full" if same(last, columns) else "row"
    same_rows = [same(a, b) for a, b in zip(leading, rows, strict=True)]
    count = len(rows) if False not in same_rows else same_rows.index(False)
    if any(not same(extent, 1) for extent in leading[count:]):
        raise CannotSay(f"{node.name} of shape {shape} is repeated along other rows than the last ones of {rows}")
    repeats = 1
    for extent in rows[count:]:
        if not isinstance(extent, int):
            raise CannotSay(f"{node.name} of shape {shape} is repeated as often as a symbol says")
        repeats *= extent
    return Leaf(node, kind, (-1, columns if kind == "full" else 1), repeats)


def _only_leaf(region: Region, node: Node) -> Leaf:
    """How a body reads a tensor, which is the same wherever it does."""
    first, *others = [leaf_of(region, node, rows) for rows in region.leaves[node]]
    if any(other != first for other in others):
        raise CannotSay(f"{node.name} is repeated along different rows in different places")
    return first


class RegionBody:
    """A body that is made of a region."""

    def __init__(self, region: Region, pieces: Sequence[Piece], quantize: Node) -> None:
        """Find out what is read and kept.

        Args:
            region: what is computed.
            pieces: columns of products that the kernel computes too.
            quantize: the call that reads the region's matrix.

        Raises:
            CannotSay: something has no place in a body.
        """
        self.region = region
        self.pieces = pieces
        self.kept = region.kept(quantize)
        of_pieces = {piece.read for piece in pieces}
        self.residuals: list[Node | None] = [piece.residual for piece in pieces]
        self.leaves = [_only_leaf(region, node) for node in sorted(region.leaves) if node not in of_pieces]
        self._check()

    def _check(self) -> None:
        tall = [leaf for leaf in self.leaves if leaf.kind in ("full", "row") and leaf.repeats == 1]
        if not self.pieces and not tall:
            raise CannotSay("nothing that it reads has all its rows")
        for node in self.kept:
            value = tensor_of(node)
            if value is None or value.dtype not in DTYPES:
                raise CannotSay(f"{node.name} is read by others, and is no matrix of numbers")

    def graph_module(self) -> GraphModule:
        """The body, with fake values in its meta.

        Raises:
            CannotSay: an operation has another dtype on matrices.
        """
        graph = Graph()
        writer = _Writer(graph, self.region)
        places: dict[Node, Node] = {}
        for i, piece in enumerate(self.pieces):
            read = piece.read
            places[read] = writer.input(f"product_{i}", self._value(read, self.region.shape))
        for i, piece in enumerate(self.pieces):
            residual = self.residuals[i]
            if residual is not None:
                read = piece.read
                added = writer.input(f"full_{len(self.leaves) + i}", self._value(residual, self.region.shape))
                places[read] = writer.call(aten.add.Tensor, (places[read], added), {}, places[read].meta["val"].dtype)
        for i, leaf in enumerate(self.leaves):
            places[leaf.node] = self._input(writer, i, leaf)
        for node in self.region.ordered:
            places[node] = writer.copy(node, places)
        graph.output([places[node] for node in (self.region.root, *self.kept)])
        return torch_private.graph_module(graph)

    def _input(self, writer: "_Writer", i: int, leaf: Leaf) -> Node:
        shape = tuple(self.region.shape[0] if extent == -1 else extent for extent in leaf.shape)
        if leaf.repeats > 1:
            shape = (shape[0] // leaf.repeats, *shape[1:])
        found = writer.input(f"{leaf.kind}_{i}", self._value(leaf.node, shape))
        if leaf.repeats > 1:
            return writer.call(_REPEAT, (found, leaf.repeats, 0), {}, found.meta["val"].dtype)
        return found

    def _value(self, node: Node, shape: Shape) -> Tensor:
        value = tensor_of(node)
        assert value is not None
        return value.new_empty(shape)

    def tensors(self, graph: Graph) -> list[Node]:
        """What the body reads beside products, in the order of its inputs, as matrices of the outer graph."""
        residuals = [Leaf(node, "full", (-1, self.region.shape[1])) for node in self.residuals if node is not None]
        return [_viewed(graph, leaf) for leaf in (*residuals, *self.leaves)]


def _viewed(graph: Graph, leaf: Leaf) -> Node:
    value = tensor_of(leaf.node)
    assert value is not None
    wanted = value.reshape(leaf.shape)
    if tuple(wanted.shape) == tuple(value.shape):
        return leaf.node
    made = graph.call_function(aten.reshape.default, (leaf.node, list(leaf.shape)))
    made.meta = {**leaf.node.meta, "val": wanted}
    return made


class _Writer:
    """Writes a body, node by node."""

    def __init__(self, graph: Graph, region: Region) -> None:
        self._graph = graph
        self._region = region

    def input(self, name: str, value: Tensor) -> Node:
        node = self._graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        value = target(*values[0], **values[1])
        first = value[0] if isinstance(value, tuple) else value
        if dtype is not None and first.dtype != dtype:
            raise CannotSay(
                f"{torch_private.operator_name(target)} of these tensors is {dtype}, and of matrices {first.dtype}"
            )
        node.meta["val"] = value
        return node

    def copy(self, node: Node, places: dict[Node, Node]) -> Node:
        """An operation of the region, on matrices."""
        if node.target in VIEWS:
            source = node.args[0]
            assert isinstance(source, Node)
            return places[source]
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: places[each])
        value = tensor_of(node)
        if node.target in REDUCTIONS:
            args, kwargs = _over_last(node, args, kwargs)
        if node.target is operator.getitem:
            value = None
        return self.call(node.target, args, kwargs, None if value is None else value.dtype)


def _over_last(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a reduction over the columns of a matrix."""
    if len(args) > 1:
        return (args[0], [-1], *args[2:]), kwargs
    return args, {**kwargs, "dim": [-1]}
