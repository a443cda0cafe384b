"""What Inductor emits for a layer of experts on a GPU: routing and two products, and what the program computes."""

import fused_models
import pytest
import torch

import olq_fx
from olq_fx.testing import EmittedCode, Emitter, Interpreter, assert_sqnr

AROUND = ("torch.ops.aten.index_add.default",)
"""Calls of torch's own: the sum of what experts made of a token. So few tokens are sorted by a kernel of Inductor's."""


def cases(*default: str) -> list[object]:
    schemes = ("fp8_per_block", "mxfp8", "mxfp4", "int8", "fp8_per_tensor", "nvfp4_per_token", "mxfp4_weight_only")
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in schemes]


def emitted(emitter: Emitter, scheme: str, capability: int = 90) -> EmittedCode:
    return emitter.emit(fused_models.experts, scheme, capability=capability)


def ours(code: EmittedCode) -> list[str]:
    return [name.partition("olq_fx.")[2].removesuffix(".default") for name in code.external if "olq_fx" in name]


@pytest.mark.parametrize("scheme", cases("fp8_per_block"))
def test_a_layer_of_experts_is_routing_and_two_products(emitter: Emitter, interpreter: Interpreter, scheme: str):
    code = emitted(emitter, scheme)
    activation = "" if "weight_only" in scheme else "quantized_"
    assert ours(code) == ["grouped_gated", f"{activation}grouped_linear"]
    assert tuple(name for name in code.external if "olq_fx" not in name) == AROUND
    # Tokens are gathered and quantized by one kernel; no other has anything to do with a quantization or an activation.
    assert sum("quantize" in name or "amax" in name for name in code.launches) == (scheme.count("weight_only") == 0)
    assert not any("silu" in name or "sigmoid" in name for name in code.launches)

    module, inputs = fused_models.experts()
    olq_fx.quantize_(module, scheme)
    with torch.no_grad():
        expected = module(*inputs)
    (found,) = code.run(interpreter)
    assert_sqnr(found, expected, 40, name="the emitted program to eager mode")


def test_nothing_waits_for_the_device(emitter: Emitter):
    source = emitted(emitter, "fp8_per_block").source
    for call in (".item()", ".tolist()", ".cpu()", "nonzero", "_local_scalar_dense"):
        assert call not in source
