"""Replaces the call of a Python function by the calls that it makes, whatever arguments and flags it was given.

    %a = torch.nn.functional.multi_head_attention_forward(%q, %k, %v, 64, 4, %w, ...)
->
    %p = torch.nn.functional.linear(%q, %w, %b);  %u = %p.unflatten(-1, (3, 64));  ...

The function runs once on the fake values of its arguments, and every torch function that it calls becomes a node. So
its control flow is that of the function itself, in the installed version of torch.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from olq_fx.passes.fxtools import Emitter, tensors_in, value_of, values


class InlineError(Exception):
    """The function could not be run on fake values; the message says why."""


def inline(node: Node, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Replace `node` by what `function(*args, **kwargs)` calls.

    Args:
        node: the call to be replaced; its result is that of the function.
        function: does what the node does.
        args, kwargs: its arguments, nodes and constants.

    Raises:
        InlineError: the function failed; the graph is as it was.
    """
    recorder = _Recorder(Emitter(node), node.all_input_nodes)
    found, named = values((tuple(args), kwargs))
    try:
        with recorder.emitter.computing((found, named)), recorder:
            result = function(*found, **named)
        made = map_aggregate(result, recorder.node_of)
    except Exception as error:
        recorder.undo()
        raise InlineError(f"{type(error).__name__}: {error}") from error
    _use_instead(node, made)


def _use_instead(node: Node, made: Any) -> None:
    """Give the users of a node what was made in its place: a node, or a tuple of nodes that they pick from."""
    if isinstance(made, Node):
        node.replace_all_uses_with(made)
    else:
        for user in list(node.users):
            piece = made[user.args[1]]
            if isinstance(piece, Node):
                user.replace_all_uses_with(piece)
            user.graph.erase_node(user)
    node.graph.erase_node(node)


_OPERATORS = {
    f"__{name}__": getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "matmul", "getitem", "neg")
}


class _Recorder(TorchFunctionMode):
    """Makes a node of every torch function that is called with tensors."""

    def __init__(self, emitter: Emitter, inputs: Sequence[Node]) -> None:
        super().__init__()
        self.emitter = emitter
        self._nodes: dict[int, Node] = {id(value_of(node)): node for node in inputs}
        self._made: list[Node] = []
        self._kept: list[Any] = []  # identities are keys: what they belong to must live on

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and record it if it computes tensors."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(True for _ in tensors_in(result)):
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        given, named = map_aggregate((tuple(args), kwargs), self._argument)
        if name == "__get__":
            node = self._emit("call_function", getattr, (given[0], func.__self__.__name__), {}, result)
        elif name in _OPERATORS and func is not _OPERATORS[name]:
            node = self._emit("call_function", _OPERATORS[name], given, named, result)
        elif getattr(torch.Tensor, name, None) is func:
            node = self._emit("call_method", name, given, named, result)
        else:
            node = self._emit("call_function", func, given, named, result)
        self._remember(node, result)

    def _remember(self, node: Node, result: Any) -> None:
        self._kept.append(result)
        if isinstance(result, Tensor):
            self._nodes[id(result)] = node
        elif isinstance(result, (tuple, list)):
            for index, piece in enumerate(result):
                if isinstance(piece, Tensor):
                    self._nodes[id(piece)] = self._emit("call_function", operator.getitem, (node, index), {}, piece)

    def _emit(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
        self._made.append(self.emitter.record(op, target, args, kwargs, value))
        return self._made[-1]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            node, made = self.emitter.number(value)
            self._made.extend(made)
            return node
        return self.node_of(value)

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; anything else is a constant."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            raise InlineError("it uses a tensor that is no input of the graph")
        return self._nodes[id(value)]

    def undo(self) -> None:
        """Drop what was recorded."""
        for node in reversed(self._made):
            node.graph.erase_node(node)
