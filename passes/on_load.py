"""Where a format's groups are wider than a tile of a product: who may quantize on load what the product computes.

    %p = products and a pointwise chain          the region of `fuse_quantize`
    %q = olq_fx.quantize(%p, format, rule)
    %y = olq_fx.quantized_linear(%q, ...)        and no other readers
->
    %v, %m = olq_fx_fused_maxima(body, products, tensors, ...)
    %y = olq_fx.linear_on_load([%v, %m], ...)
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from olq_fx import torch_private
from olq_fx.formats import get_format
from olq_fx.kernels.fused_quantize import fused_quantize
from olq_fx.kernels.on_load import LINEAR_ON_LOAD, fused_maxima, maxima_of
from olq_fx.kernels.on_load_cost import Handover
from olq_fx.passes.fxtools import tensor_of
from olq_fx.passes.row_regions import PRODUCT, Piece

_OURS = ("", "triton")


def readers_on_load(quantize: Node, pieces: Sequence[Piece]) -> tuple[list[Node], str]:
    """The products that shall quantize on load what these pieces become, and why.

    None, and why not, where a kernel of its own quantizes cheaper, or must.
    """
    format, value = get_format(str(quantize.args[1])), tensor_of(quantize.args[0])
    assert value is not None
    if maxima_of(format) is None:
        return [], "the maximum of the whole tensor is taken by a kernel of its own"
    readers, reason = _readers_of(quantize)
    if reason:
        return [], reason
    rows, columns = map(torch_private.known_extent, value.shape)
    hint = torch_private.hint_of(rows)
    if hint is None:
        return [], "how many rows it has depends on data"
    handover = Handover(
        format=format,
        products=len({piece.product for piece in pieces}),
        pieces=len(pieces),
        columns=tuple(_columns_of(reader) for reader in readers),
        k=int(columns),
        size=value.dtype.itemsize,
        zeroed=_maker_of(pieces[0].product.args[0]) is not None,
    )
    found = handover.decide(hint, _capability_of(value.device), fixed=isinstance(rows, int))
    return readers if found.on_load else [], str(found)


def _capability_of(device: torch.device) -> int:
    """Of a GPU; of what is none that of a GPU that is common."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _readers_of(quantize: Node) -> tuple[list[Node], str]:
    """The products that read a quantization, in their order; none and the reason where it has other readers too."""
    parts = [user for user in quantize.users if user.target is operator.getitem]
    if len(parts) < len(quantize.users):
        return [], f"{next(user for user in quantize.users if user not in parts).name} reads its parts"
    found: dict[Node, None] = {}
    for part in parts:
        for user in part.users:
            if not _reads_all(user, quantize):
                return [], f"{user.name} reads its parts and is no product of them"
            if torch_private.arguments_of(user)["kernel"] not in _OURS:
                return [], f"another kernel must run {user.name}, which reads its parts"
            found[user] = None
    return sorted(found), "" if found else "nothing reads its parts"


def _reads_all(user: Node, quantize: Node) -> bool:
    """Whether a node is a product of all parts of a quantization with something else."""
    if user.target is not PRODUCT or user.args[1] != quantize.args[1]:
        return False
    x: Any = user.args[0]
    of_it = [each.target is operator.getitem and each.args == (quantize, i) for i, each in enumerate(x)]
    others = [*user.args[2], *user.args[6:8]]  # type: ignore[misc]
    return all(of_it) and not any(isinstance(each, Node) and each in x for each in others)


def _columns_of(product: Node) -> int:
    """N of a product."""
    value = tensor_of(product)
    assert value is not None
    return int(value.shape[1])


def read_on_load(readers: Sequence[Node], values: Node, maxima: Node, rule: str) -> None:
    """Let products quantize the values themselves."""
    for reader in readers:
        with reader.graph.inserting_before(reader):
            args = ([values, maxima], *reader.args[1:8], rule)
            made = reader.graph.call_function(LINEAR_ON_LOAD, args)
        made.meta = {**reader.meta, "original_aten": LINEAR_ON_LOAD}
        reader.replace_all_uses_with(made)
        reader.graph.erase_node(reader)


def zeroed(product: Node, shape: tuple[Any, int]) -> list[Node]:
    """An int32 of this shape that the kernel sets to 0 which makes the activations of a product; none if none can."""
    maker = _maker_of(product.args[0])
    if maker is None:
        return []
    # What is set to zero is the sixth argument.
    already: Any = maker.args[5] if len(maker.args) > 5 else ()
    maker.args = (*maker.args[:5], (*already, shape[1]))
    value = maker.meta["val"][0].new_empty(shape, dtype=torch.int32)
    maker.meta["val"] = [*maker.meta["val"], value]
    with maker.graph.inserting_after(maker):
        return [result(maker, len(maker.meta["val"]) - 1, value)]


def _maker_of(x: Any) -> Node | None:
    """The kernel of rows that makes the activations of a product, or those of the product that these are made of."""
    maker = x[0].args[0] if x[0].target is operator.getitem else None
    if not isinstance(maker, Node) or maker.target not in (fused_quantize, fused_maxima):
        return None
    products: Any = maker.args[1]
    if products:
        return _maker_of(products[0][0])
    return maker


def result(fused: Node, number: int, value: Tensor) -> Node:
    """One of the results of a fused call, with what is known of it."""
    node = fused.graph.call_function(operator.getitem, (fused, number))
    node.meta = {**fused.meta, "val": value}
    return node
