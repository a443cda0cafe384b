"""One graph of Dynamo's on its way to the inner compiler: prepared, rewritten and compiled for given formats.

The graph is kept without any tensor that has data, so that variants for other formats can be compiled later (see
`compiled`): outside of Dynamo's compilation, with fake inputs, symbolic sizes being those of the first time.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from olq_fx import torch_private
from olq_fx.compiled import Position, Specs, Step, Variant
from olq_fx.errors import BackendError, OlqFxError
from olq_fx.inner import Inner
from olq_fx.passes import pipeline
from olq_fx.passes.base import Context, PlannedExperts, PlannedWeight
from olq_fx.passes.find_uses import owner_of, weight_uses
from olq_fx.passes.fxtools import VALUE
from olq_fx.passes.open_attention import OpenAttention
from olq_fx.passes.part_inputs import PART
from olq_fx.sessions import Session, Sessions
from olq_fx.torch_private import Frame
from olq_fx.weights import QuantizedStack, QuantizedWeight, WeightSpec

_SUBCLASS = "olq_fx_subclass"
"""The key of a graph input's meta: the fake converted weight that Dynamo saw, where it saw one."""


class GraphJob:
    """A captured graph and what is needed to compile it."""

    def __init__(
        self,
        sessions: Sessions,
        inner: Inner,
        gm: GraphModule,
        frame: Frame | None,
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        dump_dir: Path | None = None,
    ) -> None:
        """Copy the graph.

        Args:
            sessions: plans and converts.
            inner: compiles what comes out.
            gm: Dynamo's graph, which stays as it is.
            frame: what runs it.
            mode, options: of torch.compile, for the inner compiler.
            dump_dir: a folder for the graph before and after each pass.
        """
        self._sessions = sessions
        self._inner = inner
        self._code = None if frame is None else frame.code
        self._mode, self._options, self._dump_dir = mode, options, dump_dir
        self._sources = [torch_private.source_name(node) for node in _inputs(gm)]
        self._template = torch_private.copy_graph(gm)
        self._index = {node.name: i for i, node in enumerate(_inputs(self._template))}
        self._session: Session | None = None
        self._variants = 0
        for node in _inputs(self._template):
            _hide_subclass(node)

    def prepare(self, values: Sequence[Any], frame: Frame | None = None) -> list[Any]:
        """Convert what is planned of the weights that come in; what comes in then.

        Args:
            values: the inputs of the graph.
            frame: what runs it; where Dynamo has finished, the frame that calls it is looked up.
        """
        if frame is None and self._code is not None:
            frame = torch_private.calling_frame(self._code)
        live, self._session = self._sessions.prepare(frame, self._template, self._sources, values)
        return live

    def key(self, positions: Sequence[Position]) -> Any:
        """What two captured graphs have in common if code for one serves the other; None if none can.

        Code for symbolic sizes rests on the guards of its own compilation.
        """
        weights = {position.index for position in positions}
        inputs = [_described(node, i in weights) for i, node in enumerate(_inputs(self._template))]
        if self._code is None or None in inputs:
            return None
        state = (torch.is_grad_enabled(), *torch_private.autocast_state())
        return self._code, str(self._template.graph), tuple(inputs), state, self._mode, repr(self._options)

    def positions(self, live: Sequence[Any]) -> tuple[Position, ...]:
        """The inputs that are used as linear layers and are owned by somebody."""
        scratch = torch_private.copy_graph(self._template)
        OpenAttention()(scratch)
        used = {uses.weight.name for uses in weight_uses(scratch) if uses.linear}
        found = []
        for node in _inputs(scratch):
            owner, value = owner_of(node), live[self._index[node.name]]
            weight = node.name in used or isinstance(value, QuantizedStack)
            if weight and owner is not None and isinstance(value, nn.Parameter):
                found.append(Position(self._index[node.name], node.name, owner.names[0]))
        return tuple(found)

    def variant(self, positions: Sequence[Position], specs: Specs, live: Sequence[Any] | None) -> Variant:
        """Rewrite and compile the graph.

        Args:
            positions: its weights.
            specs: their formats; of those in original precision, whether they require a gradient.
            live: what comes in, within Dynamo's compilation; None after it.

        Raises:
            BackendError: the inner compiler failed.
        """
        gm = torch_private.copy_graph(self._template)
        weights, experts = [], []
        for position, spec in zip(positions, specs, strict=True):
            node = _inputs(gm)[position.index]
            if isinstance(spec, bool):
                if live is None:
                    _require_gradient(node, spec)
            elif node.meta[VALUE].dim() == 3:
                experts.append(PlannedExperts(position.placeholder, spec))
            else:
                weights.append(_planned(position, spec))
        values = [node.meta.get(VALUE) for node in _inputs(gm)] if live is None else live
        swapped = {weight.placeholder for weight in weights} | {one.placeholder for one in experts}
        gradients = _gradients(gm, (v for v, node in zip(values, _inputs(gm), strict=True) if node.name not in swapped))
        folder = self._next_dump()
        records = pipeline.run(gm, Context(tuple(weights), gradients, tuple(experts)), dump_dir=folder)
        self._report(records)
        steps = [self._step(node) for node in _inputs(gm)]
        inputs = [_input(node, step, live) for node, step in zip(_inputs(gm), steps, strict=True)]
        return Variant(specs, positions, steps, self._compiled(gm, inputs, folder))

    def _compiled(self, gm: GraphModule, inputs: Sequence[Any], dump_dir: Path | None) -> Callable[..., Any]:
        try:
            return self._inner.compile(
                gm,
                inputs,
                mode=self._mode,
                options=self._options,
                tag=self._sessions.tag,
                refuse=self._refuse,
                note=self._note,
                dump_dir=dump_dir,
            )
        except OlqFxError:
            raise
        except Exception as error:
            if torch_private.steers_dynamo(error):
                raise
            raise BackendError(
                f"the inner compiler {self._inner.name!r} failed on the quantized graph; the model is whole and works "
                f"without torch.compile: {type(error).__name__}: {error}"
            ) from error

    def _step(self, node: Node) -> Step:
        """Where an input of the rewritten graph comes from."""
        name, part = node.meta.get(PART, (node.name, None))
        return Step(self._index[name], part)

    def _report(self, records: Iterable[pipeline.PassRecord]) -> None:
        for record in records:
            for reject in record.rejects:
                self._refuse(record.name, reject.where, reject.reason)

    def _refuse(self, name: str, where: str, reason: str) -> None:
        """Put a refusal of a pass into the report."""
        if self._session is not None and self._session.report is not None:
            self._session.report.refuse(name, where, reason)

    def _note(self, text: str) -> None:
        """Put a line of a pass into the report."""
        if self._session is not None and self._session.report is not None:
            self._session.report.note(text)

    def _next_dump(self) -> Path | None:
        self._variants += 1
        folder = self._dump_dir
        return folder if folder is None or self._variants == 1 else folder / f"variant_{self._variants}"


