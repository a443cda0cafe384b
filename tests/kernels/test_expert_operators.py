"""The operators of experts: what torch checks of any operator, values, gradients, errors."""

import pytest
import torch
from expert_samples import stack_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from olq_fx.errors import ConversionError, UnsupportedError
from olq_fx.formats import FORMATS
from olq_fx.kernels import experts, native_experts
from olq_fx.kernels.experts import Gated, Layer
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_product_close, assert_same_bits

OPS = torch.ops.olq_fx
SLOTS = {name: (scheme.moe.weight, scheme.moe.activation or "") for name, scheme in SCHEMES.items()}
# One for each kind of scale and element.
KINDS = ("fp8_per_tensor", "fp8_per_block", "mxfp4_dualscale", "nvfp4_per_token", "int8_per_channel_weight_only")


def rule_of(format):
    return FORMATS[format].activation_rule if format else ""


def operands(scheme, e=3, n=48, k=40, dtype=torch.bfloat16, *, bias=True, shards=1):
    """A stack, and what follows it in the arguments of the operators."""
    weight_format, activation = SLOTS[scheme]
    added = torch.randn(e, n, dtype=dtype) if bias else None
    stack = stack_of(torch.randn(e, n, k).to(dtype), weight_format, added, shards)
    return stack, (stack.parts, weight_format, activation, rule_of(activation), added, shards)


def in_parts(x, arguments):
    """The arguments of an operator on a quantized activation for those of the one that quantizes, without routing."""
    weight, weight_format, activation, rule, bias, shards = arguments
    parts = OPS.quantize(x, activation, rule) if activation else [x]
    return (parts, activation), (weight, weight_format, x.shape[1], x.dtype, bias, shards)


def each_by_itself(x, lengths, stack, activation):
    """What `linear` gives of the rows of each expert, one after the other."""
    y = x.new_zeros(x.shape[0], stack.parts[0].shape[1])
    start = 0
    for expert, length in enumerate(lengths):
        rows = slice(start, start + length)
        for shard in range(stack.shards):
            parts, columns = experts.shard_of(stack, expert, shard)
            bias = None if stack.bias is None else stack.bias[expert][columns].contiguous()
            y[rows, columns] = OPS.linear(
                x[rows],
                [part.contiguous() for part in parts],
                stack.format,
                activation,
                rule_of(activation),
                bias,
                None,
            )
        start += length
    return y


@pytest.fixture
def comparable_float8(monkeypatch):
    """`opcheck` compares inputs by `torch.allclose`, which knows no float8: compare their bytes."""
    allclose = torch.allclose

    def by_bytes(a, b, **options):
        if a.dtype == torch.float8_e4m3fn:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", by_bytes)


@pytest.mark.usefixtures("comparable_float8")
@pytest.mark.parametrize("scheme", KINDS)
def test_torch_accepts_the_operators(scheme):
    stack, arguments = operands(scheme, dtype=torch.float32)
    x, ids = torch.randn(7, 40, requires_grad=True), torch.tensor([2, 0, 0, 2, -1, 3, 0])
    stack.bias.requires_grad_()
    opcheck(OPS.grouped_linear.default, (x, torch.tensor([3, 3, 6], dtype=torch.int32), *arguments))
    opcheck(OPS.gathered_linear.default, (x, ids, *arguments))
    stack.bias.requires_grad_(False)
    before, after = in_parts(x.detach(), arguments)
    opcheck(OPS.quantized_grouped_linear.default, (*before, torch.tensor([3, 3, 6]), *after))
    opcheck(OPS.quantized_gathered_linear.default, (*before, ids, *after))


@pytest.mark.usefixtures("comparable_float8")
@pytest.mark.parametrize("scheme", KINDS)
def test_torch_accepts_a_layer(scheme):
    opcheck(OPS.experts.default, layer_arguments(scheme)[0])


