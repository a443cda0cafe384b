"""Triton kernels on CPU tensors: the interpreter of Triton, mended, in a process of its own.

    with Interpreter() as interpreter:
        codes, scale = interpreter.call(my_quantize, x)                  # a function that launches kernels
        interpreter.launch(my_kernel, (4,), x, out, x.numel(), BLOCK=64)   # or a kernel by itself

Mended faults (seen in triton 3.6 to 3.9): casts to bfloat16 truncate; casts to float8 round ties up, lose carries,
flush subnormals and do not saturate, where the hardware rounds to nearest even and saturates; `tl.dot` multiplies
bfloat16 as raw 16-bit integers. Arithmetic on bfloat16, which would be garbage as well, is an error here: cast to
float32 after the load.

Added: memory that a launcher allocates is full of NaN (integers: their largest value), so that what a kernel leaves
unwritten shows; an access outside of the tensors that a kernel was given is an error and touches nothing.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from olq_fx.testing_process import PythonProcess, Reference


class Interpreter(PythonProcess):
    """A process in which Triton kernels run on CPU tensors. See the head of this file.

    Args:
        timeout: seconds that one call may take.
    """

    def __init__(self, timeout: float = 300.0) -> None:  # noqa: D107
        environment = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "0", "OMP_NUM_THREADS": "1"}
        super().__init__(environment, timeout, setup=mend)

    def launch(self, kernel: Any, grid: Sequence[int], *args: Any, **constants: Any) -> None:
        """`kernel[grid](*args, **constants)`; what it writes into tensors of `args` is written into them here.

        Args:
            kernel: a `triton.jit` function that stands in a module.
            grid: one to three numbers of programs.
            args: tensors on the CPU and numbers. Two tensors must not share memory.
            constants: further arguments by name.
        """
        after = self.call(_launch, Reference.of(kernel), tuple(grid), args, constants)
        for mine, written in zip(args, after, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(written)


def _launch(kernel: Reference, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    found: Any = kernel.find()
    found[grid](*args, **constants)
    return args


def mend() -> None:
    """Mend the interpreter of this process, and fill what is allocated with NaN. For the process of `Interpreter`."""
    import torch

    from olq_fx import testing_interpreter_mends

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    testing_interpreter_mends.install()
