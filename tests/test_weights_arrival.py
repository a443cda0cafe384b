"""Weights whose values come in pieces: any order and slicing gives the bytes of quantizing at once."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import olq_fx
from olq_fx import weights_arrival
from olq_fx.errors import ConversionError, PendingWeightError, UnsupportedError
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits, record_allocations
from olq_fx.weights import QuantizedWeight, missing
from olq_fx.weights_regions import Missing, every, regions, within

MATRIX = (160, 96)
EXPERTS = (3, 64, 96)


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if len(shape) == 2:
            self.inner = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
        else:
            self.inner = nn.Module()
            self.inner.gate_up_proj = nn.Parameter(torch.randn(shape, dtype=dtype))
            self.inner.down_proj = nn.Parameter(torch.randn(shape[0], shape[2], shape[1] // 2, dtype=dtype))

    @property
    def weight(self) -> torch.Tensor:
        name = "weight" if isinstance(self.inner, nn.Linear) else "gate_up_proj"
        return self.inner.get_parameter(name)


def waiting(shape: tuple[int, ...], scheme: str, dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    with torch.device("meta"):
        layer = Layer(shape, dtype)
    olq_fx.quantize_(layer, scheme)
    weight = layer.weight
    assert isinstance(weight, QuantizedWeight)
    assert missing(weight) == weight.numel()
    return weight


def at_once(values: torch.Tensor, scheme: str) -> QuantizedWeight:
    layer = Layer(tuple(values.shape), values.dtype)
    with torch.no_grad():
        layer.weight.copy_(values)
    olq_fx.quantize_(layer, scheme)
    found = layer.weight
    assert isinstance(found, QuantizedWeight)
    return found


def assert_equal(weight: torch.Tensor, expected: QuantizedWeight) -> None:
    assert isinstance(weight, QuantizedWeight)
    assert weight.pending is None
    assert weight.spec == expected.spec
    for part, other in zip(weight.parts, expected.parts, strict=True):
        assert_same_bits(part, other)


@st.composite
def slicings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Boxes that cover a tensor: a grid with cuts at random, in random order, some of them twice or overlapping."""
    axes = []
    for length in shape:
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3)))
        step = draw(st.sampled_from([1, 1, 2]))
        bounds = [0, *cuts, length]
        runs = [slice(a, b, step) for a, b in itertools.pairwise(bounds)]
        axes.append([run for a in runs for run in ([a] if step == 1 else [a, slice(a.start + 1, a.stop, 2)])])
    boxes: list[tuple[slice, ...]] = [()]
    for runs in axes:
        boxes = [(*box, run) for box in boxes for run in runs]
    return draw(st.permutations([box for box in boxes if all(one.start < one.stop for one in box)]))


@given(st.data(), st.sampled_from(sorted(SCHEMES)), st.sampled_from([MATRIX, EXPERTS, (33, 17), (2, 34, 19)]))
def test_any_order_and_slicing_gives_the_bytes_of_quantizing_at_once(data, scheme, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    weight = waiting(shape, scheme)
    boxes = data.draw(slicings(shape))
    for number, box in enumerate(boxes):
        assert weight.pending is not None
        if number % 3 == 0:
            weight[box].copy_(values[box])
        elif number % 3 == 1:
            weight.data[box] = values[box]
        else:
            weight.mT[(*box[:-2], box[-1], box[-2])].copy_(values[box].mT)
    assert_equal(weight, at_once(values, scheme))


@given(st.data(), st.sampled_from(["fp8_per_block", "int8", "nvfp4_per_token"]))
def test_what_arrives_twice_counts_once_and_the_last_values_stay(data, scheme):
    values = torch.randn(MATRIX)
    weight, left = waiting(MATRIX, scheme), torch.ones(MATRIX, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 6))):
        top, left_edge = data.draw(st.integers(0, 150)), data.draw(st.integers(0, 90))
        box = (slice(top, top + data.draw(st.integers(1, 140))), slice(left_edge, left_edge + 40))
        weight[box].copy_(torch.randn(values[box].shape))
        weight[box].copy_(values[box])
        left[box] = False
        assert missing(weight) == int(left.sum())
    for row in range(MATRIX[0]):
        weight[row].copy_(values[row])
    assert_equal(weight, at_once(values, scheme))


