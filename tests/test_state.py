"""State dicts of converted models: plain tensors out, those or original precision in, and what does not fit."""

import collections
import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from olq_fx.errors import PendingWeightError
from olq_fx.formats import FORMATS
from olq_fx.quantize import dequantize_, quantize_
from olq_fx.schemes import SCHEMES
from olq_fx.state import attach, part_names
from olq_fx.testing import Conv1D, assert_same_bits
from olq_fx.weights import QuantizedWeight

NAMES = {
    "fp8_per_tensor": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "fp8_per_channel": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "fp8_per_block": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "mxfp8": {"weight": torch.float8_e4m3fn, "weight_scale": torch.uint8},
    "mxfp4": {"weight_packed": torch.uint8, "weight_scale": torch.uint8},
    "mxfp4_dualscale": {
        "weight_packed": torch.uint8,
        "weight_scale": torch.uint8,
        "weight_coarse_scale": torch.float32,
    },
    "nvfp4_per_token": {
        "weight_packed": torch.uint8,
        "weight_scale": torch.float8_e4m3fn,
        "weight_global_scale": torch.float32,
    },
    "int8": {"weight": torch.int8, "weight_scale": torch.float32},
}
"""Keys and dtypes as compressed-tensors has them; a weight-only scheme stores the same."""

SHAPES = {
    "fp8_per_tensor": ((40, 96), (1,)),
    "fp8_per_channel": ((40, 96), (40, 1)),
    "fp8_per_block": ((40, 96), (1, 1)),
    "mxfp8": ((40, 96), (40, 3)),
    "mxfp4": ((40, 48), (40, 3)),
    "mxfp4_dualscale": ((40, 48), (40, 3), (40, 1)),
    "nvfp4_per_token": ((40, 48), (40, 6), (1,)),
    "int8": ((40, 96), (40, 1)),
}


