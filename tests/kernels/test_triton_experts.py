"""Layers of experts by Triton kernels: the activation between the products, and the whole."""

import dataclasses

import pytest
import torch
from expert_samples import INSTRUCTIONS, meta, meta_rows, meta_stack, segments_of, stack_of
from hypothesis import given, settings
from hypothesis import strategies as st

from olq_fx.errors import ConversionError, UnsupportedError
from olq_fx.formats import FORMATS, get_format
from olq_fx.kernels import (
    experts,
    reference,
    support,
    triton_expert_layer,
    triton_experts,
    triton_quantize,
    triton_sorting,
)
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.experts import Gated, Layer, Segments, Stack
from olq_fx.kernels.triton_calls import run
from olq_fx.kernels.triton_expert_chain import expert_chain_calls
from olq_fx.schemes import SCHEMES
from olq_fx.testing import (
    FLOAT_DTYPES,
    assert_kernel_code,
    assert_kernel_values,
    assert_same_bits,
    assert_sqnr,
    tensors,
)

ACTIVATIONS = [(name, rule) for name, found in FORMATS.items() if found.activation for rule in found.rules]
KINDS = experts.KINDS
# One in the default run; the others, and the golden table of all kernels, with the slow tests.
CAPABILITIES = (90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89, 100, 120)))


def close_to_rounding(hidden, shards=2):
    """Equal, but where `exp` and `erf` of two libraries round to neighbours: a step of the dtype for each rounding."""
    size = torch.stack([each.double().abs() for each in hidden.chunk(shards, 1)]).prod(0)

    def compare(actual, expected):
        wanted = expected.double()
        same = (actual == expected) | (expected.isnan() & actual.isnan())
        # In the lower tail of gelu 1 + erf cancels: of that the size of its step at 1 is known, for each library.
        limit = 8 * torch.finfo(expected.dtype).eps * wanted.abs() + 2.0**-21 * size
        assert (same | ((actual.double() - wanted).abs() <= limit)).all()
        if expected.dtype != torch.float32:
            assert (same | (wanted.abs() < 1e-3 * size)).double().mean() > 0.98

    return compare


def plain(hidden, activation, lengths, shards):
    return triton_experts.gated_parts(hidden, activation, segments_of(lengths), "", "", shards=shards)[0]


