"""Norms and activations in one kernel with quantization: the bits of the unfused pair, values near PyTorch's."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from producer_cases import (
    FORMAT_NAMES,
    PAIRS,
    NormCase,
    activation_cases,
    cancelled,
    norm_cases,
    norm_slack,
    step,
)
from torch.nn import functional

from olq_fx import numerics
from olq_fx.errors import ConfigurationError
from olq_fx.formats import get_format
from olq_fx.kernels import producers, reference, triton_fused, triton_producers, triton_quantize
from olq_fx.kernels.producers import ACTIVATIONS, LONGEST_ROW, Activation, Norm
from olq_fx.kernels.triton_calls import run
from olq_fx.kernels.triton_fused import Target
from olq_fx.testing import assert_kernel_code, assert_kernel_values, assert_same_bits

# One in the default run; the others, and the golden table of all kernels, with the slow tests.
CAPABILITIES = (90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89, 100, 120)))
NATIVE = st.booleans()
PLAIN = Norm()
TORCH = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: functional.relu(x).square(),
}


def normalize_then_quantize(norm, x, format, rule, weight, bias, residual, dtype, native):
    values, stream = producers.normalize(norm, x, weight, bias, residual, dtype)
    return reference.quantize(values, format, rule), stream


@given(case=norm_cases())
@settings(max_examples=80)
def test_norms_have_the_bits_of_their_definition(interpreter, case):
    args = (case.norm, case.x, *case.operands, case.dtype)
    assert_kernel_values(interpreter, triton_fused.normalize, producers.normalize, *args)


@pytest.mark.parametrize(("format", "rule"), PAIRS)
@given(case=norm_cases(), native=NATIVE)
@settings(max_examples=12)
def test_quantized_norms_have_the_bits_of_the_pair(interpreter, format, rule, case, native):
    args = (case.norm, case.x, format, rule, *case.operands, case.dtype, native)
    assert_kernel_values(interpreter, triton_fused.normalize_quantize, normalize_then_quantize, *args)


@pytest.mark.parametrize(("format", "rule"), PAIRS)
@given(case=activation_cases(), native=NATIVE)
@settings(max_examples=12)
def test_quantized_activations_have_the_bits_of_the_pair(interpreter, format, rule, case, native):
    def pair(activation, inputs, format, rule, native):
        return reference.quantize(interpreter.call(triton_fused.activate, activation, inputs), format, rule)

    assert_kernel_values(interpreter, triton_fused.activate_quantize, pair, *case, format, rule, native)


def rows_and_formats() -> list[Any]:
    """By default the longest rows of two formats, and the others of all."""
    found = []
    for columns in (LONGEST_ROW, LONGEST_ROW + 1, 2 * LONGEST_ROW + 300):
        for format in FORMAT_NAMES:
            short = columns <= LONGEST_ROW + 1 or format in ("fp8_per_block_dynamic", "nvfp4_per_token")
            found.append(pytest.param(columns, format, marks=() if short else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("columns", "format"), rows_and_formats())
def test_rows_longer_than_a_tile(interpreter, format, columns):
    x, up, residual = (torch.randn(3, columns).bfloat16() for _ in range(3))
    x[1, -1], x[2, 17] = 1e4, torch.nan
    rule = get_format(format).activation_rule
    for norm in (Norm(), Norm(layer=True)):
        args = (norm, x, format, rule, torch.randn(columns), torch.randn(columns), residual, None, True)
        assert_kernel_values(interpreter, triton_fused.normalize_quantize, normalize_then_quantize, *args)
    both = torch.stack((x, up), 2).reshape(3, 2 * columns)
    for activation, inputs in ((Activation("silu"), (x, up)), (Activation("silu", "interleaved"), (both,))):
        values = interpreter.call(triton_fused.activate, activation, inputs)
        found = interpreter.call(triton_fused.activate_quantize, activation, inputs, format, rule)
        assert_same_bits(found, reference.quantize(values, format, rule), any_nan=True)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_every_16_bit_value_are_within_a_step_of_torch(interpreter, kind, dtype):
    x = every_value(dtype)
    found = interpreter.call(triton_fused.activate, Activation(kind), (x[None],))[0]
    finite = x.float().abs() < 2.0**127  # above, PyTorch's GELU overflows on CPUs
    expected = TORCH[kind](x[finite])
    same = found[finite] == expected
    apart = (found[finite].double() - expected.double()).abs()
    # PyTorch's GELU flushes subnormal numbers on CPUs.
    assert (same | (apart <= step(expected, dtype) + cancelled(x[finite], kind) + 2.0**-126)).all()
    # A missing or a second rounding would move far more.
    size = x[finite].abs()
    assert (~same)[(size > 2.0**-120) & (size < 2.5)].float().mean() < 0.002
    assert found[x.isnan()].isnan().all()
    lower = 0.0 if kind == "relu_squared" else torch.nan
    assert_same_bits(found[x.isinf()], torch.tensor([torch.inf, lower], dtype=dtype), any_nan=True)


@pytest.mark.parametrize("merged", [None, "paired", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activations_round_where_torch_does(interpreter, kind, dtype, merged):
    gate, up = (torch.randn(64, 500).to(dtype) for _ in range(2))
    inputs = {
        None: (gate, up),
        "paired": (torch.cat((gate, up), 1),),
        "interleaved": (torch.stack((gate, up), 2).reshape(64, 1000),),
    }[merged]
    found = interpreter.call(triton_fused.activate, Activation(kind, merged), inputs)
    expected = TORCH[kind](gate) * up
    apart = (found.double() - expected.double()).abs()
    assert (apart <= 2 * step(expected, dtype) + cancelled(gate, kind) * up.double().abs()).all()
    assert (found != expected).float().mean() < 0.002


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_in_float32_are_within_their_bound(interpreter, kind):
    x = torch.cat((torch.randn(4000) * 4, torch.linspace(-90, 90, 4000)))
    found = interpreter.call(triton_fused.activate, Activation(kind), (x[None],))[0]
    expected = TORCH[kind](x.double())
    relative = 2.0**-22 + x.double().abs() * 2.0**-23
    flushed = 2.0**-121  # SiLU where exp(-x) is Inf, as PyTorch's
    assert ((found.double() - expected).abs() <= relative * expected.abs() + cancelled(x, kind) + flushed).all()


def torch_norm(case: NormCase) -> torch.Tensor:
    stream = case.x if case.residual is None else case.x + case.residual
    shape = stream.shape[1:]
    if case.norm.layer:
        return functional.layer_norm(stream, shape, case.weight, case.bias, case.norm.eps)
    return functional.rms_norm(stream, shape, case.weight, case.norm.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("columns", [64, 1000])
def test_norms_are_within_a_step_of_torch(interpreter, layer, columns, dtype):
    x, residual = (torch.randn(64, columns).to(dtype) * 3 for _ in range(2))
    weight, bias = torch.randn(columns).to(dtype), torch.randn(columns).to(dtype) if layer else None
    x[0], x[1], x[2], x[3] = 0.0, 1.5, x[3] * 1e-4, x[4] + 200
    case = NormCase(Norm(1e-5, layer), x, weight, bias, residual, None)
    found, stream = interpreter.call(triton_fused.normalize, case.norm, x, *case.operands)
    assert_same_bits(stream, x + residual)
    expected = torch_norm(case)
    apart = (found.double() - expected.double()).abs()
    assert (apart <= step(expected, dtype) + norm_slack(case)).all()
    if dtype != torch.float32:
        assert (found != expected)[4:].float().mean() < 0.005


def test_a_norm_that_rounds_twice_is_that_of_llama(interpreter):
    x, weight = torch.randn(64, 512).bfloat16() * 3, torch.randn(512).bfloat16()
    found, _ = interpreter.call(triton_fused.normalize, Norm(1e-6, rounds_twice=True), x, weight)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)).bfloat16()
    once = functional.rms_norm(x, (512,), weight, 1e-6)
    assert (found != expected).float().mean() < 0.005 < (found != once).float().mean()


def in_place(norm, x, residual, format):
    found = get_format(format)
    parts = [torch.empty(spec.shape, dtype=spec.dtype) for spec in numerics.part_specs(found, *x.shape)]
    target = Target(None, parts, found, found.activation_rule)
    run(triton_fused.normalize_calls(norm, x, target, None, None, residual, residual, residual.dtype))
    return parts, residual


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("columns", [700, LONGEST_ROW + 200])
def test_the_new_residual_may_take_the_place_of_the_old_one(interpreter, format, columns):
    x, residual = torch.randn(5, columns).bfloat16(), torch.randn(5, columns)
    found = interpreter.call(in_place, Norm(), x, residual, format)
    rule = get_format(format).activation_rule
    assert_same_bits(found, normalize_then_quantize(Norm(), x, format, rule, None, None, residual, None, True))


def columns_first(x, format):
    found = get_format(format)
    specs = numerics.part_specs(found, *x.shape)
    parts = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    parts[1] = torch.empty(specs[1].shape[::-1], dtype=specs[1].dtype).T
    values = torch.empty(x.shape, dtype=x.dtype)
    target = Target(values, parts, found, found.activation_rule)
    run(triton_fused.normalize_calls(Norm(), x, target, None, None, None, None, x.dtype))
    other = [*parts[:1], torch.empty(specs[1].shape[::-1], dtype=specs[1].dtype).T, *parts[2:]]
    run(triton_quantize.quantize_calls(values, other, found, found.activation_rule, True))
    return parts, values, other


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_scales_by_columns_and_values_beside_the_codes(interpreter, format):
    x = torch.randn(40, 512).bfloat16()
    parts, values, other = interpreter.call(columns_first, x, format)
    assert_same_bits(values, producers.normalize(Norm(), x)[0])
    expected = reference.quantize(values, format, get_format(format).activation_rule)
    for found in (parts, other):
        assert found[1].stride(0) == 1
        assert_same_bits([part.contiguous() for part in found], expected)


@pytest.mark.parametrize("format", ["mxfp8", "fp8_per_tensor_dynamic"])
def test_weight_and_bias_may_be_views(interpreter, format):
    x, weight, bias = torch.randn(5, 96).bfloat16(), torch.randn(192)[::2], torch.randn(1).expand(96)
    norm, rule = Norm(layer=True), get_format(format).activation_rule
    viewed = interpreter.call(triton_fused.normalize_quantize, norm, x, format, rule, weight, bias)
    plain = interpreter.call(
        triton_fused.normalize_quantize, norm, x, format, rule, weight.contiguous(), bias.contiguous()
    )
    assert_same_bits(viewed, plain)


def test_what_does_not_fit_is_named():
    x = torch.randn(4, 6)
    with pytest.raises(ConfigurationError, match=r"shape \(4, 5\) beside one of \(4, 6\)"):
        triton_fused.activate(Activation("silu"), (x, x[:, 1:]))
    with pytest.raises(ConfigurationError, match="takes one tensor"):
        triton_fused.activate(Activation("silu", "paired"), (x, x))
    with pytest.raises(ConfigurationError, match="cannot be merged in 5 columns"):
        triton_fused.activate(Activation("silu", "interleaved"), (x[:, 1:],))
    with pytest.raises(ConfigurationError, match="differ in dtype"):
        triton_fused.activate(Activation("gelu"), (x, x.bfloat16()))
    with pytest.raises(ConfigurationError, match=r"not torch\.float64"):
        triton_fused.normalize(Norm(), x.double())
    with pytest.raises(ConfigurationError, match="is no activation format"):
        triton_fused.normalize_quantize(Norm(), x, "nvfp4", "amax")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def target(format: str, rule: str, k: int, native: bool) -> Target:
    specs = numerics.part_specs(get_format(format), 4096, k)
    parts = [meta(*spec.shape, dtype=spec.dtype) for spec in specs]
    return Target(None, parts, get_format(format), rule, native)


def norm_calls(where: Target, k: int, norm: Norm = PLAIN, other: torch.Tensor | None = None):
    return triton_fused.normalize_calls(
        norm, meta(4096, k), where, meta(k), other, meta(4096, k), meta(4096, k), torch.bfloat16
    )


def assert_in_registers(calls, capability):
    for call in calls:
        [code] = assert_kernel_code(call.kernel, call.args, call.constants, {capability: ""}, **call.options)
        if call.constants.get("KIND") != "gelu":  # erf is a function of the device's library
            # In bf16 one may stand for a sum or a product of two (sm_80 has nothing else): that is rounded once.
            assert "fma.rn.f32" not in code.ptx, "a contracted product has other bits"
        assert "div.full" not in code.ptx, "a division that is not rounded correctly"
        assert "rsqrt" not in code.ptx
        assert "sqrt.approx" not in code.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("format", "rule"), PAIRS)
def test_the_code_stays_in_registers(format, rule, capability):
    where = target(format, rule, LONGEST_ROW, capability >= 89)
    calls = norm_calls(where, LONGEST_ROW)
    calls += triton_fused.activate_calls(Activation("silu", "interleaved"), (meta(4096, 2 * LONGEST_ROW),), where)
    assert_in_registers(calls, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("format", ["fp8_per_token", "fp8_per_block_dynamic", "nvfp4_per_token"])
def test_the_code_of_other_producers_stays_in_registers(format, capability):
    rule, long = get_format(format).activation_rule, 2 * LONGEST_ROW
    layer = Norm(1e-5, layer=True, rounds_twice=True)
    calls = norm_calls(target(format, rule, long, capability >= 89), long, layer, meta(long))
    calls += norm_calls(target(format, rule, 4096, capability >= 89), 4096, layer, meta(4096))
    calls += triton_fused.normalize_calls(
        layer, meta(4096, 4096), Target(meta(4096, 4096)), meta(4096), None, None, None, torch.bfloat16
    )
    where = target(format, rule, long, capability >= 89)
    for kind in ACTIVATIONS:
        calls += triton_fused.activate_calls(Activation(kind), (meta(4096, long), meta(4096, long)), where)
    calls += triton_fused.activate_calls(Activation("silu", "interleaved"), (meta(4096, 512),), Target(meta(4096, 256)))
    assert_in_registers(calls, capability)


def test_there_is_one_kernel_and_no_more():
    """But for the statistic of a whole tensor, which takes a second one."""
    for name in FORMAT_NAMES:
        where = target(name, get_format(name).activation_rule, 4096, True)
        expected = 2 if name == "fp8_per_tensor_dynamic" else 1
        assert len(norm_calls(where, 4096)) == expected
        assert len(triton_fused.activate_calls(Activation("gelu"), (meta(4096, 4096),), where)) == expected
    assert norm_calls(where, 4096)[0].kernel is triton_producers.norm_rows
    assert norm_calls(where, LONGEST_ROW + 1)[0].kernel is triton_producers.norm_long_rows
