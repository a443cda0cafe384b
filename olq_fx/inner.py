"""The inner compiler: what the rewritten graph is handed to, and what keeps its caches from serving stale code.

Inner.of(name or callable) -> Inner;  inner.compile(gm, inputs, mode=None, options=None, tag="") -> callable
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from olq_fx import errors, kernels, passes, torch_private
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, nearest
from olq_fx.kernels import fused_quantize, linear_products, ops, tuned_tables
from olq_fx.late_decomposition import LateDecompositions
from olq_fx.passes import pipeline
from olq_fx.passes.dumps import Dumps, difference, operators_of
from olq_fx.weights_recording import operators_kept

_INDUCTOR = "inductor"


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """A compiler of graphs.

    Attributes:
        name: for messages.
        compiler: the callable; None for Inductor, which gets settings of its own.
        watch: is shown each graph before it is compiled.
    """

    name: str
    compiler: Callable[..., Any] | None
    watch: Callable[[GraphModule], None] | None = None

    @staticmethod
    def of(inner: "str | Callable[..., Any] | Inner") -> "Inner":
        """A backend that torch.compile knows by a name, or any callable that takes a graph and its inputs.

        Raises:
            ConfigurationError: no backend has that name.
            ConfigurationTypeError: it is neither a name nor a callable.
        """
        if isinstance(inner, Inner):
            return inner
        if isinstance(inner, str):
            if inner == _INDUCTOR:
                return Inner(inner, None)
            names = torch_private.backend_names()
            if inner == "olq_fx" or inner not in names:
                others = [name for name in names if name != "olq_fx"]
                raise ConfigurationError(f"inner: no backend is called {inner!r}; {nearest(inner, others)}")
            return Inner(inner, torch_private.lookup_backend(inner))
        if not callable(inner):
            raise ConfigurationTypeError(f"inner is a backend's name or a callable, not a {type(inner).__name__}")
        return Inner(getattr(inner, "__name__", type(inner).__name__), inner)

    def compile(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        tag: str = "",
        refuse: Callable[[str, str, str], None] = lambda name, where, reason: None,
        note: Callable[[str], None] = lambda text: None,
        dump_dir: Path | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph.

        Args:
            gm: the graph; it is taken over.
            inputs: real or fake, one for each placeholder.
            mode, options: as given to torch.compile: Inductor's settings, or keywords of another compiler.
            tag: what else the compiled code depends on.
            refuse: is told what passes on the graph of aten operators refuse: the pass, where, and why.
            note: is told what else of them a user should know.
            dump_dir: a folder for these graphs before and after each pass.
        """
        if self.watch is not None:
            self.watch(gm)
        if self.compiler is None:
            settings = {**torch_private.mode_options(mode), **(options or {})}
            late = LateDecompositions(ops.quantization(), torch_private.inductor_decompositions(), ops.stays_whole)
            fuse = torch_private.fuses_epilogues(settings)
            fused_quantize.prepare()
            linear_products.prepare()
            with operators_kept():
                return torch_private.compile_inductor(
                    gm,
                    inputs,
                    decompositions={**ops.decompositions(), **late.table()},
                    rewrite=_rewriting(late, fuse, refuse, note, dump_dir),
                    options=settings,
                    cache_tag=f"olq_fx:{sources()}:{tag}:{tuned_tables.state()}",
                )
        keywords: dict[str, Any] = {} if mode is None else {"mode": mode}
        if options is not None:
            keywords["options"] = options
        compiled: Callable[..., Any] = self.compiler(gm, inputs, **keywords)
        return compiled


def _rewriting(
    late: LateDecompositions,
    fuse: bool,
    refuse: Callable[[str, str, str], None],
    note: Callable[[str], None],
    dump_dir: Path | None,
) -> Callable[[GraphModule], None]:
    """What is done to each graph of aten operators, forward or backward, that AOTAutograd makes of one graph."""
    folders = (dump_dir and dump_dir / f"late_{number}" for number in itertools.count(1))

    def rewrite(graph: GraphModule) -> None:
        dumps = Dumps(next(folders))
        for record in pipeline.run_late(graph, dumps, fuse=fuse):
            for reject in record.rejects:
                refuse(record.name, reject.where, reject.reason)
            for text in record.notes:
                note(text)
        before = operators_of(graph) if dumps else {}
        changed = late.expand(graph)
        if dumps:
            dumps.add(graph, "decompose", changed, difference(before, operators_of(graph)))

    return rewrite


@functools.cache
def sources() -> str:
    """A hash of all our sources (the version among them): what they have compiled is stale when one of them changes."""
    digest = hashlib.sha256()
    for module in (errors, passes, kernels):
        assert module.__file__ is not None
        folder = Path(module.__file__).parent
        for path in sorted([*folder.glob("*.py"), *folder.glob("*.cpp"), *folder.glob("*.h")]):
            digest.update(f"{folder.name}/{path.name}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
