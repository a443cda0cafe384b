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

from olq_fx.kernels.fused_quantize import fused_quantize
from olq_fx.kernels.on_load import LINEAR_ON_LOAD
from olq_fx.passes.fxtools import tensor_of
from olq_fx.passes.row_regions import PRODUCT

_OURS = ("", "triton")


def readers_of(quantize: Node) -> tuple[list[Node], str]:
    """The products that read a quantization, in their order; none and the reason where it has other readers too."""
    parts = [user for user in quantize.users if user.target is operator.getitem]
    if len(parts) < len(quantize.users):
        return [], f"{next(user for user in quantize.users if user not in parts).name} reads its parts"
    found: dict[Node, None] = {}
    for part in parts:
        for user in part.users:
            if not _reads_all(user, quantize):
                return [], f"{user.name} reads its parts and is no product of them"
            if user.args[8:] and user.args[8] not in _OURS or user.kwargs.get("kernel", "") not in _OURS:
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


def shape_of(product: Node) -> tuple[int, int]:
    """(N, K) of a product."""
    weight: Any = product.args[2]
    value = tensor_of(weight[0])
    assert value is not None
    k: Any = product.args[4]
    return int(value.shape[0]), int(k)


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
    x: Any = product.args[0]
    maker = x[0].args[0] if x[0].target is operator.getitem else None
    if maker is None or maker.target is not fused_quantize or maker.args[1]:
        return []
    *others, zeros = (*maker.args, ()) if len(maker.args) == 5 else maker.args
    maker.args = (*others, (*zeros, shape[1]))
    value = x[0].meta["val"].new_empty(shape, dtype=torch.int32)
    maker.meta["val"] = [*maker.meta["val"], value]
    with maker.graph.inserting_after(maker):
        return [result(maker, len(maker.meta["val"]) - 1, value)]


def result(fused: Node, number: int, value: Tensor) -> Node:
    """One of the results of a fused call, with what is known of it."""
    node = fused.graph.call_function(operator.getitem, (fused, number))
    node.meta = {**fused.meta, "val": value}
    return node
