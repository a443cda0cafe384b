"""The torch.compile backend: converts weights inside the first compilation and hands the rewritten graph on.

    compiled = torch.compile(model, backend=olq_fx.backend("fp8_per_block"))
    compiled = torch.compile(model, backend="olq_fx", options={"scheme": "mxfp8"})

For each graph that Dynamo captures: who owns its weights (`owners`), what it does with them (`passes.find_uses`), what
is planned for the root module and converted (`sessions`), then the passes and the inner compiler (`graph_job`,
`inner`). What Dynamo gets back reads the parameters anew at each call (`compiled`).
"""

import functools
import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from olq_fx import torch_private
from olq_fx.compiled import Compiled
from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_values import INHERIT
from olq_fx.errors import BackendError, ConfigurationError, ConfigurationTypeError, OlqFxError, OlqFxWarning
from olq_fx.graph_job import GraphJob
from olq_fx.inner import Inner
from olq_fx.kernels.tuned_tables import TunedTable, following, tables_of
from olq_fx.owners import evaluate, is_parameter
from olq_fx.report import Report
from olq_fx.sessions import Sessions
from olq_fx.weights import QuantizedWeight


def backend(
    config: object = INHERIT,
    inner: str | Callable[..., Any] = "inductor",
    root: nn.Module | None = None,
    strict: bool = True,
    dump_dir: str | Path | None = None,
    tuned: object = None,
    **keys: object,
) -> "Backend":
    """A backend for torch.compile that quantizes what it compiles.

    The first call of the compiled model converts its planned weights in place and frees the originals; from then on the
    model is as if `quantize_` had been called.

    Args:
        config: a scheme name, dictionary, JSON text, path of a file, or QuantizationConfig; None leaves all alone. It
            may be left out where keys are given.
        inner: what compiles the rewritten graph: the name of a backend, or a callable of a graph and its inputs.
        root: the module to whose tree the paths of patterns are relative, where blocks of it are compiled one by one;
            by default the module that is given to torch.compile.
        strict: whether a pattern that matches nothing is an error, or a warning.
        dump_dir: a folder for the graphs before and after each pass; by default one of its own for each backend within
            the folder that the environment variable OLQ_FX_DUMP names, if it names one.
        tuned: a tuned table, the path of one, or several in a list, which what it compiles follows on a GPU, in front
            of those in use where it is called (`olq_fx.use_tuned`).
        **keys: further keys of the configuration.

    Raises:
        ConfigurationError: the configuration has no meaning, no backend has the name `inner`, or a file is no table.
        ConfigurationTypeError: one of the arguments is of a type that is never accepted.
    """
    if root is not None and not isinstance(root, nn.Module):
        raise ConfigurationTypeError(f"root is a torch.nn.Module, not {type(root).__name__}")
    given: Iterable[Any] = () if tuned is None else tuned if isinstance(tuned, (list, tuple)) else (tuned,)
    parsed = QuantizationConfig.parse(config, **keys)
    return Backend(parsed, Inner.of(inner), root, strict, dump_dir, tables_of(given))


DUMP = "OLQ_FX_DUMP"
"""The environment variable that names a folder for dumps of all backends."""

_DUMPING = itertools.count(1)


def _folder_of_environment() -> Path | None:
    """A folder for one backend of this process, where the environment asks for dumps."""
    named = os.environ.get(DUMP, "").strip()
    return Path(named) / f"process_{os.getpid()}_backend_{next(_DUMPING)}" if named else None


