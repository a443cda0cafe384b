"""What a compilation does: the graphs before and after our passes, how often it ran, and the kernels that came out."""

import collections
import dataclasses
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

import olq_fx
from olq_fx import torch_private
from olq_fx.inner import Inner

Target = str | Callable[..., Any]
"""An operator in an assertion: what a node calls (a function, an operator, an overload), or a pattern of its name."""


def operator_name(node: torch.fx.Node) -> str:
    """The name of what a node calls: `aten.mm`, `olq_fx.quantize`, `torch.nn.functional.silu`, `.view` (a method)."""
    if node.op == "call_method":
        return f".{node.target}"
    if node.op != "call_function":
        return node.op
    target = node.target
    packet = getattr(target, "overloadpacket", target)
    if hasattr(packet, "overloads"):
        return str(packet)
    module = getattr(target, "__module__", None) or ""
    return f"{module}.{getattr(target, '__qualname__', repr(target))}".removeprefix("torch._C._nn.").lstrip(".")


def calls(node: torch.fx.Node, target: Target) -> bool:
    """Whether a node calls `target`: an operator stands for all its overloads, a string for names by fnmatch."""
    if isinstance(target, str):
        return fnmatch.fnmatchcase(operator_name(node), target)
    if node.op != "call_function":
        return False
    return node.target == target or getattr(node.target, "overloadpacket", None) == target


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A graph as it was at one moment.

    Attributes:
        graph: a copy that later rewriting does not touch.
        text: the graph as code, for messages.
    """

    graph: torch.fx.Graph
    text: str

    @staticmethod
    def of(module: torch.fx.GraphModule) -> "RecordedGraph":
        """Copy the graph of `module`."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        return RecordedGraph(graph, str(graph))

    @property
    def operators(self) -> collections.Counter[str]:
        """How often each operator is called."""
        return collections.Counter(operator_name(node) for node in self.graph.nodes if node.op.startswith("call_"))

    def count(self, target: Target) -> int:
        """How often `target` is called."""
        return sum(calls(node, target) for node in self.graph.nodes)


