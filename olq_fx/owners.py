"""Where the parameters of a compiled frame live, so that a converted one can be put in the place of the original.

    Ownership.of(frame, root, sources, values)      for one graph: its root module, and who owns what comes in
        .root            the module to whose tree paths are relative; a tree of our own where there is no such module
        .has_root        whether that is a module of the user's
        .names           (position of a graph input) -> the paths of its parameter
        .outside         parameters that stand in no module of the root: path -> how to put another one there
        .obstacles       path -> why nothing can be put there

A frame's root is the module that the user names, else the one given to torch.compile, else the `self` of the method.
Sources are expressions over the variables of the frame, such as `L['self']._modules['a']._parameters['weight']`.
"""

import dataclasses
import gc
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from olq_fx.torch_private import Frame

Setter = Callable[[nn.Parameter], None]

_TOKEN = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.(\w+)|^(\w+)")
_IMPORTED = re.compile(r"__import_(.*)")


@dataclasses.dataclass(slots=True)
class Ownership:
    """Who owns the parameters that come into one graph. Lives as long as the graph is being prepared."""

    root: nn.Module
    has_root: bool
    names: dict[int, tuple[str, ...]]
    outside: dict[str, Setter] = dataclasses.field(default_factory=dict)
    obstacles: dict[str, str] = dataclasses.field(default_factory=dict)
    others: nn.Module = dataclasses.field(default_factory=nn.Module)

    @staticmethod
    def of(
        frame: Frame | None, root: nn.Module | None, sources: Sequence[str | None], values: Sequence[Any]
    ) -> "Ownership":
        """Find out who owns what.

        Args:
            frame: what is compiled; None if that is unknown.
            root: the module that the user names.
            sources: for each graph input, where it comes from.
            values: for each graph input, what it is.
        """
        parameters = {i: value for i, value in enumerate(values) if isinstance(value, nn.Parameter)}
        found = _root(frame, root, parameters)
        scope = _Tree()
        own = Ownership(found if found is not None else scope, found is not None, {})
        own.others = scope
        known = _paths_by_identity(own.root) if own.has_root else {}
        rest = {i: p for i, p in parameters.items() if id(p) not in known}
        for i, parameter in rest.items():
            own._add(scope, frame, sources[i], i, parameter)
        known |= {key: paths for key, paths in _paths_by_identity(scope).items() if key not in known}
        own.names = {i: known[id(p)] for i, p in parameters.items() if id(p) in known}
        return own

    def _add(
        self, tree: "_Tree", frame: Frame | None, source: str | None, position: int, parameter: nn.Parameter
    ) -> None:
        """Register a parameter that is in no module of the root."""
        if frame is None or source is None:
            path = tree.place(f"input_{position}", parameter)
            self.obstacles[path] = "nothing is known of where it comes from"
            return
        prefix, module = _outermost_module(source, frame.scope, parameter)
        if module is not None:
            tree.place(path_of(prefix, frame), module)
            return
        path = tree.place(path_of(source, frame), parameter)
        setter = _setter(source, frame)
        if isinstance(setter, str):
            self.obstacles[path] = setter
        else:
            self.outside[path] = setter

    def owner_of(self, path: str) -> nn.Module:
        """The tree in which a path is looked up."""
        leaf = path.rpartition(".")
        for tree in (self.root, self.others):
            try:
                if leaf[2] in tree.get_submodule(leaf[0])._parameters:
                    return tree
            except AttributeError:
                continue
        return self.root

    def put_outside(self, path: str) -> None:
        """Put the parameter that now stands at a path of our own tree where the program reads it."""
        if path in self.outside:
            self.outside[path](self.others.get_parameter(path))

    def live(self, position: int, value: Any) -> Any:
        """What comes in at a position now that parameters have been replaced."""
        names = self.names.get(position)
        if not names:
            return value
        return self.owner_of(names[0]).get_parameter(names[0])


class _Tree(nn.Module):
    """A module tree for what has none: modules and parameters by the names of the variables that hold them."""

    def place(self, path: str, value: nn.Module | nn.Parameter) -> str:
        """Put a module or parameter at a path and return it; the modules on the way are made."""
        *way, leaf = path.split(".")
        at: nn.Module = self
        taken = []
        for name in way:
            # Nothing is ever added to a module of the user's.
            free = name if isinstance(at._modules.get(name, self), _Tree) else f"{name}_outside"
            if free not in at._modules:
                at.add_module(free, _Tree())
            at = at.get_submodule(free)
            taken.append(free)
        if isinstance(value, nn.Module):
            at.add_module(leaf, value)
        else:
            at.register_parameter(leaf, value)
        return ".".join([*taken, leaf])


