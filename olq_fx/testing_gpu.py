"""Inductor's code for an NVIDIA GPU, on a machine that has none: everything is compiled, nothing is launched.

    compiled = torch.compile(model, backend=on_gpu(compile_fx, 90))
    compiled(x)     # raises GpuCodeCompiled when the code for sm_90 is there

While it compiles, substitutes for the device stand in torch and Triton. Both remember answers of theirs: this is for a
process that has no GPU to use afterwards. Beside `torch_private` the only module that knows private parts of torch.
"""

import contextlib
import operator
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

MEMORY = 141 << 30
SHARED_MEMORY = 232448
LIMITS = {
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}
"""Of an H200, which says them as CUDA device properties."""


class GpuCodeCompiled(Exception):  # noqa: N818
    """All is compiled, and would be launched now, with the inputs that are the arguments of this exception."""


class _Driver:
    """What is asked of Triton's driver as long as nothing is launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        properties = {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": LIMITS["multi_processor_count"]}
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _patches(capability: int) -> Iterator[Any]:
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import hints, triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor

    major, minor = divmod(capability, 10)
    found = hints.DeviceProperties(type="cuda", index=0, cc=capability, major=major, **LIMITS)
    properties = types.SimpleNamespace(
        name=f"sm_{capability}",
        major=major,
        minor=minor,
        total_memory=MEMORY,
        shared_memory_per_block_optin=SHARED_MEMORY,
        L2_cache_size=60 << 20,
        gcnArchName="",
        **LIMITS,
    )
    for target, name, value in (
        (hints.DeviceProperties, "create", lambda device: found),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "_exchange_device", lambda device: 0),
        (torch.cuda, "_maybe_exchange_device", lambda device: 0),
        (torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True),
        (fake_tensor, "init_gpu_context", lambda *_: None),  # a CUDA build of torch would look for a driver
        # Inductor traces its patterns on the device; those traced on a CPU are the same ones.
        (joint_graph, "lazy_init", lambda device=None, init=joint_graph.lazy_init: init(torch.device("cpu"))),
        (post_grad, "lazy_init", lambda device=None, init=post_grad.lazy_init: init(torch.device("cpu"))),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        # Loading a kernel needs the device; the machine code is there before.
        (CachingAutotuner, "_make_launchers", lambda self: None),
        (CachingAutotuner, "_dynamic_scale_rblock", lambda self: None),
    ):
        yield mock.patch.object(target, name, value, create=target is torch._C)


@contextlib.contextmanager
def pretend_cuda(capability: int) -> Iterator[None]:
    """Within it, torch and Triton take a GPU of this compute capability (90: sm_90) for present."""
    import torch._inductor.config as inductor_config
    from triton.runtime import driver

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(capability)))
        for patch in _patches(capability):
            stack.enter_context(patch)
        has_triton = torch.utils._triton.has_triton
        has_triton.cache_clear()  # it was asked before
        stack.callback(has_triton.cache_clear)
        # Folding constants makes them on the device; whether to pad a product is measured there.
        settings = {"compile_threads": 1, "joint_graph_constant_folding": False, "shape_padding": False}
        stack.enter_context(inductor_config.patch(settings))
        yield


def on_gpu(compile_graph: Callable[..., Any], capability: int) -> Callable[..., Any]:
    """A backend that compiles a graph as if its tensors were on a GPU; the result raises `GpuCodeCompiled`.

    They are on the CPU, or on meta.

    Args:
        compile_graph: takes the graph and its inputs, which are fake CUDA tensors here.
        capability: of the GPU.
    """

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        mode = torch._guards.detect_fake_mode(inputs)
        if mode is None:
            raise ValueError("on_gpu is a backend for torch.compile: it needs its fake tensors")
        with pretend_cuda(capability), mode:
            # The values that a graph was captured with know which extents are symbols.
            nodes = gm.graph.find_nodes(op="placeholder")
            seen = [node.meta.get("example_value", value) for node, value in zip(nodes, inputs, strict=True)]
            moved = [_moved(value) for value in seen]
            _onto_gpu(gm)
            compile_graph(gm, moved)
        return _stop

    return backend


def _onto_gpu(gm: torch.fx.GraphModule) -> None:
    """Let a graph that was captured elsewhere make its tensors on the GPU, and ask the device itself for nothing.

    Dynamo writes the device of a tensor out as a constant. Python's brackets and `contiguous` ask for the device, and
    attention for what it can do.
    """
    for node in gm.graph.nodes:
        node.args = tuple(map(_device, node.args))
        node.kwargs = {name: _device(value) for name, value in node.kwargs.items()}
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            node.target = indexed
        if node.op == "call_method" and node.target == "contiguous":
            node.op, node.target = "call_function", torch.ops.aten.contiguous.default
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            node.target = attended
    gm.recompile()


def _device(value: Any) -> Any:
    plain = isinstance(value, torch.device) and value.type in ("cpu", "meta")
    return torch.device("cuda", 0) if plain else value


def indexed(x: Any, index: Any) -> Any:
    """`x[index]` by operators, where `x` is a tensor."""
    if not isinstance(x, torch.Tensor):
        return x[index]
    aten = torch.ops.aten
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    place = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[place : place + 1] = [slice(None)] * (x.dim() - taken)
    dim = 0
    tensors: list[Any] = []
    for item in items:
        if item is None:
            x = aten.unsqueeze.default(x, dim)
        elif isinstance(item, slice):
            if item != slice(None):
                x = aten.slice.Tensor(x, dim, item.start, item.stop, 1 if item.step is None else item.step)
        elif isinstance(item, torch.Tensor):
            tensors += [None] * (dim - len(tensors)) + [item]
        else:
            x = aten.select.int(x, dim, item)
            continue
        dim += 1
    return aten.index.Tensor(x, tensors) if tensors else x


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the operator that torch chooses on such a GPU, where it asks the device.

    Flash attention where there is no mask; with a mask the memory-efficient one, whose mask is a sum; what neither
    takes is written out.
    """
    aten = torch.ops.aten
    heads_alike = query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    found: torch.Tensor
    if attn_mask is None and narrow and heads_alike and query.shape[-1] <= 256:
        flash = aten._scaled_dot_product_flash_attention
        found = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return found
    if heads_alike and query.shape[1] == key.shape[1]:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                zero = torch.zeros((), dtype=query.dtype, device=query.device)
                attn_mask = torch.where(attn_mask, zero, -torch.inf)
            attn_mask = aten.expand(attn_mask, [*query.shape[:-1], key.shape[-2]])
        efficient = aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
        return found
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _moved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def _stop(*inputs: Any) -> Any:
    raise GpuCodeCompiled(*inputs)


