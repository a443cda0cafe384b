"""Products of ragged segments by Triton kernels: every pair of formats within the derived bound."""

import itertools

import pytest
import torch
from expert_samples import INSTRUCTIONS, meta, meta_rows, meta_stack, quantized, segments_of, stack_of
from hypothesis import given, settings
from hypothesis import strategies as st

from olq_fx.errors import ConversionError
from olq_fx.formats import FORMATS, block_formats, get_format
from olq_fx.kernels import experts, triton_experts, triton_product
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.experts import Segments
from olq_fx.kernels.triton_calls import run
from olq_fx.numerics import dequantize
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, assert_kernel_code, assert_product_close, assert_same_bits, tensors

WEIGHTS = [name for name, found in FORMATS.items() if found.weight]
ACTIVATIONS = [*(name for name, found in FORMATS.items() if found.activation), ""]
CAPABILITIES = (80, 90, 100)
KINDS = ("normal", "zero", "outlier", "constant", "power_of_two")


def values(parts, format, k):
    return dequantize(tuple(parts), get_format(format), k) if format else parts[0].float()


def check(interpreter, x, stack, activation, segments, capability=90, **options):
    """Multiply in the interpreter; hold each segment to the operands of its expert, and the rest to zeros."""
    k, parts = x.shape[1], quantized(x, activation)
    args = (parts, activation, stack, k, x.dtype, segments)
    y = interpreter.call(triton_experts.grouped_linear, *args, capability=capability, **options)
    assert_close(y, values(parts, activation, k), stack, segments, **options)
    expected = experts.grouped_linear(*args, **options)
    assert_close(expected, values(parts, activation, k), stack, segments, **options)
    return y


def assert_close(y, x, stack, segments, gather=False, scatter=False):
    nobodys = torch.ones(len(y), dtype=torch.bool)
    ends = segments.offsets.tolist()
    for expert in range(segments.experts):
        positions = torch.arange(ends[expert], ends[expert + 1])
        pairs = positions if segments.order is None else segments.order[positions].long()
        rows, places = pairs // segments.top_k if gather else positions, pairs if scatter else positions
        bias = None if stack.bias is None else stack.bias[expert]
        assert_product_close(y[places], x[rows], experts.values_of(stack, expert, x.shape[1]), bias=bias)
        nobodys[places] = False
    assert (y[nobodys] == 0).all()


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_pair_of_formats_is_within_the_derived_bound(interpreter, activation, weight):
    for lengths, tail, n, k, dtype, capability in (
        ([0, 5, 17, 0], 3, 70, 131, torch.bfloat16, 90),
        ([70, 1], 0, 33, 192, torch.float16, 80),
        ([1, 0, 2], 1, 140, 64, torch.float32, 100),
    ):
        stack = stack_of(torch.randn(len(lengths), n, k), weight, torch.randn(len(lengths), n))
        x = torch.randn(sum(lengths) + tail, k).to(dtype)
        check(interpreter, x, stack, activation, segments_of(lengths), capability)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
@settings(max_examples=6)
def test_segments_shapes_and_routings_of_every_kind(interpreter, scheme, data):
    slot, count = SCHEMES[scheme].moe, data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from(FLOAT_DTYPES))
    x = data.draw(tensors(rows=(1, 25), columns=(3, 200), dtypes=[dtype], kinds=KINDS))
    n, k = data.draw(st.integers(1, 90)), x.shape[1]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bias = torch.randn(count, n, generator=generator).to(dtype) if data.draw(st.booleans()) else None
    stack = stack_of(torch.randn(count, n, k, generator=generator), slot.weight, bias)
    ids = torch.randint(0, count + 1, (x.shape[0], data.draw(st.integers(1, 4))), generator=generator)
    segments = experts.route(ids, count)
    rows, options = x, {"gather": data.draw(st.booleans()), "scatter": data.draw(st.booleans())}
    if not options["gather"]:
        rows = x.repeat_interleave(segments.top_k, 0)
    check(
        interpreter, rows, stack, slot.activation or "", segments, data.draw(st.sampled_from(CAPABILITIES)), **options
    )