def _inputs(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _described(node: Node, is_weight: bool) -> Any:
    """What code depends on in an input; None if it is not static."""
    value = node.meta.get(VALUE)
    if not isinstance(value, Tensor):
        return None
    extents = (*value.shape, *value.stride())
    if not all(isinstance(torch_private.known_extent(extent), int) for extent in extents):
        return None
    return (tuple(map(int, extents)), value.dtype, value.device, not is_weight and value.requires_grad)


def _hide_subclass(node: Node) -> None:
    """Let the passes see a plain matrix where Dynamo saw a converted weight."""
    value = node.meta.get(VALUE)
    if isinstance(value, QuantizedWeight):
        mode = torch_private.fake_mode_of(value.parts)
        node.meta[_SUBCLASS] = value
        node.meta[VALUE] = torch_private.fake_like(mode, value, value.device)
        node.type = nn.Parameter


def _require_gradient(node: Node, required: bool) -> None:
    """Let the fake of a plain parameter require a gradient, or not."""
    value = node.meta.get(VALUE)
    if isinstance(value, Tensor) and value.requires_grad != required:
        node.meta[VALUE] = value.detach().requires_grad_(required)


def _planned(position: Position, spec: WeightSpec) -> PlannedWeight:
    return PlannedWeight(
        placeholder=position.placeholder,
        path=position.path,
        weight=spec.weight,
        activation=spec.activation,
        activation_rule=spec.activation_rule,
        transposed=spec.transposed,
        kernel=spec.kernel,
    )


def _gradients(gm: GraphModule, values: Iterable[Any]) -> bool:
    """Whether gradients may flow through a graph with these inputs."""
    enabled = torch.is_grad_enabled() or any(
        torch_private.enables_grad(node) for node in gm.graph.nodes if node.op == "call_function"
    )
    return enabled and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _input(node: Node, step: Step, live: Sequence[Any] | None) -> Any:
    """What the inner compiler is given for an input: what comes in, or a fake of it."""
    if live is None:
        return node.meta.get(_SUBCLASS, node.meta.get(VALUE))
    value = live[step.index]
    if not isinstance(value, QuantizedWeight):
        return value
    tensor = value if step.part is None else value.ready().parts[step.part]
    mode = torch_private.compiling_mode() or torch_private.fake_mode_of([node.meta.get(VALUE)])
    if mode is not None:
        # AOTAutograd asks for the same fake again, and so takes the weight's extents for static.
        with contextlib.suppress(NotImplementedError):
            node.meta[VALUE] = torch_private.to_fake(mode, tensor)
    return tensor
