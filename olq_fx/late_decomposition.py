"""Decompositions that take effect after AOTAutograd, each traced once for all calls alike.

    late = LateDecompositions({operator: function})
    late.table()      for AOTAutograd: leaves every call whole
    late.expand(gm)   puts the traced operations in the place of what was left

A decomposition of twenty operations that AOTAutograd traces is traced, functionalized and matched against all of
Inductor's patterns anew for every call, though the calls of all layers of a model are alike. Left whole until then, a
call is one node, and what is put in its place is copied.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from olq_fx import torch_private

_VALUE = "val"
_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.permute.default)

_PARTS = (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor)

Key = tuple[Any, ...]

_LONG = 4
"""How many operations are too many to repeat them."""

_SEVERAL = 3
"""In how many places C++ is not to be generated anew of what leads up to a quantization."""


class LateDecompositions:
    """Decompositions of operators that return a list of tensors, for one compilation."""

    def __init__(
        self,
        functions: Mapping[Any, Callable[..., Any]],
        others: Mapping[Any, Callable[..., Any]],
        whole: Callable[..., bool] = lambda *args: False,
    ) -> None:
        """Trace nothing yet.

        Args:
            functions: what each operator is in terms of others.
            others: decompositions of the operators that these functions call.
            whole: of the arguments of a call, with fake tensors: whether it is never expanded.
        """
        self._whole = whole
        self._functions = dict(functions)
        self._others = dict(others)
        self._traced: dict[Key, GraphModule] = {}

    def table(self) -> dict[Any, Callable[..., Any]]:
        """A table of decompositions that decline every call (NotImplemented)."""
        return dict.fromkeys(self._functions, _decline)

    def expand(self, gm: GraphModule) -> int:
        """Replace every call that is left in a graph of aten operators with fake values; how many there were."""
        replaced = 0
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node.target in self._functions and not self._stays(node):
                traced = self._trace(node)
                _store_once(node, traced.graph)
                _replace(node, traced)
                replaced += 1
        return replaced

    def _stays(self, node: Node) -> bool:
        return self._whole(*torch.fx.node.map_arg(node.args, lambda each: each.meta[_VALUE]))

    def _trace(self, node: Node) -> GraphModule:
        inputs = _tensor_nodes(node)
        fakes: list[Tensor] = [each.meta[_VALUE] for each in inputs]
        key = (node.target, str(_without(node, inputs)), *map(_described, fakes))
        if key not in self._traced:
            function = self._functions[node.target]

            def call(*tensors: Tensor) -> Any:
                named = dict(zip(inputs, tensors, strict=True))
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), named.__getitem__)
                return function(*args, **kwargs)

            mode = torch_private.fake_mode_of(fakes)
            with torch.no_grad(), mode:
                self._traced[key] = make_fx(call, decomposition_table=self._others)(*fakes)
            _store_what_is_reused(self._traced[key].graph)
        return self._traced[key]


def _decline(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _tensor_nodes(node: Node) -> list[Node]:
    return [each for each in node.all_input_nodes if isinstance(each.meta.get(_VALUE), Tensor)]


def _without(node: Node, inputs: Sequence[Node]) -> Any:
    """The arguments of a call with the number of each tensor in its place."""
    return torch.fx.node.map_arg((node.args, node.kwargs), lambda each: inputs.index(each))


def _described(fake: Tensor) -> Key:
    # As text: symbols are equal by name within a compilation, and cannot be hashed.
    return str(tuple(fake.shape)), str(tuple(fake.stride())), fake.dtype, fake.device


def _store_what_is_reused(graph: Graph) -> None:
    """Let what is computed by several operations on a CPU and read several times be computed once.

    Inductor would find out at each of the later uses that what it has come to is long by now, and store that: of the
    quotients of a 4-bit format all the ways in which they are rounded, each with everything that the quotient follows
    from, which its C++ generator takes most of the time for. What is read in the same loop stays in registers. (For a
    GPU the halves of a byte would become a kernel of their own, with quotients in memory before it.)
    """
    lengths: dict[Node, int] = {}
    for node in graph.nodes:
        inputs = [lengths.get(_source(each), 0) for each in node.all_input_nodes]
        if node.op != "call_function" or not _is_pointwise(node):
            continue
        lengths[node] = 1 + sum(inputs)
        if lengths[node] >= _LONG and len(_readers(node)) > 1 and node.meta[_VALUE].device.type == "cpu":
            torch_private.store_when_lowered(node)
            lengths[node] = 0


def _readers(node: Node) -> set[Node]:
    """What reads a value, or a part of it; of one user that reads two parts, both count."""
    found: set[Node] = set()
    for user in node.users:
        if user.target in _VIEWS or user.target in _PARTS:
            found |= {user} if user.target in _PARTS and _readers(user) else _readers(user)
        else:
            found.add(user)  # the output too: there it is stored in any case
    return found


def _store_once(node: Node, traced: Graph) -> None:
    """Let the operands of a call, and for a GPU its results that go into other results, be computed into memory.

    Inductor repeats a computation in each of its uses, with all that it follows from, until it finds it long: then it
    stores whatever it has come to, which for a norm and a quantization is a float32 intermediate value. It emits fewer
    and shorter pieces of code if it stores the operand, in half the bytes. Results are stored in any case, and memory
    that a single kernel uses is never allocated. (For a CPU Inductor emits one loop nest either way, but the C++ of
    each use takes long to generate where there are several.)
    """
    inputs = [each for each in traced.nodes if each.op == "placeholder"]
    for each, inner in zip(_tensor_nodes(node), inputs, strict=True):
        on_cpu = each.meta[_VALUE].device.type == "cpu"
        if _is_pointwise(_source(each)) and not (on_cpu and _times_computed(inner) < _SEVERAL):
            _store(_source(each))
    for each in map(_source, traced.output_node().all_input_nodes):
        if each.meta[_VALUE].device.type != "cpu":
            _store(each)


def _store(node: Node) -> None:
    if node.op == "call_function":
        torch_private.store_when_lowered(node)


def _times_computed(node: Node) -> int:
    """In how many places a value is computed unless it is stored: each use, or all uses of a use that is inlined."""
    inlined = [user for user in node.users if _is_inlined(user)]
    return len(node.users) - len(inlined) + sum(map(_times_computed, inlined))


def _is_inlined(node: Node) -> bool:
    return (
        node.op == "call_function"
        and not torch_private.is_stored(node)
        and (_is_pointwise(node) or node.target in _VIEWS)
    )


def _is_pointwise(node: Node) -> bool:
    return torch_private.is_pointwise(node.target) or node.target in _CASTS


def _source(node: Node) -> Node:
    """What a value is a view of."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _replace(node: Node, traced: GraphModule) -> None:
    """Put a copy of a traced graph before `node`, let its users read the results, and remove it."""
    graph: Graph = node.graph
    copies: dict[Node, Any] = {}
    inputs = iter(_tensor_nodes(node))
    with graph.inserting_before(node):
        for traced_node in traced.graph.nodes:
            if traced_node.op == "placeholder":
                copies[traced_node] = next(inputs)
            elif traced_node.op != "output":
                copies[traced_node] = _copied(traced_node, node, graph, copies)
    [results] = traced.graph.output_node().args
    assert isinstance(results, Sequence)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(copies[results[user.args[1]]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _copied(traced_node: Node, origin: Node, graph: Graph, copies: Mapping[Node, Any]) -> Node:
    """A node of a traced graph, with the meta of the call that it is a part of."""
    made = graph.node_copy(traced_node, copies.__getitem__)
    made.meta = {**origin.meta, **made.meta}
    return made
