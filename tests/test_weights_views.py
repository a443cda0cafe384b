"""Views, lookups and reading of converted weights; and what is refused."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from olq_fx.errors import UnsupportedError
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits
from olq_fx.weights import QuantizedWeight, WeightSpec, quantize_weight


def converted(values: Tensor, scheme: str = "fp8_per_block", transposed: bool = False) -> QuantizedWeight:
    slot = SCHEMES[scheme].linear
    spec = WeightSpec(
        weight=slot.weight,
        activation=slot.activation or "",
        weight_rule=FORMATS[slot.weight].weight_rule,
        activation_rule=FORMATS[slot.activation].activation_rule if slot.activation else "",
        transposed=transposed,
    )
    return quantize_weight(values, spec)


@pytest.mark.parametrize("transposed", [False, True])
def test_shape_dtype_and_strides_are_the_originals(transposed: bool):
    values = torch.randn(40, 64).bfloat16()
    for original in (values, values.t(), values[::2], torch.randn(64, 40)):
        weight = converted(original, transposed=transposed)
        assert weight.shape == original.shape
        assert weight.dtype == original.dtype
        assert weight.stride() == original.stride()
        assert weight.device == original.device
        assert weight.is_leaf
        assert not weight.requires_grad
        assert weight.reduction_size == original.shape[0 if transposed else 1]
        assert weight.t().stride() == original.t().stride()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_views_keep_the_values(scheme: str):
    weight = converted(torch.randn(300, 96), scheme)
    values = weight.dequantize()
    views = {
        "t": lambda w: w.t(),
        "T.T": lambda w: w.T.T,
        "detach": lambda w: w.detach(),
        "rows": lambda w: w[17:290],
        "rows of rows": lambda w: w[17:290][100:150],
        "rows of t": lambda w: w.t()[:, 130:140],
        "all": lambda w: w[:],
        "empty": lambda w: w[5:5],
        "negative": lambda w: w[-7:-2],
        "narrow": lambda w: w.narrow(0, 129, 64),
        "row": lambda w: w[131],
        "last row": lambda w: w.select(0, -1),
        "row of t": lambda w: w.t()[:, 131],
        "view": lambda w: w.view(300, 96),
        "reshape": lambda w: w.reshape(300, -1),
        "expand": lambda w: w.expand(3, 300, 96),
        "contiguous": lambda w: w.t().contiguous(),
        "clone": lambda w: w.clone(),
        "double": lambda w: w.double(),
    }
    for name, view in views.items():
        of_weight, of_values = view(weight), view(values)
        assert isinstance(of_weight, QuantizedWeight), name
        assert of_weight.shape == of_values.shape, name
        assert of_weight.stride() == of_values.stride(), name
        assert_same_bits(of_weight.dequantize(), of_values, name=f"{scheme} {name}")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [384, 130, 45])
def test_rows_of_a_product_are_the_product_of_the_rows(scheme: str, rows: int):
    """Also where blocks of 128 rows are cut: the same numbers come out."""
    weight, bias, x = converted(torch.randn(rows, 96), scheme), torch.randn(rows), torch.randn(5, 96)
    whole = functional.linear(x, weight, bias)
    cuts = {
        "chunk": (weight.chunk(3), bias.chunk(3)),
        "split": (weight.split([5, rows - 9, 4]), bias.split([5, rows - 9, 4])),
        "size": (weight.split(37), bias.split(37)),
        "of t": (weight.t().split(37, dim=1), bias.split(37)),
    }
    for name, (weights, biases) in cuts.items():
        pieces = [
            torch.addmm(b, x, w) if name == "of t" else functional.linear(x, w, b)
            for w, b in zip(weights, biases, strict=True)
        ]
        # The same operands, summed in an order that depends on the number of rows.
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-4)
        if name != "of t":
            plain = torch.cat([functional.linear(x, w) for w in weights], 1)
            torch.testing.assert_close(plain, functional.linear(x, weight), rtol=1e-5, atol=1e-4)


def test_gradient_through_rows_of_a_block():
    weight = converted(torch.randn(300, 96))
    x = torch.randn(5, 96, requires_grad=True)
    functional.linear(x, weight[17:200]).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(5, 183) @ weight.dequantize()[17:200])


def test_slices_share_storage():
    weight = converted(torch.randn(256, 96))
    row_bytes = weight.codes.stride(0) * weight.codes.element_size()
    assert weight[128:].codes.data_ptr() == weight.codes.data_ptr() + 128 * row_bytes
    assert weight.t().codes is weight.codes
    assert weight.detach().scale is weight.scale


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[:, 3:10],
        lambda w: w[::2],
        lambda w: w.view(60, 64),
        lambda w: w.reshape(-1),
        lambda w: w.t().flatten(),
        lambda w: w[:, 3],
        lambda w: w.unsqueeze(0).transpose(0, 1),
    ],
)
def test_views_without_meaning_are_refused(view):
    weight = converted(torch.randn(40, 96))
    weight.path = "layer.weight"
    with pytest.raises(UnsupportedError, match=r"'layer\.weight'.*dequantize\(\)"):
        view(weight)


def test_split_sizes_and_indices_are_checked():
    weight = converted(torch.randn(40, 96))
    with pytest.raises(RuntimeError, match="sum to 40"):
        weight.split([3, 4])
    with pytest.raises(IndexError):
        weight[40]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_decodes_only_the_rows_it_needs(scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    weight = converted(torch.randn(300, 96).to(dtype), scheme)
    values = weight.dequantize()
    ids = torch.tensor([[0, 299, 17], [129, 17, 17]])

    def refuse(self: QuantizedWeight, dtype: object = None) -> Tensor:
        raise AssertionError("the whole table was decoded")

    monkeypatch.setattr(QuantizedWeight, "dequantize", refuse)
    layer = nn.Embedding(300, 96, padding_idx=0)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for found in (functional.embedding(ids, weight), layer(ids), weight[ids], weight[ids - 300]):
        assert_same_bits(found, values[ids])
    assert_same_bits(weight.index_select(0, ids[1]), values[ids[1]])
    assert_same_bits(functional.embedding(ids[1], weight[5:]), values[5:][ids[1]])
    assert functional.embedding(torch.zeros(2, 0, dtype=torch.long), weight).shape == (2, 0, 96)
    with torch.inference_mode():
        assert_same_bits(layer(ids), values[ids])


def test_lookups_without_meaning_are_refused():
    weight = converted(torch.randn(40, 96))
    ids = torch.tensor([1, 2])
    for look_up in (
        lambda: weight[:, ids],
        lambda: weight[torch.ones(40, dtype=torch.bool)],
        lambda: functional.embedding(ids, weight.t()),
        lambda: functional.embedding_bag(ids[None], weight),
        lambda: functional.embedding(ids, weight, max_norm=1.0),
    ):
        with pytest.raises(UnsupportedError):
            look_up()


def test_reading_means_the_values():
    weight = converted(torch.randn(40, 96))
    values = weight.dequantize()
    for read in (
        lambda w: w.norm(),
        lambda w: torch.linalg.norm(w),
        lambda w: torch.linalg.vector_norm(w, dim=1),
        lambda w: w.sum(),
        lambda w: w.mean(1),
        lambda w: w.std(),
        lambda w: w.amax(1),
        lambda w: w.max(),
        lambda w: w.abs().max(),
        lambda w: w.max(1).values,
        lambda w: w.argmax(),
        lambda w: w.median(),
        lambda w: w.quantile(0.9),
        lambda w: torch.histc(w, 10),
        lambda w: torch.var_mean(w)[0],
        lambda w: torch.allclose(w, w),
        lambda w: w.isfinite().all(),
        lambda w: w.isnan().any(),
        lambda w: (w == 0).sum(),
        lambda w: w[3].sum(),
        lambda w: torch.equal(w, w),
    ):
        assert torch.equal(torch.as_tensor(read(weight)), torch.as_tensor(read(values)))
    torch.testing.assert_close(weight, weight)


def test_new_tensors_of_its_shape_are_plain():
    weight = converted(torch.randn(40, 96).bfloat16())
    for new in (
        torch.zeros_like(weight),
        torch.ones_like(weight),
        torch.full_like(weight, 2.0),
        torch.randn_like(weight),
        torch.rand_like(weight, dtype=torch.float32),
        weight.new_zeros(3),
        weight.new_empty(40, 96),
        weight.new_full((2,), 1.0),
        weight.new_tensor([1.0]),
    ):
        assert type(new) is Tensor
        assert new.device == weight.device
    assert torch.zeros_like(weight).shape == weight.shape
    assert torch.zeros_like(weight).dtype == torch.bfloat16
    assert torch.rand_like(weight, dtype=torch.float32).dtype == torch.float32


IN_PLACE = {
    "add_": lambda w: w.add_(1),
    "mul_": lambda w: w.mul_(0.5),
    "*=": lambda w: w.__imul__(2.0),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(1.0),
    "normal_": lambda w: w.normal_(),
    "clamp_": lambda w: w.clamp_(0, 1),
    "index_put_": lambda w: w.__setitem__(torch.tensor([1]), 0.0),
    "init": lambda w: nn.init.kaiming_uniform_(w),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "data": lambda w: w.data.add_(1),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_values_cannot_be_changed_in_place(name: str):
    weight = converted(torch.randn(40, 96))
    weight.path = "layer.weight"
    before = weight.dequantize()
    with pytest.raises(UnsupportedError, match=r"dequantize_"), torch.no_grad():
        IN_PLACE[name](weight)
    assert_same_bits(weight.dequantize(), before)


ARITHMETIC = {
    "add": lambda w: w + 1,
    "radd": lambda w: torch.ones(40, 96) + w,
    "mul": lambda w: w * torch.ones(96),
    "sub": lambda w: w - w,
    "neg": lambda w: -w,
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "where": lambda w: torch.where(torch.ones(40, 96) > 0, w, torch.zeros(40, 96)),
    "conv": lambda w: functional.conv1d(torch.randn(1, 96, 4), w.unsqueeze(-1)),
    "weight @ weight": lambda w: w @ w.T,
    "softmax": lambda w: w.softmax(-1),
    "int": lambda w: w.int(),
    "native attention": lambda w: torch._native_multi_head_attention(
        torch.randn(1, 2, 96),
        *[torch.randn(1, 2, 96)] * 2,
        96,
        4,
        w,
        torch.randn(288),
        torch.randn(96, 96),
        torch.randn(96),
    ),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_refused_by_name(name: str):
    weight = converted(torch.randn(40, 96))
    weight.path = "layer.weight"
    with pytest.raises(UnsupportedError, match=r"'layer\.weight'.*dequantize"):
        ARITHMETIC[name](weight)


def test_memory_that_is_not_there_is_not_handed_out():
    weight = converted(torch.randn(40, 96))
    weight.path = "layer.weight"
    for hand_out in (
        lambda: weight.__dlpack__(),
        lambda: weight.__dlpack_device__(),
        lambda: weight.as_strided((2, 2), (1, 1)),
        lambda: weight.view(torch.int32),
        lambda: weight.set_(torch.randn(3)),
        lambda: weight.resize_(3, 3),
    ):
        with pytest.raises(UnsupportedError, match=r"'layer\.weight'"):
            hand_out()
    for hand_out in (weight.numpy, weight.tolist, weight.untyped_storage):
        with pytest.raises((RuntimeError, TypeError)):
            hand_out()[0]


def test_processes_share_the_parts():
    layer = nn.Linear(96, 40)
    layer.weight = nn.Parameter(converted(torch.randn(40, 96)), requires_grad=False)
    assert not layer.weight.is_shared()
    values = layer.weight.dequantize()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert all(part.is_shared() for part in layer.weight.parts)
    assert_same_bits(layer.weight.dequantize(), values)


def test_outputs_that_are_given_are_refused_as_such():
    """What is written to is the output, not the weight: the advice is another one."""
    weight, x = converted(torch.randn(40, 96)), torch.randn(6, 96)
    with pytest.raises(UnsupportedError, match=r"mm\.out.*weight\.dequantize\(\)"), torch.no_grad():
        torch.mm(x, weight.T, out=torch.empty(6, 40))


def test_an_optimizer_step_is_refused():
    weight = nn.Parameter(converted(torch.randn(40, 96)), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.randn(40, 96)
    with pytest.raises(UnsupportedError, match="dequantize_"):
        optimizer.step()


def test_repr_tells_formats_without_reading():
    weight = converted(torch.randn(40, 96))
    text = repr(nn.Parameter(weight, requires_grad=False))
    for word in ("fp8_per_block_static", "fp8_per_block_dynamic", "(40, 96)", "float32", "cpu"):
        assert word in text
    assert "original" in repr(converted(torch.randn(40, 96), "fp8_weight_only"))


def test_stored_bytes():
    weight = converted(torch.randn(256, 256))
    assert weight.stored_bytes == 256 * 256 + 4 * 4
    assert weight.nbytes == 256 * 256 * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_specs_of_equal_layers_are_equal_and_hashable(scheme: str):
    a, b = converted(torch.randn(40, 96), scheme), converted(torch.randn(40, 96), scheme)
    a.path, b.path = "first", "second"
    assert a.__tensor_flatten__() == b.__tensor_flatten__()
    assert len({a.__tensor_flatten__()[1], b.__tensor_flatten__()[1]}) == 1
    assert a._stable_hash_for_caching() == b._stable_hash_for_caching()


def test_hashes_for_caching_tell_different_weights_apart():
    values = torch.randn(40, 96)
    weights = [converted(values, scheme) for scheme in SCHEMES]
    weights += [weights[0].t(), weights[0].half(), weights[2][3:], weights[2][:3], converted(torch.randn(41, 96))]
    for a, b in itertools.combinations(weights, 2):
        assert a._stable_hash_for_caching() != b._stable_hash_for_caching()
