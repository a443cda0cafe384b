"""What one call of an emitted program does: which kernels it launches, what is fused in each, how many bytes it moves.

    for call in calls_made(code):        # an `EmittedCode`; in the process of an `Emitter`, where bodies are known
        call.name, call.kind, call.operators, call.moved

The program runs on meta tensors, so that every tensor is seen as the program hands it on. A kernel moves each tensor
that it is given once. One of loops moves no more of a tensor than its loads and stores of it can reach: an embedding's
table is read by rows.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx.kernels.fused_quantize import body_of
from olq_fx.testing_emitted import EmittedCode, program

BASIS = (
    "bytes are counted from the tensors of each call in the emitted program: each once, and no more of it than the "
    "loads and stores of a kernel of loops can reach"
)
VIEWS = frozenset(
    (
        "aten._reshape_alias",
        "aten._unsafe_view",
        "aten.alias",
        "aten.expand",
        "aten.permute",
        "aten.select",
        "aten.slice",
        "aten.split",
        "aten.split_with_sizes",
        "aten.squeeze",
        "aten.t",
        "aten.transpose",
        "aten.unsqueeze",
        "aten.view",
    )
)
"""Operators that compute nothing."""

COPIES = frozenset(("aten._to_copy", "aten.clone", "aten.copy", "prims.convert_element_type"))
"""Operators that compute nothing but a cast."""

QUANTIZE = "olq_fx.quantize"
PRODUCT = "olq_fx.quantized_linear"

_ORIGIN = re.compile(
    r"^# Topologically Sorted Source Nodes: .*?Original ATen: \[(.*?)\]\n((?:#.*\n)*)(\w+) = async_compile\.triton",
    re.MULTILINE,
)
_BODY = re.compile(r"olq_fx_fused_(quantize|maxima)\]\(args = \((body_\w+),")
_LAST = {"quantize": (QUANTIZE,), "maxima": ()}
"""What a template does with the values of its body."""

_LAYERS = re.compile(r"olq_fx_linear_products\]\(args = \(\[.*?\], [^,]*, (.*)")
_LAYER = re.compile(r"\(\[%[^\]]*\], (\S+), (\S+)\)")


@dataclasses.dataclass(frozen=True, slots=True)
class EmittedCall:
    """A kernel that one call of the program runs.

    Attributes:
        name: of a kernel that Inductor has written, or of an operator.
        kind: "template" or "loops" of the former, "operator" of the latter.
        operators: those that are computed in it, as Inductor names them; of a template those of its body.
        moved: bytes.
    """

    name: str
    kind: str
    operators: tuple[str, ...]
    moved: int

    @property
    def computed(self) -> tuple[str, ...]:
        """The operators that are no views, each once."""
        return tuple(dict.fromkeys(name for name in self.operators if name not in VIEWS))

    @property
    def only_quantizes(self) -> bool:
        """Whether its only work is to quantize what lies in memory."""
        if self.kind == "operator":
            return self.name.startswith(f"torch.ops.{QUANTIZE}.")
        return set(self.computed) - COPIES == {QUANTIZE}


def calls_made(code: EmittedCode) -> tuple[EmittedCall, ...]:
    """The calls in their order. See the head of this file.

    Raises:
        KeyError: a kernel inlines a body that this process does not know.
    """
    found: list[EmittedCall] = []
    origins, templates = origins_of(code.source), {kernel.name for kernel in code.kernels if kernel.is_template}

    def kernel(name: str, text: str) -> _Kernel:
        return _Kernel(name, text, name in templates, origins.get(name, ()), found)

    def noted(name: str, arguments: Sequence[Any], result: Any) -> None:
        tensors = (*_tensors(arguments), *_tensors([result]))
        found.append(EmittedCall(name, "operator", _extras(name, arguments), sum(_bytes_of_each(tensors))))

    inputs = [value.to("meta") if isinstance(value, Tensor) else value for value in code.inputs]
    with program(code.source, kernel, "meta") as names:
        names["extern_kernels"] = _Watched(names["extern_kernels"], "extern_kernels", noted)
        names["torch"] = _Torch(noted)
        names["call"](inputs)
    return tuple(found)


def origins_of(source: str) -> dict[str, tuple[str, ...]]:
    """The operators of each kernel of an emitted module, by the kernel's name."""
    found = {}
    for operators, comments, name in _ORIGIN.findall(source):
        bodies = _BODY.findall(comments)
        layers = [each for call in _LAYERS.findall(comments) for each in _LAYER.findall(call)]
        # Inductor counts a quantization to the kernel that first asked for its result.
        known = {QUANTIZE} if bodies else {QUANTIZE, PRODUCT} if layers else set()
        named = (each for each in operators.split(", ") if each not in known)
        inlined = (each for kind, body in bodies for each in (*_operators_of(body), *_LAST[kind]))
        added = [each for i, each in enumerate(("bias", "residual")) if any(layer[i] != "None" for layer in layers)]
        found[name] = (*[PRODUCT] * len(layers), *added, *named, *inlined)
    return found


