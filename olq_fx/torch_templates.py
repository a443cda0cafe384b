"""Inductor's Triton templates, as this project uses them: the part of the adapter (`torch_private`) that needs them.

    template = make_template(name, source, grid, imports)     a kernel's text with hooks, once a process
    Choice(template, constants, ...)                          one way to launch it
    launch(...)                                               the node that Inductor emits for the best choice
    scalar_body(graph, inputs)                                a pointwise graph to be inlined by `modification`

Beside the hooks that Inductor documents for its own templates, a source may call `{{output()}}`, the name of the
pointer to what the template makes, and the device functions that `imports` names.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One way to launch a template.

    Attributes:
        template: of `make_template`.
        constants: what its grid is told, and the source by name.
        num_warps, num_stages: of a program.
    """

    template: Any
    constants: Mapping[str, int]
    num_warps: int
    num_stages: int


@functools.cache
def _kernel_type(imports: str) -> Any:
    from torch._inductor.select_algorithm import TritonTemplateKernel

    class Kernel(TritonTemplateKernel):
        """A template's kernel that knows functions from elsewhere, and contracts no products and sums by itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.extra_template_env_fns.append(self.output)

        def gen_common_triton_imports(self) -> str:  # type: ignore[override]
            return f"{TritonTemplateKernel.gen_common_triton_imports()}\n{imports}\n"

        def jit_lines(self) -> str:
            self.triton_meta = {**(self.triton_meta or {}), "enable_fp_fusion": False}
            # Not every GPU has pointers to float8; bytes are what the device functions take.
            lines: str = super().jit_lines()  # type: ignore[no-untyped-call]
            return lines.replace("'*fp8e4nv'", "'*u8'")

        def output(self) -> str:
            name: str = self.args.output(self.output_node.get_name())
            return name

    return Kernel


@functools.cache
def make_template(name: str, source: str, grid: Callable[..., tuple[int, int, int]], imports: str) -> Any:
    """A template.

    Args:
        name: of its kernels; the first word of theirs.
        source: its text. Two sources may share a name.
        grid: of the sizes and the constants of a launch, and `cdiv` by keyword, to the numbers of programs.
        imports: lines that stand before the kernel.
    """
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    kernel_type = _kernel_type(imports)

    class Template(TritonTemplate):
        """A template whose kernels are of our type, and that Inductor's table of names does not hold."""

        def __init__(self) -> None:
            super().__init__(f"{name}_{id(self)}", SymbolicGridFn(grid), source)
            TritonTemplate.all_templates.pop(self.name, None)
            self.name = name

    Template.kernel_type = kernel_type
    return Template()


def launch(
    name: str,
    choices: Sequence[Choice],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    like: Any,
    call_sizes: Sequence[Any],
    subgraphs: Sequence[Any],
    captured: Sequence[Any],
) -> Any:
    """One kernel that fills `outputs` and makes one buffer more, which is returned.

    Args:
        name: for autotuning.
        choices: of which Inductor takes the fastest, without measuring where there is one.
        inputs: buffers in the order of `def_kernel`, without `outputs`, which follow them.
        outputs: buffers that the kernel writes.
        like: the layout of what it makes.
        call_sizes: what the grid is told first.
        subgraphs: what `modification` inlines, by number.
        captured: buffers that these read.
    """
    from torch._inductor.select_algorithm import autotune_select_algorithm

    found: list[Any] = []
    for choice in choices:
        error = choice.template.maybe_append_choice(
            found,
            input_nodes=[*inputs, *outputs],
            layout=like,
            subgraphs=list(subgraphs),
            mutated_inputs=list(outputs),
            call_sizes=list(call_sizes),
            num_warps=choice.num_warps,
            num_stages=choice.num_stages,
            **choice.constants,
        )
        if error is not None:
            raise error
    select: Any = autotune_select_algorithm
    selected = select(name, found, [*inputs, *outputs, *captured], like)
    made: Any = selected[0] if isinstance(selected, tuple) else selected  # torch 2.11 returns the result alone
    made.data.data.subgraph_inps = list(captured)
    made.data.data.subgraph_outs = list(subgraphs)
    return made


