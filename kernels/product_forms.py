"""Which products a template computes as their operator would, so that they can be part of the compiled program.

The operator chooses a form when it runs and knows the number of rows: one row without a matrix instruction, few rows
with the sum over K split among programs, very many with one tile after the other and tensor descriptors. A template has
one form, that of one program a tile, and is the same kernel where the operator would take that form: the same tiles,
the same bits, nothing to lose. Everywhere else, and where rows are a symbol, the operator is left to choose.
"""

import torch

from olq_fx.kernels.triton_candidates import Work
from olq_fx.kernels.triton_product import TENSOR_MEMORY, blocking_of
from olq_fx.kernels.tuned_problem import DTYPES, Problem, bucket
from olq_fx.kernels.tuned_tables import blocking_for

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def why_operator(
    activation: str,
    weight: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    capability: int,
    device: torch.device,
) -> str:
    """Why a product stays the operator that chooses its form when it runs; "" if a template is as good.

    Args:
        activation: format of the activations, "" for original precision.
        weight: format of the weight.
        dtype: of activations in original precision, else of the result.
        sizes: M, N, K.
        capability: of the GPU, 90 for sm_90.
        device: the GPU.
    """
    m, n, k = sizes
    if not (m and n and k):
        return "there is nothing to multiply"
    problem = Problem(
        family="product", activation=activation, weight=weight, dtype=_NAMES[dtype], m=bucket(m), n=n, k=k
    )
    if blocking_for(problem, capability, device):
        return "a tuned table says how it is cut, which its operator follows"
    work = Work.of(problem, capability)
    blocking = blocking_of(m, n, k, work.operands.a, work.operands.b, work.instruction, capability)
    if blocking.form == "gemv":
        return "one row is multiplied without a matrix instruction"
    if blocking.form == "persistent":
        return f"{m} rows are enough for programs that take one tile after the other"
    if work.instruction.dot == "int8" and capability in TENSOR_MEMORY:
        # Sizes in the text of a template or not: some of its kernels spill where the operator's does not (triton 3.7).
        return f"int8 has the instruction of older GPUs on sm_{capability}, with whose registers a template does not do"
    if blocking.split_k > 1:
        return f"{m} rows are so few that {blocking.split_k} programs share each of its sums"
    return ""
