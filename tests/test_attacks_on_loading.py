"""What a user meets beyond the documented ways of loading: everything is either right or an error that names it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import olq_fx
from olq_fx.errors import ConversionError, LoadError, OlqFxWarning, PendingWeightError, UnsupportedError
from olq_fx.weights import QuantizedWeight, missing

N, K = 64, 128


def pending(scheme: str = "mxfp8") -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N, bias=False))
    olq_fx.quantize_(model, scheme)
    return model


def plain() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(K, N, bias=False))


@pytest.mark.parametrize("operation", [torch.cat, torch.stack, torch.hstack])
def test_pieces_in_a_list_need_data_too(operation):
    weight = pending()[0].weight
    with pytest.raises(PendingWeightError, match=r"'0\.weight' is planned for mxfp8"):
        operation([weight[:32], weight[32:]])


def test_a_piece_in_a_list_is_a_view_of_what_has_arrived_since():
    weight, values = pending()[0].weight, torch.randn(N, K)
    pieces = [weight[:32], weight[32:]]
    weight.copy_(values)
    with pytest.raises(UnsupportedError) as of_pieces:
        torch.cat(pieces)
    with pytest.raises(UnsupportedError) as of_views:
        torch.cat([weight[:32], weight[32:]])
    assert str(of_pieces.value) == str(of_views.value)


def test_bits_read_as_another_dtype_are_no_place_for_values():
    weight = pending()[0].weight
    with pytest.raises(PendingWeightError, match=r"'0\.weight'"):
        weight.view(torch.int32)
    with pytest.raises(PendingWeightError, match=r"'0\.weight'"):
        weight[:8].view(torch.int16)
    assert missing(weight) == N * K


def codes() -> Tensor:
    return torch.randn(N, K).to(torch.float8_e4m3fn)


def with_nan_code() -> dict[str, Tensor]:
    bytes_of = codes().view(torch.uint8)
    bytes_of[3, 5] = 0xFF
    return {"weight": bytes_of.view(torch.float8_e4m3fn), "weight_scale": torch.ones(N, 1)}


NOT_FINITE = {
    "a scale is NaN": lambda: {"weight": codes(), "weight_scale": torch.full((N, 1), float("nan"))},
    "a scale is Inf": lambda: {"weight": codes(), "weight_scale": torch.full((N, 1), float("inf"))},
    "a code is NaN": with_nan_code,
    "a power of two is NaN": lambda: {
        "weight": codes(),
        "weight_scale": torch.full((N, K // 32), 255, dtype=torch.uint8),
    },
    "a global scale is 0": lambda: {
        "weight": torch.zeros(N, K // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(N, K // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.0),
    },
}


@pytest.mark.parametrize("why", list(NOT_FINITE))
def test_quantized_weights_of_others_are_finite_as_all_others(why: str):
    model = plain()
    with pytest.raises(ConversionError, match=r"'0\.weight' is quantized in .* has NaN or Inf"):
        olq_fx.load_(model, {f"0.{name}": tensor for name, tensor in NOT_FINITE[why]().items()})
    assert model[0].weight.is_meta


def test_the_largest_codes_and_bytes_are_no_nan():
    large = torch.full((N, K), 448.0).to(torch.float8_e4m3fn)
    scale = torch.full((N, K // 32), 120, dtype=torch.uint8)
    model = plain()
    olq_fx.load_(model, {"0.weight": large, "0.weight_scale": scale})
    assert torch.equal(model[0].weight.dequantize(), torch.full((N, K), 448.0 / 128))


def test_codes_of_a_vector_are_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(32, bias=False))
    stored = {"0.weight": torch.ones(32).to(torch.float8_e4m3fn), "0.weight_scale": torch.tensor(0.5)}
    with pytest.raises(LoadError, match=r"'0\.weight' \(float8_e4m3fn \(32,\)\).*belong to matrices"):
        olq_fx.load_(model, stored)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(N, K)
        self.head = nn.Linear(K, N, bias=False)
        self.head.weight = self.embed.weight


def tied_twice(scale: Tensor, other: Tensor) -> dict[str, Tensor]:
    shared = {"embed.weight": torch.ones(N, K).to(torch.float8_e4m3fn)}
    shared |= {"head.weight": shared["embed.weight"].clone()}
    return shared | {"embed.weight_scale": scale, "head.weight_scale": other}


def test_a_tied_weight_that_is_stored_quantized_twice_is_one():
    with torch.device("meta"):
        model = Tied()
    olq_fx.load_(model, tied_twice(torch.full((N, 1), 0.5), torch.full((N, 1), 0.5)))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight.dequantize(), torch.full((N, K), 0.5))


@pytest.mark.parametrize("other", [torch.full((N, 1), 0.25), torch.tensor(0.25)], ids=["rows", "tensor"])
def test_a_tied_weight_whose_copies_differ_is_an_error(other: Tensor):
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(LoadError, match="has other values, and is the same parameter"):
        olq_fx.load_(model, tied_twice(torch.full((N, 1), 0.5), other))


def test_what_was_loaded_in_part_is_not_cached_and_no_error(tmp_path: Path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False))
    olq_fx.quantize_(model, "mxfp8")
    save_file({"0.weight": torch.randn(N, K)}, tmp_path / "part.safetensors")
    with pytest.warns(OlqFxWarning, match=r"loaded, but not cached: .*1\.weight"):
        report = olq_fx.load_(model, tmp_path / "part.safetensors", strict=False, cache_dir=tmp_path / "cache")
    assert report.missing == ("1.weight",)
    assert isinstance(model[0].weight, QuantizedWeight)
    assert missing(model[0].weight) == 0


def test_a_link_to_nowhere_says_where_it_leads(tmp_path: Path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(LoadError, match=r"is a link to .*gone, which is not there"):
        olq_fx.load_(plain(), tmp_path / "model.safetensors")


@pytest.mark.parametrize("scale", [torch.tensor(1.0), torch.ones(N, 0)], ids=["one", "none"])
@pytest.mark.parametrize("kind", ["weight_packed", "weight"])
def test_scales_that_make_no_groups_are_refused_by_name(kind: str, scale: Tensor):
    dtype, columns = (torch.int32, K // 8) if kind == "weight_packed" else (torch.int8, K)
    stored = {kind: torch.ones(N, columns, dtype=dtype), "weight_scale": scale, "weight_zero_point": torch.tensor(1)}
    with pytest.raises(LoadError, match=rf"'0\.{kind}' .*scales of integers in groups"):
        olq_fx.load_(plain(), {f"0.{name}": tensor for name, tensor in stored.items()})


def test_what_a_configuration_beside_a_file_declares_is_part_of_the_cache(tmp_path: Path):
    file, found = tmp_path / "model.safetensors", []
    save_file({"0.weight": codes(), "0.weight_scale_inv": torch.ones(1, 1)}, file)
    for _ in range(2):
        model = plain()
        olq_fx.load_(model, file, cache_dir=tmp_path / "cache")
        found.append(model[0].weight.spec.weight)
        declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
    assert found == ["fp8_per_tensor_static", "fp8_per_block_static"]