WAYS = {
    "chunk": lambda w: w.chunk(4),
    "split": lambda w: w.split([10, 100, 50]),
    "unbind": lambda w: w.unbind(),
    "iter": lambda w: list(w),
    "unbind along columns": lambda w: w.unbind(1),
    "narrow": lambda w: [w.narrow(0, 0, 80), w.data.narrow(0, 80, 80)],
    "select": lambda w: [w.select(1, column) for column in range(96)],
    "flat": lambda w: w.view(-1).split(777),
    "unflattened": lambda w: w.unflatten(0, (40, 4)).unbind(1),
    "of a transposed one": lambda w: w.t().chunk(3, dim=1),
    "permuted": lambda w: w.unsqueeze(0).permute(2, 0, 1).split(32),
    "every third row": lambda w: [w[0::3], w[1::3], w[2::3]],
    "as_strided": lambda w: [w.as_strided((160, 48), (96, 2)), w.as_strided((160, 48), (96, 2), 1)],
    "heads": lambda w: w.view(4, 40, 96).transpose(0, 1).chunk(2),
    "detached": lambda w: w.detach().chunk(2)[0].detach().split(40) + w.chunk(2)[1].data.split(40),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_views_of_every_kind_are_places_for_values(way: str):
    values, weight = torch.randn(MATRIX), waiting(MATRIX, "fp8_per_block")
    pieces, sources = WAYS[way](weight), WAYS[way](values)
    assert [piece.shape for piece in pieces] == [source.shape for source in sources]
    for piece, source in zip(reversed(pieces), reversed(sources), strict=True):
        assert weight.pending is not None
        assert piece.stride() == source.stride()
        piece.copy_(source)
    assert_equal(weight, at_once(values, "fp8_per_block"))


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_block", "mxfp4", "nvfp4_weight_only"])
@pytest.mark.parametrize("order", ["by expert", "gates first", "all at once", "backwards"])
def test_experts_convert_one_by_one(scheme: str, order: str):
    values, weight = torch.randn(EXPERTS), waiting(EXPERTS, scheme)
    half = EXPERTS[1] // 2
    if order == "by expert":
        for expert in range(3):
            weight[expert, :half].copy_(values[expert, :half])
            weight.data[expert][half:] = values[expert, half:]
    elif order == "gates first":
        weight[:, :half].copy_(values[:, :half])
        weight.chunk(2, dim=1)[1].copy_(values[:, half:])
    elif order == "all at once":
        weight.copy_(values)
    else:
        for expert in (2, 1, 0):
            weight.select(0, expert).copy_(values[expert])
    assert_equal(weight, at_once(values, scheme))


def test_only_what_has_begun_to_arrive_is_held_in_original_precision():
    shape = (16, 256, 512)
    values, weight = torch.randn(shape), waiting(shape, "fp8_per_tensor")
    with record_allocations() as allocations, allocations.mark("load"):
        for expert in range(16):
            for part in range(4):
                weight[expert, part * 64 : part * 64 + 64].copy_(values[expert, part * 64 : part * 64 + 64])
    one = values[0].nbytes
    assert allocations.peak("load") < weight.stored_bytes + 2 * one + (1 << 20)
    # Whole groups of rows wait for nothing: all gates may come before all ups.
    weight = waiting(shape, "mxfp8")
    with record_allocations() as allocations, allocations.mark("load"):
        weight[:, :128].copy_(values[:, :128])
        weight[:, 128:].copy_(values[:, 128:])
    assert allocations.peak("load") < weight.stored_bytes + one + (8 << 20)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_pieces_of_several_dtypes_keep_their_values(dtypes: tuple[torch.dtype, torch.dtype]):
    first, second = torch.randn(80, 96).to(dtypes[0]), torch.randn(80, 96).to(dtypes[1])
    weight = waiting(MATRIX, "mxfp8", torch.bfloat16)
    weight[:80].copy_(first)
    weight[80:].copy_(second)
    assert weight.dtype == torch.bfloat16
    assert_equal(weight, at_once(torch.cat([first.float(), second.float()]), "mxfp8"))


def test_values_may_be_numbers_or_broadcast():
    weight, values = waiting(MATRIX, "int8"), torch.zeros(MATRIX)
    row = torch.randn(96)
    weight[:40] = row
    weight[40:80] = 1.5
    weight[80:120].zero_()
    weight[120:].fill_(2)
    values[:40], values[40:80], values[120:] = row, 1.5, 2
    assert_equal(weight, at_once(values, "int8"))
    weight = waiting(MATRIX, "int8")
    weight.copy_(row)
    assert_equal(weight, at_once(row.expand(MATRIX).contiguous(), "int8"))


def test_a_piece_has_shape_and_dtype_but_no_values():
    weight = waiting(MATRIX, "fp8_per_block", torch.bfloat16)
    piece = weight[8:16]
    assert (piece.shape, piece.dtype, piece.stride(), piece.is_meta) == ((8, 96), torch.bfloat16, (96, 1), True)
    assert "PendingPiece" in repr(piece)
    for use in (
        lambda: piece + 1,
        lambda: piece.float(),
        lambda: piece.sum(),
        lambda: nn.functional.linear(piece, weight),
    ):
        with pytest.raises(PendingWeightError, match=r"'inner\.weight'.*no data yet: load"):
            use()
    with pytest.raises(PendingWeightError, match=r"inner\.weight"):
        weight[torch.tensor([1, 2])]
    piece.copy_(torch.randn(8, 96))
    with pytest.raises(PendingWeightError, match=r"no data yet \(14592 of 15360 values are missing\)"):
        nn.functional.linear(torch.randn(2, 96), weight)


def test_a_piece_of_a_weight_that_has_data_meanwhile_is_a_view_of_it():
    weight, values = waiting(MATRIX, "mxfp8"), torch.randn(MATRIX)
    piece, transposed, half = weight[:80], weight.t(), weight.chunk(2)[1]
    weight.copy_(values)
    new = torch.randn(80, 96)
    piece.copy_(new)
    values[:80] = new
    assert_equal(weight, at_once(values, "mxfp8"))
    assert (torch.ones(2, 96) @ transposed).shape == (2, 160)
    assert half.sum() == weight[80:].sum()


def test_bad_values_are_refused_by_name_and_lose_nothing():
    weight, values = waiting(MATRIX, "int8"), torch.randn(MATRIX)
    weight[:100].copy_(values[:100])
    bad = values[100:].clone()
    bad[3, 3] = torch.inf
    for wrong, error, message in (
        (bad, ConversionError, "1 of 5760 are NaN or Inf"),
        (bad.int(), ConversionError, "floating dtype"),
        (values, UnsupportedError, r"takes no values of shape \(160, 96\) where it has \(60, 96\)"),
    ):
        with pytest.raises(error, match=rf"'inner\.weight'.*{message}"):
            weight[100:].copy_(wrong)
    with pytest.raises(UnsupportedError, match="expanded"):
        weight[100:101].unsqueeze(0).squeeze(0).as_strided((60, 96), (0, 1)).copy_(values[100:])
    weight[100:].copy_(torch.empty(60, 96, device="meta"))
    assert missing(weight) == 60 * 96
    weight[100:].copy_(values[100:])
    assert_equal(weight, at_once(values, "int8"))


def test_parts_of_experts_that_are_converted_are_refused():
    values, weight = torch.randn(EXPERTS), waiting(EXPERTS, "fp8_per_tensor")
    weight[1].copy_(values[1])
    with pytest.raises(UnsupportedError, match=r"rows 3 to 8 of matrix 1 of 'inner\.gate_up_proj' came before"):
        weight[1, 3:9].copy_(values[1, 3:9])
    weight[1].copy_(values[0])
    weight[0].copy_(values[0])
    weight[1].copy_(values[1])
    weight[2].copy_(values[2])
    assert_equal(weight, at_once(values, "fp8_per_tensor"))


@pytest.mark.parametrize("shape", [MATRIX, EXPERTS])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_go_on_from_what_has_arrived(way: str, shape: tuple[int, ...]):
    values, weight = torch.randn(shape), waiting(shape, "fp8_per_block")
    weight[0].copy_(values[0])
    weight[1, 3:].copy_(values[1, 3:])
    if way == "deepcopy":
        other = copy.deepcopy(weight)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(weight))
    else:
        buffer = io.BytesIO()
        torch.save(weight, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    for one in (other, weight):
        assert missing(one) == values[1:].numel() - values[1, 3:].numel()
        one[1:].copy_(values[1:])
        assert_equal(one, at_once(values, "fp8_per_block"))


def test_a_weight_in_use_keeps_what_has_arrived(monkeypatch: pytest.MonkeyPatch):
    values, weight = torch.randn(MATRIX), waiting(MATRIX, "int8")
    weight[:100].copy_(values[:100])

    def refuse(*_: object) -> None:
        raise RuntimeError("in use")

    with monkeypatch.context() as patch:
        patch.setattr(weights_arrival, "_swap", refuse)
        with pytest.raises(PendingWeightError, match=r"'inner\.weight' cannot be given data while it is in use"):
            weight[100:].copy_(values[100:])
    assert weight.pending is not None
    weight[100:].copy_(values[100:])
    assert_equal(weight, at_once(values, "int8"))


def test_dtype_and_device_may_change_on_the_way():
    values = torch.randn(MATRIX)
    with torch.device("meta"):
        layer = Layer(MATRIX, torch.bfloat16)
    olq_fx.quantize_(layer, "mxfp8")
    layer.weight[:100].copy_(values[:100])
    layer.float()
    layer.weight[100:].copy_(values[100:])
    assert layer.weight.dtype == torch.float32
    assert_equal(layer.weight, at_once(values, "mxfp8"))


def test_to_empty_loses_values_as_it_does_of_any_parameter():
    with torch.device("meta"):
        layer = Layer(MATRIX)
    olq_fx.quantize_(layer, "mxfp8")
    layer.weight[:100].copy_(torch.randn(100, 96))
    layer.to_empty(device="cpu")
    assert missing(layer.weight) == layer.weight.numel()


def test_all_that_is_missing_is_listed():
    with torch.device("meta"):
        model = nn.ModuleDict({name: Layer(MATRIX) for name in ("a", "b", "c")})
    olq_fx.quantize_(model, "int8")
    model["a"].weight.copy_(torch.randn(MATRIX))
    model["b"].weight[:100].copy_(torch.randn(100, 96))
    with pytest.raises(
        PendingWeightError, match=r"b\.inner\.weight \(5760 of 15360 values\).*c\.inner\.weight \(all\)"
    ):
        olq_fx.finalize(model)
    for name in ("b", "c"):
        model[name].weight.copy_(torch.randn(MATRIX))
    olq_fx.finalize(model)


def _step(tensor: torch.Tensor, kind: str, number: int, step: int) -> torch.Tensor:
    """A view of a view."""
    if tensor.dim() == 0:
        return tensor
    dim = number % tensor.dim()
    length = tensor.shape[dim]
    if kind == "slice":
        return tensor[(slice(None),) * dim + (slice(number % length, None, step),)]
    if kind == "select":
        return tensor.select(dim, number % length)
    if kind == "transpose":
        return tensor.transpose(dim, 0)
    if kind == "flatten":
        return tensor.view(-1) if tensor.is_contiguous() else tensor
    return tensor.unflatten(dim, (2, -1)) if length % 2 == 0 else tensor


KINDS = st.sampled_from(["slice", "select", "transpose", "flatten", "split"])


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=3),
    st.booleans(),
    st.lists(st.tuples(KINDS, st.integers(0, 9), st.integers(1, 3)), max_size=5),
)
def test_regions_are_what_a_copy_into_the_view_writes(shape, transposed, steps):
    like = torch.empty(shape, device="meta")
    like = like.transpose(0, -1) if transposed else like
    truth = torch.empty_strided(like.shape, like.stride()).zero_()
    view, real = like, truth
    for step in steps:
        view, real = _step(view, *step), _step(real, *step)
    source = torch.arange(1, real.numel() + 1, dtype=torch.float32).reshape(real.shape)
    real.copy_(source)
    found = torch.zeros(like.shape)
    for ranges, values in regions(view, like, source):
        index = tuple(slice(one.start, one.stop, one.step) for one in ranges)
        assert found[index].shape == values.shape
        found[index] = values
    assert_same_bits(found, truth.contiguous())


@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_parts_of_ranges(start, count, step, apart, first):
    chosen = range(start, start + count * step, step)
    positions, numbers = every(chosen, apart, first % apart)
    expected = [value for value in chosen if value % apart == first % apart]
    assert [value * apart + first % apart for value in numbers] == expected == list(chosen[positions])
    positions, numbers = within(chosen, 4, 4 + 3 * apart)
    expected = [value for value in chosen if 4 <= value < 4 + 3 * apart]
    assert [value + 4 for value in numbers] == expected == list(chosen[positions])


def test_missing_is_counted_by_elements():
    left = Missing(10, 8)
    left.take(range(0, 4), range(0, 8))
    left.take(range(2, 6), range(4, 8))
    assert left.count == 80 - 32 - 8
    left.take(range(0, 10, 3), range(8))
    assert left.count == 80 - 32 - 8 - 16
    left.take(range(0, 10), range(0, 4))
    assert left.count == 24 - 16
    left.take(range(10), range(8))
    assert left.count == 0
