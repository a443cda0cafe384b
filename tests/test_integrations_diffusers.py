"""`from_pretrained` of diffusers' models and pipelines: the weights of quantize_, by component, and saved and back."""

import copy
import json
import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import ConfigurationError, ConversionError, PendingWeightError, PlanError
from olq_fx.testing import assert_same_bits

UNET: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 1,
    "sample_size": 8,
    "num_embeds_ada_norm": 10,
}
FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
MODELS = {"UNet2DConditionModel": UNET, "DiTTransformer2DModel": DIT, "FluxTransformer2DModel": FLUX}


@pytest.fixture(scope="module")
def hub() -> Any:
    """The package diffusers, which knows of olq_fx."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("diffusers")
    found.utils.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    return found


@pytest.fixture(scope="module")
def config(hub: Any) -> Any:
    from olq_fx.integrations.diffusers import OlqFxConfig

    return OlqFxConfig


def built(hub: Any, name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = getattr(hub, name)(**MODELS[name]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def saved(hub: Any, tmp_path: Path) -> Any:
    """A folder with a model of random weights."""

    def of(name: str, **options: Any) -> Path:
        model: Any = built(hub, name)
        model.save_pretrained(tmp_path / name, **options)
        return tmp_path / name

    return of


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert_same_bits(mine[name], value)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("scheme", ["fp8_per_block", "nvfp4_per_token"])
def test_loading_gives_what_quantize_gives_and_so_does_loading_what_was_saved(
    hub: Any, config: Any, saved: Any, name: str, scheme: str, tmp_path: Path
):
    path, kind = saved(name), getattr(hub, name)
    expected = kind.from_pretrained(path, torch_dtype=torch.bfloat16)
    report = olq_fx.quantize_(expected, scheme)
    model = kind.from_pretrained(path, quantization_config=config(scheme), torch_dtype=torch.bfloat16)
    assert model.hf_quantizer.report.converted == report.converted != ()
    assert_same_model(model, expected)
    model.save_pretrained(tmp_path / "again", max_shard_size="30KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    assert about["quantization_config"] == {"quant_method": "olq_fx", "quantization": scheme}
    again = kind.from_pretrained(tmp_path / "again", torch_dtype=torch.bfloat16)
    assert_same_model(again, expected)
    assert again.hf_quantizer.report.already == report.converted


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("scheme", sorted(olq_fx.SCHEMES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_model_scheme_and_dtype(
    hub: Any, config: Any, saved: Any, name: str, scheme: str, dtype: torch.dtype, tmp_path: Path
):
    path, kind = saved(name), getattr(hub, name)
    expected = kind.from_pretrained(path, torch_dtype=dtype)
    olq_fx.quantize_(expected, scheme)
    model = kind.from_pretrained(path, quantization_config=config(scheme), torch_dtype=dtype)
    assert_same_model(model, expected)
    model.save_pretrained(tmp_path / "again")
    assert_same_model(kind.from_pretrained(tmp_path / "again", torch_dtype=dtype), expected)


def test_a_forward_pass_gives_the_same_before_and_after_saving(hub: Any, config: Any, saved: Any, tmp_path: Path):
    path = saved("DiTTransformer2DModel")
    model = hub.DiTTransformer2DModel.from_pretrained(path, quantization_config=config("mxfp8"), device_map="cpu")
    x, step, label = torch.randn(2, 4, 8, 8), torch.tensor([3, 5]), torch.tensor([1, 2])
    with torch.no_grad():
        y = model(x, timestep=step, class_labels=label).sample
        model.save_pretrained(tmp_path / "again")
        again = hub.DiTTransformer2DModel.from_pretrained(tmp_path / "again")
        assert_same_bits(again(x, timestep=step, class_labels=label).sample, y)
        plain = hub.DiTTransformer2DModel.from_pretrained(path)
        olq_fx.quantize_(plain, "mxfp8")
        assert_same_bits(plain(x, timestep=step, class_labels=label).sample, y)


def test_copies_save_themselves(hub: Any, config: Any, saved: Any, tmp_path: Path):
    path = saved("DiTTransformer2DModel")
    model = hub.DiTTransformer2DModel.from_pretrained(path, quantization_config=config("int8"))
    for index, twin in enumerate([copy.deepcopy(model), pickle.loads(pickle.dumps(model))]):
        olq_fx.dequantize_(twin)
        twin.save_pretrained(tmp_path / str(index))
        again = hub.DiTTransformer2DModel.from_pretrained(tmp_path / str(index))
        assert_same_model(again, twin)
        assert not isinstance(again.transformer_blocks[0].attn1.to_q.weight, olq_fx.QuantizedWeight)
    assert isinstance(model.transformer_blocks[0].attn1.to_q.weight, olq_fx.QuantizedWeight)


def test_dequantize(hub: Any, config: Any, saved: Any, tmp_path: Path):
    path = saved("DiTTransformer2DModel")
    model = hub.DiTTransformer2DModel.from_pretrained(path, quantization_config=config("int8"))
    values = model.transformer_blocks[0].attn1.to_q.weight.dequantize()
    model.dequantize()
    assert_same_bits(model.transformer_blocks[0].attn1.to_q.weight.detach(), values)
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert_same_model(hub.DiTTransformer2DModel.from_pretrained(tmp_path / "again"), model)


def test_what_cannot_be_is_an_error_by_name(hub: Any, config: Any, saved: Any, tmp_path: Path):
    import safetensors.torch

    path, load = saved("DiTTransformer2DModel"), hub.DiTTransformer2DModel.from_pretrained
    with pytest.raises(PlanError, match="to_kk"):
        load(path, quantization_config=config({"linear": "int8", "ignore": ["*.to_kk"]}))
    model = load(path, quantization_config=config("int8"))
    with pytest.raises(ConfigurationError, match="saved as safetensors only"):
        model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    modules = [name for name, _ in model.named_children()]
    devices = {**dict.fromkeys(modules, "cpu"), modules[-1]: "disk"}
    with pytest.raises(ConfigurationError, match=f"device_map puts '{modules[-1]}' on 'disk'"):
        load(path, quantization_config=config("int8"), device_map=devices, offload_folder=tmp_path / "disk")
    file, name = path / "diffusion_pytorch_model.safetensors", "transformer_blocks.0.attn1.to_q.weight"
    tensors = safetensors.torch.load_file(file)
    values = tensors.pop(name)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PendingWeightError, match=rf"{name} \(all\)"):
        load(path, quantization_config=config("int8"))
    values[1, 2] = torch.nan
    safetensors.torch.save_file({**tensors, name: values}, file, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=f"'{name}' cannot be given these values: 1 of"):
        load(path, quantization_config=config("int8"))


def test_sizes_for_a_device_map(hub: Any, config: Any, saved: Any):
    path = saved("DiTTransformer2DModel")
    model = hub.DiTTransformer2DModel.from_pretrained(path, quantization_config=config("mxfp4"))
    quantizer = model.hf_quantizer
    found = quantizer.get_special_dtypes_update(model, torch.float32)
    assert set(found) == set(quantizer.report.converted)
    assert {str(kind) for kind in found.values()} == {"CustomDtype.INT4"}
    room = quantizer.adjust_max_memory({0: 10**9, 1: "1GB", "cpu": 5})
    assert 0.87e9 < room[0] == room[1] < 0.88e9
    assert room["cpu"] == 5


NOT_THERE: dict[str, Any] = {
    "tokenizer": None,
    "safety_checker": None,
    "feature_extractor": None,
    "requires_safety_checker": False,
}


@pytest.fixture
def pipeline(hub: Any, tmp_path: Path) -> Path:
    """A folder with the components of a pipeline, one of them of transformers."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    text = CLIPTextConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1, vocab_size=99,
        max_position_embeddings=8, projection_dim=32,
    )  # fmt: skip
    found = hub.StableDiffusionPipeline(
        vae=hub.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8),
        text_encoder=CLIPTextModel(text),
        unet=built(hub, "UNet2DConditionModel"),
        scheduler=hub.DDIMScheduler(steps_offset=1, clip_sample=False),
        **NOT_THERE,
    )
    found.save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def quantized(model: nn.Module) -> set[str]:
    """The formats of the converted weights."""
    return {weight.spec.weight for weight in model.parameters() if isinstance(weight, olq_fx.QuantizedWeight)}


