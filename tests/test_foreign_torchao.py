"""Parameters that torchao has quantized are taken over: the numbers are torchao's own."""

from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import OlqFxError, PlanError
from olq_fx.testing import assert_same_bits
from olq_fx.weights import QuantizedWeight

N, K = 200, 320


def by_torchao(kind: str) -> Any:
    """A matrix as torchao quantizes it."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    from torchao.quantization import quantize_ as quantized_by_torchao

    values = torch.randn(N, K, dtype=torch.bfloat16)
    configurations = {
        "fp8": Float8WeightOnlyConfig(),
        "int8": Int8WeightOnlyConfig(),
        "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
    }
    if kind in configurations:
        model = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16))
        with torch.no_grad():
            model[0].weight.copy_(values)
        quantized_by_torchao(model, configurations[kind])
        return model[0].weight
    swizzled = kind.endswith("swizzled")
    if kind.startswith("nvfp4"):
        scale = values.abs().max().float() / (448 * 6)
        return NVFP4Tensor.to_nvfp4(values, per_tensor_scale=scale, is_swizzled_scales=swizzled)
    element = torch.float8_e4m3fn if kind.startswith("mxfp8") else torch.float4_e2m1fn_x2
    return MXTensor.to_mx(values, element, 32, is_swizzled_scales=swizzled)


class Holder(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K, N, bias=False), nn.Linear(N, K, dtype=torch.bfloat16)
        self.first.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


FORMATS = {
    "fp8": "fp8_per_channel_static",
    "int8": "int8_per_channel_static",
    "int8 dynamic": "int8_per_channel_static",
    "mxfp8": "mxfp8",
    "mxfp8 swizzled": "mxfp8",
    "mxfp4": "mxfp4",
    "mxfp4 swizzled": "mxfp4",
    "nvfp4": "nvfp4",
    "nvfp4 swizzled": "nvfp4",
}


@pytest.mark.filterwarnings("ignore::UserWarning:torchao")
@pytest.mark.parametrize("kind", list(FORMATS))
def test_numbers_are_those_of_torchao(kind: str):
    weight = by_torchao(kind)
    values = weight.dequantize(torch.float32) if kind.startswith(("mx", "nv")) else weight.dequantize().float()
    model = Holder(weight)
    olq_fx.quantize_(model, {"targets": {"second": "mxfp8"}})
    taken = model.first.weight
    assert isinstance(taken, QuantizedWeight)
    assert taken.spec.weight == FORMATS[kind]
    assert taken.spec.activation == ("int8_per_token" if kind == "int8 dynamic" else "")
    assert taken.codes.data_ptr() == weight.qdata.data_ptr()
    own = taken.dequantize() if kind in ("fp8", "int8", "int8 dynamic") else taken.dequantize(torch.float32)
    if kind.startswith("nvfp4"):  # the scale of the tensor and its reciprocal: two roundings more
        torch.testing.assert_close(own, values, rtol=2.0**-22, atol=0)
    else:
        assert_same_bits(own.float(), values)
    assert model(torch.randn(2, K, dtype=torch.bfloat16)).shape == (2, K)
    assert "first.weight_scale" in model.state_dict()


@pytest.mark.filterwarnings("ignore::UserWarning:torchao")
def test_a_failed_call_leaves_them_to_torchao():
    weight = by_torchao("int8")
    model = Holder(weight)
    before = model.first.weight
    for config in ({"linear": "int8", "ignore": ["sceond"]}, {"targets": {"first": "mxfp8"}}):
        with pytest.raises(OlqFxError):
            olq_fx.quantize_(model, config)
        assert model.first.weight is before
        assert not model.first._state_dict_hooks
    with pytest.raises(PlanError, match=r"first"):
        olq_fx.quantize_(model, "mxfp8")
    assert model.first.weight is before


@pytest.mark.filterwarnings("ignore::UserWarning:torchao")
def test_their_activations_may_be_chosen():
    model = Holder(by_torchao("fp8"))
    olq_fx.quantize_(model, {"linear": {"activation": "fp8_per_token"}, "ignore": ["second"]})
    taken = model.first.weight
    assert isinstance(taken, QuantizedWeight)
    assert (taken.spec.weight, taken.spec.activation) == ("fp8_per_channel_static", "fp8_per_token")
