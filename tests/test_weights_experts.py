"""Weights of experts in one tensor: every form of product, views, new values, and the life of the tensor."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import olq_fx
from olq_fx.errors import ConversionError, PendingWeightError, UnsupportedError
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits
from olq_fx.weights import QuantizedStack, QuantizedWeight, WeightSpec, quantize_weight

E, N, K = 4, 12, 40


def spec_of(scheme: str, **changes: object) -> WeightSpec:
    slot = SCHEMES[scheme].moe
    activation = FORMATS[slot.activation] if slot.activation else None
    spec = WeightSpec(
        weight=slot.weight,
        activation=slot.activation or "",
        weight_rule=FORMATS[slot.weight].weight_rule,
        activation_rule=activation.activation_rule if activation else "",
    )
    return dataclasses.replace(spec, **changes)


def stored(matrices: Tensor, *, transposed: bool = False, interleaved: bool = False) -> Tensor:
    """(E, N, K), whose two halves are gate and up, as a checkpoint stores it."""
    if interleaved:
        gate, up = matrices.chunk(2, 1)
        matrices = torch.stack((gate, up), 2).flatten(1, 2)
    return matrices.mT.contiguous() if transposed else matrices


def stack_of(values: Tensor, scheme: str = "int8", **changes: object) -> QuantizedStack:
    weight = quantize_weight(values, spec_of(scheme, **changes))
    assert isinstance(weight, QuantizedStack)
    return weight


def matrix_of(weight: QuantizedStack, index: int) -> Tensor:
    """(N, K): the values of one expert."""
    values = weight.dequantize()[index]
    return values.mT if weight.spec.transposed else values


def product_of(x: Tensor, weight: QuantizedStack, index: int) -> Tensor:
    """(M, N): the product of the operator for matrices, shard by shard, in the order of the tensor."""
    spec, shards = weight.spec, weight.spec.shards
    found = []
    for shard in range(shards):
        parts = [part[index].reshape(shards, -1, part.shape[-1])[shard] for part in weight.parts]
        formats = (spec.weight, spec.activation, spec.activation_rule)
        found.append(torch.ops.olq_fx.linear(x, parts, *formats, None, None))
    return torch.stack(found, 2).flatten(1) if spec.interleaved else torch.cat(found, 1)


STORAGE = [
    {},
    {"transposed": True},
    {"shards": 2},
    {"shards": 2, "interleaved": True},
    {"shards": 2, "interleaved": True, "transposed": True},
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n", [12, 400])
def test_all_ways_to_store_gate_and_up_give_equal_bytes(scheme: str, n: int):
    matrices = torch.randn(2, n, K)
    merged = stack_of(matrices, scheme, shards=2)
    apart = [stack_of(half, scheme) for half in matrices.chunk(2, 1)]
    for transposed in (False, True):
        for interleaved in (False, True):
            values = stored(matrices, transposed=transposed, interleaved=interleaved)
            weight = stack_of(values, scheme, shards=2, transposed=transposed, interleaved=interleaved)
            for part, expected in zip(weight.parts, merged.parts, strict=True):
                assert_same_bits(part, expected)
            assert_same_bits(
                weight.dequantize(), stored(merged.dequantize(), transposed=transposed, interleaved=interleaved)
            )
    for part, gate, up in zip(merged.parts, apart[0].parts, apart[1].parts, strict=True):
        rows = part.shape[1] // 2
        assert_same_bits(part[:, :rows].contiguous(), gate)
        assert_same_bits(part[:, rows:].contiguous(), up)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stack_has_the_bytes_of_its_matrices(scheme: str):
    values = torch.randn(3, 130, 70, dtype=torch.bfloat16)
    weight = stack_of(values, scheme)
    for index in range(3):
        alone = quantize_weight(values[index], spec_of(scheme))
        one = weight[index]
        assert type(one) is QuantizedWeight
        for part, expected in zip(one.parts, alone.parts, strict=True):
            assert_same_bits(part, expected)
    assert weight.shape == values.shape
    assert weight.dtype == values.dtype
    assert weight.stride() == values.stride()


Form = Callable[[Tensor, Tensor], Tensor]
"""Of x (T, K) and a weight that reads (E, N, K): (E, T, N), every row with every expert."""

FORMS: dict[str, Form] = {
    "linear": lambda x, w: torch.stack([functional.linear(x, w[e]) for e in range(len(w))]),
    "select": lambda x, w: torch.stack([x @ w.select(0, e).t() for e in range(len(w))]),
    "unbind": lambda x, w: torch.stack([x @ one.t() for one in w.unbind(0)]),
    "iterated": lambda x, w: torch.stack([torch.mm(x, one.mT) for one in w]),
    "by a tensor": lambda x, w: torch.stack([functional.linear(x, w[e]) for e in torch.arange(len(w))]),
    "addmm": lambda x, w: torch.stack(
        [torch.addmm(torch.zeros(w.shape[1], dtype=x.dtype), x, w[e].T) for e in range(len(w))]
    ),
    "bmm": lambda x, w: torch.bmm(x.expand(len(w), *x.shape), w.transpose(1, 2)),
    "bmm on the left": lambda x, w: torch.bmm(w, x.mT.expand(len(w), x.shape[1], len(x))).mT,
    "baddbmm": lambda x, w: torch.baddbmm(
        torch.zeros(len(w), 1, w.shape[1], dtype=x.dtype), x.expand(len(w), *x.shape), w.permute(0, 2, 1)
    ),
    "matmul": lambda x, w: torch.matmul(x, w.mT),
    "matmul with more in front": lambda x, w: torch.matmul(x[None, None], w.mT)[0],
    "matmul on the left": lambda x, w: torch.matmul(w, x.mT).mT,
    "matmul with vectors": lambda x, w: torch.stack([w @ row for row in x], 1),
    "@": lambda x, w: x @ w.transpose(-2, -1),
    "einsum": lambda x, w: torch.einsum("td,efd->etf", x, w),
    "einsum by expert": lambda x, w: torch.einsum("etd,efd->etf", x.expand(len(w), *x.shape), w),
    "einsum with an ellipsis": lambda x, w: torch.einsum("...d,efd->...ef", x, w).movedim(0, 1),
    "einsum, weight first": lambda x, w: torch.einsum("enk,mk->men", w, x).movedim(0, 1),
    "einsum, implied": lambda x, w: torch.einsum("efd,td", w, x).movedim(2, 1),
    "grouped_mm": lambda x, w: functional.grouped_mm(
        x.repeat(len(w), 1), w.mT, offs=len(x) * torch.arange(1, len(w) + 1, dtype=torch.int32)
    ).unflatten(0, (len(w), -1)),
    "_grouped_mm": lambda x, w: torch._grouped_mm(x.expand(len(w), *x.shape), w.mT),
    "chosen, weight first": lambda x, w: torch.stack(
        [torch.bmm(w[torch.full((len(x),), e)], x.unsqueeze(-1)).squeeze(-1) for e in range(len(w))]
    ),
    "chosen, weight last": lambda x, w: torch.stack(
        [torch.bmm(x.unsqueeze(1), w.mT[torch.full((len(x),), e - len(w))]).squeeze(1) for e in range(len(w))]
    ),
    "chosen, einsum": lambda x, w: torch.einsum(
        "ti,taoi->tao", x, w[torch.arange(len(w)).expand(len(x), len(w))]
    ).movedim(1, 0),
    "index_select": lambda x, w: torch.stack(
        [torch.matmul(w.index_select(0, torch.full((len(x),), e)), x[:, :, None])[..., 0] for e in range(len(w))]
    ),
    "slices of experts": lambda x, w: torch.cat([x @ w[:1].mT, x @ w[1:].mT]),
    "split by experts": lambda x, w: torch.cat([x @ part.mT for part in w.split(3)]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize("scheme", [pytest.param("int8", marks=pytest.mark.slow), "fp8_per_tensor"])
def test_every_form_is_the_product_of_each_expert(form: str, storage: dict[str, bool], scheme: str):
    transposed = bool(storage.get("transposed"))
    weight = stack_of(torch.randn((E, K, N) if transposed else (E, N, K)), scheme, **storage)
    x = torch.randn(5, K)
    y = FORMS[form](x, weight.mT if transposed else weight)
    assert_same_bits(y.contiguous(), torch.stack([product_of(x, weight, e) for e in range(E)]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_scheme_multiplies_experts(scheme: str, dtype: torch.dtype):
    weight = stack_of(torch.randn(E, 50, 70, dtype=dtype), scheme, shards=2)
    x, ids = torch.randn(7, 70, dtype=dtype), torch.tensor([3, 0, 0, 1, 3, 3, 0])
    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    chosen = torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)
    for row, index in enumerate(ids.tolist()):
        if SCHEMES[scheme].moe.activation != "fp8_per_tensor_dynamic":
            assert_same_bits(chosen[row : row + 1], product_of(x[row : row + 1], weight, index))
    grouped = functional.grouped_mm(x, weight.mT, offs=ends)
    assert_same_bits(grouped[:3], product_of(x[:3], weight, 1))
    assert_same_bits(grouped[3:], product_of(x[3:], weight, 3))


def test_nothing_is_gathered():
    weight = stack_of(torch.randn(E, N, K))
    chosen = weight[torch.randint(E, (1000,))]
    assert chosen.shape == (1000, N, K)
    assert all(a is b for a, b in zip(chosen.parts, weight.parts, strict=True))


def test_rows_of_nobody_are_zero():
    weight = stack_of(torch.randn(E, N, K), "fp8_per_block")
    x = torch.randn(6, K)
    x[4:] = torch.nan
    y = functional.grouped_mm(x, weight.mT, offs=torch.tensor([1, 1, 4, 4], dtype=torch.int32))
    assert (y[4:] == 0).all()
    assert_same_bits(y[:1], product_of(x[:1], weight, 0))


@pytest.mark.parametrize("form", ["bmm", "grouped_mm", "chosen, weight first", "linear", "einsum"])
@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_gradients_of_inputs_are_those_of_the_values(form: str, storage: dict[str, bool]):
    transposed = bool(storage.get("transposed"))
    weight = stack_of(torch.randn((E, K, N) if transposed else (E, N, K)), "nvfp4_weight_only", **storage)
    x = torch.randn(5, K, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    values = weight.dequantize()
    seed = torch.randn(E, 5, N)
    FORMS[form](x, weight.mT if transposed else weight).backward(seed)
    FORMS[form](other, values.mT if transposed else values).backward(seed)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_an_expert_without_rows_is_zero():
    weight = stack_of(torch.randn(E, N, K))
    x = torch.randn(3, K, requires_grad=True)
    functional.grouped_mm(x, weight.mT, offs=torch.zeros(E, dtype=torch.int32)).sum().backward()
    assert x.grad is not None
    assert (x.grad == 0).all()


@pytest.mark.parametrize("scheme", ["int8", "fp8_per_tensor", "fp8_per_block", "nvfp4_weight_only"])
@pytest.mark.parametrize("storage", STORAGE[2:], ids=str)
def test_gate_and_up_can_be_cut_apart(scheme: str, storage: dict[str, bool]):
    transposed = bool(storage.get("transposed"))
    weight = stack_of(torch.randn((E, K, N) if transposed else (E, N, K)), scheme, **storage)
    oriented = weight.mT if transposed else weight
    x = torch.randn(5, K)
    whole = torch.matmul(x, oriented.mT)
    if storage.get("interleaved"):
        halves, expected = (oriented[:, ::2], oriented[:, 1::2]), (whole[..., ::2], whole[..., 1::2])
    else:
        halves, expected = oriented.chunk(2, 1), whole.chunk(2, 2)
    for half, values in zip(halves, expected, strict=True):
        assert_same_bits(torch.matmul(x, half.mT), values.contiguous())


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w + 1,
        lambda w: w * w,
        lambda w: w[torch.tensor([True, False, True, False])],
        lambda w: w[:, :, :8],
        lambda w: w[:, 3],
        lambda w: w.view(E * N, K),
        lambda w: w.transpose(0, 1),
        lambda w: w.sum(0) if w.add_(1) is None else None,
        lambda w: torch.bmm(w, w.mT),
        lambda w: torch.einsum("efd,egd->fg", torch.randn(E, N, K), w),
        lambda w: torch.bmm(torch.randn(E, 2, N), w),
        lambda w: torch.matmul(torch.randn(2, N), w),
        lambda w: w[torch.tensor([0])].copy_(torch.randn(1, N, K)),
        lambda w: pickle.dumps(w[torch.tensor([0])]),
    ],
)
def test_what_has_no_meaning_is_refused(call: Callable[[QuantizedStack], object]):
    weight = stack_of(torch.randn(E, N, K))
    weight.path = "mlp.experts.gate_up_proj"
    with pytest.raises(UnsupportedError, match=r"mlp\.experts\.gate_up_proj"):
        call(weight)


def test_shapes_and_dtypes_are_held_to_each_other():
    weight = stack_of(torch.randn(E, N, K))
    for call in (
        lambda: torch.bmm(torch.randn(E, 2, K + 1), weight.mT),
        lambda: torch.bmm(torch.randn(E - 1, 2, K), weight.mT),
        lambda: torch.bmm(torch.randn(E, 2, K, dtype=torch.bfloat16), weight.mT),
    ):
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises(IndexError):
        weight[E]


def equal(a: QuantizedStack, b: Tensor) -> None:
    assert type(b) is QuantizedStack
    assert (a.shape, a.stride(), a.dtype, a.spec) == (b.shape, b.stride(), b.dtype, b.spec)
    for part, other in zip(a.parts, b.parts, strict=True):
        assert_same_bits(part, other)


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "mxfp4", "nvfp4_per_token"])
@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_copies_are_equal(scheme: str, storage: dict[str, bool]):
    weight = stack_of(torch.randn(E, N, 2 * N), scheme, **storage)
    equal(weight, copy.deepcopy(weight))
    equal(weight, weight.clone())
    equal(weight, pickle.loads(pickle.dumps(weight)))
    equal(weight, weight.to("cpu", copy=True))
    half = weight.half()
    assert half.dtype == torch.float16
    for part, other in zip(half.parts, weight.parts, strict=True):
        assert_same_bits(part, other)


class Experts(nn.Module):
    """Experts as transformers holds them."""

    def __init__(self, e: int = E, i: int = 24, h: int = K, *, transposed: bool = False):
        super().__init__()
        gate_up, down = ((e, h, 2 * i), (e, i, h)) if transposed else ((e, 2 * i, h), (e, h, i))
        self.gate_up_proj = nn.Parameter(torch.randn(gate_up))
        self.down_proj = nn.Parameter(torch.randn(down))
        self.is_transposed = transposed

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj[ids], self.down_proj[ids]
        if self.is_transposed:
            gate_up, down = gate_up.mT, down.mT
        gate, up = torch.bmm(gate_up, x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        return torch.bmm(down, (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)


def model_of(**options: bool) -> nn.ModuleDict:
    return nn.ModuleDict({"experts": Experts(**options)})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_block", "mxfp4_dualscale", "nvfp4_per_token", "int8"])
def test_state_dicts_are_plain_and_come_back(scheme: str, transposed: bool):
    model, other = model_of(transposed=transposed), model_of(transposed=transposed)
    original = copy.deepcopy(model.state_dict())
    olq_fx.quantize_(model, scheme)
    olq_fx.quantize_(other, scheme)
    state = model.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    before = {name: part.data_ptr() for name, part in other.state_dict().items()}
    for name, value in other.state_dict().items():
        assert_same_bits(value, state[name])
    fresh = copy.deepcopy(other)
    fresh.load_state_dict(original)
    other.load_state_dict(original)
    assert before == {name: part.data_ptr() for name, part in other.state_dict().items()}
    for name, value in other.state_dict().items():
        assert_same_bits(value, state[name])


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_on_meta_wait_for_their_data(transposed: bool):
    model = model_of(transposed=transposed)
    with torch.device("meta"):
        later = model_of(transposed=transposed)
    original = copy.deepcopy(model.state_dict())
    olq_fx.quantize_(model, "fp8_per_tensor")
    report = olq_fx.quantize_(later, "fp8_per_tensor")
    assert report.pending == ("experts.gate_up_proj", "experts.down_proj")
    with pytest.raises(PendingWeightError, match=r"experts\.gate_up_proj"):
        later["experts"](torch.randn(1, K), torch.tensor([0]))
    later.load_state_dict(original, assign=True)
    for name in ("gate_up_proj", "down_proj"):
        equal(model["experts"].get_parameter(name), later["experts"].get_parameter(name))


def test_new_values_for_one_expert_change_only_its_own():
    weight = stack_of(torch.randn(E, N, K), "fp8_per_tensor", shards=2)
    before, pointer = weight.clone(), weight.codes.data_ptr()
    values = torch.randn(N, K)
    with torch.no_grad():
        weight[2].copy_(values)
    expected = stack_of(values[None], "fp8_per_tensor", shards=2)
    assert weight.codes.data_ptr() == pointer
    for part, old, new in zip(weight.parts, before.parts, expected.parts, strict=True):
        assert_same_bits(part[2], new[0])
        assert_same_bits(part[:2], old[:2])
        assert_same_bits(part[3:], old[3:])


def test_bad_values_are_refused_and_change_nothing():
    weight = stack_of(torch.randn(E, N, K))
    before = weight.clone()
    values = torch.randn(E, N, K)
    values[3, 1, 2] = torch.inf
    with pytest.raises(ConversionError, match="1 of 1920 are NaN or Inf"), torch.no_grad():
        weight.copy_(values)
    equal(before, weight)


@pytest.mark.parametrize("transposed", [False, True])
def test_original_precision_comes_back(transposed: bool):
    model = model_of(transposed=transposed)
    olq_fx.quantize_(model, "nvfp4_weight_only")
    values = {name: p.dequantize() for name, p in model.named_parameters()}
    olq_fx.dequantize_(model)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad
        assert_same_bits(parameter.detach(), values[name])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_compiles_to_the_same_bits(form: str):
    weight = nn.Parameter(stack_of(torch.randn(E, N, K), "fp8_per_tensor", shards=2, interleaved=True), False)
    x = torch.randn(5, K)
    with torch.no_grad():
        expected = FORMS[form](x, weight)
        compiled = torch.compile(FORMS[form], backend="aot_eager", fullgraph=form != "by a tensor")
        assert_same_bits(compiled(x, weight), expected)


@pytest.mark.parametrize("form", ["bmm", "chosen, weight first", "matmul", "linear"])
def test_autocast_decides_on_the_dtype(form: str):
    weight = stack_of(torch.randn(E, N, K), "fp8_per_block")
    x = torch.randn(5, K)
    with torch.autocast("cpu", torch.bfloat16):
        y = FORMS[form](x, weight)
    assert_same_bits(y, FORMS[form](x.bfloat16(), weight.bfloat16()))


@pytest.mark.parametrize("scheme", ["fp8_per_block", "nvfp4_weight_only"])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_routes_and_eager_agree(scheme: str, transposed: bool):
    model = model_of(transposed=transposed)
    x, ids = torch.randn(6, K), torch.tensor([3, 0, 0, 1, 2, 3])
    through_backend = copy.deepcopy(model)
    olq_fx.quantize_(model, scheme)
    with torch.no_grad():
        expected = model["experts"](x, ids)
        compiled = torch.compile(model["experts"], backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(x, ids), expected)
        backend = olq_fx.backend(scheme, inner="aot_eager")
        other = torch.compile(through_backend["experts"], backend=backend, fullgraph=True)
        assert_same_bits(other(x, ids), expected)
    assert backend.report.converted == ("gate_up_proj", "down_proj")
    for name in ("gate_up_proj", "down_proj"):
        equal(model["experts"].get_parameter(name), through_backend["experts"].get_parameter(name))