def test_a_pipeline_routes_each_component(hub: Any, config: Any, pipeline: Path, tmp_path: Path):
    from olq_fx.integrations.transformers import OlqFxConfig

    routes = hub.PipelineQuantizationConfig(
        quant_mapping={"unet": config("mxfp4"), "text_encoder": OlqFxConfig("int8")}
    )
    found = hub.DiffusionPipeline.from_pretrained(pipeline, quantization_config=routes, **NOT_THERE)
    assert quantized(found.unet) == {"mxfp4"}
    assert quantized(found.text_encoder) == {"int8_per_channel_static"}
    assert quantized(found.vae) == set()
    expected = hub.UNet2DConditionModel.from_pretrained(pipeline / "unet")
    olq_fx.quantize_(expected, "mxfp4")
    assert_same_model(found.unet, expected)
    found.save_pretrained(tmp_path / "again")
    again = hub.DiffusionPipeline.from_pretrained(tmp_path / "again", **NOT_THERE)
    assert_same_model(again.unet, found.unet)
    assert_same_model(again.text_encoder, found.text_encoder)
    x = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        state = found.text_encoder(torch.arange(8)[None]).last_hidden_state
        assert_same_bits(again.text_encoder(torch.arange(8)[None]).last_hidden_state, state)
        assert_same_bits(again.unet(x, 3, state).sample, found.unet(x, 3, state).sample)


def test_one_configuration_for_some_components(hub: Any, config: Any, pipeline: Path):
    routes = hub.PipelineQuantizationConfig(
        quant_backend="olq_fx", quant_kwargs={"config": "int8"}, components_to_quantize=["unet", "text_encoder"]
    )
    found = hub.DiffusionPipeline.from_pretrained(pipeline, quantization_config=routes, **NOT_THERE)
    assert quantized(found.unet) == quantized(found.text_encoder) == {"int8_per_channel_static"}
    assert quantized(found.vae) == set()
