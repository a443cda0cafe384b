"""Makes one kernel of a quantization on a GPU and of what leads up to it.

    %y : "bf16[M, N]" = olq_fx.quantized_linear(%gate, ...)
    %z : "bf16[M, N]" = olq_fx.quantized_linear(%up, ...)
    %s = silu(%y) * %z                                            any pointwise operations
    %q = olq_fx.quantize(%s, format, rule)
->
    %q = olq_fx_fused_quantize(body, [gate, up], [], format, rule)

and likewise of a norm, which has reductions over rows, with the addition of a residual before it. What others read too
(the residual stream) is a result of the same call.

It runs on the graph of aten operators. A quantization that has neither products nor reductions before it stays as it
is: Inductor makes one kernel of it and of what is pointwise before it.
"""

import collections
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from olq_fx import torch_private
from olq_fx.formats import get_format
from olq_fx.kernels import support
from olq_fx.kernels.fused_quantize import Product, fused_quantize, remember
from olq_fx.kernels.on_load import fused_maxima, maxima_of
from olq_fx.passes.base import PassResult, Reject
from olq_fx.passes.body_stages import cut, name_of
from olq_fx.passes.fxtools import caller, tensor_of
from olq_fx.passes.on_load import read_on_load, readers_on_load, result, zeroed
from olq_fx.passes.region_bodies import CannotSay, RegionBody
from olq_fx.passes.row_regions import DTYPES, VIEWS, Piece, Region, find, piece_of

_QUANTIZE = torch.ops.olq_fx.quantize.default
_OURS = ("", "triton")
"""Kernels whose products a template computes as they do."""

LONGEST_ROW = 16384
"""Columns of a row that one program holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class FuseQuantize:
    """Fuses quantizations with their producers.

    Attributes:
        devices: kinds of devices whose compiler makes one kernel of the call.
    """

    devices: tuple[str, ...] = ("cuda",)
    name: ClassVar[str] = "fuse_quantize"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Fuse what can be fused."""
        fused = 0
        rejects: list[Reject] = []
        notes: list[str] = []
        for node in [each for each in gm.graph.nodes if each.target is _QUANTIZE]:
            x = tensor_of(node.args[0])
            if x is None or x.device.type not in self.devices or x.dtype not in DTYPES:
                continue
            lacks = _lacks(x.device)
            where = caller(node) or node.name
            if lacks:
                rejects.append(Reject(where, f"no kernel fuses its quantization: {lacks}"))
                continue
            outcome = _fuse(node)
            fused += outcome.fused
            rejects += [Reject(where, outcome.reason)] if outcome.reason else []
            notes += [f"{where}: {outcome.note}"] if outcome.note else []
        if fused:
            torch_private.drop_dead_code(gm)
        return PassResult(fused, tuple(rejects), tuple(notes))


def _lacks(device: torch.device) -> str:
    """Why no kernel is made for a device; "" if one is."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return support.why_not(10 * major + minor)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one quantization.

    Attributes:
        fused: whether it was fused with what is before it.
        reason: why it was not, or not with all of it.
        note: how, where there was a choice.
    """

    fused: bool
    reason: str = ""
    note: str = ""


def _fuse(quantize: Node) -> _Outcome:
    root, format = quantize.args[0], str(quantize.args[1])
    assert isinstance(root, Node)
    region = find(root)
    found = [piece for leaf in region.leaves if (piece := piece_of(region, leaf)) is not None]
    pieces, apart = _pieces(region, found, quantize)
    maxima = _wider_than_a_tile(format) if pieces else ""
    readers: list[Node] = []
    told = ""
    if maxima:
        readers, told = readers_on_load(quantize, pieces)
        pieces, apart = (pieces, "") if readers else ([], f"{maxima}, and {told}")
    reason = f"the product before its quantization is a kernel of its own: {apart}" if apart else ""
    if not (pieces or region.reductions or _takes_several_kernels(format)):
        return _Outcome(False, reason)
    try:
        if not pieces:
            _check_rows(region, format)
        _rewrite(quantize, RegionBody(region, pieces, quantize), readers)
    except CannotSay as refusal:
        return _Outcome(False, f"its quantization is a kernel of its own: {refusal}")
    return _Outcome(True, reason, f"quantized by what reads it: {told}" if readers else "")


def _wider_than_a_tile(format: str) -> str:
    """Why no tile of a product holds the groups of a format; "" if one does."""
    group = get_format(format)
    if group.group[0] == 1 and group.group[1] is not None and group.coarse is None:
        return ""
    return f"{format} has a statistic of more than a piece of a row, which no tile of a product holds"


def _takes_several_kernels(format: str) -> bool:
    """Whether Inductor makes more than one kernel of a quantization, though all before it is pointwise."""
    found = get_format(format)
    return found.packed or (found.coarse is not None and found.coarse[0] == 1)


def longest_row(format: str) -> int:
    """Columns of a row that one program holds in registers, with what the format needs beside it."""
    coarse = get_format(format).coarse
    return LONGEST_ROW // 2 if coarse is not None and coarse[1] is not None else LONGEST_ROW


def _check_rows(region: Region, format: str) -> None:
    columns, longest = region.shape[1], longest_row(format)
    if not isinstance(columns, int) or columns > longest:
        raise CannotSay(f"rows of {columns} columns are longer than {longest}, which is what one program holds")
    found = get_format(format)
    if found.group[0] != 1 or (found.coarse is not None and found.coarse[0] != 1):
        raise CannotSay(f"{format} has a statistic of more than a row")


