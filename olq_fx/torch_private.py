"""All use of private API of torch, for the versions that are supported. Nothing else may rely on it."""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor


def current_recording() -> Any:
    """The tracer of make_fx that is recording what is called now (torch.compile, torch.export), or None."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


_SAME_VALUE = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
    }
)


def recorded_value(tensor: Tensor, recording: Any) -> torch.fx.Node | None:
    """The node of the recorded graph whose rows `tensor` holds; None if it is not recorded.

    Reshapes that keep the last dimension, copies and aliases are looked through, so that two of them over one value
    give the same node.
    """
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    elif (inner := getattr(tensor, "elem", None)) is not None and torch._is_functional_tensor(inner):
        torch._sync(inner)
        tensor = torch._from_functional_tensor(inner)
    slot = proxy_tensor.get_proxy_slot(tensor, recording, None)
    if slot is None:
        return None
    node: torch.fx.Node = slot.proxy.node
    while node.op == "call_function" and node.target in _SAME_VALUE:
        source = node.args[0]
        if not isinstance(source, torch.fx.Node) or not _same_rows(node, source):
            break
        node = source
    return node


def _same_rows(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    after, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(after, Tensor) or not isinstance(before, Tensor) or not after.dim() or not before.dim():
        return False
    return bool(after.shape[-1] == before.shape[-1])


def in_backward() -> bool:
    """Whether autograd's engine is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
