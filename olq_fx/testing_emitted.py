"""What Inductor emits for an NVIDIA GPU, as a value: which kernels, what they compute, what machine code they become.

    with Emitter() as emitter, Interpreter() as interpreter:
        code = emitter.emit(build, "fp8_per_block", capability=90)     # build() -> (module, inputs)
        code.launches                                                  # ("triton_tem_fused_quantize_0", ...)
        outputs = code.run(interpreter)                                # the emitted program, on CPU tensors
        code.kernels[0].machine_code(compiler)                         # registers, spills, matrix instructions

No GPU is needed. The program runs as it was emitted, but for its memory, which is the CPU's and full of NaN, and for
calls of operators, which are those of CPU tensors.
"""

import ast
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from olq_fx.inner import Inner
from olq_fx.testing_gpu import (
    PROGRAM_NAMES,
    GpuCodeCompiled,
    compile_plain,
    emitted_program,
    on_gpu,
    undecorated_kernels,
    without_machine_code,
)
from olq_fx.testing_graphs import calls_of
from olq_fx.testing_interpreter import Interpreter
from olq_fx.testing_machine_code import Compiler, MachineCode
from olq_fx.testing_process import PythonProcess

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "i1": torch.bool,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A way to launch a kernel of loops, of those among which Inductor chooses by measuring, where there are several.

    Attributes:
        constants: by name, such as XBLOCK.
        num_warps, num_stages: of a program.
    """

    constants: Mapping[str, int]
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class EmittedKernel:
    """A Triton kernel that Inductor has written.

    Attributes:
        name: of the function.
        source: the module that it stands in.
        capability: of the GPU.
        ways: the ways to launch it, that which Inductor takes without measuring first; that of a template stands in
            its source.
    """

    name: str
    source: str
    capability: int
    ways: tuple[Launch, ...] = ()

    @property
    def is_template(self) -> bool:
        """Whether it is made of a template, and not of loops."""
        return "@triton_heuristics.template" in self.source

    def number(self, name: str) -> int:
        """A constant of its launch or of its tile by name: `num_warps`, `BLOCK_M`."""
        found = re.search(rf"\b{name}\b[^=\n]*=\s*(\d+)", self.source)
        assert found is not None, f"{self.name} has no {name}"
        return int(found[1])

    def machine_code(self, compiler: Compiler, **constants: int) -> MachineCode:
        """Compile it as it is launched, by the first way where there are several.

        Args:
            compiler: the process that does.
            constants: instead of those that Inductor chooses, such as XBLOCK.
        """
        found: MachineCode = compiler.call(_compiled, self, constants)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class EmittedCode:
    """What Inductor has emitted for one graph.

    Attributes:
        source: the Python module.
        inputs: what its `call` takes.
        capability: of the GPU.
        reasons: what passes on the graph of aten operators refused: the pass, the place, and why.
        ways: the ways to launch each kernel, by its name.
        notes: what else these passes say of what they did.
    """

    source: str
    inputs: tuple[Any, ...]
    capability: int
    reasons: tuple[str, ...] = ()
    ways: Mapping[str, tuple[Launch, ...]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def kernels(self) -> tuple[EmittedKernel, ...]:
        """The Triton kernels, each once."""
        found = _KERNEL.findall(self.source)
        return tuple(EmittedKernel(name, text, self.capability, self.ways.get(name, ())) for name, text in found)

    @property
    def launches(self) -> tuple[str, ...]:
        """The Triton kernels that one call launches, in order."""
        return calls_of([self.source]).generated

    @property
    def external(self) -> tuple[str, ...]:
        """The other operators that one call runs, in order."""
        return calls_of([self.source]).external

    def run(self, interpreter: Interpreter) -> list[Any]:
        """What the program returns for its inputs, computed there."""
        found: list[Any] = interpreter.call(run_program, self.source, self.inputs)
        return found


class Emitter(PythonProcess):
    """A process that takes a GPU for present and compiles for it. See the head of this file."""

    def emit(
        self,
        build: Callable[..., tuple[Any, Sequence[Any]]],
        config: Any,
        *arguments: Any,
        capability: int = 90,
        dynamic: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> EmittedCode:
        """Compile a model for a GPU.

        Args:
            build: a function in a module that returns a callable and its inputs, on the CPU or on meta.
            config: what `olq_fx.backend` takes; None is torch.compile without quantization.
            arguments: of `build`.
            capability: of the GPU, 90 for sm_90.
            dynamic: as for torch.compile.
            options: settings of Inductor, as for torch.compile, of the quantized model.
        """
        settings = None if options is None else dict(options)
        found: EmittedCode = self.call(_built_and_emitted, build, config, arguments, capability, dynamic, settings)
        return found


def _built_and_emitted(build: Any, config: Any, arguments: Any, *rest: Any) -> EmittedCode:
    model, inputs = build(*arguments)
    return emitted(model, inputs, config, *rest)


def emitted(
    model: Any,
    inputs: Sequence[Any],
    config: Any,
    capability: int,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    dump_dir: str | Path | None = None,
) -> EmittedCode:
    """Compile a callable for a GPU. For the process of an `Emitter`.

    Args:
        model: a callable.
        inputs: of it, on the CPU or on meta.
        config, capability, dynamic, options: see `Emitter.emit`.
        dump_dir: see `olq_fx.backend`.

    Raises:
        torch._dynamo.exc.Unsupported: it cannot be captured as one graph.
    """
    import olq_fx
    from olq_fx import torch_private

    torch.compiler.reset()
    backend: Any = on_gpu(compile_plain, capability)
    refused: list[str] = []
    notes: list[str] = []
    if config is not None:
        inner: Any = _InnerForGpu("inductor", None, capability=capability, refused=refused, notes=notes)
        backend = olq_fx.backend(config, inner=inner, dump_dir=dump_dir)
    settings: dict[str, Any] = {} if options is None or config is None else {"options": options}
    compiled: Any = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True, **settings)
    given: list[Any] = []
    ways: dict[str, tuple[Launch, ...]] = {}

    def call() -> None:
        try:
            with torch.no_grad():
                compiled(*inputs)
        except GpuCodeCompiled as stopped:
            given.extend(stopped.args)

    def noted(name: str, configurations: Sequence[Any]) -> None:
        ways[name] = tuple(Launch(dict(each.kwargs), each.num_warps, each.num_stages) for each in configurations)

    with without_machine_code(noted):
        [source] = torch_private.inductor_sources(call)
    return EmittedCode(source, tuple(_plain(value) for value in given), capability, tuple(refused), ways, tuple(notes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _InnerForGpu(Inner):
    """Inductor as the inner compiler, for a GPU that is not there.

    Attributes:
        capability: of the GPU.
        refused: gets what passes on the graph of aten operators refuse.
        notes: gets what else they say.
    """

    capability: int
    refused: list[str]
    notes: list[str]

    def compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **told: Any) -> Callable[..., Any]:
        """Compile a graph of tensors that are elsewhere."""

        def refuse(name: str, where: str, reason: str) -> None:
            self.refused.append(f"{name}: {where}: {reason}")

        def compile_moved(graph: torch.fx.GraphModule, moved: Sequence[Any]) -> Any:
            return Inner.compile(self, graph, moved, **{**told, "refuse": refuse, "note": self.notes.append})

        compiled: Callable[..., Any] = on_gpu(compile_moved, self.capability)(gm, inputs)
        return compiled


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# In the process of an interpreter


def run_program(source: str, inputs: Sequence[Any]) -> list[Any]:
    """Run an emitted program on CPU tensors. For the process of an `Interpreter`."""
    with program(source, _Interpreted, "cpu") as namespace:
        return list(namespace["call"](list(inputs)))


@contextlib.contextmanager
def program(source: str, kernel: Callable[[str, str], Any], device: str) -> Iterator[dict[str, Any]]:
    """The names of an emitted module, whose `call` can be called within.

    Args:
        source: the module.
        kernel: makes what is launched (by `run`) of a kernel's name and source.
        device: where the program allocates.
    """

    for name, instead in PROGRAM_NAMES.items():
        source = source.replace(name, instead)
    namespace: dict[str, Any] = {
        "__name__": "emitted_program",
        "_new_memory": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device),
        "_any_layout": lambda *args: None,
        "get_raw_stream": lambda index: 0,
    }
    with emitted_program(kernel):
        exec(compile(source, "emitted_program", "exec"), namespace)
        yield namespace


class _Interpreted:
    """A kernel of an emitted program, which launches by itself what a GPU would."""

    def __init__(self, name: str, text: str) -> None:
        self._kernel = _module_of(name, text.replace("libdevice,", "")).__dict__[name]
        self._fixed = "'grid_type': 'FixedGrid'" in text
        self._names: list[str] = list(self._kernel.arg_names)

    def run(self, *args: Any, stream: int) -> None:
        """Launch it, as the wrapper that Inductor emits does."""
        if self._fixed:
            self._kernel[args[-3:]](*args[:-3])
            return
        given = dict(zip(self._names, args, strict=False))
        rest = self._names[len(args) :]
        sizes = {name: _block(name, given) for name in rest}
        axes = [axis for axis in "xyz" if f"{axis}numel" in given]
        grid = tuple(-(-given[f"{axis}numel"] // sizes.get(f"{axis.upper()}BLOCK", 1)) for axis in axes)
        self._kernel[grid](*args, **sizes)


def _block(name: str, given: dict[str, Any]) -> int:
    """How many elements of an axis one program takes."""
    axis = name.removesuffix("BLOCK").removesuffix("_").lower()
    extent = int(given[f"{axis}_numel" if f"{axis}_numel" in given else f"{axis}numel"])
    return min(1 << max(extent - 1, 0).bit_length(), 128 if axis.startswith("r") else 16)


def _module_of(name: str, text: str) -> Any:
    """The module of an emitted kernel; Triton reads the text of a kernel from its file."""
    import importlib.util
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="emitted_")
    path = Path(folder.name) / f"{name}.py"
    shim = "from olq_fx import testing_libdevice as libdevice\n" if "libdevice" in text else ""
    path.write_text(shim + text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["_olq_fx_folder"] = folder  # it is there as long as the module
    return module


# In the process of a compiler


def _compiled(kernel: EmittedKernel, constants: dict[str, int]) -> MachineCode:
    from olq_fx.testing_machine_code import machine_code

    signature: dict[str, str] = _literal("signature", kernel)
    fixed: dict[str, Any] = _literal("constants", kernel)  # an extent of 1
    with undecorated_kernels():
        function = _module_of(kernel.name, kernel.source).__dict__[kernel.name]
    # A symbolic extent is a number that no power of two divides, as Inductor takes it for.
    args = [_argument(kind) for kind in signature.values() if kind != "constexpr"]
    chosen = kernel.ways[0] if kernel.ways and not kernel.is_template else None
    if chosen is None:
        chosen = Launch({}, kernel.number("num_warps"), kernel.number("num_stages"))
    values = {**fixed, **chosen.constants, **constants}
    return machine_code(
        function,
        args,
        {name: value for name, value in values.items() if name in function.arg_names},
        kernel.capability,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        enable_fp_fusion=False,
    )


def _literal(name: str, kernel: EmittedKernel) -> Any:
    """A dictionary of what Inductor notes beside a kernel."""
    found = re.search(rf"'{name}': (\{{.*?\}})", kernel.source)
    assert found is not None, f"{kernel.name} has no {name}"
    return ast.literal_eval(found[1])


def _argument(kind: str) -> Any:
    if kind.startswith("*"):
        return torch.empty(0, dtype=_DTYPES[kind[1:]])
    return 1237
