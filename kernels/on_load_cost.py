"""How a product that quantizes on load is cut into programs, and whether it is cheaper than a quantization apart."""

from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.triton_product import TENSOR_MEMORY, Instruction, Operand, tile_blocking_of


def on_load_blocking(
    m: int, n: int, k: int, a: Operand, b: Operand, instruction: Instruction, capability: int
) -> Blocking:
    block_k = tile_blocking_of(m, n, k, a, b, instruction, capability).block_k
    return Blocking(64, 128, block_k, num_warps=8)