def fuse_nothing_into(buffer: Any) -> None:
    """Let what follows a kernel that stores its results by itself stay outside of it."""
    from torch._inductor.virtualized import V

    V.graph.no_fuse_buffer_names.add(buffer.get_name())


def register_lowering(operator: Any, lowering: Callable[..., Any]) -> None:
    """Let Inductor lower calls of an operator of ours by `lowering`."""
    from torch._inductor.lowering import lowerings
    from torch._inductor.lowering import register_lowering as register

    if operator not in lowerings:
        register(operator, type_promotion_kind=None)(lowering)


def register_call(operator: Any) -> None:
    """Let Inductor call an operator of ours as it is, where a graph has it after all decompositions."""
    from torch._inductor.lowering import fallback_handler

    handler: Any = fallback_handler
    register_lowering(operator, handler(operator, add_to_fallback_set=False))


def register_rounding(operator: Any) -> None:
    """Let Inductor round float32 values to a dtype, element by element, though it goes on in float32."""
    from torch._inductor.lowering import make_pointwise
    from torch._inductor.virtualized import ops

    def lowering(x: Any, dtype: torch.dtype) -> Any:
        def rounded(value: Any) -> Any:
            narrow = ops.to_dtype(value, dtype, src_dtype=torch.float32, use_compute_types=False)
            return ops.to_dtype(narrow, torch.float32, src_dtype=dtype, use_compute_types=False)

        return make_pointwise(rounded)(x)

    register_lowering(operator, lowering)


def realized(buffer: Any) -> Any:
    """A buffer in memory, with a layout that is settled."""
    from torch._inductor.ir import ExternKernel

    found = ExternKernel.realize_input(buffer)
    found.freeze_layout()
    return found


def contiguous(buffer: Any) -> Any:
    """The same, row by row."""
    from torch._inductor.ir import ExternKernel

    return realized(ExternKernel.require_contiguous(buffer))


def new_buffer(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Memory for an output, row by row."""
    from torch._inductor.lowering import empty_strided

    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    found = empty_strided(list(shape), strides, dtype=dtype, device=device)
    found.realize()
    return found


def new_zeros(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """The same, which a kernel of its own, called after `aten.zeros`, sets to 0 in every run."""
    from torch._inductor.lowering import full

    node = torch.fx.Graph().call_function(torch.ops.aten.zeros.default, ([],))
    node.meta["original_aten"] = torch.ops.aten.zeros.default
    with _made_for(node):
        found = full(list(shape), 0, dtype=dtype, device=device)
        found.realize()
    return found


@contextlib.contextmanager
def _made_for(node: torch.fx.Node) -> Iterator[None]:
    """Within, what is lowered is for a node alone, after which its kernel is named."""
    from torch._inductor.ir import IRNode
    from torch.utils._ordered_set import OrderedSet

    others, IRNode._current_origins = IRNode._current_origins, OrderedSet()
    try:
        with IRNode.current_origins(OrderedSet([node])):
            yield
    finally:
        IRNode._current_origins = others


def layout(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """The layout of an output, row by row."""
    from torch._inductor.ir import FixedLayout

    return FixedLayout(device, dtype, list(shape))


def scalar(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """An input of a scalar body that `modification` gives by name."""
    from torch._inductor.kernel.flex.common import create_placeholder

    return create_placeholder(name, dtype, device)


def scalar_body(graph_module: Any, inputs: Sequence[Any]) -> Any:
    """A graph of pointwise operators on scalars with one result, as `modification` inlines it."""
    from torch._inductor.kernel.flex.common import build_subgraph_module_buffer, freeze_irnodes

    found = build_subgraph_module_buffer(list(inputs), graph_module)
    freeze_irnodes(found)
    return found


def static(extent: Any) -> int | None:
    """An extent that is known while compiling; None for a symbolic one."""
    try:
        return int(extent)
    except TypeError:
        return None


def hint(extent: Any) -> int:
    """The extent that was seen first, of one that may change."""
    from torch._inductor.virtualized import V

    sizevars = V.graph.sizevars
    name = "optimization_hint" if hasattr(sizevars, "optimization_hint") else "size_hint"
    return int(getattr(sizevars, name)(extent))


def wants_tuning() -> bool:
    """Whether Inductor may measure products while it compiles."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)