@pytest.mark.parametrize("lengths", [[0, 0, 40], [40, 0, 0], [0, 40, 0], [0, 0, 0], [16, 16, 8]], ids=str)
@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp4", "int8"])
def test_one_expert_with_all_rows_and_none_with_any(interpreter, scheme, lengths):
    slot = SCHEMES[scheme].moe
    stack = stack_of(torch.randn(3, 40, 96), slot.weight)
    check(interpreter, torch.randn(40, 96).bfloat16(), stack, slot.activation, segments_of(lengths))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_with_nan_is_nan_and_no_other_one(interpreter, scheme):
    slot = SCHEMES[scheme].moe
    x, stack = torch.randn(20, 96).bfloat16(), stack_of(torch.randn(3, 40, 96), slot.weight)
    x[3, 50], x[17, 95] = torch.nan, torch.inf
    ids = torch.tensor([[0, 2]] * 10 + [[1, 2]] * 10)
    y = check(interpreter, x, stack, slot.activation or "", experts.route(ids, 3), gather=True, scatter=True)
    finite = y.isfinite().all(1).reshape(20, 2).all(1)
    if slot.activation and get_format(slot.activation).group != (None, None):
        assert y[6:8].isnan().all()
        assert y[34:36].isnan().all()
        assert finite.sum() == 18


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "mxfp4_weight_only"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_tokens_multiply_what_has_been_rounded(interpreter, scheme, dtype):
    slot = SCHEMES[scheme].moe
    x, stack = torch.randn(9, 64).to(dtype), stack_of(torch.randn(4, 24, 64), slot.weight, torch.randn(4, 24))
    ids, weights = torch.randint(0, 5, (9, 1)), torch.rand(9, 1)
    parts, segments = quantized(x, slot.activation), experts.route(ids, 4)
    args = (parts, slot.activation or "", stack, 64, dtype, segments)
    options = {"gather": True, "scatter": True, "capability": 90}
    plain = interpreter.call(triton_experts.grouped_linear, *args, **options)
    weighted = interpreter.call(triton_experts.grouped_linear, *args, weights=weights, **options)
    mine = (plain.float() * weights).to(dtype)
    assert_same_bits(weighted, torch.where(ids < 4, mine, torch.zeros_like(mine)))
    reference = experts.grouped_linear(*args, weights=weights, gather=True, scatter=True)
    torch.testing.assert_close(weighted, reference, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


BLOCKINGS = [
    Blocking(16, 32, 32, swap=True),
    Blocking(32, 16, 32),
    Blocking(16, 64, 32, swap=True, group=1),
    Blocking(64, 32, 32, group=3),
]


def cuts():
    """Schemes and blockings; by default two of the latter for each, so that every one is tried."""
    for i, scheme in enumerate(["fp8_per_block", "int8", "mxfp4", "nvfp4_per_token", "fp8_weight_only"]):
        for j, blocking in enumerate(BLOCKINGS):
            marks = () if (i + j) % 2 == 0 else pytest.mark.slow
            yield pytest.param(scheme, blocking, marks=marks, id=f"{scheme}-{blocking}")


@pytest.mark.parametrize(("scheme", "blocking"), list(cuts()))
def test_every_way_to_cut_the_work(interpreter, scheme, blocking):
    slot = SCHEMES[scheme].moe
    x, stack = torch.randn(75, 200).bfloat16(), stack_of(torch.randn(3, 150, 200), slot.weight, torch.randn(3, 150))
    segments, parts = segments_of([5, 0, 68]), quantized(x, slot.activation)
    args = (parts, slot.activation or "", stack, 200, torch.empty(75, 150, dtype=torch.bfloat16), segments)
    y = interpreter.call(multiply, *args, tail=True, capability=90, blocking=blocking)
    assert_close(y, values(parts, slot.activation, 200), stack, segments)


def multiply(*args, **kwargs):
    args[4].fill_(torch.nan)
    run(triton_experts.grouped_calls(*args, **kwargs))
    return args[4]


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "mxfp8"])
def test_without_a_tail_rows_of_nobody_are_not_touched(interpreter, scheme):
    slot = SCHEMES[scheme].moe
    x, stack = torch.randn(30, 64).bfloat16(), stack_of(torch.randn(2, 40, 64), slot.weight)
    out = torch.empty(30, 40, dtype=torch.bfloat16)
    args = (quantized(x, slot.activation), slot.activation, stack, 64, out, segments_of([3, 18]))
    y = interpreter.call(multiply, *args, tail=False, capability=90)
    assert y[21:].isnan().all()
    assert y[:21].isfinite().all()


