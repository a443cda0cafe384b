"""Small tools for graphs of torch functions: values of nodes, arguments by name, new nodes with their meta, mutation.

The graphs are Dynamo's: nodes call torch functions and tensor methods, and `meta["example_value"]` is a fake tensor
(or a number, or a tuple) for each.
"""

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from olq_fx import torch_private

VALUE = "example_value"
"""The key of `Node.meta` under which Dynamo keeps what a node computes."""

MADE = "olq_fx_made"
"""The key of `Node.meta` that says that a pass has made the node."""

_NOT_INHERITED = frozenset({VALUE, "val", "tensor_dict", "grapharg", "unbacked_bindings"})


def value_of(node: Node) -> Any:
    """What a node computes: a fake tensor, a number, a tuple; None if unknown."""
    return node.meta.get(VALUE, node.meta.get("val"))


def tensor_of(node: object) -> Tensor | None:
    """The fake tensor that a node computes; None if it is no node or computes something else."""
    value = value_of(node) if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def target_name(node: Node) -> str:
    """What a node calls, for messages: `torch.nn.functional.embedding`, `Tensor.sum`."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op == "output":
        return "the output of the graph"
    target = node.target
    if isinstance(target, str):
        return f"{node.op} {target}"
    module = (getattr(target, "__module__", None) or "").replace("torch._C._nn", "torch.nn.functional")
    name = getattr(target, "__name__", None) or str(target)
    return f"{module}.{name}".removeprefix("torch._ops.").removeprefix("_").removeprefix("builtins.").lstrip(".")


def caller(node: Node) -> str:
    """The path of the module that makes a call, from the root of the frame; "" outside any module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    # "L['self'].layers.0.q": what Dynamo calls the root is cut off.
    _, bracket, rest = path.partition("]")
    return rest.lstrip(".") if bracket else path


def arguments(node: Node, *names: str) -> dict[str, Any] | None:
    """The arguments of a call by the given names, in their order; None if there are others.

    Absent ones are absent from the dictionary.
    """
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def is_call(node: object, *targets: Any) -> bool:
    """Whether a node calls one of these functions, or the tensor method with that name."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


class Emitter:
    """Adds nodes before a node of a graph, each with the meta of that node and with its own fake value."""

    def __init__(self, before: Node, origin: Node | None = None) -> None:
        """Emit before `before`, with the meta of `origin` (by default the same node)."""
        self._before = before
        self._origin = before if origin is None else origin
        self._autocast = _autocast_regions(before)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of a function."""
        return self._add("call_function", target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """A call of a tensor method."""
        return self._add("call_method", name, args, kwargs)

    def size(self, node: Node, dim: int) -> Any:
        """An extent of a tensor: a number where it is static, else a node."""
        tensor = tensor_of(node)
        assert tensor is not None
        extent = torch_private.known_extent(tensor.shape[dim])
        return extent if isinstance(extent, int) else self.method("size", node, dim % tensor.dim())

    def times(self, *factors: Any) -> Any:
        """The product of numbers and of nodes that are numbers."""
        static = 1
        nodes = []
        for factor in factors:
            if isinstance(factor, Node):
                nodes.append(factor)
            else:
                static *= factor
        product: Any = static
        for node in nodes:
            product = node if isinstance(product, int) and product == 1 else self.call(operator.mul, product, node)
        return product

    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
        """A call of which the value is known."""
        graph = self._before.graph
        with graph.inserting_before(self._before):
            node = graph.create_node(op, target, args, kwargs)
        node.meta = {key: kept for key, kept in self._origin.meta.items() if key not in _NOT_INHERITED}
        node.meta[VALUE] = value
        node.meta[MADE] = True
        return node

    def number(self, value: torch.SymInt) -> tuple[Node, list[Node]]:
        """A node that computes a symbolic number, and the nodes that were added for it."""
        graph = self._before.graph
        before = set(graph.nodes)
        with graph.inserting_before(self._before):
            node = torch_private.number_to_node(graph, value)
        made = [other for other in graph.nodes if other not in before]
        node.meta.setdefault(VALUE, value)
        return node, made

    @contextlib.contextmanager
    def computing(self, inputs: Any) -> Iterator[None]:
        """Compute fake values as the graph would at this place: no data, no gradients, autocast as it is there."""
        mode = torch_private.fake_mode_of(tensors_in(inputs))
        with contextlib.ExitStack() as stack:
            for region in self._autocast:
                stack.enter_context(torch.autocast(*region))
            stack.enter_context(torch.no_grad())
            stack.enter_context(mode if mode is not None else contextlib.nullcontext())
            yield

    def _add(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        found, named = values((args, kwargs))
        with self.computing((found, named)):
            function = getattr(found[0], target) if op == "call_method" else target
            value = function(*(found[1:] if op == "call_method" else found), **named)
        return self.record(op, target, args, kwargs, value)


def values(argument: Any) -> Any:
    """An argument of a node with every node in it replaced by what it computes."""
    return torch.fx.node.map_arg(argument, value_of)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def _autocast_regions(node: Node) -> list[tuple[Any, ...]]:
    """The arguments of the autocast regions of the graph that are open at a node."""
    opened: dict[Any, tuple[Any, ...]] = {}
    for other in torch_private.autocast_entries(node.graph):
        if other < node:
            if torch_private.enters_autocast(other):
                opened[other] = tuple(other.args)
            else:
                opened.pop(other.args[0], None)
    return list(opened.values())


def replace(node: Node, by: Node) -> None:
    """Let `by` be used wherever `node` was, and drop `node`."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def placeholders(gm: GraphModule) -> dict[str, Node]:
    """The inputs of a graph by name."""
    return {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}


# Mutation

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
) | {operator.setitem}


def written(node: Node) -> Sequence[Any]:
    """The arguments that a node may write to; all of them for a node of which nothing is known."""
    if node.op == "call_module" or torch_private.is_higher_order(node.target):
        return node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return ()
    found = [node.kwargs["out"]] if node.kwargs.get("out") is not None else []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or name == "__setitem__" or (name.startswith("__i") and name.endswith("__"))
    if node.args and (in_place or _inplace_flag(node)):
        found.append(node.args[0])
    if torch_private.schema_writes(node.target):
        found.extend(node.all_input_nodes)
    return found


def _inplace_flag(node: Node) -> bool:
    """Whether a function of torch.nn.functional was told to work in place."""
    if node.op != "call_function" or getattr(node.target, "__module__", "") != "torch.nn.functional":
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True


class Writes:
    """Which storages are written to where in a graph. It stays right as long as no node that writes comes or goes."""

    def __init__(self, gm: GraphModule) -> None:
        """Read the graph once."""
        self._writes = [
            (node, tensor)
            for node in gm.graph.nodes
            for argument in written(node)
            for tensor in tensors_in(values((argument,)))
        ]

    def between(self, first: Node, last: Node, tensor: Tensor) -> bool:
        """Whether the storage of `tensor` may be written to after `first` and before `last`."""
        return any(first < at < last and torch_private.shares_storage(other, tensor) for at, other in self._writes)
