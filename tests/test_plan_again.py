"""Plans over layers that are converted already: kept, never converted twice, never other formats over them."""

import pytest
import torch
from torch import nn

from olq_fx.errors import PlanError
from olq_fx.plan import Plan, plan_for
from olq_fx.schemes import Slot


def formats(plan: Plan) -> dict[str, str]:
    return {row.path: row.formats for row in plan.rows if row.decision == "quantize"}


def refused(config: object, model: nn.Module, kind: type[Exception] = PlanError, strict: bool = True) -> str:
    with pytest.raises(kind) as caught:
        plan_for(config, model, strict=strict)
    assert type(caught.value) is kind
    return str(caught.value)


class Quantized(nn.Parameter):
    """What is known of a converted weight from below."""

    __olq_fx_quantized__ = True

    class spec:  # noqa: N801
        weight, activation, weight_rule, activation_rule, transposed = "mxfp4", "mxfp4", "mse", "even", False


def converted() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(64, 8, bias=False), "b": nn.Linear(64, 8, bias=False)})
    model["a"].weight = Quantized(torch.zeros(8, 64), requires_grad=False)
    return model


def test_the_same_formats_again_are_kept():
    plan = plan_for("mxfp4", converted())
    assert [(row.decision, row.slot) for row in plan.rows] == [
        ("already", Slot("mxfp4", "mxfp4")),
        ("quantize", Slot("mxfp4", "mxfp4")),
    ]
    row = plan.rows[0]
    assert (row.reason, row.asked) == ("converted before, with these formats", True)
    assert (row.weight_rule, row.activation_rule) == ("mse", "even")
    assert (row.bytes_before, row.bytes_after) == (8 * 64 * 4, 8 * 32 + 8 * 2)
    assert plan.share == 1


def test_when_all_is_done_a_second_run_is_no_error():
    model = nn.ModuleDict({"a": converted()["a"]})
    for config in ("mxfp4", {"targets": {"a": "mxfp4"}}, {"targets": {"*": "mxfp4"}}):
        assert [row.decision for row in plan_for(config, model).rows] == ["already"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        "mxfp8",
        "mxfp4_weight_only",
        {"targets": {"*": "fp8"}},
        {"quantization": "mxfp4", "mxfp4_scale": "floor"},
    ],
)
def test_other_formats_over_converted_layers_name_the_way_back(config, strict):
    message = refused(config, converted(), strict=strict)
    for words in ("a.weight has mxfp4 / mxfp4 (scales mse / even), asked for is", "olq_fx.dequantize_(model)"):
        assert words in message


def test_converted_layers_that_are_not_asked_for_stay_as_they_are():
    for config in ({"targets": {"b": "fp8"}}, {"quantization": "fp8", "ignore": ["a"]}):
        plan = plan_for(config, converted())
        assert [(row.decision, row.formats) for row in plan.rows] == [
            ("already", "mxfp4 / mxfp4"),
            ("quantize", "fp8_per_tensor_static / fp8_per_token"),
        ]
        assert plan.rows[0].reason.startswith("converted before; ")
        assert not plan.rows[0].asked
    assert [row.decision for row in plan_for(None, converted()).rows] == ["already", "leave"]
    only = nn.ModuleDict({"a": converted()["a"], "lm_head": nn.Linear(4, 4)})
    assert "nothing would be quantized" in refused({"quantization": "fp8", "ignore": ["a"]}, only)
