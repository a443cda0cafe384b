"""What a Triton kernel becomes on an NVIDIA GPU, on a machine that has none: matrix instructions, registers, spills.

    code = machine_code(my_kernel, (x, out, 4096), {"BLOCK": 128}, capability=90, num_warps=8)
    code.assert_instruction("wgmma.*e4m3")
    code.assert_no_spills()

Triton's wheel brings ptxas and the disassembler. Arguments give types only: tensors may be on the meta device.
"""

import dataclasses
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from olq_fx.cost_model import SHARED_MEMORY
from olq_fx.testing_process import PythonProcess

_MATRIX = re.compile(r"\b((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_INT32 = 1 << 31


@dataclasses.dataclass(frozen=True, slots=True)
class MachineCode:
    """A kernel compiled for one GPU.

    Attributes:
        name: of the kernel.
        capability: of the GPU: 90 is sm_90.
        instructions: the matrix instructions in its PTX, each once, sorted.
        registers: of a thread.
        stack: bytes of a thread in local memory.
        spills: how many machine instructions read or write local memory (LDL, STL).
        shared_memory: bytes of a block of threads.
        ptx: the whole text.
        cubin: the machine code.
    """

    name: str
    capability: int
    instructions: tuple[str, ...]
    registers: int
    stack: int
    spills: int
    shared_memory: int
    ptx: str = dataclasses.field(repr=False)
    cubin: bytes = dataclasses.field(repr=False)

    @property
    def sass(self) -> str:
        """The disassembled machine code."""
        return _disassembled(self.cubin)

    def assert_instruction(self, pattern: str) -> None:
        """Hold the kernel to matrix instructions that match the regular expression `pattern`, and to no other one."""
        wrong = [found for found in self.instructions if not re.search(pattern, found)]
        assert self.instructions, f"{self.name} on sm_{self.capability} has no matrix instruction, not {pattern}"
        assert not wrong, f"{self.name} on sm_{self.capability} has {', '.join(wrong)}, not {pattern}"

    def assert_no_spills(self) -> None:
        """Hold the kernel to registers: no stack, no access to local memory."""
        assert not self.stack, f"{self.name} on sm_{self.capability} has {self.stack} bytes of stack"
        assert not self.spills, f"{self.name} on sm_{self.capability} accesses local memory {self.spills} times"

    def assert_fits(self) -> None:
        """Hold the kernel to the shared memory that a block of threads may have."""
        limit = SHARED_MEMORY[self.capability]
        assert self.shared_memory <= limit, (
            f"{self.name} wants {self.shared_memory} bytes of shared memory; sm_{self.capability} has {limit}"
        )


def machine_code(
    kernel: Any,
    args: Sequence[Any],
    constants: Mapping[str, Any],
    capability: int,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: Any,
) -> MachineCode:
    """Compile a kernel for a GPU of `capability`.

    Args:
        kernel: a `triton.jit` function.
        args: its arguments but the constants, in order: tensors of the dtypes that it will have, descriptors of such,
            numbers, None. As at a launch, a pointer is taken for aligned to 16 bytes, an integer that is a multiple of
            16 for one; and 1 is a constant.
        constants: its constants by name.
        capability: 80, 86, 89, 90, 100 or 120.
        num_warps: warps of a block.
        num_stages: of the pipelines of its loops.
        options: others that Triton's compiler has, as `enable_fp_fusion`.

    Raises:
        TypeError: the process interprets kernels, or an argument has no type in Triton.
        triton.compiler.errors.CompilationError: the kernel is wrong.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not hasattr(kernel, "signature") or triton.knobs.runtime.interpret:
        raise TypeError(f"{kernel} is no kernel to compile: no triton.jit function, or TRITON_INTERPRET is set")
    signature, constexprs, attributes = _signature(kernel.arg_names, args, constants)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    chosen = {"num_warps": num_warps, "num_stages": num_stages, **options}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    name, ptx = built.metadata.name, built.asm["ptx"]
    cubin = built.asm["cubin"]
    registers, stack = map(int, _USAGE.search(_tool_on(cubin, "cuobjdump", "-res-usage")).groups())  # type: ignore[union-attr]
    return MachineCode(
        name=name,
        capability=capability,
        instructions=tuple(sorted(set(_MATRIX.findall(ptx)))),
        registers=registers,
        stack=stack,
        # Local memory is the stack: without one there is no access to look for.
        spills=len(re.findall(r"\b(?:LDL|STL)\b", _disassembled(cubin))) if stack else 0,
        shared_memory=built.metadata.shared,
        ptx=ptx,
        cubin=cubin,
    )


class Compiler(PythonProcess):
    """Compiles kernels in a process of its own, so that a crash of the compiler costs one kernel.

    A call that takes longer than `timeout` seconds counts as a crash.
    """

    def machine_code(self, kernel: Any, *args: Any, **options: Any) -> MachineCode:
        """`machine_code` with the same arguments, there. Tensors are sent as their dtypes.

        Raises:
            ProcessDied: the compiler crashed or took too long; the next call has another process.
        """
        from olq_fx.testing_process import Reference

        code: MachineCode = self.call(_compile, Reference.of(kernel), *args, **options)
        return code


def _compile(kernel: Any, *args: Any, **options: Any) -> MachineCode:
    return machine_code(kernel.find(), *args, **options)


def _signature(
    names: Sequence[str], args: Sequence[Any], constants: Mapping[str, Any]
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types by name, constants and attributes by position, as Triton's compiler takes them."""
    unknown = [name for name in constants if name not in names]
    plain = [name for name in names if name not in constants]
    if unknown or len(plain) != len(args):
        raise TypeError(f"the kernel takes {', '.join(plain)}; given {len(args)} arguments and {', '.join(unknown)}")
    values = dict(zip(plain, args, strict=True)) | dict(constants)
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(names):
        value = values[name]
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name], constexprs[position,] = "constexpr", value
            continue
        signature[name] = _type(name, value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[position,] = [["tt.divisibility", 16]]
    return signature, constexprs, attributes


def _type(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.dtype in _TYPES:
        return f"*{_TYPES[value.dtype]}"
    if hasattr(value, "block_shape") and value.base.dtype in _TYPES:  # a tensor descriptor
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -_INT32 <= value < _INT32 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"the argument {name} has no type in Triton: {value!r}")


def _disassembled(cubin: bytes) -> str:
    return _tool_on(cubin, "nvdisasm", "-c")


def _tool_on(cubin: bytes, name: str, *options: str) -> str:
    """What a tool of Triton's wheel says of machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        command = [os.path.join(_tools(), name), *options, path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@functools.cache
def _tools() -> str:
    import triton.backends.nvidia

    return os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")