def layer_arguments(scheme, tokens=5, e=3, h=40, inner=24, dtype=torch.float32, kind="silu"):
    """Arguments of `experts`, and the layer that they describe."""
    weight_format, activation = SLOTS[scheme]
    gate_up, (_, _, _, rule, *_) = operands(scheme, e, 2 * inner, h, dtype, shards=2)
    down, _ = operands(scheme, e, h, inner, dtype)
    x = torch.randn(tokens, h, dtype=dtype)
    ids = torch.stack([torch.randperm(e + 1)[:2] for _ in range(tokens)]) if tokens else torch.empty(0, 2).long()
    weights = torch.rand(tokens, 2)
    stacks = (gate_up.parts, weight_format, gate_up.bias, 2, down.parts, weight_format, down.bias)
    layer = Layer(gate_up, down, Gated(kind), activation, rule)
    return (x, ids, weights, *stacks, activation, rule, kind, 1.702, 7.0), layer


@pytest.mark.parametrize("lengths", [(2, 0, 5), (0, 0, 0), (7, 0, 0), (0, 0, 7), (1, 1, 1)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_segment_is_multiplied_as_by_itself(scheme, lengths):
    """Statistics of the whole tensor aside, which no scheme has, rows do not know of each other."""
    stack, arguments = operands(scheme, shards=2)
    x = torch.randn(sum(lengths), 40).bfloat16()
    y = OPS.grouped_linear(x, torch.tensor(lengths).cumsum(0), *arguments)
    assert_same_bits(y, each_by_itself(x, lengths, stack, SLOTS[scheme][1]))


@pytest.mark.parametrize("lengths", [(60, 0, 70), (3, 1, 200)])
@pytest.mark.parametrize("scheme", KINDS)
def test_threads_change_no_bit(scheme, lengths):
    """Whether they take one expert each, or share that which has most rows."""
    stack, arguments = operands(scheme, n=64, k=96, shards=2)
    x = torch.randn(sum(lengths), 96).bfloat16()
    y = OPS.grouped_linear(x, torch.tensor(lengths).cumsum(0), *arguments)
    assert_same_bits(y, each_by_itself(x, lengths, stack, SLOTS[scheme][1]))


@pytest.mark.parametrize("ends", [(1, 9, 12), (-3, 2, 99), (4, 2, 6)])
def test_ends_beyond_the_rows_read_nothing_there(ends):
    stack, arguments = operands("fp8_weight_only")
    x = torch.randn(6, 40).bfloat16()
    y = OPS.grouped_linear(x, torch.tensor(ends), *arguments)
    expected, start = torch.zeros_like(y), 0
    for expert, end in enumerate(min(max(end, 0), 6) for end in ends):
        rows = slice(start, max(start, end))
        alone = [part[expert] for part in stack.parts]
        expected[rows] = OPS.linear(x[rows], alone, stack.format, "", "", stack.bias[expert], None)
        start = end
    assert_same_bits(y, expected)


@pytest.mark.parametrize("scheme", KINDS)
def test_weights_that_do_not_lie_row_by_row(scheme):
    _, arguments = operands(scheme)
    x, ids = torch.randn(5, 40).bfloat16(), torch.tensor([0, 2, 2, 1, 0])
    spread = [part.mT.contiguous().mT for part in arguments[0]]
    found = OPS.gathered_linear(x, ids, spread, *arguments[1:])
    assert_same_bits(found, OPS.gathered_linear(x, ids, *arguments))


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_are_quantized_by_themselves(scheme, shards):
    """Also where they end within a group of rows."""
    n = 150 * shards
    w, x = torch.randn(3, n, 40), torch.randn(6, 40).bfloat16()
    w[:, :150] *= 50
    stack = stack_of(w, SLOTS[scheme][0], torch.randn(3, n), shards)
    described = (SLOTS[scheme][0], SLOTS[scheme][1], rule_of(SLOTS[scheme][1]))
    y = OPS.grouped_linear(x, torch.tensor([1, 2, 6]), stack.parts, *described, stack.bias, shards)
    found = [
        OPS.grouped_linear(x, torch.tensor([1, 2, 6]), alone.parts, *described, bias)
        for alone, bias in (
            (stack_of(part, SLOTS[scheme][0]), bias.contiguous())
            for part, bias in zip(w.chunk(shards, 1), stack.bias.chunk(shards, 1), strict=True)
        )
    ]
    assert_same_bits(y, torch.cat(found, 1))


@pytest.mark.parametrize("format", [name for name, found in FORMATS.items() if found.weight])
def test_a_stack_is_as_its_parts_are_specified(format):
    for n, shards in ((96, 1), (96, 2), (150, 2), (128, 3)):
        stack = stack_of(torch.randn(2, n * shards, 40), format, shards=shards)
        specs = experts.part_specs_of_stack(FORMATS[format], 2, n, 40, shards)
        assert [(tuple(part.shape), part.dtype) for part in stack.parts] == [(each.shape, each.dtype) for each in specs]
    assert [each.name for each in specs] == ["codes", "scale", "coarse"][: len(specs)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_activation_that_is_quantized_already(scheme):
    _, arguments = operands(scheme, shards=2)
    x, ids, ends = torch.randn(6, 40).bfloat16(), torch.tensor([2, 0, -1, 1, 3, 1]), torch.tensor([1, 2, 6])
    before, after = in_parts(x, arguments)
    found = OPS.quantized_grouped_linear(*before, ends, *after)
    assert_same_bits(found, OPS.grouped_linear(x, ends, *arguments))
    found = OPS.quantized_gathered_linear(*before, ids, *after)
    assert_same_bits(found, OPS.gathered_linear(x, ids, *arguments))


@pytest.mark.parametrize("where", ["cpu", "reference"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_the_dequantized_operands(scheme, where, monkeypatch):
    stack, arguments = operands(scheme, n=64, k=96)
    x, activation = torch.randn(130, 96).bfloat16(), SLOTS[scheme][1]
    if where == "reference":
        monkeypatch.setattr(native_experts, "grouped_linear", experts.grouped_linear)
    y = OPS.grouped_linear(x, torch.tensor([1, 129, 130]), *arguments)
    read = x.float()
    if activation:
        read = OPS.dequantize(OPS.quantize(x, activation, rule_of(activation)), activation, 96, torch.float32)
    for expert, rows in enumerate((slice(0, 1), slice(1, 129), slice(129, 130))):
        assert_product_close(y[rows], read[rows], experts.values_of(stack, expert, 96), bias=stack.bias[expert])


def assert_of_ids(x, ids, stack, arguments, activation):
    """`gathered_linear` gives each row what `grouped_linear` gives it in the order of experts."""
    y = OPS.gathered_linear(x, ids, *arguments)
    count = stack.parts[0].shape[0]
    order = torch.sort(torch.where((ids >= 0) & (ids < count), ids, count), stable=True).indices
    ends = torch.tensor([int(((ids >= 0) & (ids <= expert)).sum()) for expert in range(count)])
    grouped = OPS.grouped_linear(x[order], ends, *arguments)
    assert_same_bits(y[order], grouped)
    assert not y[(ids < 0) | (ids >= count)].any()


@settings(max_examples=30)
@given(st.data())
def test_rows_in_any_order(data):
    scheme = data.draw(st.sampled_from(list(SCHEMES)))
    count, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, count), max_size=9)), dtype=torch.int64)
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    stack, arguments = operands(scheme, count, 8 * data.draw(st.integers(1, 4)), k, shards=2)
    assert_of_ids(torch.randn(len(ids), k).bfloat16(), ids, stack, arguments, SLOTS[scheme][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_is_what_the_definition_says(scheme, kind, dtype):
    arguments, layer = layer_arguments(scheme, dtype=dtype, kind=kind)
    expected = experts.layer(*arguments[:3], layer)
    y = OPS.experts(*arguments)
    assert y.dtype == dtype
    # The kernels of CPUs add in another order than the definition does, and codes between the products may move.
    error = (y.double() - expected.double()).norm() / expected.double().norm()
    assert error <= (2**-6 if arguments[10] else 2**-7)


@pytest.mark.parametrize("scheme", KINDS)
def test_a_layer_without_a_gate(scheme):
    weight_format, activation = SLOTS[scheme]
    up, down = (operands(scheme, 3, n, k, torch.float32)[0] for n, k in ((24, 40), (40, 24)))
    x, ids, weights = torch.randn(5, 40), torch.tensor([[0, 1], [2, 3], [1, 1], [-1, 0], [2, 0]]), torch.rand(5, 2)
    stacks = (up.parts, weight_format, up.bias, 1, down.parts, weight_format, down.bias)
    rule = rule_of(activation)
    y = OPS.experts(x, ids, weights, *stacks, activation, rule, "relu_squared", 1.702, 7.0)
    expected = experts.layer(x, ids, weights, Layer(up, down, Gated("relu_squared"), activation, rule))
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())
    if not activation:
        by_hand = torch.zeros(5, 40)
        for token, choices in enumerate(ids.tolist()):
            for choice, expert in enumerate(choices):
                if expert not in range(3):
                    continue
                inner = torch.relu(experts.values_of(up, expert, 40) @ x[token] + up.bias[expert]).square()
                found = experts.values_of(down, expert, 24) @ inner + down.bias[expert]
                by_hand[token] += weights[token, choice] * found
        torch.testing.assert_close(y, by_hand, rtol=1e-4, atol=1e-4 * by_hand.abs().max().item())


@pytest.mark.parametrize("scheme", KINDS)
def test_no_tokens(scheme):
    arguments, _ = layer_arguments(scheme, tokens=0)
    assert OPS.experts(*arguments).shape == (0, 40)
    _, stacked = operands(scheme)
    nobody = torch.zeros(3, dtype=torch.int32)
    assert OPS.grouped_linear(torch.empty(0, 40).bfloat16(), nobody, *stacked).shape == (0, 48)
    assert OPS.gathered_linear(torch.empty(0, 40).bfloat16(), torch.empty(0).int(), *stacked).shape == (0, 48)


@pytest.mark.parametrize("format", [name for name, found in FORMATS.items() if found.activation])
def test_what_belongs_to_nobody_counts_for_nothing(format):
    """Rows behind the last segment may be anything: NaN in them changes no statistic of the others."""
    parts, weight_format, _, _, bias, shards = operands("int8")[1]
    x = torch.randn(6, 40).bfloat16()
    with_tail = torch.cat([x, torch.full((2, 40), torch.nan).bfloat16()])
    ends = torch.tensor([1, 4, 6])
    arguments = (parts, weight_format, format, rule_of(format), bias, shards)
    y = OPS.grouped_linear(with_tail, ends, *arguments)
    assert_same_bits(y[:6], OPS.grouped_linear(x, ends, *arguments))
    assert not y[6:].any()
    ids = torch.tensor([0, 1, 1, 1, 2, 2, 3, -1])
    assert_same_bits(OPS.gathered_linear(with_tail, ids, *arguments), y)


@pytest.mark.parametrize("scheme", KINDS)
def test_gradients_are_those_of_the_dequantized_product(scheme):
    stack, arguments = operands(scheme, dtype=torch.float32, shards=2)
    values = torch.stack([experts.values_of(stack, expert, 40) for expert in range(3)])
    ids, upstream = torch.tensor([0, 0, 2, 2, 2, 3]), torch.randn(6, 48)
    wanted_x, wanted_bias = torch.zeros(6, 40), torch.zeros(3, 48)
    for row, expert in enumerate(ids[:5].tolist()):
        wanted_x[row] = upstream[row] @ values[expert]
        wanted_bias[expert] += upstream[row]
    for name, where in (("grouped_linear", torch.tensor([2, 2, 5])), ("gathered_linear", ids)):
        x = torch.randn(6, 40, requires_grad=True)
        bias = stack.bias.clone().requires_grad_()
        y = getattr(OPS, name)(x, where, *arguments[:4], bias, arguments[5])
        y.backward(upstream)
        torch.testing.assert_close(x.grad, wanted_x)
        torch.testing.assert_close(bias.grad, wanted_bias)


def test_products_of_quantized_activations_have_no_gradient():
    before, after = in_parts(torch.randn(6, 40).bfloat16(), operands("fp8_weight_only")[1])
    before[0][0].requires_grad_()
    with pytest.raises(UnsupportedError, match=r"olq_fx\.quantized_grouped_linear has no gradient"):
        OPS.quantized_grouped_linear(*before, torch.tensor([1, 2, 6]), *after)
    with pytest.raises(UnsupportedError, match=r"olq_fx\.quantized_gathered_linear has no gradient"):
        OPS.quantized_gathered_linear(*before, torch.zeros(6).int(), *after)


def test_a_layer_has_no_gradient():
    arguments, _ = layer_arguments("int8")
    x = arguments[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="has no gradient"):
        OPS.experts(x, *arguments[1:])


def test_operands_that_do_not_fit():
    arguments = operands("mxfp8")[1]
    x = torch.randn(4, 40).bfloat16()
    cases = {
        r"the ends of the rows of 3 experts are so many int32 or int64, not torch.int64 \(2,\)": (
            x,
            torch.tensor([1, 4]),
        ),
        r"the ends of the rows of 3 experts .* not torch.float32": (x, torch.tensor([1.0, 2.0, 4.0])),
        r"weights \(48, 32\) of 3 experts in mxfp8 have codes": (x[:, :32], torch.tensor([1, 2, 4])),
    }
    for message, given_ in cases.items():
        for device in ("cpu", "meta"):
            moved = [each.to(device) for each in (*given_, *arguments[0])]
            with pytest.raises(ConversionError, match=message):
                OPS.grouped_linear(*moved[:2], moved[2:], *arguments[1:4], None, 1)
    with pytest.raises(ConversionError, match="48 rows of a weight cannot be 5 shards"):
        OPS.grouped_linear(x, torch.tensor([1, 2, 4]), *arguments[:5], 5)
    with pytest.raises(ConversionError, match=r"weights \(48, 40\) of 3 experts, 2 shards each, in fp8_per_tensor"):
        OPS.grouped_linear(x, torch.tensor([1, 2, 4]), *operands("fp8_per_tensor")[1][:5], 2)
    before, after = in_parts(x, arguments)
    with pytest.raises(ConversionError, match="mxfp8 with K = 32 is stored as"):
        OPS.quantized_grouped_linear(*before, torch.tensor([1, 2, 4]), *after[:2], 32, *after[3:])
    with pytest.raises(ConversionError, match=r"4 rows have so many experts, not torch.int64 \(3,\)"):
        OPS.quantized_gathered_linear(*before, torch.tensor([1, 2, 0]), *after)
    with pytest.raises(ConversionError, match=r"4 rows have so many experts, not torch.int64 \(3,\)"):
        OPS.gathered_linear(x, torch.tensor([1, 2, 0]), *arguments)
    with pytest.raises(ConversionError, match=r"parts \(E, N, \.\.\.\), not \[\(48, 40\), \(48, 2\)\]"):
        OPS.grouped_linear(x, torch.tensor([1, 2, 4]), [part[0] for part in arguments[0]], *arguments[1:])
    given_, _ = layer_arguments("int8")
    with pytest.raises(ConversionError, match="gate and up are 2 shards, up alone is 1, and down is 1, not 3 and 1"):
        OPS.experts(*given_[:6], 3, *given_[7:])
    with pytest.raises(ConversionError, match="there is no activation 'swish' between experts; there are silu, gelu"):
        OPS.experts(*given_[:12], "swish", *given_[13:])


def test_operands_on_two_devices():
    """With one operand on meta torch calls the function that knows shapes only, whose result would have no values."""
    arguments = operands("mxfp8")[1]
    x = torch.randn(4, 40).bfloat16()
    with pytest.raises(RuntimeError, match="must be on one device, but there is x on cpu, offs on meta"):
        OPS.grouped_linear(x, torch.tensor([1, 2, 4]).to("meta"), *arguments)
    with pytest.raises(RuntimeError, match="must be on one device, but there is x on meta, ids on cpu"):
        OPS.gathered_linear(x.to("meta"), torch.tensor([1, 2, 0, 0]), *arguments)


def test_a_layer_without_values_refuses_what_one_with_values_refuses():
    given_, _ = layer_arguments("int8")
    wrong = (given_[0], given_[1][:, :1], *given_[2:])
    moved = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in wrong]
    moved = [[part.to("meta") for part in x] if isinstance(x, list) else x for x in moved]
    for arguments in (wrong, moved):
        with pytest.raises(ConversionError, match="5 tokens choose by integers"):
            OPS.experts(*arguments)
