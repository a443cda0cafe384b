"""The one place that touches private API of torch: small functions, each tried with torch 2.11, 2.13 and 2.14.

What stands behind them: how Dynamo names the inputs of a graph and where in the running program they live, what guards
it has recorded, how tensors become fake, how Inductor is called, and what enters its caches.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
# (what is private is exported to nobody)

import contextlib
import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._python_dispatch import return_and_correct_aliasing as return_and_correct_aliasing

# Dynamo: the frame that is being compiled


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """The frame that Dynamo compiles at this moment.

    Attributes:
        code: its code object.
        scope: its variables, as `{"L": locals, "G": globals}`, in which the names of sources are evaluated.
        target: the module that was given to torch.compile, or None (a function was, or nothing is known).
        receiver: the module whose method the frame runs, or None.
    """

    code: types.CodeType
    scope: dict[str, Any]
    target: nn.Module | None
    receiver: nn.Module | None


def current_frame() -> Frame | None:
    """The frame that Dynamo compiles now; None outside a compilation."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return None
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return None
    code = output.root_tx.f_code
    scope = {"L": dict(output.local_scope), "G": output.global_scope}
    return Frame(code, scope, _compile_target(), _receiver(code, scope["L"]))


def calling_frame(code: types.CodeType) -> Frame | None:
    """The nearest frame up the stack that runs what Dynamo made of `code`, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_code
        if found.co_name == code.co_name and found.co_filename == code.co_filename:
            scope = {"L": dict(frame.f_locals), "G": frame.f_globals}
            return Frame(code, scope, _compile_target(), _receiver(code, scope["L"]))
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _compile_target() -> nn.Module | None:
    """The module that the innermost running call of torch.compile was given."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            function = frame.f_locals.get("fn")
            if getattr(function, "__name__", "") == "inner":
                cells = getattr(function, "__closure__", None) or ()
                function = next((cell.cell_contents for cell in cells), None)
            return _module_behind(function)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _module_behind(function: Any) -> nn.Module | None:
    """The module that is called, or whose method is, also with some of its arguments given by functools.partial."""
    while isinstance(function, functools.partial):
        function = function.func
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def _receiver(code: types.CodeType, variables: dict[str, Any]) -> nn.Module | None:
    """The module on which a method runs: the first argument of a method, or what torch wraps as `fn` in `inner`."""
    if code.co_name == "inner":
        return _module_behind(variables.get("fn"))
    first = variables.get(next(iter(code.co_varnames), ""))
    if isinstance(first, nn.Module) and hasattr(type(first), code.co_name):
        return first
    # What follows a graph break is a function of its own, whose first arguments are Dynamo's.
    own = variables.get("self")
    return own if code.co_name.startswith("torch_dynamo_resume") and isinstance(own, nn.Module) else None


def forget_compiled(code: types.CodeType) -> None:
    """Drop what Dynamo has compiled of `code`, so that its next call compiles anew."""
    from torch._dynamo.eval_frame import reset_code

    reset_code(code)


def steers_dynamo(error: Exception) -> bool:
    """Whether an exception from a compiler is a message to Dynamo (trace again, skip this frame), and no failure."""
    from torch._dynamo import exc

    names = ("TensorifyScalarRestartAnalysis", "RestartAnalysis", "SkipFrame")
    return isinstance(error, tuple(getattr(exc, name) for name in names if hasattr(exc, name)))


