"""On a GPU: one row is within the derived bound, many have the bits of the same tiles, mixed pairs are right."""

import dataclasses

import pytest
import torch
from product_cases import ACTIVATIONS, WEIGHTS, quantized, values

from olq_fx.kernels.triton_calls import run
from olq_fx.kernels.triton_product import blocking_of, instruction_of, operand_of, product_calls
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_product_close, assert_same_bits

pytestmark = pytest.mark.gpu


def capability():
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def on_gpu(parts):
    return [part.cuda() for part in parts]


def chosen(a, activation, b, weight, k, out):
    left, right = operand_of(a, activation), operand_of(b, weight)
    return blocking_of(*out.shape, k, left, right, instruction_of(left, right, k, capability()), capability())


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_row_is_within_the_derived_bound(activation, weight):
    for n, k in ((256, 4096), (67, 2880)):
        a, b = quantized(torch.randn(1, k), activation), quantized(torch.randn(n, k), weight, weight=True)
        bias, out = torch.randn(n), torch.full((1, n), torch.nan, device="cuda")
        args = on_gpu(a), activation, on_gpu(b), weight, k, out
        assert chosen(*args).form == "gemv"
        run(product_calls(*args, bias=bias.cuda(), capability=capability()))
        assert_product_close(out.cpu(), values(a, activation, k), values(b, weight, k), bias=bias)
        first = out.clone()
        run(product_calls(*args, bias=bias.cuda(), capability=capability()))
        assert_same_bits(out.cpu(), first.cpu())


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "fp8_per_block", "int8"])
def test_many_rows_have_the_bits_of_the_same_tiles(scheme):
    slot, m, n, k = SCHEMES[scheme].linear, 2050, 4200, 1040
    a, b = quantized(torch.randn(m, k), slot.activation), quantized(torch.randn(n, k), slot.weight, weight=True)
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    args = on_gpu(a), slot.activation, on_gpu(b), slot.weight, k, out
    blocking = chosen(*args)
    if blocking.form != "persistent":
        pytest.skip("this GPU decodes such codes")
    found = []
    for form in ("persistent", "tiles"):
        run(product_calls(*args, capability=capability(), blocking=dataclasses.replace(blocking, form=form)))
        found.append(out.cpu())
    assert_same_bits(*found)
    expected = values(a, slot.activation, k).cuda() @ values(b, slot.weight, k).cuda().T
    assert float((out.float() - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("pair", [("mxfp8", "mxfp4"), ("mxfp4", "mxfp8")], ids=str)
@pytest.mark.parametrize("m", [16, 300])
def test_mixed_pairs_are_within_the_derived_bound(pair, m):
    n, k = 320, 1056
    a, b = quantized(torch.randn(m, k), pair[0]), quantized(torch.randn(n, k), pair[1], weight=True)
    out = torch.full((m, n), torch.nan, device="cuda")
    run(product_calls(on_gpu(a), pair[0], on_gpu(b), pair[1], k, out, capability=capability()))
    assert_product_close(out.cpu(), values(a, pair[0], k), values(b, pair[1], k))