def expected_plain(hidden, activation, lengths, shards):
    mine = torch.arange(len(hidden)) < sum(lengths)
    return torch.where(mine[:, None], experts.gated(hidden, activation, shards), 0.0).to(hidden.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_the_activation_is_rounded_where_eager_rounds(interpreter, kind, dtype):
    hidden = (torch.randn(19, 600) * 4).to(dtype)
    hidden[2, :7], hidden[3, 5] = 0.0, torch.nan
    if kind != "gelu":  # of Inf in bf16 or fp16, PyTorch's for a CPU makes NaN
        hidden[4, 9] = torch.inf
    for shards in (1, 2) if kind != "clamped" else (2,):
        args = (hidden, Gated(kind), [3, 0, 10, 4], shards)
        compare = close_to_rounding(hidden, shards)
        y = assert_kernel_values(interpreter, plain, expected_plain, *args, compare=compare)
        assert (y[17:] == 0).all()


def test_the_reference_is_what_models_compute():
    hidden = torch.randn(9, 64).bfloat16()
    gate, up = hidden.chunk(2, 1)
    assert_same_bits(experts.gated(hidden, Gated("silu")), torch.nn.functional.silu(gate) * up)
    assert_same_bits(experts.gated(hidden, Gated("gelu")), torch.nn.functional.gelu(gate) * up)
    assert_same_bits(experts.gated(hidden, Gated("relu_squared"), 1), torch.nn.functional.relu(hidden).square())
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    assert_same_bits(experts.gated(hidden, Gated("clamped")), expected)


def both(hidden, activation, lengths, format, rule, native):
    """Quantized by the kernel of the activation, and by another one after it."""
    segments, end = segments_of(lengths), sum(lengths)
    fused = triton_experts.gated_parts(hidden, activation, segments, format, rule, native)
    values = triton_experts.gated_parts(hidden, activation, segments, "", "", native)[0]
    apart = triton_quantize.quantize(values[:end], format, rule, native)
    return [part[: len(other)] for part, other in zip(fused, apart, strict=True)], apart, fused


@pytest.mark.parametrize(("format", "rule"), ACTIVATIONS)
@given(data=st.data())
@settings(max_examples=8)
def test_codes_and_scales_are_those_of_the_two_kernels_apart(interpreter, format, rule, data):
    hidden = data.draw(tensors(rows=(1, 40), columns=(2, 700), nonfinite=data.draw(st.booleans())))
    hidden = hidden[:, : hidden.shape[1] // 2 * 2]
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    if sum(lengths) > len(hidden):
        lengths = [len(hidden)]
    activation = Gated(data.draw(st.sampled_from(KINDS)))
    args = (hidden, activation, lengths, format, rule, data.draw(st.booleans()))
    fused, apart, whole = interpreter.call(both, *args)
    if not sum(lengths):  # a scale of no rows is of no use
        fused, apart = fused[:1], apart[:1]
    assert_same_bits(fused, apart, any_nan=True)
    if get_format(format).group[0] == 1:
        assert not any(part[sum(lengths) :].view(torch.uint8).any() for part in whole)


@pytest.mark.parametrize("format", ["fp8_per_token", "nvfp4_per_token", "int8_per_token"])
def test_rows_longer_than_a_tile(interpreter, format):
    hidden = torch.randn(5, 9002).bfloat16()
    hidden[2, 4400] = torch.nan
    fused, apart, _ = interpreter.call(both, hidden, Gated("silu"), [1, 3], format, "amax", True)
    assert_same_bits(fused, apart, any_nan=True)


def layer_of(scheme, count, h, inner, gated=None, bias=False, shards=2):
    slot = SCHEMES[scheme].moe
    gated = gated or Gated("silu")
    w, v = torch.randn(count, shards * inner, h) / h**0.5, torch.randn(count, h, inner) / inner**0.5
    biases = (torch.randn(count, shards * inner), torch.randn(count, h)) if bias else (None, None)
    activation = slot.activation or ""
    return Layer(
        stack_of(w, slot.weight, biases[0], shards),
        stack_of(v, slot.weight, biases[1]),
        gated,
        activation,
        get_format(activation).activation_rule if activation else "",
    )


def check_layer(interpreter, layer, tokens, top_k, beyond=1, dtype=torch.bfloat16, h=96):
    """Bits of the steps one by one; close to the reference, whose products may round to neighbours."""
    count = layer.gate_up.parts[0].shape[0]
    x, ids = torch.randn(tokens, h).to(dtype), torch.randint(0, count + beyond, (tokens, top_k))
    weights = torch.rand(tokens, top_k)
    y, apart = interpreter.call(together_and_apart, x, ids, weights, layer)
    assert_same_bits(y, apart)
    assert_sqnr(y, experts.layer(x, ids, weights, layer), 35)
    return y


def together_and_apart(x, ids, weights, layer):
    y = triton_expert_layer.layer(x, ids, weights, layer, 90)
    again = triton_expert_layer.layer(x, ids, weights, layer, 90)
    assert_same_bits(y, again)
    count, name = layer.gate_up.parts[0].shape[0], layer.activation_format
    segments = triton_sorting.route(ids, count)
    parts = triton_quantize.quantize(x, name, layer.rule) if name else [x]
    args = (layer.gate_up, x.shape[1], x.dtype, segments)
    hidden = triton_experts.grouped_linear(parts, name, *args, gather=True, capability=90)
    shards = layer.gate_up.shards
    between = triton_experts.gated_parts(hidden, layer.gated, segments, name, layer.rule, shards=shards)
    args = (layer.down, layer.inner, x.dtype, segments)
    rows = triton_experts.grouped_linear(between, name, *args, scatter=True, capability=90)
    return y, triton_sorting.combine(rows, ids, weights, count)


STEPS = ("fp8_per_tensor", "fp8_per_block", "mxfp4", "nvfp4_per_token", "int8", "mxfp4_weight_only")


@pytest.mark.parametrize("scheme", [n if n in STEPS else pytest.param(n, marks=pytest.mark.slow) for n in SCHEMES])
def test_a_layer_is_its_steps(interpreter, scheme):
    check_layer(interpreter, layer_of(scheme, 5, 96, 72, bias=True), tokens=20, top_k=2)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp4", "fp8_weight_only"])
def test_every_number_of_choices_an_expert_chosen_twice_and_none_of_ours(interpreter, scheme, top_k):
    layer = layer_of(scheme, 4, 96, 40, Gated("clamped"))
    check_layer(interpreter, layer, tokens=9, top_k=top_k, beyond=3)
    x, ids, weights = torch.randn(6, 96), torch.full((6, top_k), 4), torch.rand(6, top_k)
    assert (interpreter.call(triton_expert_layer.layer, x, ids, weights, layer, 90) == 0).all()


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "nvfp4_weight_only", "fp8_per_block"])
def test_shards_with_scales_of_their_own(interpreter, scheme):
    """Of the whole shard, and of blocks of rows that end with it."""
    layer = layer_of(scheme, 3, 96, 40, Gated("gelu"))
    assert not layer.gate_up.whole
    check_layer(interpreter, layer, tokens=12, top_k=2)


