"""A graph that was compiled, as Dynamo calls it: parts are read from the live parameters at each call.

    Compiled(positions, compile_variant, prepare)(*inputs of Dynamo's graph)

One graph may serve many layers (blocks compiled one by one share their code) and outlive what it was compiled for. So
at each call the weights that come in are compared with those that the code expects. A weight in another format, or a
layer that is left alone, has a variant of its own, compiled when it first comes in. A plain parameter that was put in
the place of a converted one is converted like the first.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from olq_fx.errors import BackendError
from olq_fx.weights import QuantizedStack, QuantizedWeight, WeightSpec

_CONVERTED = (QuantizedWeight, QuantizedStack)

Specs = tuple[WeightSpec | bool, ...]
"""For each weight of a graph, its formats; of one in original precision, whether it requires a gradient."""


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """A weight among the inputs of a graph.

    Attributes:
        index: which input it is.
        placeholder: the input's name.
        path: of the parameter for which the graph was captured, for messages.
    """

    index: int
    placeholder: str
    path: str


@dataclasses.dataclass(slots=True)
class Step:
    """How one input of the inner code is found among those of Dynamo's graph.

    Attributes:
        index: which input of Dynamo's graph.
        part: which part of a weight; None for the input itself.
    """

    index: int
    part: int | None = None


class Variant:
    """The code for one combination of formats."""

    def __init__(self, specs: Specs, positions: Sequence[Position], steps: Sequence[Step], code: Callable[..., Any]):
        """Remember what the code expects.

        Args:
            specs: the formats of the weights at `positions`.
            positions: the weights.
            steps: one for each input of the code.
            code: what the inner compiler returned.
        """
        self.code = code
        self._weights = [(position.index, spec) for position, spec in zip(positions, specs, strict=True)]
        self._steps = [(step.index, step.part) for step in steps]
        self._left: dict[int, dict[int, weakref.ref[Any]]] = {}

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the weights that come in are those that the code expects."""
        for index, spec in self._weights:
            value = inputs[index]
            if isinstance(spec, bool):
                known = self._left[index].get(id(value)) if index in self._left else None
                if known is None or known() is not value or inputs[index].requires_grad is not spec:
                    return False
            elif value.__class__ not in _CONVERTED or (value.spec is not spec and value.spec != spec):
                return False
        return True

    def leave(self, inputs: Sequence[Any]) -> None:
        """Accept these parameters as those that are left in original precision."""
        for index, spec in self._weights:
            if isinstance(spec, bool):
                self._left.setdefault(index, {})[id(inputs[index])] = weakref.ref(inputs[index])

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the code."""
        parts = {index: inputs[index].ready().parts for index, spec in self._weights if not isinstance(spec, bool)}
        return self.code(*[inputs[i] if part is None else parts[i][part] for i, part in self._steps])


CompileVariant = Callable[[Sequence[Position], Specs, Sequence[Any] | None], Variant]


class Compiled:
    """What the backend returns to Dynamo."""

    def __init__(
        self,
        positions: Sequence[Position],
        compile_variant: CompileVariant,
        prepare: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        """Compile nothing yet.

        Args:
            positions: the weights of the graph.
            compile_variant: makes the code for the formats that come in; the inputs are None where Dynamo has finished.
            prepare: converts what a plan says of the inputs, and returns what comes in then.
        """
        self._positions = tuple(positions)
        self._compile_variant = compile_variant
        self._prepare = prepare
        self._variants: dict[Specs, Variant] = {}
        self._latest: Variant | None = None
        self._lock = threading.RLock()

    def compile(self, inputs: Sequence[Any], compile_variant: CompileVariant) -> None:
        """Compile for inputs that are prepared already, within Dynamo's compilation; known formats need nothing new."""
        with self._lock:
            specs = self._specs(inputs)
            if specs not in self._variants:
                self._variants[specs] = compile_variant(self._positions, specs, inputs)
            self._variants[specs].leave(inputs)
            self._latest = self._variants[specs]

    def __call__(self, *inputs: Any) -> Any:
        """Run the code for what comes in.

        Raises:
            BackendError: a tensor stands where a parameter was.
        """
        variant = self._latest
        if variant is not None and variant.fits(inputs):
            return variant(inputs)
        return self._adapted(inputs)

    def _adapted(self, inputs: Sequence[Any]) -> Any:
        with self._lock:
            self._check(inputs)
            variant = next((v for v in self._variants.values() if v.fits(inputs)), None)
            if variant is None:
                inputs = self._prepare(inputs)
                specs = self._specs(inputs)
                if specs not in self._variants:
                    self._variants[specs] = self._compile_variant(self._positions, specs, None)
                variant = self._variants[specs]
                variant.leave(inputs)
            self._latest = variant
        return variant(inputs)

    def _check(self, inputs: Sequence[Any]) -> None:
        for position in self._positions:
            value = inputs[position.index]
            if not isinstance(value, nn.Parameter):
                found = f"a plain {type(value).__name__}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise BackendError(
                    f"{position.path}: {found} stands where the compiled code has a parameter; assign an nn.Parameter, "
                    "which is converted, or copy_ new values into the parameter that was there"
                )

    def _specs(self, inputs: Sequence[Any]) -> Specs:
        found = (inputs[position.index] for position in self._positions)
        return tuple(value.spec if isinstance(value, QuantizedWeight) else value.requires_grad for value in found)