class RecordingBackend:
    """A backend for torch.compile that applies a configuration and remembers the graphs before and after.

        recording = RecordingBackend("mxfp8")
        torch.compile(model, backend=recording)(x)
        recording.assert_replaced({F.linear: 3}, {torch.ops.olq_fx.quantize: 1, torch.ops.olq_fx.quantized_linear: 3})

    Attributes:
        before: the graph of each compilation as Dynamo hands it over.
        after: each graph as our passes hand it to the inner compiler.
        backend: the `olq_fx.backend(...)` inside, or None for a configuration of None (graphs are recorded only).
    """

    def __init__(self, config: Any = None, *, inner: str | Callable[..., Any] = "eager", **options: Any) -> None:
        """Make a backend.

        Args:
            config: any configuration that `olq_fx.backend` takes, or None to leave graphs as they are.
            inner: the compiler that gets the rewritten graph: a backend's name or a callable.
            **options: further arguments of `olq_fx.backend`.
        """
        self.before: list[RecordedGraph] = []
        self.after: list[RecordedGraph] = []
        self._inner = torch_private.lookup_backend(inner)
        # As a compiler of its own it would not be known for Inductor, and so miss our settings of it.
        watched: Any = dataclasses.replace(Inner.of(inner), watch=self._watch)
        self.backend = None if config is None else olq_fx.backend(config, inner=watched, **options)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Record the graph and compile it."""
        self.before.append(RecordedGraph.of(gm))
        if self.backend is not None:
            compiled: Callable[..., Any] = self.backend(gm, example_inputs, **options)
            return compiled
        self._watch(gm)
        compiled = self._inner(gm, example_inputs)
        return compiled

    def _watch(self, gm: torch.fx.GraphModule) -> None:
        self.after.append(RecordedGraph.of(gm))

    @property
    def compilations(self) -> int:
        """How many graphs Dynamo handed over: first compilations, recompilations and graph breaks."""
        return len(self.before)

    def assert_compilations(self, expected: int) -> None:
        """Assert how many graphs were compiled."""
        if self.compilations != expected:
            graphs = "\n".join(graph.text for graph in self.before)
            raise AssertionError(f"{self.compilations} compilations, expected {expected}:\n{graphs}")

    def count_before(self, target: Target) -> int:
        """How often `target` is called in all graphs before our passes."""
        return sum(graph.count(target) for graph in self.before)

    def count_after(self, target: Target) -> int:
        """How often `target` is called in all graphs after our passes."""
        return sum(graph.count(target) for graph in self.after)

    def assert_replaced(self, gone: dict[Any, int] | None = None, new: dict[Any, int] | None = None) -> None:
        """Assert that operators were in the graphs and are gone, and that others are new.

        Args:
            gone: operator -> how often it was called before; afterwards it must not be called at all.
            new: operator -> how often it is called afterwards; before it must not have been called at all.

        Raises:
            AssertionError: a count differs; the message holds the counts of all operators and the graphs.
        """
        wrong = []
        for target, times in (gone or {}).items():
            found = (self.count_before(target), self.count_after(target))
            if found != (times, 0):
                wrong.append(f"{_named(target)}: {found[0]} before and {found[1]} after, expected {times} and 0")
        for target, times in (new or {}).items():
            found = (self.count_before(target), self.count_after(target))
            if found != (0, times):
                wrong.append(f"{_named(target)}: {found[0]} before and {found[1]} after, expected 0 and {times}")
        if wrong:
            graphs = "\n".join(
                f"--- {name}\n{graph.text}"
                for name, recorded in (("before", self.before), ("after", self.after))
                for graph in recorded
            )
            raise AssertionError("\n".join([*wrong, graphs]))


def _named(target: Target) -> str:
    if isinstance(target, str):
        return target
    is_operator = hasattr(target, "overloads") or hasattr(target, "overloadpacket")
    return str(target) if is_operator else getattr(target, "__qualname__", str(target))


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a compiled function, in the order in which its code calls them.

    Attributes:
        generated: names of the kernels that Inductor wrote; the name says what was fused.
        external: calls of libraries and of opaque operators, such as `extern_kernels.mm`.
        sources: the emitted Python modules, one for each graph.
    """

    generated: tuple[str, ...]
    external: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def total(self) -> int:
        """Calls of both kinds."""
        return len(self.generated) + len(self.external)


_GENERATED = re.compile(r"^\s*((?:cpp|triton)_\w+)(?:\.run)?\(")
_EXTERNAL = re.compile(r"(?:^|=|\s)((?:extern_kernels|torch\.ops)\.[\w.]+)\(")


def count_kernels(
    function: Callable[..., Any], *args: Any, backend: str | Callable[..., Any] = "inductor", **kwargs: Any
) -> Kernels:
    """Compile `function` afresh, call it once, and read from the emitted code which kernels one call runs.

    Args:
        function: a function or module that is not compiled yet.
        *args: its arguments, on the CPU or elsewhere.
        backend: what compiles it: "inductor" or an `olq_fx.backend(...)` object with that inner compiler.
        **kwargs: further arguments.

    Returns:
        The kernels of all graphs that the call compiled. Cached code is not emitted, so what torch.compile has compiled
        so far in this process is dropped (`torch.compiler.reset()`) and Inductor's caches on disk are off meanwhile.
    """
    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend)
    sources = torch_private.inductor_sources(lambda: compiled(*args, **kwargs))
    return calls_of(sources)


def calls_of(sources: Sequence[str]) -> Kernels:
    """The kernels that one call of emitted modules runs."""
    generated: list[str] = []
    external: list[str] = []
    for source in sources:
        for line in _body_of_call(source):
            if match := _GENERATED.match(line):
                generated.append(match[1])
            external.extend(_EXTERNAL.findall(line))
    return Kernels(tuple(generated), tuple(external), tuple(sources))


def _body_of_call(source: str) -> list[str]:
    """The lines of the emitted `def call(args)`, and of the parts that CUDA graphs cut it into, without comments."""
    lines: list[str] = []
    indent: int | None = None
    for line in source.splitlines():
        here = len(line) - len(line.lstrip())
        if indent is not None and line.strip() and here <= indent:
            indent = None
        if indent is not None and not line.lstrip().startswith("#"):
            lines.append(line)
        if re.match(r"\s*def (?:call|partition_\d+)\(", line):
            indent = here
    return lines
