"""A launch of a Triton kernel as a value: it can be run, compiled for a GPU that is not there, or listed.

On tensors without values (the meta device) a call is as complete as on others, but for its running.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_BYTES = (torch.float8_e4m3fn, torch.int8)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A kernel with all that a launch of it takes.

    Attributes:
        kernel: the `triton.jit` function.
        grid: one to three numbers of programs.
        args: tensors, numbers and None, in the order of its parameters.
        constants: its constants by name.
        num_warps: of a program.
        num_stages: of the pipelines of its loops.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler takes besides.

        Products are contracted with sums only where a kernel says so: all that is made of the same functions has the
        same bits.
        """
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}

    def run(self) -> None:
        """Launch the kernel."""
        self.kernel[self.grid](*self.args, **self.constants, **self.options)


def run(calls: Sequence[Call]) -> None:
    """Launch one kernel after the other."""
    for call in calls:
        call.run()


def as_bytes(part: Tensor) -> Tensor:
    """Codes and e4m3 scales as bytes, which every GPU has; other tensors as they are."""
    return part.view(torch.uint8) if part.dtype in _BYTES else part