@pytest.mark.parametrize("weight", ["fp8_per_tensor_static", "nvfp4", "fp8_per_block_static", "fp8_per_channel_static"])
def test_each_shard_of_an_expert_is_quantized_by_itself(interpreter, weight):
    """Scales of the whole shard, of blocks of rows that end with it, and those that know of no shards."""
    w = torch.randn(3, 300, 64)
    w[:, 150:] *= 7
    stack = stack_of(w, weight, torch.randn(3, 300), shards=2)
    for activation in (get_format(weight).default_activation, ""):
        for capability in CAPABILITIES:
            x = torch.randn(25, 64).bfloat16()
            check(interpreter, x, stack, activation, segments_of([20, 0, 4]), capability)


@pytest.mark.parametrize("rows", [32, 64, 128, 256])
@pytest.mark.parametrize("size", [1, 31, 96, 130, 192])
def test_blocks_of_rows_begin_anew_with_a_shard(interpreter, rows, size):
    weight, activation = block_formats(rows, 64)
    w = torch.randn(2, 3 * size, 130) * torch.tensor([1.0, 8.0, 64.0]).repeat_interleave(size)[:, None]
    stack = stack_of(w, weight, shards=3)
    assert stack.whole == (size % rows == 0)
    for m in (3, 40):
        check(interpreter, torch.randn(2 * m, 130).bfloat16(), stack, activation, segments_of([m, m]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_segment_has_the_bits_of_the_dense_product(interpreter, scheme):
    """Where both cut the work alike."""
    slot = SCHEMES[scheme].moe
    x, stack = torch.randn(40, 160).bfloat16(), stack_of(torch.randn(2, 72, 160), slot.weight, torch.randn(2, 72))
    parts, segments = quantized(x, slot.activation), segments_of([30, 10])
    args = (parts, slot.activation or "", stack, 160, torch.empty(40, 72, dtype=torch.bfloat16), segments)
    blocking = Blocking(16, 64, 32, swap=True)
    grouped = interpreter.call(multiply, *args, tail=False, capability=90, blocking=blocking)
    for expert, rows in ((0, slice(0, 30)), (1, slice(30, 40))):
        weight = [part[expert] for part in stack.parts]
        out = torch.empty(40, 72, dtype=torch.bfloat16)
        args = (parts, slot.activation or "", weight, slot.weight, 160, out)
        dense = interpreter.call(dense_product, *args, bias=stack.bias[expert], capability=90, blocking=blocking)
        assert_same_bits(grouped[rows], dense[rows])


def dense_product(*args, **kwargs):
    run(triton_product.product_calls(*args, **kwargs))
    return args[5]


@pytest.mark.parametrize(("shape", "lengths"), [((0, 40, 64), [0, 0]), ((5, 0, 64), [2, 3]), ((5, 40, 0), [2, 2])])
def test_nothing_to_multiply(interpreter, shape, lengths):
    m, n, k = shape
    stack = stack_of(torch.randn(2, n, k), "fp8_per_channel_static", torch.randn(2, n))
    check(interpreter, torch.randn(m, k), stack, "fp8_per_token", segments_of(lengths))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 65}, "K = 65"),
        ({"bias": torch.zeros(3, 24)}, r"bias of 2 experts has shape \(2, 24\)"),
        ({"lengths": [4, 5, 0]}, "of 3 experts in fp8_per_channel_static have codes"),
        ({"gather": True}, "only with an order"),
        ({"order": torch.zeros(18, dtype=torch.int32)}, "18 rows of segments"),
        ({"order": torch.zeros(9, dtype=torch.int32), "weights": torch.zeros(9).half()}, "are float32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_operands_that_do_not_fit_are_refused_by_name(change, message):
    stack = stack_of(torch.randn(2, 24, 64), "fp8_per_channel_static", change.get("bias"))
    segments = segments_of(change.get("lengths", [4, 5]), change.get("order"))
    args = (quantized(torch.randn(9, 64), "fp8_per_token"), "fp8_per_token", stack, change.get("k", 64), torch.float32)
    options = {name: change[name] for name in ("gather", "weights") if name in change}
    for function in (experts.grouped_linear, triton_experts.grouped_linear):
        more = {} if function is experts.grouped_linear else {"capability": 90}
        with pytest.raises(ConversionError, match=message):
            function(*args, segments, **options, **more)


# The representatives of the catalogue are compiled for each of them in any case.
ALL_CODE = [90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 89, 100, 120))]