# What is emitted, elsewhere


def compile_plain(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Inductor itself, for `on_gpu`."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs)


@contextlib.contextmanager
def without_machine_code(note: Callable[[str, Sequence[Any]], None]) -> Iterator[None]:
    """Within it, Inductor writes kernels and does not compile them.

    Args:
        note: is told the name of each kernel, and the configurations of Triton's among which Inductor would choose.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        note(kernel.fn.__name__, kernel.configs)

    with mock.patch.object(CachingAutotuner, "precompile", noted), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32")  # advice on what is not run
        yield


@contextlib.contextmanager
def undecorated_kernels() -> Iterator[None]:
    """Within it, the module of an emitted kernel defines Triton's function, and not what launches it."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    with contextlib.ExitStack() as stack:
        for name in ("template", "pointwise", "reduction", "persistent_reduction"):
            stack.enter_context(mock.patch.object(triton_heuristics, name, _no_decorator))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        yield


def _no_decorator(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function


PROGRAM_NAMES = {
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "",
    "torch._C._dynamo.guards._empty_strided_cuda": "_new_memory",
    "torch._C._dynamo.guards.assert_size_stride_grouped": "_any_layout",  # from torch 2.14 on
    "torch._C._dynamo.guards.assert_size_stride": "_any_layout",
}
"""What an emitted program calls of the device, and the names by which it is to find something else. Of two that begin
alike the longer one stands first."""


@contextlib.contextmanager
def emitted_program(kernel: Callable[[str, str], Any]) -> Iterator[None]:
    """Within it, an emitted program can be run: its kernels are `kernel(name, source)`, its device is the CPU."""
    from torch._inductor.async_compile import AsyncCompile

    with contextlib.ExitStack() as stack:
        stack.enter_context(undecorated_kernels())
        for target, name, value in (
            (AsyncCompile, "triton", lambda self, name, text, **options: kernel(name, text)),
            (AsyncCompile, "wait", lambda self, scope: None),
            (torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),
            (torch.cuda, "set_device", lambda index: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
