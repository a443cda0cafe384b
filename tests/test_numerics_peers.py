"""torchao's float8, MX and NVFP4 primitives give the same bytes wherever their rule is the same one.

What differs, and is kept out of the data: torchao derives the exponent of mxfp8 from log2 (wrong beside powers of two),
writes negative zeros in e2m1, takes reciprocals where we divide, and has a floor under the block scales of nvfp4.
"""

import types
import warnings

import pytest
import torch

from olq_fx.formats import FORMATS
from olq_fx.numerics import dequantize, quantize
from olq_fx.testing import assert_same_bits


@pytest.fixture(scope="module")
def torchao() -> types.SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
        from torchao.quantization import quant_primitives as primitives
    return types.SimpleNamespace(
        modes=ScaleCalculationMode,
        to_mx=to_mx,
        to_dtype=to_dtype,
        nvfp4_quantize=nvfp4_quantize,
        nvfp4_scale=per_tensor_amax_to_scale,
        float8_scale=primitives._choose_scale_float8,
        float8_codes=primitives._quantize_affine_float8,
        float8_values=primitives._dequantize_affine_float8,
    )


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    spread = torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator).to(torch.float32))
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("fp8_per_tensor_static", (256, 512)),
        ("fp8_per_tensor_dynamic", (256, 512)),
        ("fp8_per_channel_static", (1, 512)),
        ("fp8_per_token", (1, 512)),
        ("fp8_per_block_static", (128, 128)),
        ("fp8_per_block_dynamic", (1, 128)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8(torchao: types.SimpleNamespace, name: str, block: tuple[int, int], dtype: torch.dtype) -> None:
    x = _normal(256, 512, dtype=dtype)
    codes, scale = quantize(x, FORMATS[name], "amax")
    # In float32: from bfloat16 torchao would divide the maximum in bfloat16.
    their_scale = torchao.float8_scale(x.to(torch.float32), list(block))
    assert_same_bits(scale, their_scale, name="scale")
    assert_same_bits(codes, torchao.float8_codes(x, their_scale), name="codes")
    values = dequantize((codes, scale), FORMATS[name], 512)
    assert_same_bits(values, torchao.float8_values(codes, their_scale), name="values")


@pytest.mark.parametrize(("rule", "mode"), [("floor", "FLOOR"), ("even", "EVEN"), ("ceil", "RCEIL")])
def test_mxfp4(torchao: types.SimpleNamespace, rule: str, mode: str) -> None:
    x = _normal(64, 1024)
    codes, scale = quantize(x, FORMATS["mxfp4"], rule)
    their_scale, their_codes = torchao.to_mx(x, torch.float4_e2m1fn_x2, 32, torchao.modes[mode])
    assert_same_bits(scale, their_scale.view(torch.uint8), name="scale")
    # Their codes keep the sign of what rounds to zero.
    low, high = their_codes & 15, their_codes >> 4
    positive = torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)
    assert_same_bits(codes, positive, name="codes")
    values = torchao.to_dtype(their_codes, their_scale, torch.float4_e2m1fn_x2, 32, torch.float32)
    assert torch.equal(dequantize((codes, scale), FORMATS["mxfp4"], 1024), values)


def test_mxfp8(torchao: types.SimpleNamespace) -> None:
    x = _normal(64, 1024)
    codes, scale = quantize(x, FORMATS["mxfp8"], "ceil")
    their_scale, their_codes = torchao.to_mx(x, torch.float8_e4m3fn, 32, torchao.modes.RCEIL)
    assert_same_bits(scale, their_scale.view(torch.uint8), name="scale")
    assert_same_bits(codes, their_codes, name="codes")
    values = torchao.to_dtype(their_codes, their_scale, torch.float8_e4m3fn, 32, torch.float32)
    assert_same_bits(dequantize((codes, scale), FORMATS["mxfp8"], 1024), values, name="values")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_per_token"])
@pytest.mark.parametrize("exponent", [-9, 0, 5])
def test_nvfp4_with_a_global_scale_that_is_a_power_of_two(
    torchao: types.SimpleNamespace, name: str, exponent: int
) -> None:
    """There the order in which the two scales are divided out does not matter."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(1, 4096, generator=generator).clamp(-4, 4) * 2.0**exponent
    x[0, 100] = 2688.0 * 2.0**exponent / 512
    codes, scale, coarse = quantize(x, FORMATS[name], "amax")
    their_global = torchao.nvfp4_scale(x.abs().amax())
    assert their_global.item() == 2.0 ** (exponent - 9)
    assert coarse.item() == (1 / their_global if name == "nvfp4" else their_global).item()
    their_scale, their_codes = torchao.nvfp4_quantize(x, 16, their_global)
    assert_same_bits(scale, their_scale.reshape(scale.shape), name="scale")
    low, high = their_codes & 15, their_codes >> 4
    positive = torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)
    assert_same_bits(codes, positive.reshape(codes.shape), name="codes")
