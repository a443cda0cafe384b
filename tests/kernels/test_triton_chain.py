"""linear -> chain -> quantization in one kernel: the bits of the unfused kernels, without spills."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olq_fx import numerics
from olq_fx.errors import UnsupportedError
from olq_fx.formats import FORMATS, get_format
from olq_fx.kernels import producers, reference, triton_linear_chain, triton_product
from olq_fx.kernels.support import chain_refusal
from olq_fx.kernels.triton_linear_chain import Chain, chain_call
from olq_fx.testing import FLOAT_DTYPES, assert_kernel_code, assert_same_bits

OPERANDS = [
    ("fp8_per_block_dynamic", "fp8_per_block_static"),
    ("fp8_per_token", "fp8_per_channel_static"),
    ("int8_per_token", "int8_per_channel_static"),
    ("mxfp8", "mxfp8"),
    ("mxfp4_dualscale", "mxfp4_dualscale"),
    ("nvfp4_per_token", "nvfp4"),
    ("", "mxfp4"),
]
OUTPUTS = ["fp8_per_block_dynamic", "fp8_per_block_dynamic_1x32", "mxfp8", "mxfp4"]
CHAINS = [
    Chain(),
    Chain("gelu"),
    Chain("gelu_tanh"),
    Chain("relu_squared"),
    Chain("silu", "paired"),
    Chain("silu", "interleaved"),
    Chain("gelu", "paired"),
]


def integers(rows, columns, limit, dtype=torch.float32):
    """Small integers, with a largest one in each group of 16: codes and all sums of their products are exact."""
    x = torch.randint(-limit, limit + 1, (rows, columns)).to(dtype)
    x[:, ::16] = 6
    return x


def quantized(x, format, rule):
    return reference.quantize(x, format, rule) if format else [x]


def unfused(interpreter, x, activation, weight, weight_format, k, dtype, chain, bias, residual, capability):
    """The values of the chain, from a product by itself."""
    args = (x, activation, weight, weight_format, k, dtype, bias, residual, capability)
    y = interpreter.call(triton_product.quantized_linear, *args)
    if not chain.kind:
        return y
    return producers.activate(producers.Activation(chain.kind, chain.gated or None), [y])


def case(activation, weight_format, m, n, k, dtype):
    """Both operands, quantized."""
    x, w = integers(m, k, 3, dtype), integers(n, k, 3)
    rule = get_format(activation).activation_rule if activation else ""
    return quantized(x, activation, rule), quantized(w, weight_format, get_format(weight_format).weight_rule)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("operands", OPERANDS, ids=str)
@given(data=st.data())
@settings(max_examples=5)
def test_codes_and_scales_are_those_of_the_unfused_kernels(interpreter, operands, output, data):
    m, k = data.draw(st.integers(1, 40)), data.draw(st.integers(16, 200))
    n = 2 * data.draw(st.integers(1, 100))
    dtype, chain = data.draw(st.sampled_from(FLOAT_DTYPES)), data.draw(st.sampled_from(CHAINS))
    capability = data.draw(st.sampled_from([80, 90, 100]))
    x, weight = case(*operands, m, n, k, dtype)
    bias = integers(1, n, 4)[0] if data.draw(st.booleans()) else None
    residual = integers(m, n, 4, dtype) if not chain.gated and data.draw(st.booleans()) else None
    common = (x, operands[0], weight, operands[1], k, dtype, chain)
    rule = data.draw(st.sampled_from(get_format(output).rules))
    parts, values = interpreter.call(
        triton_linear_chain.linear_chain_quantize,
        *(*common, output, rule),
        bias=bias,
        residual=residual,
        keep=True,
        capability=capability,
    )
    expected = unfused(interpreter, *common, bias, residual, capability)
    torch.testing.assert_close(values, expected, rtol=2.0**-6, atol=1e-6)  # exp and erf are another library's
    assert_same_bits(parts, reference.quantize(values, output, rule))
    if chain.kind in ("", "relu_squared"):
        assert_same_bits(values, expected)


def test_values_that_are_not_wanted_are_not_written(interpreter):
    x, weight = case("mxfp8", "mxfp8", 5, 64, 96, torch.bfloat16)
    args = (x, "mxfp8", weight, "mxfp8", 96, torch.bfloat16, Chain("gelu"), "mxfp8", "ceil")
    parts, values = interpreter.call(triton_linear_chain.linear_chain_quantize, *args, capability=90)
    assert values is None
    kept, _ = interpreter.call(triton_linear_chain.linear_chain_quantize, *args, keep=True, capability=90)
    assert_same_bits(parts, kept)


def test_bias_and_residual_may_be_views(interpreter):
    x, weight = case("mxfp8", "mxfp8", 5, 64, 96, torch.bfloat16)
    bias, residual = torch.randn(128)[::2], torch.randn(64, 5).bfloat16().T
    args = (x, "mxfp8", weight, "mxfp8", 96, torch.bfloat16, Chain(), "mxfp8", "ceil")
    run = triton_linear_chain.linear_chain_quantize
    viewed = interpreter.call(run, *args, bias=bias, residual=residual, keep=True, capability=90)
    whole = bias.contiguous(), residual.contiguous()
    plain = interpreter.call(run, *args, bias=whole[0], residual=whole[1], keep=True, capability=90)
    assert_same_bits(viewed, plain)


def test_a_row_that_is_not_finite_marks_its_own_groups_only(interpreter):
    x, w = torch.randn(20, 128).bfloat16(), torch.randn(128, 128)
    x[7, 3] = torch.nan
    weight, format = reference.quantize(w, "fp8_per_channel_static", "amax"), "fp8_per_channel_static"
    a = reference.quantize(x, "fp8_per_token", "amax")
    args = (a, "fp8_per_token", weight, format, 128, torch.bfloat16, Chain("silu", "paired"), "mxfp8", "ceil")
    (codes, scale), _ = interpreter.call(triton_linear_chain.linear_chain_quantize, *args, capability=90)
    assert (scale[7] == 255).all()
    assert (codes[7].view(torch.uint8) == 0).all()
    others = torch.arange(20) != 7
    assert (scale[others] != 255).all()


@pytest.mark.parametrize("chain", [Chain(), Chain("gelu"), Chain("silu", "paired")], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 64, 32), (3, 0, 32), (3, 64, 0)])
def test_products_of_nothing(interpreter, m, n, k, chain):
    a, b = (reference.quantize(torch.randn(rows, k), "mxfp8", "ceil") for rows in (m, n))
    bias = torch.randn(n)
    args = (a, "mxfp8", b, "mxfp8", k, torch.float32, chain, "mxfp8", "ceil")
    parts, values = interpreter.call(
        triton_linear_chain.linear_chain_quantize, *args, bias=bias, keep=True, capability=90
    )
    expected = unfused(interpreter, *args[:7], bias, None, 90) if n else torch.empty(m, 0)
    assert_same_bits(values, expected)
    assert_same_bits(parts, reference.quantize(values, "mxfp8", "ceil"))


@pytest.mark.parametrize("format", [name for name, found in FORMATS.items() if found.activation])
def test_formats_whose_statistics_are_wider_than_a_tile_are_refused_by_name(format):
    found = get_format(format)
    wide = format in ("fp8_per_tensor_dynamic", "fp8_per_token", "int8_per_token", "nvfp4_per_token", "mxfp4_dualscale")
    assert bool(chain_refusal(found)) == wide
    if wide:
        args = ([torch.zeros(2, 32)], "", reference.quantize(torch.zeros(8, 32), "mxfp8", "ceil"), "mxfp8")
        with pytest.raises(UnsupportedError, match=f"{format} has a statistic of more than a piece of a row"):
            triton_linear_chain.linear_chain_quantize(
                *(*args, 32, torch.float32, Chain(), format, found.activation_rule), capability=90
            )


def test_a_residual_of_a_gated_product_is_refused():
    weight = reference.quantize(torch.zeros(8, 32), "mxfp8", "ceil")
    args = ([torch.zeros(2, 32)], "", weight, "mxfp8", 32, torch.float32, Chain("silu", "paired"), "mxfp8", "ceil")
    with pytest.raises(UnsupportedError, match="a residual has no place"):
        triton_linear_chain.linear_chain_quantize(*args, residual=torch.zeros(2, 8), capability=90)


def meta(format, rows, k):
    if not format:
        return [torch.empty(rows, k, dtype=torch.bfloat16, device="meta")]
    specs = numerics.part_specs(get_format(format), rows, k)
    return [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]


CODE = [
    ("fp8_per_block_dynamic", "fp8_per_block_static", "fp8_per_block_dynamic", 90, r"^wgmma.*e4m3\.e4m3"),
    ("fp8_per_token", "fp8_per_channel_static", "mxfp8", 100, r"^tcgen05.*f8f6f4"),
    ("mxfp4", "mxfp4", "mxfp4", 120, r"^mma\.sync.*mxf4nvf4"),
    ("mxfp4", "mxfp4", "mxfp4", 100, r"^tcgen05.*mxf4.*block_scale"),  # in another form before triton 3.7
    ("int8_per_token", "int8_per_channel_static", "mxfp8", 80, r"^mma\.sync.*s8"),
    ("fp8_per_block_dynamic", "fp8_per_block_static", "fp8_per_block_dynamic", 89, r"^mma\.sync.*e4m3"),
]


@pytest.mark.parametrize("m", [16, 4096])
@pytest.mark.parametrize(("activation", "weight", "output", "capability", "instruction"), CODE)
def test_the_code_of_a_gated_layer_stays_in_registers(activation, weight, output, capability, instruction, m):
    n, k, format = 8192, 4096, get_format(output)
    a = triton_product.operand_of(meta(activation, m, k), activation)
    b = triton_product.operand_of(meta(weight, n, k), weight)
    call = chain_call(
        *(a, b, k, torch.bfloat16, Chain("silu", "paired"), meta(output, m, n // 2), format, format.activation_rule),
        *(None, None, None),
        capability=capability,
    )
    assert_kernel_code(call.kernel, call.args, call.constants, {capability: instruction}, **call.options)
