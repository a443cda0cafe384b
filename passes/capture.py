"""What one call of a model does with its weights, found without data: for `quantize_(example_inputs=...)`.

    linear_uses(model, args, kwargs) -> tuple[Candidate, ...]

The model is copied with fake tensors in the place of all its own, and the copy runs under Dynamo. Each graph (there are
several where it breaks) goes through the same matching as in the backend. The model itself is not run.

A loop over those experts that tokens chose needs data. The models of transformers have the same products in batches too
(their option `experts_implementation`), and the copy runs those.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from olq_fx import torch_private
from olq_fx.candidates import Candidate
from olq_fx.errors import PlanError
from olq_fx.passes.find_uses import annotate_owners, find_linear_uses, merged, owner_of_parameter
from olq_fx.passes.open_attention import OpenAttention


def linear_uses(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Candidate, ...]:
    """The weights that a call uses, as candidates of a plan.

    Args:
        model: on any device, or on meta.
        args, kwargs: of one call; tensors in them are replaced by fake ones.

    Returns:
        One candidate a weight, with the reason where it is used by something that is no linear layer. A weight in
        several graphs is a linear layer only if it is one in each.

    Raises:
        PlanError: the call cannot be traced without data.
    """
    mode = torch_private.new_fake_mode()
    try:
        copied = torch_private.fake_copy(mode, model)
        _batch_experts(copied)
        given = map_aggregate((tuple(args), dict(kwargs or {})), lambda value: _fake(mode, value))
        recorder = _Recorder(copied)
        with torch_private.trace_unnoticed() as compiling, mode, torch.no_grad():
            recorder.compiling = compiling
            torch.compile(copied, backend=recorder)(*given[0], **given[1])
    except Exception as error:
        raise PlanError(
            f"example_inputs: this call of {type(model).__name__} cannot be traced without data "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); "
            "leave them out, or use olq_fx.backend, which sees the data"
        ) from error
    return recorder.found()


def _batch_experts(model: nn.Module) -> None:
    """Let the models of transformers within a model multiply with experts in batches where they loop over them."""
    for module in model.modules():
        chosen: dict[str, str | None] = getattr(module, "get_experts_implementation", dict)()
        if "eager" in chosen.values():
            batched = {part: "batched_mm" if name == "eager" else name for part, name in chosen.items()}
            # A model that has no such choice refuses it, and has no such loop.
            with contextlib.suppress(ValueError):
                module.set_experts_implementation(batched)  # type: ignore[operator]


def _fake(mode: Any, value: Any) -> Any:
    return torch_private.to_fake(mode, value) if isinstance(value, Tensor) else value


class _Recorder:
    """A backend that reads each graph and lets it run as it is."""

    def __init__(self, model: nn.Module) -> None:
        self.compiling: Callable[[], None] = lambda: None
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._found: dict[str, Candidate] = {}

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Read a graph."""
        self.compiling()
        graph = torch_private.copy_graph(gm)
        inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        owners = {
            name: owner_of_parameter(tuple(self._names[id(value)]), value)
            for name, value in zip(inputs, example_inputs, strict=True)
            if id(value) in self._names
        }
        annotate_owners(graph, owners)
        OpenAttention()(graph)
        for candidate in find_linear_uses(graph):
            known = self._found.get(candidate.path)
            self._found[candidate.path] = candidate if known is None else merged(known, candidate)
        forward: Callable[..., Any] = gm.forward
        return forward

    def found(self) -> tuple[Candidate, ...]:
        """What all graphs together show."""
        return tuple(self._found.values())
