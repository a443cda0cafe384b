"""What leads up to a matrix, as far as it is computed row by row: the region that a fused kernel can take over.

A region is found backwards from a matrix (M, K): through pointwise operations, views that keep rows whole, and
reductions over columns, to what is in memory. In the graph it may be seen in other shapes: (B, S, K) with B S = M, one
value a row (B, S, 1), one a column (K,), one a batch (B, 1, K).

The graph is one of aten operators, as AOTAutograd makes it.
"""

import dataclasses
import operator
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from olq_fx import torch_private
from olq_fx.kernels.on_load import LINEAR_ON_LOAD
from olq_fx.passes.fxtools import tensor_of

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
MOMENTS = aten.var_mean.correction
REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, MOMENTS)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default, aten.alias.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCT = torch.ops.olq_fx.quantized_linear.default
PRODUCTS = (PRODUCT, LINEAR_ON_LOAD)

Shape = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Some columns of a product that a region reads.

    Attributes:
        product: the call.
        first, columns: which.
        path: the nodes between the call and what the region reads, that included.
    """

    product: Node
    first: int
    columns: int
    path: tuple[Node, ...]

    @property
    def read(self) -> Node:
        """What the region reads."""
        return self.path[0] if self.path else self.product

    @property
    def residual(self) -> Node | None:
        """What the product adds after its rounding."""
        found = self.product.args[7]
        return found if isinstance(found, Node) else None

    @property
    def kernel(self) -> str:
        """The kernel that must run the product; "" for the best."""
        named = torch_private.arguments_of(self.product)
        return str(named.get("kernel", ""))

    @property
    def rule(self) -> str:
        """Of the scales, where the product quantizes on load; else ""."""
        return str(self.product.args[8]) if self.product.target is LINEAR_ON_LOAD else ""

    @property
    def is_whole(self) -> bool:
        """Whether these are all columns of the product."""
        value = tensor_of(self.product)
        return value is not None and same(value.shape[1], self.columns)


@dataclasses.dataclass(slots=True)
class Region:
    """What was found.

    Attributes:
        root: the matrix.
        shape: its shape (M, K).
        inside: the operations, with the extents of rows that each is computed for. What is broadcast may have several:
            (2, 1, K) is another thing to rows (2, 2) than to rows (2, 2, 1).
        leaves: what they read from elsewhere, with all such extents.
        stops: full-sized operations that count as leaves, because something that the region reads depends on them.
    """

    root: Node
    shape: Shape
    inside: dict[Node, list[Shape]] = dataclasses.field(default_factory=dict)
    leaves: dict[Node, list[Shape]] = dataclasses.field(default_factory=dict)
    stops: frozenset[Node] = frozenset()

    @property
    def ordered(self) -> list[Node]:
        """The operations in the order of the graph."""
        return sorted(self.inside)

    @property
    def reductions(self) -> list[Node]:
        """Those over columns."""
        return [node for node in self.ordered if node.target in REDUCTIONS]

    def kept(self, *but: Node) -> list[Node]:
        """Operations that others than `but` read, by themselves or through a view."""
        return [
            node
            for node in self.ordered
            if node.target not in VIEWS and not self._is_small(node) and any(self.outside(node, but))
        ]

    def outside(self, node: Node, but: Sequence[Node] = ()) -> Iterator[Node]:
        """Who reads an operation outside of the region, by itself or through a view."""
        for user in node.users:
            if user not in self.inside:
                if user not in but:
                    yield user
            elif user.target in VIEWS:
                yield from self.outside(user, but)

    def _is_small(self, node: Node) -> bool:
        """Whether an operation is so small that whoever reads it may compute it again."""
        value = tensor_of(node)
        return (
            value is not None
            and not self.is_full(value)
            and not any(each.target in REDUCTIONS for each in _ancestors(node, self.inside))
        )

    def is_full(self, value: Tensor) -> bool:
        """Whether a tensor has an element for each of the matrix."""
        rows, columns = self.shape
        return value.dim() >= 2 and same(value.shape[-1], columns) and same(value.numel(), rows * columns)


def same(a: Any, b: Any) -> bool:
    """Whether two extents are known to be equal."""
    return torch_private.known_equal(a, b)


def find(root: Node) -> Region:
    """The region of a matrix, with as much inside as can be."""
    stops: frozenset[Node] = frozenset()
    while True:
        value = tensor_of(root)
        assert value is not None
        region = Region(root, tuple(value.shape), stops=stops)
        _grow(region, root, tuple(value.shape[:-1]))
        early = {kept for kept in region.kept() if kept not in _views_of(root) and not _can_be_kept(kept, region)}
        if not early:
            return region
        stops |= early


def _views_of(node: Node) -> list[Node]:
    """A node, and what it is a view of."""
    found = [node]
    while found[-1].target in VIEWS:
        found.append(found[-1].all_input_nodes[0])
    return found


def _can_be_kept(node: Node, region: Region) -> bool:
    """Whether an operation that others read too can be computed in the region, and be handed to them afterwards."""
    value = tensor_of(node)
    return value is not None and region.is_full(value) and value.dtype in DTYPES and not _feeds(node, region)


def _feeds(kept: Node, region: Region) -> bool:
    """Whether something that a region reads depends on one of its operations by a way around."""
    seen: set[Node] = set()
    waiting = list(region.outside(kept))
    while waiting:
        node = waiting.pop()
        if node in region.leaves:
            return True
        if node not in seen:
            seen.add(node)
            waiting.extend(user for user in node.users if user not in region.inside)
            if any(user in region.inside for user in node.users):
                return True
    return False


def _grow(region: Region, root: Node, rows: Shape) -> None:
    """Take in a node that is computed for rows of these extents, and all that it is computed from."""
    waiting = [(root, rows)]
    while waiting:
        node, rows = waiting.pop()
        value = tensor_of(node)
        if value is not None and region.is_full(value):
            rows = tuple(value.shape[:-1])
        is_leaf = node in region.stops or not _is_inside(region, node, value)
        known = (region.leaves if is_leaf else region.inside).setdefault(node, [])
        if any(_alike(rows, each) for each in known):
            continue
        known.append(rows)
        if not is_leaf:
            # What else a view reads are extents.
            sources = node.all_input_nodes[:1] if node.target in VIEWS else node.all_input_nodes
            waiting += [(source, rows) for source in reversed(sources)]


def _alike(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def _is_inside(region: Region, node: Node, value: Tensor | None) -> bool:
    """Whether an operation can be part of a region."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and node.args[0].target is MOMENTS
    if node.target in REDUCTIONS:
        return _over_columns(region, node)
    if value is None:
        return False
    if node.target in VIEWS:
        source = tensor_of(node.args[0])
        return source is not None and region.is_full(value) and region.is_full(source)
    return node.target is CAST or torch_private.is_inlined(node.target)