def hide_from_dynamo(function: Any) -> None:
    """Let Dynamo never compile a Python function, nor what it calls, when it runs by itself.

    Where Dynamo gives up on a frame it tries those that the frame calls: without this, those of our own kernels too.
    (`torch.compiler.disable` would do it, and import Dynamo.)
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    function = getattr(function, "__func__", function)
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


@contextlib.contextmanager
def trace_unnoticed() -> Iterator[Callable[[], None]]:
    """Trace with Dynamo, and leave nothing behind that the user's own compilations would notice.

    Yields a function to be called within each compilation. Afterwards the code that was compiled in the meantime only
    is forgotten, and so are the sizes seen (from which Dynamo guesses what is dynamic).
    """
    import torch._dynamo.config as dynamo_config
    from torch._dynamo import pgo
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    seen = copy.deepcopy(pgo.get_code_state())
    fresh: list[types.CodeType] = []

    def compiling() -> None:
        frame = current_frame()
        if frame is not None and not _debug_get_cache_entry_list(frame.code):
            fresh.append(frame.code)

    try:
        with dynamo_config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            yield compiling
    finally:
        for code in fresh:
            forget_compiled(code)
        pgo.get_code_state().clear()
        pgo.get_code_state().update(seen)


# Dynamo: the inputs of a graph


def source_name(node: torch.fx.Node) -> str | None:
    """Where a graph input comes from, as an expression over the scope, such as `L['self']._parameters['weight']`."""
    argument = node.meta.get("grapharg")
    source = getattr(node, "_dynamo_source", None) if argument is None else argument.source
    return None if source is None else str(source.name)


def copy_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy that may be rewritten: Dynamo reads the meta of its own graph after the backend is done.

    The copy keeps no real tensor alive and is recognized by AOTAutograd as one from Dynamo. Like Dynamo's graphs, it
    generates Python code only when that is read.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    results: Any = graph.graph_copy(gm.graph, copies)
    last = gm.graph.output_node()
    copies[last] = graph.output(results)
    copies[last].meta = dict(last.meta)
    for original, copied in copies.items():
        if original.op == "placeholder":
            argument = original.meta.get("grapharg")
            source = getattr(original, "_dynamo_source", None if argument is None else argument.source)
            copied._dynamo_source = source
            copied.meta.pop("grapharg", None)
    copy = _LazyGraphModule(gm, graph, class_name=type(gm).__name__)
    copy.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "_backend_id"):
        if name in gm.__dict__:
            copy.__dict__[name] = gm.__dict__[name]
    return copy


def name_part(node: torch.fx.Node, owner: torch.fx.Node, attribute: str) -> None:
    """Say that graph input `node` is the attribute of what comes in as `owner`, at a stable address."""
    from torch._dynamo.source import AttrSource

    source = getattr(owner, "_dynamo_source", None)
    node._dynamo_source = None if source is None else AttrSource(source, attribute)
    # Read by AOTAutograd: CUDA graphs need no copy of it.
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def replace_guards(node: torch.fx.Node, names: Iterable[str]) -> None:
    """Guard the shape of a weight that comes into a graph, and no longer that it is the plain tensor that it was.

    Args:
        node: the input of Dynamo's own graph.
        names: the expressions by which the same tensor is reached (tied parameters have several).
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import TensorProperty, TensorPropertySource
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    stale = {f"{name}{part}" for name in names for part in _PARTS}
    for guard in [guard for guard in guards if guard.name in stale and _describes_tensor(guard)]:
        guards.inner.discard(guard)
    argument = node.meta.get("grapharg")
    if argument is not None:
        for dim in range(node.meta["example_value"].dim()):
            extent = TensorPropertySource(argument.source, TensorProperty.SIZE, dim)
            guards.add(Guard(extent, GuardBuilder.EQUALS_MATCH))


_PARTS = ("", ".codes", ".scale", ".coarse", ".__tensor_flatten__()[0]")
"""What Dynamo guards of a converted weight, beside the weight itself."""


def _describes_tensor(guard: Any) -> bool:
    """Whether a guard is on the tensor itself (that tied parameters are one tensor remains true)."""
    return bool(guard.create_fn_name() != "DUPLICATE_INPUT")


def guarded_names() -> tuple[str, ...]:
    """The expressions on which the compilation that is under way has guards."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        return ()
    return tuple(dict.fromkeys(str(guard.name) for guard in context.guards_context.dynamo_guards))


# Fake tensors


def is_fake(value: object) -> bool:
    """Whether a tensor has no data: it is fake (or wraps fake ones)."""
    from torch._subclasses.fake_tensor import is_fake as torch_is_fake

    return bool(torch_is_fake(value))


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The fake mode of the first fake tensor among `values`, or None."""
    from torch._subclasses.fake_tensor import FakeTensor

    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def new_fake_mode() -> Any:
    """A fake mode for running a whole model, part of whose tensors may be real; extents may depend on data."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within it tensors have data, also while a compiler works with fake ones."""
    from torch.utils._python_dispatch import _disable_current_modes

    found: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return found


def compiling_mode() -> Any:
    """The fake mode in which AOTAutograd will trace what Dynamo has captured; None outside a compilation."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def to_fake(mode: Any, tensor: Tensor) -> Tensor:
    """The fake of a tensor with a static shape; asked again (by AOTAutograd too), `mode` gives the same one."""
    fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake


def fake_copy(mode: Any, model: nn.Module) -> nn.Module:
    """A deep copy of a module in which every tensor is fake; ties between parameters are kept."""
    from torch._subclasses.fake_tensor import FakeCopyMode

    with FakeCopyMode(mode):
        return copy.deepcopy(model)


def fake_like(mode: Any, tensor: Tensor, device: torch.device) -> Tensor:
    """A fake tensor of the shape and dtype of `tensor` on a device."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def known_extent(extent: Any) -> Any:
    """An extent as a number if it is one, though it may be written as a symbolic one."""
    if isinstance(extent, torch.SymInt):
        number = extent.node.maybe_as_int()
        return extent if number is None else number
    return extent


