"""How a product is cut into programs: a value that tables hold and kernels are launched by. Knows no triton."""

import dataclasses

import torch

_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160, 120: 170}
"""Of the largest GPU of each compute capability; of others that of the common one."""

TENSOR_MEMORY = (100, 103)
"""Compute capabilities whose matrix instructions accumulate in a memory of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocking:
    """How a product is cut into programs.

    Attributes:
        block_m, block_n, block_k: the tile of one program, and how much of K it takes at a time.
        form: `tiles`, one program for each tile; `persistent`, as many programs as multiprocessors; `gemv`, one row
            without a matrix instruction.
        swap: whether the weight is on the side of the matrix instruction that is 64 high.
        split_k: how many programs share the sum over K of one tile.
        group: tiles down before one to the right.
        num_warps, num_stages: of a program.
    """

    block_m: int
    block_n: int
    block_k: int
    swap: bool = False
    split_k: int = 1
    group: int = 8
    num_warps: int = 4
    num_stages: int = 3
    form: str = "tiles"


def multiprocessors(device: torch.device | None, capability: int) -> int:
    """Of a GPU; where there is none, of a large one of that compute capability."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _MULTIPROCESSORS.get(capability, _MULTIPROCESSORS[90])