def _operators_of(body: str) -> Iterator[str]:
    """The operators of a body that a template inlines, the products first."""
    function: Any = body_of(body).function
    for node in function.graph.nodes:
        if node.op == "placeholder" and str(node.target).startswith("product"):
            yield PRODUCT
        elif node.op == "call_function":
            packet = getattr(node.target, "overloadpacket", None)
            if packet is not None:
                yield str(packet)


class _Kernel:
    """Stands for a kernel of an emitted program; writes down what it would be launched on."""

    def __init__(self, name: str, text: str, template: bool, origin: tuple[str, ...], found: list[EmittedCall]) -> None:
        signature = re.search(rf"^def {name}\((.*?)\):", text, re.MULTILINE)
        assert signature is not None
        self._names = [part.partition(":")[0].strip() for part in signature[1].split(",")]
        self._name, self._text, self._template, self._origin, self._found = name, text, template, origin, found

    def run(self, *args: Any, stream: int) -> None:
        """What the program calls."""
        given = dict(zip(self._names, args, strict=False))
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if self._template:
            moved = sum(_bytes_of_each(tensors.values()))
        else:
            extents = [value for name, value in given.items() if name.endswith("numel")]
            moved = sum(self._reached(name, value, extents) for name, value in tensors.items())
        kind = "template" if self._template else "loops"
        self._found.append(EmittedCall(self._name, kind, self._origin, moved))

    def _reached(self, name: str, tensor: Tensor, extents: Sequence[int]) -> int:
        """Bytes of a tensor that loops over these extents load and store."""
        elements = 1
        for extent in extents:
            elements *= int(extent)
        whole = _bytes(tensor)
        moved = 0
        for access in (r"tl\.load", r"tl\.(?:store|atomic_\w+)"):
            count = len(re.findall(rf"{access}\({name}\b", self._text))
            moved += min(whole, count * elements * tensor.element_size())
        return moved or whole  # through a descriptor


class _Watched:
    """Operators of torch by their names; calls are written down."""

    def __init__(self, inner: Any, name: str, note: Callable[[str, Sequence[Any], Any], None]) -> None:
        self._inner, self._name, self._note = inner, name, note

    def __getattr__(self, name: str) -> "_Watched":
        return _Watched(getattr(self._inner, name), f"{self._name}.{name}", self._note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._inner(*args, **kwargs)
        self._note(self._name, (*args, *kwargs.values()), result)
        return result


class _Torch:
    """torch, whose operators are watched."""

    def __init__(self, note: Callable[[str, Sequence[Any], Any], None]) -> None:
        self.ops = _Watched(torch.ops, "torch.ops", note)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _extras(name: str, arguments: Sequence[Any]) -> tuple[str, ...]:
    """What an operator of ours computes beside its product."""
    if name != f"torch.ops.{PRODUCT}.default":
        return ()
    schema = torch.ops.olq_fx.quantized_linear.default._schema
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    return tuple(each for each in ("bias", "residual") if given.get(each) is not None)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _bytes_of_each(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Bytes of tensors; what is the same memory counts once."""
    seen = set()
    for tensor in tensors:
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel())
        if key not in seen:
            seen.add(key)
            yield _bytes(tensor)


def _bytes(tensor: Tensor) -> int:
    """Bytes of the elements that differ: a broadcast one is read once."""
    elements = 1
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= int(extent) if stride else min(1, int(extent))
    return elements * tensor.element_size()