def hint_of(extent: Any) -> int | None:
    """An extent as it was when it was seen first; None of one that depends on data."""
    found = extent.node.hint if isinstance(extent, torch.SymInt) else extent
    return None if found is None else int(found)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, real, fake or meta, are views of one storage."""
    return bool(torch._C._is_alias_of(a, b))


# Inductor


def lookup_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The compiler that torch.compile knows by a name; a callable is its own."""
    from torch._dynamo import lookup_backend as torch_lookup

    found: Callable[..., Any] = torch_lookup(backend)
    return found


def backend_names() -> tuple[str, ...]:
    """The names of all registered backends."""
    from torch._dynamo import list_backends

    return tuple(list_backends(exclude_tags=()))


def mode_options(mode: str | None) -> dict[str, Any]:
    """The settings of Inductor for a `mode` of torch.compile."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def compile_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    decompositions: dict[Any, Callable[..., Any]],
    rewrite: Callable[[torch.fx.GraphModule], None],
    options: dict[str, Any],
    cache_tag: str,
) -> Callable[..., Any]:
    """Compile a graph with Inductor under settings of this compilation only, its backward included.

    Args:
        gm: the graph; Inductor takes it over.
        example_inputs: real or fake.
        decompositions: of our operators, beside Inductor's own.
        rewrite: changes each graph of aten operators that AOTAutograd hands on, forward or backward.
        options: settings of Inductor; each wins over what is set here (see `_settings`).
        cache_tag: what enters the keys of all caches: other sources or options of ours never see each other's code.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    patches = _settings(options)
    # A patch is an exception-safe context whose state is one compilation's: the backward makes its own later.
    tag = f"{torch.compiler.config.cache_key_tag}{cache_tag}"

    def inner(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        rewrite(graph)
        with torch.compiler.config.patch(cache_key_tag=tag), config.patch(patches), _no_futile_fusion():
            return compile_fx_inner(graph, *args, **kwargs)

    with torch.compiler.config.patch(cache_key_tag=tag), config.patch(patches):
        compiled: Any = compile_fx(
            gm,
            example_inputs,
            inner_compile=inner,
            decompositions=_Decompositions(tag, {**inductor_decompositions(), **decompositions}),
        )
    found: Callable[..., Any] = compiled
    return found


def fuses_epilogues(options: dict[str, Any]) -> bool:
    """Whether Inductor may compute in a product's kernel what follows it, under these settings."""
    from torch._inductor import config

    return bool(options.get("epilogue_fusion", config.epilogue_fusion))


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor puts in the place of aten's operators before it looks at a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def store_when_lowered(node: torch.fx.Node) -> None:
    """Let Inductor compute a node of a graph into memory instead of repeating the computation in each use."""
    node.meta["inductor_realize_to_strides"] = True


def is_stored(node: torch.fx.Node) -> bool:
    """Whether `store_when_lowered` was said of a node."""
    return bool(node.meta.get("inductor_realize_to_strides", False))


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's settings for one compilation: casts and divisions as eager does them, and one form of each reduction.

    Of a reduction over fewer than 256 elements, such as a group's maximum, Inductor compiles three forms for a GPU and
    measures which is the fastest; where nobody asks for tuning, we let it compile the one that it takes when it must
    not measure.
    """
    from torch._inductor import config

    found: dict[str, Any] = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
    tuned = ("max_autotune", "max_autotune_pointwise")
    if not any(options.get(name, getattr(config, name)) for name in tuned):
        found["test_configs.force_filter_reduction_configs"] = True
    return {**found, **options}


@contextlib.contextmanager
def _no_futile_fusion() -> Iterator[None]:
    """Keep Inductor from trying, for CPUs, to put loops into one outer loop that cannot be.

    It generates all of their code before it finds that one of them is cut into vectors at the level of the outer loop
    while the others are not, and then generates all of it again, apart.
    """
    from torch._inductor.virtualized import V

    choices: Any = copy.copy(V.choices)
    allowed = choices.can_fuse_vertical

    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, *args: Any) -> bool:
        return bool(allowed(scheduler, node1, node2, *args)) and not _is_futile(scheduler, node1, node2)

    choices.can_fuse_vertical = can_fuse_vertical
    with V.set_choices_handler(choices):
        yield


def _is_futile(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether C++ code of two nodes can only share an outer loop, and one is cut into vectors at its level."""
    backend = scheduler.get_backend(node1.get_device())
    in_outer_loop = getattr(backend, "can_fuse_vertical_outer_loop", None)
    if in_outer_loop is None or not in_outer_loop(node1, node2):
        return False
    depth = backend._get_outer_loop_fusion_depth(node1, node2)
    parts = [part for node in (node1, node2) for part in (node.get_outer_nodes() if _is_nested(node) else [node])]
    nests = [_loops(part) for part in parts]
    return any(len(nest) <= depth or nest[:depth] != nests[0][:depth] for nest in nests)


def _is_nested(node: Any) -> bool:
    return hasattr(node, "get_outer_nodes")


def _loops(node: Any) -> tuple[Any, ...]:
    """The extents of the loops of a scheduled node, a reduction's last."""
    _, (extents, reduced) = max(node.get_nodes(), key=lambda each: int(each.is_reduction())).group
    return (*extents, *reduced)


class _Decompositions(dict[Any, Callable[..., Any]]):
    """A table of decompositions that is pickled as a name: it enters the keys of caches, and functions cannot."""

    def __init__(self, name: str, table: dict[Any, Callable[..., Any]]) -> None:
        super().__init__(table)
        self.name = name

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return str, (self.name,)


def inductor_sources(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The Python modules that Inductor emits while `compiled(*args, **kwargs)` compiles, one a graph.

    Cached code is not emitted again: Inductor's caches are off meanwhile.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    with (
        mock.patch.object(GraphLowering, "save_output_code", found.append),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        compiled(*args, **kwargs)
    return found


# Trees


def split_tensors(value: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors in nested arguments or results, and a function that puts others in their places."""
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(value)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def joined(tensors: Sequence[torch.Tensor]) -> Any:
        found: list[Any] = list(rest)
        for place, tensor in zip(places, tensors, strict=True):
            found[place] = tensor
        return _pytree.tree_unflatten(found, structure)

    return [leaves[place] for place in places], joined


# Graphs


def is_higher_order(target: object) -> bool:
    """Whether a call target runs a graph of its own (checkpointing, cond, a region compiled once)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def enables_grad(node: torch.fx.Node) -> bool:
    """Whether a node of a graph turns gradients on."""
    return node.target is torch._C._set_grad_enabled and bool(node.args[0])


def is_pointwise(target: object) -> bool:
    """Whether an operator computes each element from the elements at its place, by its tags."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def is_inlined(target: object) -> bool:
    """Whether Inductor puts a pointwise operator into the loops around it."""
    from torch._inductor.lowering import fallbacks, lowerings

    return is_pointwise(target) and target in lowerings and target not in fallbacks


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operator by name, with the defaults of its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    named = {each.name: each.default_value for each in schema if each.has_default_value()}
    return named | {each.name: value for each, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)


def known_equal(a: Any, b: Any) -> bool:
    """Whether two extents are known to be equal, without a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def operator_name(target: object) -> str:
    """What an operator is called in messages: `aten.add.Tensor`."""
    return str(target)


def graph_module(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module that runs a graph, which owns nothing."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(nn.Module(), graph)


def sort_graph(graph: torch.fx.Graph) -> None:
    """Move nodes that stand before what they read behind it, and leave the others in their order."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def drop_dead_code(gm: torch.fx.GraphModule) -> None:
    """Remove what nobody reads from a graph of aten operators, but for what writes to memory."""
    gm.graph.eliminate_dead_code()
    gm.recompile()


def viewed(node: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
    """A tensor with all its elements in their order, in the shape that another node has."""
    value = like.meta["val"]
    graph = node.graph
    shape = [extent if isinstance(extent, int) else number_to_node(graph, extent) for extent in value.shape]
    made = graph.call_function(torch.ops.aten.reshape.default, (node, shape))
    made.meta = {**like.meta, "val": node.meta["val"].reshape(value.shape)}
    return made


def schema_writes(target: object) -> bool:
    """Whether the schema of an operator says that it writes to an argument."""
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


GROUPED_PRODUCTS = (torch.nn.functional.grouped_mm, torch._grouped_mm, torch.ops.aten._grouped_mm.default)
"""The names of the product of ragged rows."""


def autocast_entries(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes of a graph that enter or leave a region of autocast, in order; usually none."""
    from torch.amp import autocast_mode

    targets = (autocast_mode._enter_autocast, autocast_mode._exit_autocast)
    found = [node for target in targets for node in graph.find_nodes(op="call_function", target=target, sort=False)]
    return sorted(found)


def transformed_nodes(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """The nodes of a graph that run within torch.vmap, torch.func.grad and the like; usually none.

    A graph enters and leaves such a level by calls, which stand in other modules from one torch to the next.
    """
    depth, found = 0, []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.endswith("_increment_nesting"):
            depth += 1
        elif name.endswith("_decrement_nesting"):
            depth -= 1
        elif depth:
            found.append(node)
    return frozenset(found)


def autocast_state() -> tuple[Any, ...]:
    """What autocast does at this moment, on every device that may have it on."""
    state: list[Any] = []
    for device in ("cpu", "cuda", "xpu"):
        state += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    return tuple(state)


def enters_autocast(node: torch.fx.Node) -> bool:
    """Whether a node enters a region of autocast; its arguments are those of `torch.autocast`."""
    from torch.amp import autocast_mode

    return node.target is autocast_mode._enter_autocast


def number_to_node(graph: torch.fx.Graph, number: torch.SymInt) -> torch.fx.Node:
    """A node that computes a symbolic number from those that come into the graph, added where the graph inserts now.

    Raises:
        KeyError: it depends on a symbol that does not come in.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    known = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.SymInt):
            known[value.node.expr] = torch.fx.Proxy(node)
    expression = number.node.expr
    symbols = {symbol: known[symbol] for symbol in expression.free_symbols}
    computed: torch.fx.Node = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
    return computed


# Recording by make_fx


def current_recording() -> Any:
    """The tracer of make_fx that is recording what is called now (torch.compile, torch.export), or None."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


_SAME_VALUE = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
    }
)


def recorded_value(tensor: Tensor, recording: Any) -> tuple[torch.fx.Node, tuple[torch.dtype, ...]] | None:
    """What the rows of `tensor` are in the recorded graph; None if it is not recorded.

    Reshapes that keep the last dimension, copies, aliases and casts (of autocast) are looked through, so that two of
    them over one value give the same.

    Returns:
        The node that computes the value, and the dtypes to which it was then cast, the last one first.
    """
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    elif (inner := getattr(tensor, "elem", None)) is not None and torch._is_functional_tensor(inner):
        torch._sync(inner)
        tensor = torch._from_functional_tensor(inner)
    slot = proxy_tensor.get_proxy_slot(tensor, recording, None)
    if slot is None:
        return None
    node: torch.fx.Node = slot.proxy.node
    casts: list[torch.dtype] = []
    while node.op == "call_function" and isinstance(source := node.args[0] if node.args else None, torch.fx.Node):
        if node.target is torch.ops.aten._to_copy.default and node.kwargs.keys() == {"dtype"}:
            casts.append(node.kwargs["dtype"])  # type: ignore[arg-type]
        elif node.target not in _SAME_VALUE or not _same_rows(node, source):
            break
        node = source
    return node, tuple(casts)


def _same_rows(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    after, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(after, Tensor) or not isinstance(before, Tensor) or not after.dim() or not before.dim():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy: not at import

    return statically_known_true(after.shape[-1] == before.shape[-1])


def converts_a_module() -> bool:
    """Whether the caller was called by `Module.to`, `.half`, `.cpu`, `.to_empty` and the like, for a parameter."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_APPLY_DEPTH):
        frame = None if frame is None else frame.f_back
        if frame is None or frame.f_code is nn.Module._apply.__code__:
            break
    return frame is not None and frame.f_code is nn.Module._apply.__code__


def takes_data_of(parameter: Tensor, value: Tensor) -> bool:
    """Whether `parameter.data = value` is possible (not from or to meta)."""
    return torch._has_compatible_shallow_copy_type(parameter, value)


_APPLY_DEPTH = 6
"""Frames between a tensor's own function and `Module._apply`: that of the function handed to it, and a few more."""


def runs_at_once() -> bool:
    """Whether operators called now just run: no mode of dispatch and no transform of functorch takes them first."""
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None


def in_backward() -> bool:
    """Whether autograd's engine is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


HigherOrderOperator = torch._ops.HigherOrderOperator
"""An operator whose arguments may be graphs."""


def implement_higher_order(operator: Any, computed: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Say what an operator does to tensors, and what it returns for fake ones. It has no gradient."""
    from torch._C import DispatchKey
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(mode: FakeTensorMode, *args: Any) -> Any:
        with mode:
            return shapes(*args)

    for key in (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.AutogradMeta):
        operator.fallthrough(key)
    operator.py_impl(DispatchKey.CompositeExplicitAutograd)(computed)
    operator.py_impl(FakeTensorMode)(fake)