def _pieces(region: Region, found: list[Piece], quantize: Node) -> tuple[list[Piece], str]:
    """The products that are computed in the same kernel; where there is none of some, the reason."""
    if not found or region.reductions:
        return [], ""
    for piece in found:
        if not _is_own(region, piece, [each for each in found if each.product is piece.product], quantize):
            found = [each for each in found if each is not piece]
    if not found:
        return [], "others read the product too"
    found = [piece for piece in found if piece.residual is None or piece.is_whole]
    if not found:
        return [], "a residual is added to the whole product, of which these are some columns"
    found = [piece for piece in found if piece.kernel in _OURS]
    if not found:
        return [], "another kernel must run the product"
    if any(not isinstance(extent, int) for extent in region.shape[1:]):
        return [], "its rows have a symbol's number of columns"
    sharing = collections.Counter(map(_sharing, found))
    most, _ = sharing.most_common(1)[0]
    chosen = _few([piece for piece in found if _sharing(piece) == most])
    return chosen, "" if chosen else "more than two parts of it are read"


def _few(pieces: list[Piece]) -> list[Piece]:
    """At most two, of products that need not be computed elsewhere for the sake of other pieces."""
    chosen: list[Piece] = []
    for product in dict.fromkeys(piece.product for piece in pieces):
        parts = [piece for piece in pieces if piece.product is product]
        if len(chosen) + len(parts) <= 2:
            chosen += parts
    return chosen


def _sharing(piece: Piece) -> tuple[Any, ...]:
    """What products have in common that one kernel can compute: activations, formats, K, dtype."""
    x, activation_format, _, weight_format, k, dtype, *_ = piece.product.args
    assert isinstance(x, (list, tuple))
    return tuple(x), activation_format, weight_format, k, dtype, piece.rule


def _is_own(region: Region, piece: Piece, alike: list[Piece], quantize: Node) -> bool:
    """Whether nothing but the region reads a product."""
    read = {each.read for each in alike}
    path = {node for each in alike for node in each.path} | {piece.product}
    waiting = [piece.product]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in path:
                waiting.append(user)
            elif node in read and (user in region.inside or user is quantize):
                continue
            elif not (user.target is operator.getitem and not user.users):
                split = any(each in path for each in user.users)
                if not split:
                    return False
                waiting.append(user)
    return True


def _rewrite(quantize: Node, body: RegionBody, readers: list[Node]) -> None:
    """Put the call in the place of a quantization, and its results in that of what is kept.

    Where there are readers they quantize on load, and the call gives values with their maxima.
    """
    made = body.graph_module()
    graph = quantize.graph
    results: Any = made.graph.output_node().args[0]
    whole, *kept = (each.meta["val"] for each in results)
    with graph.inserting_before(quantize):
        products = [_plain(piece) for piece in body.pieces]
        args: tuple[Any, ...] = (remember(name_of(made), cut(made)), products, body.tensors(graph))
        parts: Any = quantize.meta["val"]
        if readers:
            maxima = maxima_of(get_format(str(quantize.args[1])))
            assert maxima is not None
            shape = whole.shape[0], maxima.parts(whole.shape[1])
            parts = [whole, whole.new_empty(shape, dtype=torch.int32)]
            zeros = zeroed(body.pieces[0].product, shape)
            fused = graph.call_function(fused_maxima, (*args, maxima.wide, maxima.finite, zeros))
        else:
            fused = graph.call_function(fused_quantize, (*args, *quantize.args[1:3]))
        fused.meta = {**quantize.meta, "val": [*parts, *kept]}
        for i, node in enumerate(body.kept):
            _hand_over(node, result(fused, len(parts) + i, kept[i]), body.region, quantize)
        if readers:
            given = [result(fused, i, part) for i, part in enumerate(parts)]
            read_on_load(readers, given[0], given[1], str(quantize.args[2]))
    if not readers:
        quantize.replace_all_uses_with(fused)
        graph.erase_node(quantize)
    # What reads a result that is kept may stand before the call. Sorting takes as long as the graph is.
    if any(user < fused for node in _derived(fused) for user in node.users):
        torch_private.sort_graph(graph)


def _derived(node: Node) -> Iterator[Node]:
    """A call, its results, and the views of them."""
    yield node
    for user in node.users:
        if user.target is operator.getitem or user.target in VIEWS:
            yield from _derived(user)


def _plain(piece: Piece) -> Any:
    x, activation_format, weight, weight_format, k, dtype, bias, *_ = piece.product.args
    args: Any = (x, activation_format, weight, weight_format, k, dtype, bias, piece.first, piece.columns, piece.rule)
    return Product(*args).plain


def _hand_over(node: Node, matrix: Node, region: Region, quantize: Node) -> None:
    """Let those outside read a result of the call in the place of an operation of the region."""
    value = tensor_of(node)
    assert value is not None
    seen = matrix
    if tuple(value.shape) != tuple(matrix.meta["val"].shape):
        seen = torch_private.viewed(matrix, node)
    for user in list(node.users):
        # Views are read outside too; the other operations of the region are about to go.
        if (user not in region.inside or user.target in VIEWS) and user is not quantize and user is not seen:
            user.replace_input_with(node, seen)