@pytest.mark.parametrize(
    "scheme",
    [
        "mxfp8",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("fp8_per_tensor", "nvfp4_per_token", "int8_per_channel_weight_only")
        ),
    ],
)
def test_experts_without_a_gate(interpreter, scheme):
    for kind in ("relu_squared", "silu"):
        layer = layer_of(scheme, 3, 96, 40, Gated(kind), bias=True, shards=1)
        check_layer(interpreter, layer, tokens=12, top_k=2)


def routed(kind):
    """40 rows of 20 tokens in segments of 4 experts, some of them of nobody."""
    ids = {"any": torch.randint(-1, 5, (20, 2)), "one": torch.full((20, 2), 2), "none": torch.full((20, 2), 4)}[kind]
    return experts.route(ids, 4)


CUTS = [Blocking(16, 128, 32, swap=True), Blocking(32, 128, 32), Blocking(64, 256, 32, swap=True, group=1)]


def chained(x, activation, stack, gated, output, rule, dtype, segments, blocking):
    """What one kernel makes, and what the pair makes, cut alike; rows of nobody hold what was there before."""
    k, m, inner = x.shape[1], segments.order.shape[0], stack.parts[0].shape[1] // stack.shards
    read = triton_quantize.quantize(x, activation, get_format(activation).activation_rule) if activation else [x]
    like = torch.empty(0, dtype=dtype)
    one, other = (triton_experts.empty_parts(m, inner, output, like, poisoned) for _ in range(2))
    given = (gated, one, output, rule, like, segments)
    run(expert_chain_calls(read, activation, stack, k, *given, capability=90, blocking=blocking))
    hidden = torch.empty(m, stack.parts[0].shape[1], dtype=dtype)
    given = (read, activation, stack, k, hidden, segments)
    run(triton_experts.grouped_calls(*given, gather=True, tail=False, capability=90, blocking=blocking))
    run(triton_experts.gated_calls(hidden, gated, segments, other, output, rule, True, stack.shards))
    return one, other


