"""Hooks that move weights in and out: whole weights move and stay right, and what would take one apart is refused."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import OlqFxError, UnsupportedError
from olq_fx.testing import assert_same_bits

CPU = torch.device("cpu")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
SCHEMES = ["int8", "mxfp4"]


@pytest.fixture(scope="module")
def hub() -> Any:
    for name in ("torchao", "torch.utils._pytree", "accelerate.big_modeling", "accelerate.utils.modeling"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("accelerate")


class Blocks(nn.Module):
    """Blocks as group offloading looks for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def quantized(scheme: str) -> tuple[nn.Module, torch.Tensor]:
    model = Blocks()
    olq_fx.quantize_(model, scheme)
    return model, model(X).detach()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whole_models_move(hub: Any, scheme: str):
    model, y = quantized(scheme)
    hooked, hook = hub.cpu_offload_with_hook(model, CPU)
    assert_same_bits(hooked(X).detach(), y)
    hook.offload()
    assert_same_bits(hooked(X).detach(), y)
    model, y = quantized(scheme)
    hub.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert_same_bits(model(X).detach(), y)
    assert isinstance(model.get_parameter("blocks.0.0.weight"), olq_fx.QuantizedWeight)


def offloads(hub: Any, folder: Path) -> list[Callable[[nn.Module], object]]:
    devices = {"blocks.0": "cpu", "blocks.1": "disk"}
    return [
        lambda model: hub.cpu_offload(model, CPU),
        lambda model: hub.disk_offload(model, folder / "disk", CPU),
        lambda model: hub.dispatch_model(model, devices, main_device="cpu", offload_dir=folder / "dispatch"),
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["cpu_offload", "disk_offload", "dispatch_model"])
def test_hooks_that_set_weights_by_one_name_are_refused_by_name(hub: Any, scheme: str, which: int, tmp_path: Path):
    model, _ = quantized(scheme)
    with pytest.raises(UnsupportedError, match=r"made of 'blocks\.[01]\.0\.weight': .*offload hooks of accelerate"):
        offloads(hub, tmp_path)[which](model)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("level", ["block", "leaf"])
def test_group_offloading_of_diffusers(hub: Any, scheme: str, level: str):
    hooks = pytest.importorskip("diffusers.hooks")
    model, y = quantized(scheme)
    parts = {id(weight): weight for weight in model.parameters()}
    options: dict[str, Any] = {"num_blocks_per_group": 1} if level == "block" else {}
    options["offload_type"] = f"{level}_level"
    hooks.apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)
    for _ in range(2):
        assert_same_bits(model(X).detach(), y)
    assert {id(weight) for weight in model.parameters()} == set(parts)


def test_group_offloading_to_disk_is_refused_by_name(hub: Any, tmp_path: Path):
    hooks = pytest.importorskip("diffusers.hooks")
    model, _ = quantized("int8")
    options = {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path)}
    with pytest.raises(OlqFxError, match=r"'blocks\.[01]\.[02]\.weight' is quantized and has no storage of its own"):
        hooks.apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_was_built_empty(hub: Any, scheme: str):
    with hub.init_empty_weights():
        model = Blocks()
    olq_fx.quantize_(model, scheme)
    model.load_state_dict(Blocks().state_dict(), assign=True)
    olq_fx.finalize(model)
    assert_same_bits(model(X).detach(), quantized(scheme)[1])


def test_a_pending_weight_that_is_set_by_a_loader_of_accelerate_is_refused(hub: Any):
    from accelerate.utils import set_module_tensor_to_device

    with hub.init_empty_weights():
        model = Blocks()
    olq_fx.quantize_(model, "int8")
    with pytest.raises(UnsupportedError, match=r"made of a plain tensor of shape \(96, 64\): .*load_state_dict give"):
        set_module_tensor_to_device(model, "blocks.0.0.weight", "cpu", value=torch.ones(96, 64))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_device_maps_count_quantized_bytes(hub: Any, scheme: str):
    from accelerate.utils import compute_module_sizes

    from olq_fx.integrations.accelerate import special_dtypes

    model, _ = quantized(scheme)
    dtypes = special_dtypes(model)
    sizes = compute_module_sizes(model, special_dtypes=dtypes)
    codes = {path: weight.codes.nbytes for path, weight in model.named_parameters() if path in dtypes}
    assert len(codes) == 4
    assert {path: sizes[path] for path in codes} == codes
    stored = sum(weight.stored_bytes for weight in model.parameters() if isinstance(weight, olq_fx.QuantizedWeight))
    assert sum(codes.values()) <= stored <= 1.125 * sum(codes.values())
    options: dict[str, Any] = {"max_memory": {"cpu": sizes[""] + 8, "disk": 10**6}}
    assert set(hub.infer_auto_device_map(model, special_dtypes=dtypes, **options).values()) == {"cpu"}
    assert "disk" in hub.infer_auto_device_map(model, **options).values()


@pytest.mark.parametrize("shape", [(96, 64), (3, 96, 64)], ids=["matrix", "experts"])
def test_the_type_of_a_parameter_makes_one_of_a_weight_that_has_moved(shape: tuple[int, ...]):
    spec = olq_fx.weights.WeightSpec(weight="mxfp4", activation="", weight_rule="ceil", activation_rule="")
    weight: Any = nn.Parameter(olq_fx.weights.quantize_weight(torch.randn(shape), spec), requires_grad=False)
    weight.path = "layer.weight"
    again: Any = type(weight)(weight.to("cpu"), requires_grad=weight.requires_grad)
    assert type(again) is type(weight)
    assert isinstance(again, nn.Parameter)
    assert not again.requires_grad
    assert again.path == "layer.weight"
    assert_same_bits(again.dequantize(), weight.dequantize())
    with pytest.raises(UnsupportedError, match=r"'layer\.weight'"):
        type(weight)(weight.to("meta"), requires_grad=False)
