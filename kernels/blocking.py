"""How a product is cut into programs: a value that tables hold and kernels are launched by. Knows no triton."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Blocking:
    """How a product is cut into programs.

    Attributes:
        block_m, block_n, block_k: the tile of one program, and how much of K it takes at a time.
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