def poisoned(shape, dtype, device):
    """Memory that holds what nobody writes."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(shape, -123.0, dtype=dtype, device=device)
    return torch.full(shape, 0x5A, dtype=torch.uint8, device=device).view(dtype)


def fused_cases():
    """Operands, format between, routing; by default every format, and every routing of one of them."""
    for operands in (("fp8_per_block_dynamic", "fp8_per_block_static"), ("", "nvfp4")):
        for output in ("", "fp8_per_block_dynamic", "fp8_per_block_dynamic_1x32", "mxfp8", "mxfp4"):
            for routing in ("any", "one", "none"):
                default = (
                    output == "mxfp8" or routing == "any" if operands[0] else (output, routing) == ("mxfp8", "any")
                )
                marks = () if default else pytest.mark.slow
                yield pytest.param(operands, output, routing, marks=marks, id=f"{operands[1]}-{output}-{routing}")


@pytest.mark.parametrize(("operands", "output", "routing"), list(fused_cases()))
def test_one_kernel_has_the_bits_of_the_product_and_the_activation(interpreter, operands, output, routing):
    rules = get_format(output).rules if output else ("",)
    for number, cut in enumerate(CUTS):
        kind, shards = KINDS[(number + len(output)) % len(KINDS)], 2 - (number == 1)
        kind = "relu_squared" if shards == 1 else kind
        stack = stack_of(torch.randn(4, shards * 150, 96), operands[1], torch.randn(4, shards * 150), shards)
        dtype = FLOAT_DTYPES[number]
        x = torch.randn(20, 96).to(dtype)
        x[3, 5] = torch.nan
        args = (x, operands[0], stack, Gated(kind), output, rules[number % len(rules)], dtype, routed(routing), cut)
        one, other = interpreter.call(chained, *args)
        assert_same_bits(one, other, any_nan=True)


@pytest.mark.parametrize("activation", [name for name, found in FORMATS.items() if found.activation])
def test_what_the_first_product_cannot_quantize_has_a_kernel_of_its_own_and_a_reason(activation):
    names = [call.kernel.__name__ for call in layer_calls_of(activation)]
    reason = support.between_refusal(activation)
    assert ("grouped_chain" in names) == (not reason)
    assert any(name.startswith("gated_") for name in names) == bool(reason)
    if reason:
        assert reason == f"{activation} has a statistic of more than a piece of a row, which no tile of a product holds"
        given = (None, "", None, 0, None, None, activation, "", None, None)
        with pytest.raises(UnsupportedError, match="no kernel fuses the activation between experts"):
            expert_chain_calls(*given, capability=90)


def layer_calls_of(activation):
    slot = Layer(meta_stack(8, 512, 256, "mxfp8", shards=2), meta_stack(8, 256, 256, "mxfp8"), Gated("silu"))
    rule = get_format(activation).activation_rule
    layer = dataclasses.replace(slot, activation_format=activation, rule=rule)
    given = (meta((16, 256)), meta((16, 2), torch.int64), meta((16, 2), torch.float32))
    return triton_expert_layer.layer_calls(*given, layer, meta((16, 256)), 90)


@pytest.mark.slow
def test_many_tokens_and_none(interpreter):
    layer = layer_of("fp8_per_channel", 3, 96, 40)
    check_layer(interpreter, layer, tokens=300, top_k=2, dtype=torch.float16)
    for tokens, top_k in ((0, 2), (4, 0)):
        args = (torch.randn(tokens, 96), torch.zeros(tokens, top_k, dtype=torch.int64), torch.zeros(tokens, top_k))
        assert torch.equal(interpreter.call(triton_expert_layer.layer, *args, layer, 90), torch.zeros(tokens, 96))


def test_weights_of_tokens_in_their_dtype(interpreter):
    layer, ids = layer_of("fp8_per_channel", 3, 96, 40), torch.randint(0, 3, (8, 2))
    x, weights = torch.randn(8, 96).bfloat16(), torch.rand(8, 2).bfloat16()
    args = [interpreter.call(triton_expert_layer.layer, x, ids, each, layer, 90) for each in (weights, weights.float())]
    assert_same_bits(*args)


WITHOUT_GATE = stack_of(torch.randn(3, 40, 96), "fp8_per_channel_static")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(8, 2)}, "choose by integers"),
        ({"ids": torch.zeros(8, 3, dtype=torch.int64)}, "8 tokens choose"),
        ({"gated": Gated("clamped"), "gate_up": WITHOUT_GATE}, "'clamped' between experts needs a gate"),
        ({"gate_up": dataclasses.replace(WITHOUT_GATE, shards=4)}, "gate and up are 2 shards, up alone is 1"),
        ({"x": torch.randn(8, 64)}, r"weights \(80, 64\) of 3 experts"),
        ({"down": stack_of(torch.randn(2, 96, 40), "fp8_per_channel_static")}, r"weights \(96, 40\) of 3 experts"),
        ({"down": Stack([torch.zeros(3, 96, 40).to(torch.int8)], "int8_per_channel_static")}, "given: nothing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_operands_that_do_not_fit_are_refused_by_name(change, message):
    layer = layer_of("fp8_per_channel", 3, 96, 40)
    layer = dataclasses.replace(
        layer, **{name: change[name] for name in ("down", "gate_up", "gated") if name in change}
    )
    x, ids = change.get("x", torch.randn(8, 96)), change.get("ids", torch.zeros(8, 2, dtype=torch.int64))
    with pytest.raises(ConversionError, match=message):
        experts.layer(x, ids, torch.rand(8, 2), layer)
    with pytest.raises(ConversionError, match=message):
        triton_expert_layer.layer(x, ids, torch.rand(8, 2), layer, 90)


def test_a_token_with_nan_is_nan_and_no_other_one(interpreter):
    layer = layer_of("mxfp8", 4, 96, 64)
    x, ids, weights = torch.randn(10, 96).bfloat16(), torch.arange(20).reshape(10, 2) % 4, torch.rand(10, 2)
    x[3, 7] = torch.nan
    y = interpreter.call(triton_expert_layer.layer, x, ids, weights, layer, 90)
    assert y[3].isnan().all()
    assert y.isfinite().all(1).sum() == 9


def test_the_reference_is_a_loop_over_tokens():
    """With values that dequantize to themselves, against float64."""
    layer = layer_of("fp8_weight_only", 4, 32, 24)
    x, ids, weights = torch.randn(7, 32), torch.randint(0, 5, (7, 3)), torch.rand(7, 3)
    expected = torch.zeros(7, 32, dtype=torch.float64)
    for token, choices in enumerate(ids.tolist()):
        for choice, expert in enumerate(choices):
            if expert == 4:
                continue
            up, down = (
                reference.dequantize([part[expert] for part in stack.parts], stack.format, k, torch.float32).double()
                for stack, k in ((layer.gate_up, 32), (layer.down, 24))
            )
            gate, factor = (up @ x[token].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * factor
            expected[token] += weights[token, choice].double() * (down @ inner)
    torch.testing.assert_close(experts.layer(x, ids, weights, layer).double(), expected, rtol=1e-4, atol=1e-5)


def meta_layer(scheme, count=64, h=4096, inner=1536):
    slot = SCHEMES[scheme].moe
    activation = slot.activation or ""
    rule = get_format(activation).activation_rule if activation else ""
    up, down = meta_stack(count, 2 * inner, h, slot.weight, shards=2), meta_stack(count, h, inner, slot.weight)
    return Layer(up, down, Gated("silu"), activation, rule)


def meta_calls(scheme, tokens, top_k, capability):
    layer, weights = meta_layer(scheme), meta((tokens, top_k), torch.float32)
    x, ids = meta((tokens, 4096)), meta((tokens, top_k), torch.int64)
    return triton_expert_layer.layer_calls(x, ids, weights, layer, meta((tokens, 4096)), capability)


def test_launches_follow_from_shapes_alone_and_are_few():
    """On tensors without values: nothing can wait for the device."""
    names = [call.kernel.__name__ for call in meta_calls("fp8_per_block", 8, 8, 90)]
    products = ["tile_table", "grouped_chain", "tile_table", "grouped_product"]
    assert names == ["place_pairs", "quantize_tiles", *products, "combine"]
    names = [call.kernel.__name__ for call in meta_calls("mxfp4_weight_only", 4096, 1, 90)]
    assert names == ["count_experts", "sum_counts", "place_pairs", *products]


def test_few_tokens_read_no_more_weights_than_they_chose():
    """No tile stands for an expert without rows."""
    for tokens, tiles in ((1, 8), (8, 64), (64, 64 + 28)):
        calls = [call for call in meta_calls("fp8_per_block", tokens, 8, 90) if "grouped" in call.kernel.__name__]
        assert [call.grid[0] for call in calls] == [tiles * 1536 // 128, tiles * 4096 // 128]


PAIRS = [("silu", *each) for each in [*ACTIVATIONS, ("", "")]]
PAIRS += [(kind, "fp8_per_token", "amax") for kind in KINDS if kind != "silu"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("kind", "format", "rule"), PAIRS)
def test_the_code_of_the_activation_stays_in_registers(kind, format, rule, capability):
    hidden, native = meta((4096, 3072)), capability >= 89
    parts = meta_rows(format, 4096, 1536)
    for call in triton_experts.gated_calls(hidden, Gated(kind), segments_of([1]), parts, format, rule, native):
        [code] = assert_kernel_code(call.kernel, call.args, call.constants, {capability: ""}, **call.options)
        assert "div.full" not in code.ptx, "a division that is not rounded correctly"


FUSED = [name for name in SCHEMES if not support.between_refusal(SCHEMES[name].moe.activation or "")]


@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp4", "fp8_weight_only"])
def test_the_code_of_the_first_product_stays_in_registers(scheme):
    for tokens in (8, 8192):
        assert_code_of_first(scheme, Gated("silu"), tokens, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("scheme", FUSED)
def test_the_code_of_every_first_product_stays_in_registers(scheme, capability):
    for tokens in (8, 64, 512, 8192):
        assert_code_of_first(scheme, Gated("silu"), tokens, capability)
        assert_code_of_first(scheme, Gated("clamped"), tokens, capability, inner=2880, bias=True)
        assert_code_of_first(scheme, Gated("gelu"), tokens, capability, bias=True)
        assert_code_of_first(scheme, Gated("relu_squared"), tokens, capability, shards=1)
        for dtype in (torch.float16, torch.float32) if not SCHEMES[scheme].moe.activation else ():
            assert_code_of_first(scheme, Gated("silu"), tokens, capability, dtype=dtype)


def assert_code_of_first(scheme, gated, tokens, capability, *, shards=2, inner=1536, bias=False, dtype=torch.bfloat16):
    slot, k, m = SCHEMES[scheme].moe, 4096, 8 * tokens
    activation = slot.activation or ""
    stack = meta_stack(64, shards * inner, k, slot.weight, bias=bias, shards=shards)
    segments = Segments(meta((65,), torch.int32), meta((m,), torch.int32), 8)
    x = meta_rows(activation, tokens, k) if activation else [meta((tokens, k), dtype)]
    parts = meta_rows(activation, m, inner) if activation else [meta((m, inner), dtype)]
    rule = get_format(activation).activation_rule if activation else ""
    given = (gated, parts, activation, rule, meta((1,), dtype), segments)
    call = expert_chain_calls(x, activation, stack, k, *given, capability=capability)[-1]
    wanted = INSTRUCTIONS[call.constants["DOT"], capability]
    assert_kernel_code(call.kernel, call.args, call.constants, {capability: wanted}, **call.options)