def _root(frame: Frame | None, given: nn.Module | None, parameters: Mapping[int, nn.Parameter]) -> nn.Module | None:
    """The first module of those in question that owns a parameter of the graph; any, if none comes in."""
    in_question: tuple[nn.Module | None, ...] = (given, *((frame.target, frame.receiver) if frame is not None else ()))
    wanted = {id(parameter) for parameter in parameters.values()}
    for module in in_question:
        if module is not None and (not wanted or any(id(p) in wanted for p in module.parameters())):
            return module
    return None


def _paths_by_identity(root: nn.Module) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {key: tuple(names) for key, names in found.items()}


def _tokens(source: str) -> Iterator[tuple[str, str, int]]:
    """(name, the text up to and with it, its length) of each access in an expression; nothing if it has calls."""
    position = 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            return
        position = match.end()
        yield next(group for group in match.groups() if group is not None), source[:position], len(match[0])


def is_parameter(source: str) -> bool:
    """Whether an expression reads a parameter of a module, or a variable."""
    steps = [so_far for _, so_far, _ in _tokens(source)]
    return len(steps) > 1 and steps[-1] == source and (len(steps) == 2 or steps[-2].endswith("._parameters"))


def path_of(source: str, frame: Frame) -> str:
    """A path for what an expression names: the variables and attributes on the way, without those of nn.Module.

    >>> path_of("G['net']._modules['0']._parameters['weight']", frame)
    'net.0.weight'
    """
    names: list[str] = []
    for name, so_far, _ in _tokens(source):
        if name == "cell_contents" and ".__closure__[" in so_far:
            names[-2:] = [_free_name(so_far, frame.scope) or names[-1]]
        elif name not in ("_modules", "_parameters"):
            names.append(name)
    names = names[1:]
    if names and (imported := _IMPORTED.fullmatch(names[0])):
        names[0] = imported[1].replace("_dot_", ".")
    if len(names) > 1 and names[0] == _receiver_name(frame):
        names = names[1:]
    return ".".join(names) or "input"


def _receiver_name(frame: Frame) -> str | None:
    """What a method calls the object that it is a method of; None in a function."""
    first = next(iter(frame.code.co_varnames), "")
    is_method = hasattr(type(frame.scope["L"].get(first)), frame.code.co_name)
    return first if is_method else "self" if "self" in frame.scope["L"] else None


def _free_name(source: str, scope: Mapping[str, Any]) -> str | None:
    """The name of the variable that a function keeps in a cell."""
    match = re.fullmatch(r"(.*)\.__closure__\[(\d+)\]\.cell_contents", source)
    function = None if match is None else evaluate(match[1], scope)
    if match is None or not isinstance(function, types.FunctionType):
        return None
    return function.__code__.co_freevars[int(match[2])]


def _outermost_module(source: str, scope: Mapping[str, Any], parameter: nn.Parameter) -> tuple[str, nn.Module | None]:
    """The first module on the way to a parameter that has it in its tree, and the expression of that module."""
    for _, so_far, _ in _tokens(source):
        value = None if so_far in ("L", "G") else evaluate(so_far, scope)
        if isinstance(value, nn.Module) and any(other is parameter for other in value.parameters()):
            return so_far, value
    return source, None


def _setter(source: str, frame: Frame) -> Setter | str:
    """How to put another parameter where an expression finds one; why that cannot be done."""
    steps = list(_tokens(source))
    if not steps or steps[-1][1] != source:
        return f"it is held in a place that cannot be written to ({source})"
    name, text, length = steps[-1]
    if text[:-length] == "L":
        return _cell_setter(name, frame)
    holder = evaluate(text[:-length], frame.scope)
    if text[-length] == ".":
        return lambda parameter: setattr(holder, name, parameter)
    if isinstance(holder, dict):
        return lambda parameter: holder.__setitem__(name, parameter)
    if isinstance(holder, list):
        return lambda parameter: holder.__setitem__(int(name), parameter)
    return f"it is held in a {type(holder).__name__}, in which nothing can be replaced"


def _cell_setter(name: str, frame: Frame) -> Setter | str:
    """How to replace a variable of an enclosing function; an argument's caller keeps the original whatever we do."""
    if name not in frame.code.co_freevars:
        return "it is an argument of the compiled function, not a parameter that something owns"
    value = frame.scope["L"][name]
    cells = [cell for cell in gc.get_referrers(value) if isinstance(cell, types.CellType)]
    if not cells:
        return "the function that holds it was not found"

    def put(parameter: nn.Parameter) -> None:
        for cell in cells:
            cell.cell_contents = parameter

    return put


def evaluate(expression: str, scope: Mapping[str, Any]) -> Any:
    """What an expression of Dynamo's finds in a frame; None if it finds nothing."""
    try:
        return eval(expression, dict(scope))
    except Exception:
        return None
