"""Moves the addition of a residual into the product before it, where unquantized Inductor code has it too.

    %y : "bf16[M, N]" = olq_fx.quantized_linear(..., %bias, None)
    %h : "bf16[B, S, N]" = %y.reshape(B, S, N)
    %s : "bf16[B, S, N]" = %residual + %h
->
    %r : "bf16[M, N]" = %residual.flatten(0, -2)
    %y : "bf16[M, N]" = olq_fx.quantized_linear(..., %bias, %r)
    %s : "bf16[B, S, N]" = %y.reshape(B, S, N)

The operator rounds the product first and the sum then, as the two operations did. Only a product that nothing else
reads is fused, with a residual of the same shape and dtype.
"""

import dataclasses
import operator
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from olq_fx.passes.annotate import label_of
from olq_fx.passes.base import Context, PassResult, Reject
from olq_fx.passes.fxtools import Emitter, Writes, is_call, replace, tensor_of

_ADDITIONS = (operator.add, torch.add, "add", "__add__", "__radd__")


@dataclasses.dataclass(frozen=True, slots=True)
class FuseResidual:
    """Fuses additions to the results of quantized products."""

    context: Context
    name: ClassVar[str] = "fuse_residual"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Fuse what can be fused."""
        fused = 0
        rejects = []
        writes = Writes(gm)
        for node in _products(gm):
            reshape = _only_user(node, "reshape")
            result = node if reshape is None else reshape
            addition = next((user for user in result.users if is_call(user, *_ADDITIONS)), None)
            if node.args[-1] is not None or addition is None:
                continue
            reason = _refused(writes, node, result, addition)
            if reason:
                rejects.append(Reject(label_of(node), f"the addition after it stays apart: {reason}"))
            else:
                _fuse(writes, node, reshape, addition)
                fused += 1
        return PassResult(fused, tuple(rejects))


def _products(gm: GraphModule) -> list[Node]:
    ops = torch.ops.olq_fx
    targets = (ops.quantized_linear.default, ops.linear.default)
    return [node for node in gm.graph.nodes if node.target in targets]


def _only_user(node: Node, method: str) -> Node | None:
    """The one user of a node, if it is this method."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], method) else None


def _residual(result: Node, addition: Node) -> Node | None:
    """The other operand of an addition, if it is a node of its own."""
    others = [argument for argument in addition.args if argument is not result]
    if len(addition.args) != 2 or addition.kwargs or len(others) != 1 or not isinstance(others[0], Node):
        return None
    return others[0]


def _refused(writes: Writes, node: Node, result: Node, addition: Node) -> str:
    """Why an addition cannot be part of the product; "" if it can."""
    if len(result.users) > 1 or len(node.users) > 1:
        return "the product is read by others too"
    residual = _residual(result, addition)
    other, own, total = tensor_of(residual), tensor_of(result), tensor_of(addition)
    if residual is None or other is None or own is None or total is None:
        return "it is no sum of two tensors"
    if other.shape != own.shape or other.dtype != own.dtype or total.dtype != own.dtype or own.dim() < 2:
        return "its operands differ in shape or dtype"
    inputs = [tensor for source in node.all_input_nodes if (tensor := tensor_of(source)) is not None]
    if any(writes.between(node, addition, tensor) for tensor in inputs):
        return "an input of the product is written to before it"
    return ""


def _fuse(writes: Writes, node: Node, reshape: Node | None, addition: Node) -> None:
    residual = _residual(node if reshape is None else reshape, addition)
    assert residual is not None
    tensor = tensor_of(residual)
    assert tensor is not None
    emit = Emitter(addition, node)
    flat = residual if tensor.dim() == 2 else _flattened(writes, residual, addition)
    flat = emit.method("flatten", residual, 0, -2) if flat is None else flat
    assert callable(node.target)
    fused = emit.call(node.target, *node.args[:-1], flat, **node.kwargs)
    if reshape is not None:
        fused = emit.method("reshape", fused, *reshape.args[1:])
    replace(addition, fused)
    if reshape is not None:
        node.graph.erase_node(reshape)
    node.graph.erase_node(node)


def _flattened(writes: Writes, residual: Node, addition: Node) -> Node | None:
    """The residual as a matrix, where a layer before the addition has read it so already."""
    tensor = tensor_of(residual)
    assert tensor is not None
    for user in residual.users:
        known = is_call(user, "flatten") and user.args[1:] == (0, -2) and user < addition
        if known and not writes.between(user, addition, tensor):
            return user
    return None
