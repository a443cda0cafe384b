"""Checkpoints that others have quantized: codes and scales are taken as they are, whoever wrote them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor, nn

import olq_fx
from olq_fx import numerics
from olq_fx.errors import LoadError
from olq_fx.foreign import unpacked
from olq_fx.formats import get_format
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits
from olq_fx.weights import QuantizedStack, QuantizedWeight

N, K = 192, 256
E4M3 = torch.float8_e4m3fn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(N, K, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def checkpoint(folder: Path, tensors: dict[str, Tensor], declared: dict[str, Any] | None = None) -> Path:
    """A directory whose first layer is quantized by others, and whose second is in original precision."""
    rest = {"second.weight": torch.randn(K, N, dtype=torch.bfloat16)}
    save_file(
        {**{f"first.{name}": value.contiguous() for name, value in tensors.items()}, **rest},
        folder / "model.safetensors",
    )
    if declared is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": declared}))
    return folder


def converted(parameter: Tensor) -> QuantizedWeight:
    assert isinstance(parameter, QuantizedWeight)
    assert parameter.pending is None
    return parameter


ARGS = {
    "fp8_per_tensor_static": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (1,)),
    "fp8_per_channel_static": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (N, 1)),
    "fp8_per_block_static": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        (2, 2),
    ),
    "int8_per_channel_static": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, (N, 1)),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        (N, K // 32),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        (N, K // 32),
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        (N, K // 16),
    ),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}, (N, K // 64)),
}


def by_compressed_tensors(format: str) -> tuple[dict[str, Tensor], Tensor]:
    """What the library itself writes of a weight, and what it reads from that."""
    name, arguments, scale_shape = ARGS[format]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=name)
    weight = torch.randn(N, K)
    grid = (
        weight.abs().reshape(N, -1, K // scale_shape[-1]).amax(-1)
        if len(scale_shape) == 2 and scale_shape[0] == N
        else None
    )
    if grid is None and scale_shape == (1,):
        grid = weight.abs().max().reshape(1)
    elif grid is None:
        grid = torch.stack([torch.stack([b.abs().max() for b in a.split(128, 1)]) for a in weight.split(128, 0)])
    largest = {"int8_per_channel_static": 127, "int4": 7, "mxfp4": 6, "nvfp4": 6}.get(format, 448)
    scale = grid / largest
    given = {"weight": weight, "weight_scale": scale}
    if format.startswith("mx"):
        given["weight_scale"] = torch.exp2(torch.ceil(torch.log2(scale)))
    if format == "nvfp4":
        given["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
        given["weight_scale"] = (scale * given["weight_global_scale"]).to(E4M3).float()
    compressor = BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(given, scheme)
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


@pytest.mark.parametrize("format", [name for name in ARGS if name != "int4"])
def test_what_compressed_tensors_writes_is_taken_as_it_is(format: str, tmp_path: Path):
    stored, values = by_compressed_tensors(format)
    model = on_meta()
    report = olq_fx.load_(model, checkpoint(tmp_path, stored), progress=False)
    weight = converted(model.first.weight)
    assert weight.spec.weight == format
    assert report.taken == (("first.weight", format),)
    codes = stored.get("weight_packed", stored.get("weight"))
    assert_same_bits(weight.codes.view(torch.uint8), codes.view(torch.uint8))
    if format == "nvfp4":  # the library gives bfloat16, of scales that it has rounded to it
        torch.testing.assert_close(weight.dequantize(torch.float32), values.float(), rtol=2.0**-7, atol=0)
    else:
        assert_same_bits(weight.dequantize(torch.float32), values.float())
    assert type(model.second.weight) is nn.Parameter
    assert model(torch.randn(3, K, dtype=torch.bfloat16)).isfinite().all()
    # What it saves is what it was given.
    saved = model.state_dict()
    for name, value in stored.items():
        if name != "weight_shape":
            assert_same_bits(saved[f"first.{name}"].float(), value.float().reshape(saved[f"first.{name}"].shape))


def test_packed_integers_are_dequantized_and_quantized_as_planned(tmp_path: Path):
    stored, values = by_compressed_tensors("int4")
    folder = checkpoint(tmp_path, stored)
    plain, planned, expected = on_meta(), on_meta(), Model()
    report = olq_fx.load_(plain, folder, progress=False)
    assert_same_bits(plain.first.weight.detach(), values.bfloat16())
    assert report.taken == (("first.weight", "original precision, of packed integers of 4 bits"),)
    assert "packed integers of 4 bits" in str(report)
    olq_fx.quantize_(planned, "mxfp8")
    olq_fx.load_(planned, folder, progress=False)
    with torch.no_grad():
        expected.float().first.weight.copy_(values)
    olq_fx.quantize_(expected, "mxfp8")
    for part, other in zip(converted(planned.first.weight).parts, converted(expected.first.weight).parts, strict=True):
        assert_same_bits(part, other)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_words_hold_integers_as_compressed_tensors_packs_them(bits: int):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, 70), dtype=torch.int8)
    assert torch.equal(unpacked(pack_to_int32(values, bits), bits, 70), values.long())


def in_our_format(format: str, values: Tensor) -> tuple[Tensor, ...]:
    return tuple(numerics.quantize(values, get_format(format), get_format(format).weight_rule))


def by_hand(method: str) -> tuple[dict[str, Tensor], str, Tensor]:
    """What other libraries write of a weight, from the layouts that they document; the format; its values."""
    weight = torch.randn(N, K)
    format = {
        "deepseek": "fp8_per_block_static",
        "fbgemm": "fp8_per_channel_static",
        "modelopt fp8": "fp8_per_tensor_static",
        "modelopt nvfp4": "nvfp4",
        "quark": "mxfp4",
        "ue8m0": "fp8_per_block_static",
    }[method]
    parts = in_our_format(format, weight)
    if method == "ue8m0":
        exponent = torch.ceil(torch.log2(parts[1])).to(torch.int32)
        parts = (parts[0], torch.exp2(exponent.float()))
    values = numerics.dequantize(parts, get_format(format), K, torch.float32)
    codes, scale = parts[0], parts[1]
    if method == "deepseek":
        return {"weight": codes, "weight_scale_inv": scale}, format, values
    if method == "ue8m0":
        return (
            {"weight": codes, "weight_scale_inv": (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)},
            format,
            values,
        )
    if method == "fbgemm":
        return {"weight": codes, "weight_scale": scale}, format, values
    if method == "quark":
        return {"weight": codes, "weight_scale": scale}, format, values
    if method == "modelopt fp8":
        return {"weight": codes, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.5)}, format, values
    return (
        {
            "weight": codes,
            "weight_scale": scale,
            "weight_scale_2": (1 / parts[2]).reshape(()),
            "input_scale": torch.tensor(0.5),
        },
        format,
        values,
    )


@pytest.mark.parametrize("method", ["deepseek", "ue8m0", "fbgemm", "modelopt fp8", "modelopt nvfp4", "quark"])
def test_layouts_of_others(method: str, tmp_path: Path):
    stored, format, values = by_hand(method)
    model = on_meta()
    report = olq_fx.load_(model, checkpoint(tmp_path, stored), progress=False)
    weight = converted(model.first.weight)
    assert weight.spec.weight == format
    assert_same_bits(weight.codes.view(torch.uint8), stored["weight"].view(torch.uint8))
    # A global scale is stored as a reciprocal by one and not by the other: two roundings of float32.
    tolerance = 2.0**-22 if method == "modelopt nvfp4" else 0.0
    torch.testing.assert_close(weight.dequantize(torch.float32), values, rtol=tolerance, atol=0)
    assert report.left_out == (("first.input_scale",) if "input_scale" in stored else ())


def test_blocks_are_those_that_are_declared(tmp_path: Path):
    parts = in_our_format("fp8_per_block_static_64x64", torch.randn(N, K))
    stored = {"weight": parts[0], "weight_scale_inv": parts[1]}
    model = on_meta()
    declared = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
    olq_fx.load_(model, checkpoint(tmp_path, stored, declared), progress=False)
    assert converted(model.first.weight).spec.weight == "fp8_per_block_static_64x64"
    assert converted(model.first.weight).spec.activation == "fp8_per_block_dynamic_1x64"


def test_the_rest_is_quantized_online_and_the_same_format_is_taken_over(tmp_path: Path):
    stored, _, _ = by_hand("deepseek")
    folder = checkpoint(tmp_path, stored)
    model = on_meta()
    olq_fx.quantize_(
        model, {"targets": {"first": {"weight": "fp8_per_block_static", "activation": "mxfp8"}, "second": "mxfp4"}}
    )
    olq_fx.load_(model, folder, progress=False)
    assert_same_bits(converted(model.first.weight).codes, stored["weight"])
    assert converted(model.first.weight).spec.activation == "mxfp8"
    assert converted(model.second.weight).spec.weight == "mxfp4"
    other = on_meta()
    olq_fx.quantize_(other, "int8")
    with pytest.raises(
        LoadError, match=r"'first\.weight' is already quantized by the checkpoint in fp8_per_block_static"
    ):
        olq_fx.load_(other, folder, progress=False)
    assert converted_or_pending(other.second.weight)
    # Afterwards other activations may be chosen, and other formats for what is in original precision.
    later = on_meta()
    olq_fx.load_(later, folder, progress=False)
    olq_fx.quantize_(later, {"linear": {"activation": "fp8_per_token"}, "ignore": ["second"]})
    assert converted(later.first.weight).spec.activation == "fp8_per_token"


def converted_or_pending(parameter: Tensor) -> bool:
    return isinstance(parameter, QuantizedWeight) and parameter.pending is not None


def test_weights_only_as_they_are_declared(tmp_path: Path):
    stored, _ = by_compressed_tensors("fp8_per_channel_static")
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    declared = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    model = on_meta()
    olq_fx.load_(model, checkpoint(tmp_path, stored, declared), progress=False)
    assert converted(model.first.weight).spec.activation == ""


class Experts(nn.Module):
    """As gpt-oss has them: (E, K, N), gate and up by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated, self.has_gate = True, False, True
        self.gate_up_proj = nn.Parameter(torch.randn(3, 64, 2 * 48, dtype=torch.bfloat16))
        self.down_proj = nn.Parameter(torch.randn(3, 48, 64, dtype=torch.bfloat16))


