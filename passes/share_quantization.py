"""Lets all layers that read one input share its quantization: q, k and v, gate and up.

    %a = olq_fx.quantize(%x, "mxfp8", "ceil");  %y = olq_fx.quantized_linear([%a[0], %a[1]], ..., %q_codes, ...)
    %b = olq_fx.quantize(%x, "mxfp8", "ceil");  %z = olq_fx.quantized_linear([%b[0], %b[1]], ..., %k_codes, ...)
->
    %a = olq_fx.quantize(%x, "mxfp8", "ceil");  both products read %a

Quantizations of one value, in one format, by one rule become one. So do the reshapes and casts that our passes put
before them. An input that is written to in between is quantized again; that is refused, with the reason.
"""

import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from olq_fx.passes.base import Context, PassResult, Reject
from olq_fx.passes.fxtools import MADE, Writes, caller, replace, tensor_of

_RESHAPES = frozenset(("flatten", "unsqueeze", "permute", "to"))


@dataclasses.dataclass(frozen=True, slots=True)
class ShareQuantization:
    """Merges equal quantizations."""

    context: Context
    name: ClassVar[str] = "share_quantization"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Merge each with the first equal one before it."""
        quantize = torch.ops.olq_fx.quantize.default
        writes = Writes(gm)
        first: dict[Any, Node] = {}
        merged = 0
        rejects = []
        for node in list(gm.graph.nodes):
            if not _shareable(node):
                continue
            key = (node.op, node.target, node.args, tuple(node.kwargs.items()))
            earlier = first.setdefault(key, node)
            if earlier is node:
                continue
            source = tensor_of(node.args[0])
            if source is not None and writes.between(earlier, node, source):
                first[key] = node
                where = caller(node) or node.name
                rejects.append(Reject(where, "its input is written to after another layer has read it"))
                continue
            merged += node.target is quantize
            replace(node, earlier)
        return PassResult(merged, tuple(rejects))


def _shareable(node: Node) -> bool:
    """Whether a node is a quantization, a part of one, or a reshape that was put before one."""
    if node.target is torch.ops.olq_fx.quantize.default:
        return True
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and source.target is torch.ops.olq_fx.quantize.default
    return node.op == "call_method" and node.target in _RESHAPES and bool(node.meta.get(MADE))
