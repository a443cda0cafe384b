"""A template takes a product where the operator would launch the same kernel, and says what else it would do."""

import itertools

import pytest
import torch
from product_cases import meta

from olq_fx.kernels import triton_matmul
from olq_fx.kernels.product_forms import why_operator
from olq_fx.kernels.triton_product import instruction_of, operand_of, product_calls, tile_blocking_of
from olq_fx.schemes import SCHEMES

SIZES = list(itertools.product((1, 2, 16, 64, 65, 128, 1000, 8192), (40, 256, 4096), (96, 256, 4096)))
KNOWN = ("one row", "are so few", "are enough", "of older GPUs", "")


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_the_kernel_of_the_operator_or_none(scheme: str, capability: int):
    slot, device, dtype = SCHEMES[scheme].linear, torch.device("meta"), torch.bfloat16
    activation = slot.activation or ""
    seen = set()
    for m, n, k in SIZES:
        reason = why_operator(activation, slot.weight, dtype, (m, n, k), capability, device)
        seen.add(next(word for word in KNOWN if word in reason))
        x, w = meta(activation, m, k), meta(slot.weight, n, k)
        calls = product_calls(
            x, activation, w, slot.weight, k, torch.empty(m, n, dtype=dtype, device="meta"), capability=capability
        )
        one = len(calls) == 1 and calls[0].kernel is triton_matmul.product
        if capability == 100 and calls[0].constants.get("DOT") == "int8":
            assert reason
            continue
        assert one == (not reason), (m, n, k, reason)
        if not reason:
            # The tile that the lowering takes, for whatever other layers are in the kernel.
            a, b = operand_of(x, activation), operand_of(w, slot.weight)
            tile = tile_blocking_of(m, n, k, a, b, instruction_of(a, b, k, capability), capability)
            found = calls[0].constants
            names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SWAP", "SPLIT_K")
            assert tuple(found[name] for name in names) == (tile.block_m, tile.block_n, tile.block_k, tile.swap, 1)
            assert (calls[0].num_warps, calls[0].num_stages) == (tile.num_warps, tile.num_stages)
    assert {"one row", "of older GPUs" if (scheme, capability) == ("int8", 100) else ""} <= seen
