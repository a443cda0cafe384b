"""Run two models side by side: the same inputs, the same random numbers, step by step.

API:
    calls_of(inputs) -> list[Call]                one call: a tensor, a tuple, a dictionary; a list: several of them
    side_by_side(reference, candidate, call, seed, loop=None) -> Iterator[(step, reference's outputs, candidate's)]
    outputs_of(value) -> dict[str, Tensor]        the floating tensors in what a call returned, by name
    watch(model, paths, see) -> context           calls `see(path, tensors)` whenever one of these modules returns
    run_once(model, call, loop)                   a whole call, for the clock
    random_states()                               a context that leaves the random states of the process as they were

A loop is a function `loop(model, call)` that yields what each of its steps made, as the sampler of a diffusion model
does. Without one the model is called once. Both lanes advance in turn, so that only one step's outputs are alive.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx.errors import ComparisonError, ConfigurationTypeError, shown

Call = Tensor | tuple[Any, ...] | Mapping[str, Any]
Loop = Callable[[Callable[..., Any], Any], Iterable[Any]]

_END = object()


def calls_of(inputs: object) -> list[Any]:
    """The calls that `inputs` means.

    Raises:
        ConfigurationTypeError: it is none of the accepted types.
        ComparisonError: there is no call in it.
    """
    if isinstance(inputs, (Tensor, tuple, Mapping)):
        return [inputs]
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
        raise ConfigurationTypeError(f"{_INPUTS}, not {type(inputs).__name__}: {shown(inputs)}")
    calls = list(inputs)
    for call in calls:
        if not isinstance(call, (Tensor, tuple, Mapping)):
            raise ConfigurationTypeError(f"{_INPUTS}; one of the list is {type(call).__name__}: {shown(call)}")
    if not calls:
        raise ComparisonError("there are no inputs to compare on")
    return calls


_INPUTS = "inputs are one call (a tensor, a tuple of arguments, a dictionary of named ones) or a list of calls"


def invoke(model: Callable[..., Any], call: Any) -> Any:
    """Call a model with a tensor, a tuple of arguments or a dictionary of named ones."""
    if isinstance(call, Mapping):
        return model(**call)
    return model(*call) if isinstance(call, tuple) else model(call)


def _steps(model: Callable[..., Any], call: Any, loop: Loop | None) -> Iterator[Any]:
    if loop is None:
        yield invoke(model, call)
        return
    made = loop(model, call)
    if isinstance(made, Tensor) or not isinstance(made, Iterable):
        raise ConfigurationTypeError(
            f"a loop yields what each step made; this one returned one {type(made).__name__} (write `yield`)"
        )
    yield from made


def run_once(model: Callable[..., Any], call: Any, loop: Loop | None) -> None:
    """All steps of a call; their outputs are dropped."""
    for _ in _steps(model, copy.deepcopy(call), loop):
        pass


class _Lane:
    """One model's steps, with random states of its own."""

    def __init__(self, model: nn.Module, call: Any, seed: int, loop: Loop | None) -> None:
        # A copy of the arguments for each: caches and random generators among them change as they are used.
        self._steps = _steps(model, copy.deepcopy(call), loop)
        with random_states():
            random.seed(seed)
            torch.manual_seed(seed)
            self._states = _states()

    def next(self) -> object:
        """What the next step made, or `_END`."""
        with random_states(), torch.no_grad():
            _restore(self._states)
            made = next(self._steps, _END)
            self._states = _states()
        return made


def side_by_side(
    reference: nn.Module, candidate: nn.Module, call: Any, seed: int, loop: Loop | None = None
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
    """The steps of both models, the reference's first.

    Neither the global random state nor the order of the two changes what they draw.

    Raises:
        ComparisonError: the number of steps or the names of their outputs differ, or there is no output.
    """
    lanes = _Lane(reference, call, seed, loop), _Lane(candidate, call, seed, loop)
    step = 0
    while True:
        there, here = (lane.next() for lane in lanes)
        if there is _END and here is _END:
            return
        if there is _END or here is _END:
            longer = "candidate" if there is _END else "reference"
            raise ComparisonError(f"the {longer} makes more than {step} steps, the other one does not")
        outputs = outputs_of(there), outputs_of(here)
        if outputs[0].keys() != outputs[1].keys():
            raise ComparisonError(f"outputs differ: {list(outputs[0])} and {list(outputs[1])}")
        if not outputs[0]:
            raise ComparisonError(f"there is no floating tensor in what was returned ({type(there).__name__})")
        yield step, *outputs
        step += 1


def outputs_of(value: Any) -> dict[str, Tensor]:
    """The floating tensors in what a call returned: `output` for a tensor, else keys and positions, joined by dots."""
    return dict(_named("", value))


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name or "output", value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _named(f"{name}.{index}" if name else str(index), part)


@contextlib.contextmanager
def watch(model: nn.Module, paths: Sequence[str], see: Callable[[str, dict[str, Tensor]], None]) -> Iterator[None]:
    """Within the context, `see(path, outputs)` is called after each call of the module at one of the paths."""

    def hook_of(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            see(path, {name: tensor.detach() for name, tensor in outputs_of(result).items()})

        return hook

    handles = [model.get_submodule(path).register_forward_hook(hook_of(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _states() -> tuple[Any, Any, list[Tensor]]:
    started: Any = torch.cuda.is_initialized
    cuda = torch.cuda.get_rng_state_all() if started() else []
    return random.getstate(), torch.get_rng_state(), cuda


def _restore(states: tuple[Any, Any, list[Tensor]]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2]:
        torch.cuda.set_rng_state_all(states[2])


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """The random states of the process are afterwards what they were."""
    outer = _states()
    try:
        yield
    finally:
        _restore(outer)