class Backend:
    """A backend with its plans and reports; made by `olq_fx.backend`. One may serve several models and threads.

    Attributes:
        config: what is asked for.
        strict: whether a pattern that matches nothing is an error.
    """

    def __init__(
        self,
        config: QuantizationConfig,
        inner: Inner,
        root: nn.Module | None = None,
        strict: bool = True,
        dump_dir: str | Path | None = None,
        tuned: tuple[TunedTable, ...] = (),
    ) -> None:
        """See `olq_fx.backend`."""
        self.config = config
        self.strict = strict
        self._inner = inner
        self._sessions = Sessions(config, strict, root)
        self._dump_dir = _folder_of_environment() if dump_dir is None else Path(dump_dir)
        self._tuned = tuned
        self._graphs = 0
        self._compiled: weakref.WeakValueDictionary[Any, Compiled] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self.__name__ = "olq_fx"

    def __repr__(self) -> str:
        """What it does, in a line."""
        return f"olq_fx.backend({json.dumps(self.config.to_dict())}, inner={self._inner.name!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        """Itself: a copy of a compiled model is one more model that it serves."""
        return self

    @property
    def report(self) -> Report:
        """What was done with the model that was compiled last.

        Raises:
            BackendError: nothing with parameters has been compiled yet.
        """
        if not self.reports:
            raise BackendError(
                "nothing has been compiled yet: the first call of the compiled model does that, unless Dynamo leaves "
                "it alone (its recompile_limit is reached, or the code cannot be traced): TORCH_LOGS=dynamo says why"
            )
        return self.reports[-1]

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of all models that are still there, in the order in which they were compiled."""
        return self._sessions.reports

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's: what torch.compile calls.

        Our own errors reach the caller of the compiled model as they are: what is returned then raises the error once,
        and the next call compiles anew. (Raised here, Dynamo would wrap or swallow them.)
        """
        frame = torch_private.current_frame()
        try:
            return self._compile(frame, gm, example_inputs, mode, options)
        except (OlqFxError, OlqFxWarning) as error:
            if frame is None:
                raise
            return functools.partial(_fail, error, frame)

    def _compile(
        self,
        frame: torch_private.Frame | None,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        mode: str | None,
        options: dict[str, Any] | None,
    ) -> Callable[..., Any]:
        job = GraphJob(self._sessions, self._inner, gm, frame, mode=mode, options=options, dump_dir=self._dump())
        live = job.prepare(example_inputs, frame)
        positions = job.positions(live)
        if frame is not None:
            _guard_weights(frame, gm, {position.index: live[position.index] for position in positions})
        compiled = self._shared(job.key(positions), Compiled(positions, job.variant, job.prepare))
        with following(self._tuned):
            compiled.compile(live, job.variant)
        return functools.partial(_following, self._tuned, compiled) if self._tuned else compiled

    def _shared(self, key: Any, compiled: Compiled) -> Compiled:
        """The code of an equal graph, if there is one: Dynamo traces again what differs in formats only."""
        if key is None:
            return compiled
        with self._lock:
            return self._compiled.setdefault(key, compiled)

    def _dump(self) -> Path | None:
        """A folder for the dumps of one graph."""
        if self._dump_dir is None:
            return None
        with self._lock:
            self._graphs += 1
            return self._dump_dir / f"graph_{self._graphs:03}"


def _following(tables: tuple[TunedTable, ...], compiled: Compiled, *inputs: Any) -> Any:
    """Run code with these tables in use."""
    with following(tables):
        return compiled(*inputs)


def _fail(error: OlqFxError | OlqFxWarning, frame: torch_private.Frame, *inputs: Any) -> Any:
    """Raise an error, once: the next call compiles anew."""
    torch_private.forget_compiled(frame.code)
    raise error.with_traceback(None)


def _guard_weights(frame: torch_private.Frame, gm: GraphModule, live: Mapping[int, Any]) -> None:
    """Let the guards describe the converted weights that now come in, under all the names by which they are reached.

    Their formats are no matter of guards: `Compiled` looks at them at each call.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    weights = {id(value): inputs[i] for i, value in live.items() if isinstance(value, QuantizedWeight)}
    reached: dict[int, set[str]] = {key: {str(torch_private.source_name(node))} for key, node in weights.items()}
    for name in torch_private.guarded_names():
        value = evaluate(name, frame.scope) if is_parameter(name) else None
        if id(value) in reached:
            reached[id(value)].add(name)
    for key, node in weights.items():
        torch_private.replace_guards(node, reached[key])


def dynamo_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **more: Any,
) -> Callable[..., Any]:
    """What `torch.compile(model, backend="olq_fx", options={"scheme": "mxfp8", ...})` calls.

    Args:
        gm: the graph.
        example_inputs: its inputs.
        options: `scheme` (or any form of configuration, as `config`), `inner`, `strict`, `root`, `dump_dir`, `tuned`,
            keys of the configuration; `inner_options` are those of the inner compiler.
        mode: that of torch.compile.
        **more: as `options`.

    Raises:
        ConfigurationError: there is no scheme, or a key that nothing knows.
    """
    given = {**(options or {}), **more}
    inner_options = given.pop("inner_options", None)
    frame = torch_private.current_frame()
    try:
        found = _named_backend(given)
    except (OlqFxError, OlqFxWarning) as error:
        if frame is None:
            raise
        return functools.partial(_fail, error, frame)
    return found(gm, example_inputs, mode=mode, options=inner_options)


_NAMED: dict[str, Backend] = {}
_NAMED_OF_ROOTS: Any = (
    WeakIdKeyDictionary()
)  # a module's backends by its identity: modules alike look the same in words
_NAMED_LOCK = threading.Lock()


def _named_backend(options: dict[str, Any]) -> Backend:
    """The backend for these options: one for equal ones, so that its plans hold over graphs and recompilations."""
    if "scheme" in options and "config" in options:
        raise ConfigurationError("options: 'scheme' and 'config' are two names of the same; give one")
    config = options.get("scheme", options.get("config", INHERIT))
    keys = {key: value for key, value in options.items() if key not in ("scheme", "config")}
    if config is INHERIT and not set(keys) - {"inner", "root", "strict", "dump_dir", "tuned"}:
        raise ConfigurationError('options: name a scheme, as in options={"scheme": "fp8_per_block"}')
    root = keys.get("root")
    key = repr((config, sorted((name, value) for name, value in keys.items() if name != "root")))
    with _NAMED_LOCK:
        named = _NAMED_OF_ROOTS.setdefault(root, {}) if isinstance(root, nn.Module) else _NAMED
        if key not in named:
            named[key] = backend(config, **keys)
        return named[key]