def test_experts_of_gpt_oss(tmp_path: Path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = (
        torch.randint(0, 256, (3, 96, 2, 16), dtype=torch.uint8),
        torch.randint(118, 130, (3, 96, 2), dtype=torch.uint8),
    )
    down = torch.randn(3, 48, 64, dtype=torch.bfloat16)
    save_file(
        {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales, "experts.down_proj": down},
        tmp_path / "model.safetensors",
    )
    with torch.device("meta"):
        model = nn.ModuleDict({"experts": Experts()})
    report = olq_fx.load_(model, tmp_path, progress=False)
    weight = model["experts"].gate_up_proj
    assert isinstance(weight, QuantizedStack)
    assert report.taken == (("experts.gate_up_proj", "mxfp4"),)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert_same_bits(weight.dequantize(torch.float32), expected.contiguous())
    # Quantizing those values online gives the same kind of weight.
    with torch.no_grad():
        other = nn.ModuleDict({"experts": Experts()})
        other["experts"].gate_up_proj.copy_(expected)
    olq_fx.quantize_(other, {"targets": {"*.gate_up_proj": "mxfp4"}})
    assert other["experts"].gate_up_proj.spec.interleaved == weight.spec.interleaved
    assert other["experts"].gate_up_proj.spec.shards == weight.spec.shards


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("scheme", ["fp8_per_block", "fp8_per_tensor"])
def test_experts_one_by_one(scheme: str, planned: bool, tmp_path: Path):
    """As DeepSeek and Qwen write them: each expert a matrix with scales of its own, merged into one parameter here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(__file__).parent / "data" / "tiny-qwen3moe-wiki"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    olq_fx.quantize_(model, {"moe": scheme})
    stored: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, QuantizedStack):
            stored[name] = parameter.detach().clone()
            continue
        stem, leaf = name.rsplit(".", 1)
        inner = parameter.shape[1] // 2
        for expert in range(parameter.shape[0]):
            names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            for number, which in enumerate(names):
                rows = slice(number * inner, (number + 1) * inner) if len(names) == 2 else slice(None)
                stored[f"{stem}.{expert}.{which}.weight"] = parameter.codes[expert, rows].clone()
                high = 128 if scheme == "fp8_per_block" else inner
                blocks = slice(number * inner // high, (number + 1) * inner // high) if len(names) == 2 else slice(None)
                stored[f"{stem}.{expert}.{which}.weight_scale_inv"] = parameter.scale[expert, blocks].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    if planned:
        olq_fx.quantize_(fresh, {"moe": scheme})
    olq_fx.load_(fresh, tmp_path, progress=False)
    for (name, one), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        if isinstance(one, QuantizedStack):
            assert isinstance(other, QuantizedStack), name
            for part, same in zip(other.parts, one.parts, strict=True):
                assert_same_bits(part, same)


def refused(model: nn.Module, source: Path) -> str:
    """Why a checkpoint cannot be loaded; "" if it was."""
    try:
        olq_fx.load_(model, source, progress=False)
    except LoadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["as they are", "transposed by turns", "by turns"])
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_our_own_state_dict_is_right_or_refused(scheme: str, layout: str, tmp_path: Path):
    """Parts lie shard by shard, whatever the parameter reads: whose they are must be known, or nothing is loaded."""

    def built() -> nn.ModuleDict:
        torch.manual_seed(5)
        experts = Experts()
        experts.is_transposed, experts.is_concatenated = layout.startswith("transposed"), layout == "as they are"
        with torch.no_grad():
            experts.gate_up_proj[..., 48:] *= 7  # gate and up have other scales
        if not experts.is_transposed:
            experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().mT.contiguous())
            experts.down_proj = nn.Parameter(experts.down_proj.detach().mT.contiguous())
        return nn.ModuleDict({"experts": experts, "dense": nn.Linear(100, 60)})

    model = built()
    olq_fx.quantize_(model, scheme)
    save_file({name: part.contiguous() for name, part in model.state_dict().items()}, tmp_path / "model.safetensors")
    for planned in (True, False):
        with torch.device("meta"):
            other = built()
        if planned:
            olq_fx.quantize_(other, scheme)
            olq_fx.load_(other, tmp_path, progress=False)
        elif reason := refused(other, tmp_path):
            assert "gate" in reason or "global scales" in reason
            assert all(parameter.is_meta for parameter in other.parameters())
            continue
        for own, found in zip(model.parameters(), other.parameters(), strict=True):
            if isinstance(own, QuantizedWeight):
                assert_same_bits(converted(found).dequantize(torch.float32), own.dequantize(torch.float32))


def test_what_lies_around_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A state dict has no directory: the `config.json` of the current one says nothing of it."""
    stored, _ = by_compressed_tensors("fp8_per_channel_static")
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    declared = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
    monkeypatch.chdir(tmp_path)
    tensors = {f"first.{name}": value for name, value in stored.items()}
    model = on_meta()
    olq_fx.load_(model, {**tensors, "second.weight": torch.zeros(K, N, dtype=torch.bfloat16)}, progress=False)
    assert converted(model.first.weight).spec.activation == "fp8_per_token"


BROKEN = {
    "scales twice": (
        {"weight": torch.zeros(N, K).to(E4M3), "weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)},
        r"'first\.weight_scale\w*' and 'first\.weight_scale\w*' are both scales of 'first\.weight'",
    ),
    "scales that are whole numbers": (
        {"weight": torch.zeros(N, K).to(E4M3), "weight_scale": torch.ones(1, dtype=torch.int32)},
        "scales are floating numbers",
    ),
    "scales of another shape": (
        {"weight": torch.zeros(N, K).to(E4M3), "weight_scale": torch.ones(7)},
        r"first\.weight_scale",
    ),
    "codes without scales": (
        {"weight_packed": torch.zeros(N, K // 2, dtype=torch.uint8)},
        r"'first\.weight_packed' has codes",
    ),
    "no global scale": (
        {"weight_packed": torch.zeros(N, K // 2, dtype=torch.uint8), "weight_scale": torch.ones(N, K // 16).to(E4M3)},
        r"need a global one",
    ),
    "columns in another order": (
        {
            "weight_packed": torch.zeros(N, K // 8, dtype=torch.int32),
            "weight_scale": torch.ones(N, 2),
            "weight_g_idx": torch.zeros(K, dtype=torch.int32),
        },
        r"'first\.weight_packed' has its columns in another order than its scales \('first\.weight_g_idx'\)",
    ),
    "groups of several sizes": (
        {"weight_packed": torch.zeros(N, K // 8, dtype=torch.int32), "weight_scale": torch.ones(N, 3)},
        r"256 columns are no 3 groups of one size",
    ),
    "another matrix": (
        {"weight": torch.zeros(N, 2 * K).to(E4M3), "weight_scale": torch.ones(1)},
        r"'first\.weight' of .*its shape is \(192, 512\), that of 'first\.weight' \(192, 256\)",
    ),
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_what_does_not_belong_together_is_refused(fault: str, tmp_path: Path):
    stored, message = BROKEN[fault]
    model = on_meta()
    with pytest.raises(LoadError, match=message):
        olq_fx.load_(model, checkpoint(tmp_path, stored), progress=False)
    assert model.first.weight.is_meta
    assert model.second.weight.is_meta


@pytest.mark.parametrize("scale", ["weight_scale_inv", "scale", "qscale_weight"])
def test_a_small_matrix_of_a_checkpoint_in_blocks_is_one_block(scale: str, tmp_path: Path):
    """And the scales of activations, which such a checkpoint may have, are left out."""
    codes, scales = torch.randn(64, 96).to(E4M3), torch.rand(1, 1) + 0.1
    stored = {"0.weight": codes, f"0.{scale}": scales, "0.activation_scale": torch.ones(())}
    save_file(stored, tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(96, 64, bias=False, device="meta"))
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model.config = SimpleNamespace(quantization_config=declared)
    olq_fx.load_(model, tmp_path / "model.safetensors", progress=False)
    weight = model[0].weight
    assert isinstance(weight, QuantizedWeight)
    assert weight.spec.weight == "fp8_per_block_static"
    assert_same_bits(weight.dequantize(), codes.float() * scales)
    assert olq_fx.quantize_(model, "fp8_per_block").already == ("0.weight",)