class Model(nn.Module):
    """A linear layer, a Conv1D, an attention, a norm, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 40)
        self.conv = Conv1D(96, 40)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.norm = nn.LayerNorm(96)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("not_saved", torch.arange(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(self.first(x)))
        return self.attention(y, y, y, need_weights=False)[0]


def quantized(scheme: str, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model().eval()
    quantize_(model, scheme)
    return model


def original(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


def parts_of(model: nn.Module) -> list[Tensor]:
    return [part for p in model.parameters() if isinstance(p, QuantizedWeight) for part in p.parts]


def assert_same_output(a: nn.Module, b: nn.Module) -> None:
    x = torch.randn(2, 5, 96)
    with torch.no_grad():
        assert_same_bits(a(x), b(x))


@pytest.mark.parametrize("scheme", NAMES)
def test_keys_shapes_and_dtypes(scheme: str):
    state = quantized(scheme).state_dict()
    for key, value in state.items():
        assert type(value) is Tensor, key
        assert value.is_contiguous()
    layer = {key.removeprefix("first."): value for key, value in state.items() if key.startswith("first.")}
    assert {key: value.dtype for key, value in layer.items() if key != "bias"} == NAMES[scheme]
    assert tuple(tuple(layer[key].shape) for key in NAMES[scheme]) == SHAPES[scheme]
    for leaf, key in (("weight", "conv."), ("in_proj_weight", "attention."), ("weight", "attention.out_proj.")):
        for name in part_names(leaf, FORMATS[SCHEMES[scheme].linear.weight]):
            assert key + name in state
    assert state["kept"].tolist() == [0, 1, 2]
    assert "not_saved" not in state


def test_all_schemes_are_covered():
    formats = {SCHEMES[name].linear.weight for name in NAMES}
    assert formats == {scheme.linear.weight for scheme in SCHEMES.values()}
    names = [part_names("weight", FORMATS[name]) for name in formats]
    assert all(len(set(keys)) == len(keys) for keys in names)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_save_and_load_are_bit_exact(scheme: str, tmp_path: Path):
    model = quantized(scheme)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for state in (torch.load(tmp_path / "model.pt", weights_only=True), load_file(tmp_path / "model.safetensors")):
        for assign in (False, True):
            other = quantized(scheme, seed=1)
            pointers = [part.data_ptr() for part in parts_of(other)]
            result = other.load_state_dict(state, strict=True, assign=assign)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            for mine, theirs in zip(parts_of(other), parts_of(model), strict=True):
                assert_same_bits(mine, theirs)
            assert ([part.data_ptr() for part in parts_of(other)] == pointers) is not assign
            assert_same_output(other, model)
            assert isinstance(other.first.weight, nn.Parameter)


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("assign", [False, True])
def test_original_precision_is_converted_on_loading(scheme: str, assign: bool):
    """The hot refresh: the same storage, the bits of a fresh conversion, everything else as torch loads it."""
    model, fresh = quantized(scheme), original(seed=1)
    fresh.kept += 5
    pointers = [part.data_ptr() for part in parts_of(model)]
    result = model.load_state_dict(fresh.state_dict(), assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert [part.data_ptr() for part in parts_of(model)] == pointers
    assert model.kept.tolist() == [5, 6, 7]
    assert model.not_saved.tolist() == [0, 1]
    quantize_(fresh, scheme)
    assert_same_output(model, fresh)


def test_part_of_a_refresh():
    model, fresh = quantized("fp8_per_block"), original(seed=1)
    state = {"first.weight": fresh.first.weight.detach().bfloat16()}
    result = model.load_state_dict(state, strict=False)
    assert "first.bias" in result.missing_keys
    assert "conv.weight_scale" in result.missing_keys
    assert result.unexpected_keys == []
    expected = original(seed=1)
    expected.first.weight.data = state["first.weight"].float()
    quantize_(expected, "fp8_per_block")
    assert_same_bits(model.first.weight.codes, expected.first.weight.codes)
    assert_same_bits(model.conv.weight.codes, quantized("fp8_per_block").conv.weight.codes)


def test_assigned_values_bring_their_dtype():
    model, fresh = quantized("int8"), original(seed=1).bfloat16()
    model.load_state_dict(fresh.state_dict(), assign=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.load_state_dict(original(seed=1).state_dict(), assign=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@functools.cache
def saved_by(scheme: str) -> dict[str, Tensor]:
    return dict(quantized(scheme, seed=1).state_dict())


@pytest.mark.parametrize("held", NAMES)
def test_another_scheme_is_an_error_that_tells_both(held: str):
    """Key, expected and found shape and dtype; and the model keeps what it has."""
    model = quantized(held)
    before = [part.clone() for part in parts_of(model)]
    for saved in NAMES.keys() - {held}:
        if set(NAMES[saved].items()) < set(NAMES[held].items()):
            # As far as it goes it fits: a scale is missing, and nothing is loaded without it.
            assert "first.weight_coarse_scale" in model.load_state_dict(saved_by(saved), strict=False).missing_keys
            with pytest.raises(RuntimeError, match=r"first\.weight_coarse_scale"):
                model.load_state_dict(saved_by(saved))
            continue
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"first\.weight is held in.*expected.*found") as caught:
                model.load_state_dict(saved_by(saved), strict=strict)
        for key in NAMES[held].keys() | NAMES[saved].keys():
            if NAMES[held].get(key) != NAMES[saved].get(key):
                assert f"first.{key}: " in str(caught.value)
    for part, kept in zip(parts_of(model), before, strict=True):
        assert_same_bits(part, kept)


def test_messages_name_shapes_and_dtypes():
    model, state = quantized("fp8_per_block"), quantized("int8").state_dict()
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert "first.weight: expected float8_e4m3fn (40, 96), found int8 (40, 96)" in text
    assert "first.weight_scale: expected float32 (1, 1), found float32 (40, 1)" in text


def test_strictness_works_both_ways():
    model = quantized("mxfp4")
    state = collections.OrderedDict(model.state_dict())
    scale = state.pop("first.weight_scale")
    before = model.first.weight.codes.clone()
    state["first.weight_packed"] = state["first.weight_packed"] ^ 1
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"first.weight_scale"'):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["first.weight_scale"]
    assert_same_bits(model.first.weight.codes, before)
    state["first.weight_scale"] = scale
    state["first.extra"] = scale
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"first.extra"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).unexpected_keys == ["first.extra"]
    with pytest.raises(RuntimeError, match="Unexpected key"):
        original().load_state_dict(state)


def test_codes_without_scales_are_not_loaded():
    model = quantized("fp8_per_channel")
    state = model.state_dict()
    del state["first.weight_scale"]
    with pytest.raises(RuntimeError, match=r"first\.weight_scale"):
        model.load_state_dict(state)


def test_sizes_are_checked_as_by_torch():
    model, state = quantized("fp8_per_block"), original().state_dict()
    state["first.weight"] = torch.randn(41, 96)
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        model.load_state_dict(state)
    state = model.state_dict()
    state["first.weight"] = torch.zeros(41, 96, dtype=torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"first\.weight: expected float8_e4m3fn \(40, 96\), found .* \(41, 96\)"):
        model.load_state_dict(state)
    state["first.weight"] = "text"
    with pytest.raises(RuntimeError, match=r"first\.weight: expected .* found str"):
        model.load_state_dict(state)


def test_values_that_cannot_be_converted_are_an_error_by_name():
    model, state = quantized("fp8_per_block"), original(seed=1).state_dict()
    state["conv.weight"][3, 4] = float("nan")
    before = model.conv.weight.codes.clone()
    with pytest.raises(RuntimeError, match=r"conv\.weight.*1 of 3840 are NaN or Inf"):
        model.load_state_dict(state)
    assert_same_bits(model.conv.weight.codes, before)


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["parts", "original"])
def test_a_model_on_meta_converts_when_it_is_loaded(scheme: str, assign: bool, kind: str):
    with torch.device("meta"):
        model = Model().eval()
    report = quantize_(model, scheme)
    assert len(report.pending) == 4
    source = quantized(scheme, seed=1) if kind == "parts" else original(seed=1)
    expected = quantized(scheme, seed=1)
    with warnings.catch_warnings():
        if not assign:
            # torch says of the biases and norms that nothing can be copied into them.
            warnings.filterwarnings("ignore", message=".*no-op.*")
        model.load_state_dict(source.state_dict(), assign=assign)
    weights = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    assert len(weights) == 4
    for weight, other in zip(
        weights, (p for p in expected.parameters() if isinstance(p, QuantizedWeight)), strict=True
    ):
        assert weight.pending is None
        assert weight.device.type == "cpu"
        assert weight.spec == other.spec
        for part, same in zip(weight.parts, other.parts, strict=True):
            assert_same_bits(part, same)
    if assign:
        model.not_saved = expected.not_saved
        assert_same_output(model, expected)


def test_a_weight_that_never_arrives_is_missing_by_name():
    with torch.device("meta"):
        model = Model()
    quantize_(model, "mxfp4")
    assert list(model.state_dict()) == list(Model().state_dict())
    state = original().state_dict()
    del state["first.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"first.weight"'):
        model.load_state_dict(state, assign=True)
    with pytest.raises(PendingWeightError, match=r"'first\.weight'"):
        model(torch.randn(2, 5, 96))


@pytest.mark.parametrize("assign", [False, True])
def test_ties_stay_ties(assign: bool):
    model = nn.ModuleList([nn.Linear(96, 40, bias=False), nn.Linear(96, 40, bias=False)])
    model[1].weight = model[0].weight
    quantize_(model, "fp8_per_block")
    for state in (model.state_dict(), nn.ModuleList([nn.Linear(96, 40, bias=False)] * 2).state_dict()):
        model.load_state_dict(state, assign=assign)
        assert model[0].weight is model[1].weight
    with torch.device("meta"):
        empty = nn.ModuleList([nn.Linear(96, 40, bias=False), nn.Linear(96, 40, bias=False)])
        empty[1].weight = empty[0].weight
    quantize_(empty, "fp8_per_block")
    empty.load_state_dict(model.state_dict(), assign=assign)
    assert empty[0].weight is empty[1].weight
    assert_same_bits(empty[0].weight.codes, model[0].weight.codes)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_load_for_themselves(copied: Callable[[nn.Module], Model]):
    model, state = quantized("int8"), original(seed=1).state_dict()
    other = copied(model)
    before = [part.clone() for part in parts_of(model)]
    other.load_state_dict(state)
    for part, kept in zip(parts_of(model), before, strict=True):
        assert_same_bits(part, kept)
    assert_same_output(other, quantized("int8", seed=1))
    assert list(other.state_dict()) == list(model.state_dict())


def test_swapping_parameters_on_load():
    """torch's other way of loading, which exchanges the content of parameters."""
    model, fresh = quantized("int8"), original(seed=1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(fresh.state_dict())
        model.load_state_dict(model.state_dict())
        model.load_state_dict(fresh.state_dict(), assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    quantize_(fresh, "int8")
    assert_same_output(model, fresh)


def test_hooks_are_there_once_and_go_with_the_weights():
    layer = nn.Linear(96, 40)
    model = nn.Sequential(layer)
    quantize_(model, "int8")
    attach(layer)
    assert len(layer._state_dict_hooks) == len(layer._load_state_dict_pre_hooks) == 1
    dequantize_(model)
    assert not layer._state_dict_hooks
    assert not layer._load_state_dict_pre_hooks
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


def test_a_parameter_of_the_state_itself_is_taken():
    model, other = quantized("int8"), quantized("int8", seed=1)
    state = dict(other.named_parameters()) | dict(other.named_buffers())
    del state["not_saved"]
    model.load_state_dict(state)
    assert_same_output(model, other)