@pytest.mark.parametrize("capability", ALL_CODE)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_code_has_the_instruction_and_stays_in_registers(scheme, capability):
    slot, count, n, k = SCHEMES[scheme].moe, 64, 3072, 4096
    stack = meta_stack(count, n, k, slot.weight, bias=True, shards=2)
    for tokens, top_k in ((8, 8), (512, 8), (8192, 8)):
        m = tokens * top_k
        segments = Segments(meta((count + 1,), torch.int32), meta((m,), torch.int32), top_k)
        x = meta_rows(slot.activation, tokens, k)
        call = triton_experts.grouped_calls(
            *(x, slot.activation or "", stack, k, meta((m, n)), segments),
            gather=True,
            tail=False,
            capability=capability,
        )[-1]
        wanted = INSTRUCTIONS[call.constants["DOT"], capability]
        [code] = assert_kernel_code(call.kernel, call.args, call.constants, {capability: wanted}, **call.options)
        assert "cp.async" in code.ptx, "weights are not read ahead"


@pytest.mark.parametrize("capability", ALL_CODE)
def test_the_code_of_shards_that_end_within_a_block_stays_in_registers(capability):
    segments = Segments(meta((33,), torch.int32))
    for m, n, activation in itertools.product((32, 4096), (2880, 2900), ("fp8_per_block_dynamic", "")):
        stack = meta_stack(32, 2 * n, 2880, "fp8_per_block_static", bias=True, shards=2)
        given = (meta_rows(activation, m, 2880), activation, stack, 2880, meta((m, 2 * n)), segments)
        call = triton_experts.grouped_calls(*given, tail=False, capability=capability)[-1]
        assert call.constants["B_SHARD"] == n
        wanted = INSTRUCTIONS[call.constants["DOT"], capability]
        assert_kernel_code(call.kernel, call.args, call.constants, {capability: wanted}, **call.options)


def test_few_rows_an_expert_lie_on_the_narrow_side():
    found = get_format("fp8_per_token"), get_format("fp8_per_channel_static")
    a = triton_product.operand_of(meta_rows(found[0].name, 64, 256), found[0].name)
    b = triton_product.operand_of(meta_rows(found[1].name, 64, 256), found[1].name)
    instruction = triton_product.instruction_of(a, b, 256, 90)
    for m, count, block_m in ((1, 8, 16), (64, 8, 16), (512, 8, 64), (300, 16, 32)):
        chosen = triton_experts.grouped_blocking_of(m, count, a, b, instruction, 90)
        assert (chosen.block_m, chosen.swap) == (block_m, True)
    assert not triton_experts.grouped_blocking_of(8192, 8, a, b, instruction, 90).swap