def _over_columns(region: Region, node: Node) -> bool:
    """Whether a reduction is one over the columns of something full, and keeps its dimension."""
    source = tensor_of(node.args[0])
    if source is None or not region.is_full(source):
        return False
    named = torch_private.arguments_of(node)
    # A row is held and added in float32.
    if source.dtype not in DTYPES or named.get("dtype") not in (None, *DTYPES):
        return False
    dims = named.get("dim")
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or dims[0] not in (-1, source.dim() - 1):
        return False
    return named.get("keepdim") is True and named.get("correction", 0) == 0


def _ancestors(node: Node, inside: Container[Node]) -> Iterator[Node]:
    waiting, seen = [node], set()
    while waiting:
        each = waiting.pop()
        if each in inside and each not in seen:
            seen.add(each)
            yield each
            waiting.extend(each.all_input_nodes)


def piece_of(region: Region, leaf: Node) -> Piece | None:
    """The columns of a product that a leaf is; None if it is something else."""
    path, node, first = [leaf], leaf, 0
    value = tensor_of(leaf)
    if value is None or not region.is_full(value) or not isinstance(columns := value.shape[-1], int):
        return None
    while node.target not in PRODUCTS:
        step = _step(node)
        if step is None:
            return None
        offset, node = step
        first += offset
        path.append(node)
    return Piece(node, first, columns, tuple(path[:-1]))


def _step(node: Node) -> tuple[int, Node] | None:
    """From a view of whole rows, or some of their columns, to what it is a view of, and by how many columns."""
    if node.op != "call_function" or not node.args:
        return None
    source, value = node.args[0], tensor_of(node)
    if not isinstance(source, Node) or value is None:
        return None
    if node.target is operator.getitem and source.target in SPLITS:
        return _split_step(node, source, value)
    whole = tensor_of(source)
    if whole is None:
        return None
    if node.target in VIEWS and same(whole.shape[-1], value.shape[-1]):
        return 0, source
    if node.target is aten.slice.Tensor:
        named = torch_private.arguments_of(node)
        if named["dim"] in (-1, whole.dim() - 1) and named.get("step", 1) == 1:
            return _slice_step(named["start"], whole.shape[-1], source)
    return None


def _slice_step(start: Any, extent: Any, source: Node) -> tuple[int, Node] | None:
    """Of a slice that begins somewhere, which may be given from the end, or before the first column."""
    if start is None or (isinstance(start, int) and start == 0):
        return 0, source
    if not isinstance(start, int) or not isinstance(extent, int):
        return None
    return max(0, start + extent if start < 0 else start), source


def _split_step(node: Node, split: Node, value: Tensor) -> tuple[int, Node] | None:
    named = torch_private.arguments_of(split)
    whole = split.args[0]
    assert isinstance(whole, Node)
    if named["dim"] not in (-1, value.dim() - 1):
        return None
    number: Any = node.args[1]
    sizes: Any = named.get("split_sizes", named.get("split_size"))
    return (int(sum(sizes[:number])) if isinstance(sizes, Sequence) else int(sizes) * number), whole
