"""LoRA of PEFT on converted weights: it trains, merges into them, is taken out again, and is saved as ever."""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import ConversionError, UnsupportedError
from olq_fx.testing import assert_same_bits

DENSE = Path(__file__).parent / "data" / "tiny-qwen3-wiki"
IDS = torch.arange(14).reshape(2, 7)
SCHEMES = ["fp8_per_block", "int8", "mxfp4", "nvfp4_per_token"]


@pytest.fixture(scope="module")
def peft() -> Any:
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = nn.Linear(64, 96)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.down_proj(nn.functional.silu(self.up_proj(x))))
        return y


@pytest.fixture
def build(peft: Any) -> Any:
    def of(scheme: str, base: nn.Module | None = None, b: float = 0.0, **options: Any) -> Any:
        model = Block() if base is None else base
        olq_fx.quantize_(model, {"linear": scheme_of(scheme), "ignore": ["head"]})
        torch.manual_seed(1)
        config = peft.LoraConfig(**{"target_modules": ["up_proj", "down_proj"], "r": 4, "lora_alpha": 8, **options})
        found = peft.get_peft_model(model, config)
        for name, parameter in found.named_parameters():
            if b and "lora_B" in name:
                nn.init.normal_(parameter, std=b)
        return found

    return of


def scheme_of(name: str) -> dict[str, str | None]:
    slot = olq_fx.QuantizationConfig(name).linear
    assert slot is not None
    return {"weight": slot.weight, "activation": slot.activation}


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parts of all converted weights."""
    return {
        f"{name}.{index}": part.clone()
        for name, weight in model.named_parameters()
        if isinstance(weight, olq_fx.QuantizedWeight)
        for index, part in enumerate(weight.parts)
    }


def assert_same_parts(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, part in expected.items():
        assert_same_bits(found[name], part)


@pytest.mark.parametrize("scheme", sorted(olq_fx.SCHEMES))
def test_2_an_adapter_of_zeros_changes_nothing_and_has_finite_gradients(build: Any, scheme: str):
    model = build(scheme)
    x = torch.randn(5, 64)
    y = model(x)
    assert_same_bits(y.detach(), model.get_base_model()(x).detach())
    with model.disable_adapter():
        assert_same_bits(model(x).detach(), y.detach())
    y.sum().backward()
    grads = [parameter.grad for name, parameter in model.named_parameters() if "lora_" in name]
    assert len(grads) == 4
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert any(grad.abs().sum() > 0 for grad in grads)


def test_32_a_wrapper_reads_what_it_reads_of_any_layer(build: Any):
    model = build("mxfp4", base=Block().to(torch.bfloat16))
    layer = model.base_model.model.up_proj
    base = layer.get_base_layer()
    assert (base.weight.dtype, base.weight.shape, base.weight.device.type) == (torch.bfloat16, (96, 64), "cpu")
    assert (base.in_features, base.out_features) == (64, 96)
    assert (layer.in_features, layer.out_features) == (64, 96)
    assert layer.lora_A["default"].weight.shape == (4, 64)
    assert model.get_nb_trainable_parameters()[0] == 4 * (64 + 96) * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_moves_the_adapter_and_not_the_base(build: Any, scheme: str):
    model = build(scheme)
    before = parts(model)
    x, target = torch.randn(32, 64), torch.randn(32, 8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(12):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert_same_parts(parts(model), before)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_merging_converts_the_sum_and_unmerging_the_difference(build: Any, scheme: str, safe: bool):
    model = build(scheme, b=0.05)
    layer = model.base_model.model.up_proj
    weight, values = layer.get_base_layer().weight, layer.get_base_layer().weight.dequantize()
    delta = layer.get_delta_weight("default").detach()
    where = [part.data_ptr() for part in weight.parts]
    expected = olq_fx.weights.quantize_weight(values.float() + delta, weight.spec)
    model.merge_adapter(safe_merge=safe)
    assert layer.get_base_layer().weight is weight
    if not safe:
        assert [part.data_ptr() for part in weight.parts] == where
    for mine, theirs in zip(weight.parts, expected.parts, strict=True):
        assert_same_bits(mine, theirs)
    model.unmerge_adapter()
    error = (weight.dequantize() - values).abs().max()
    step = (expected.dequantize() - (values + delta)).abs().max()
    assert error <= 3 * step


@pytest.mark.parametrize("scheme", SCHEMES)
def test_merge_and_unload_leaves_quantized_layers(build: Any, scheme: str):
    model = build(scheme, b=0.02)
    x = torch.randn(6, 64)
    with torch.no_grad():
        y = model(x)
        merged = model.merge_and_unload()
        assert type(merged.up_proj) is nn.Linear
        assert isinstance(merged.up_proj.weight, olq_fx.QuantizedWeight)
        assert_same_bits(merged(x), copy.deepcopy(merged)(x))
        cosine = nn.functional.cosine_similarity(merged(x).flatten(), y.flatten(), 0)
    assert cosine > (0.95 if "4" in scheme else 0.995)


def test_an_adapter_is_saved_and_loaded_without_the_base(build: Any, peft: Any, tmp_path: Path):
    import safetensors.torch

    model = build("int8", b=0.05, modules_to_save=["head"])
    with torch.no_grad():
        model.base_model.model.head.modules_to_save["default"].weight.add_(1)
    model.save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert {name.split(".")[-3 if "lora" in name else -2] for name in names} <= {"up_proj", "down_proj", "head"}
    assert len(names) == 6
    base = Block()
    olq_fx.quantize_(base, {"linear": scheme_of("int8"), "ignore": ["head"]})
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    x = torch.randn(3, 64)
    assert_same_bits(again(x).detach(), model(x).detach())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 asks for it
def test_adapters_on_a_model_that_was_quantized_while_it_was_loaded(peft: Any, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from olq_fx.integrations.transformers import OlqFxConfig

    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(DENSE, quantization_config=OlqFxConfig("fp8_per_block"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2)
    adapted = peft.get_peft_model(model, config)
    before = parts(adapted)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(3):
        loss = adapted(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_parts(parts(adapted), before)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_same_parts(parts(load(tmp_path / "merged")), parts(merged))


def test_what_has_no_meaning_is_refused_by_name(build: Any):
    model = Block()
    olq_fx.quantize_(model, {"linear": "int8", "ignore": ["head"]})
    weight = model.up_proj.weight
    before = parts(model)
    refused = [
        lambda: weight.data.add_(1),
        lambda: weight.data.add_(torch.ones(64)),
        lambda: weight.data.add_(torch.ones(96, 64, dtype=torch.int32)),
        lambda: weight.data.mul_(torch.ones(96, 64)),
    ]
    for call in refused:
        with pytest.raises(UnsupportedError, match=r"'up_proj\.weight'"):
            call()
    with pytest.raises(ConversionError, match=r"'up_proj\.weight' cannot be given these values: 1 of"):
        weight.data += torch.eye(96, 64).masked_fill(torch.arange(96)[:, None] + torch.arange(64) == 0, torch.nan)
    assert_same_parts(parts(model), before)


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8_per_tensor"])
def test_adding_to_experts_in_one_tensor(scheme: str):
    holder = nn.Module()
    torch.manual_seed(0)
    holder.gate_up_proj = nn.Parameter(torch.randn(3, 64, 32))
    holder.down_proj = nn.Parameter(torch.randn(3, 32, 32))
    model = nn.ModuleDict({"experts": holder})
    olq_fx.quantize_(model, {"targets": {"*_proj": olq_fx.QuantizationConfig(scheme).moe}})
    delta = torch.randn(3, 64, 32)
    weight = holder.gate_up_proj
    expected = olq_fx.weights.quantize_weight(weight.dequantize() + delta, weight.spec)
    weight.data += delta
    for mine, theirs in zip(weight.parts, expected.parts, strict=True):
        assert_same_bits(mine, theirs)
    weight.data -= 2 * delta
    torch.testing.assert_close(weight.dequantize(), expected.dequantize() - 2 * delta, rtol=0.3, atol=1.0)
