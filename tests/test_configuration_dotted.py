"""Dotted keys of a command line, and the same configuration in every form that there is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_dotted import _KEYS, from_dotted
from olq_fx.configuration_sources import KEY_ALIASES
from olq_fx.errors import ConfigurationError
from olq_fx.plan import plan_for

TAKEN: list[tuple[list[tuple[str, object]], dict[str, Any]]] = [
    ([], {}),
    ([("--quantization", "fp8")], {"quantization": "fp8"}),
    ([("--quantization-config.moe.activation", "mxfp8")], {"quantization_config": {"moe": {"activation": "mxfp8"}}}),
    ([("quantization_config.moe.activation", "null")], {"quantization_config": {"moe": {"activation": None}}}),
    ([("--linear", "mxfp8"), ("--moe.weight", "mxfp4"), ("--moe.activation", "null")],
     {"linear": "mxfp8", "moe": {"weight": "mxfp4", "activation": None}}),
    ([("--weight-block-size", "[64, 32]"), ("--fast-accum", "true")],
     {"weight_block_size": [64, 32], "fast_accum": True}),
    ([("num_bf16_fallback_layers", "5"), ("skip_unprofitable", False)],
     {"num_bf16_fallback_layers": 5, "skip_unprofitable": False}),
    ([("ignore", '["lm_head", "re:.*gate$"]')], {"ignore": ["lm_head", "re:.*gate$"]}),
    ([("ignore", "re:.*\\.gate$")], {"ignore": "re:.*\\.gate$"}),
    ([("targets.model.layers.0.mlp.weight", "fp8"), ("targets.re:.*\\.up-proj", "mxfp8")],
     {"targets": {"model.layers.0.mlp.weight": "fp8", "re:.*\\.up-proj": "mxfp8"}}),
    ([("targets.*.up", '{"weight": "mxfp4", "activation": null}')],
     {"targets": {"*.up": {"weight": "mxfp4", "activation": None}}}),
    ([("components.transformer", "fp8"), ("components.vae", "null")],
     {"components": {"transformer": "fp8", "vae": None}}),
    ([("components.text_encoder.model", "fp8")], {"components": {"text_encoder.model": "fp8"}}),
    ([("components.a.b.linear.weight", "mxfp4"), ("components.a.b.ignore", "x")],
     {"components": {"a.b": {"linear": {"weight": "mxfp4"}, "ignore": "x"}}}),
    ([("components.linear", "fp8")], {"components": {"linear": "fp8"}}),
    ([("components.a.targets.x.y", "fp8")], {"components": {"a": {"targets": {"x.y": "fp8"}}}}),
    ([("quantization-config", '{"linear": "fp8"}'), ("quantization-config.moe", "mxfp4")],
     {"quantization_config": {"linear": "fp8", "moe": "mxfp4"}}),
    ([("moe.activation", "mxfp8"), ("moe", '{"weight": "mxfp4"}')],
     {"moe": {"activation": "mxfp8", "weight": "mxfp4"}}),
    ([("mxfp4_scale.weight", "floor")], {"mxfp4_scale": {"weight": "floor"}}),
    ([("packed-modules-mapping.qkv", '["q", "k"]')], {"packed_modules_mapping": {"qkv": ["q", "k"]}}),
    ([("quantization", "NaN")], {"quantization": "NaN"}),
    ([("lienar", "fp8")], {"lienar": "fp8"}),
    ([("ignore", "0"), ("components.a.ignored_layers", "1.5")],
     {"ignore": "0", "components": {"a": {"ignored_layers": "1.5"}}}),
]  # fmt: skip

REFUSED: list[tuple[list[tuple[str, object]], str]] = [
    ([("moe.activaton", "mxfp8")], "'moe.activaton': unknown key 'activaton' in 'moe'; did you mean 'activation'?"),
    ([("linear.weight.x", "mxfp8")],
     "'linear.weight.x': unknown key 'weight.x' in 'linear'; did you mean 'weight'?"),
    ([("ignore.x", "y")],
     "'ignore.x': 'ignore' has no keys of its own; valid: components, linear, moe, mxfp4_scale, "
     "packed_modules_mapping, targets"),
    ([("lienar.weight", "y")], "'lienar.weight': 'lienar' has no keys of its own; did you mean 'linear'?"),
    ([("moe", "fp8"), ("moe.weight", "mxfp4")], "'moe.weight' is given beside 'moe' as a whole; give one"),
    ([("moe.weight", "mxfp4"), ("moe", "fp8")], "'moe' is given twice, or as a whole and in parts"),
    ([("--moe", "fp8"), ("moe", "fp8")], "'moe' is given twice, or as a whole and in parts"),
    ([("moe.weight", "a"), ("moe", '{"weight": "a"}')], "'moe.weight' is given twice, or as a whole and in parts"),
    ([("moe..weight", "a")], "'moe..weight' is no dotted key: a part of it is empty"),
    ([("--", "a")], "'--' is no dotted key: a part of it is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("pairs", "expected"), TAKEN, ids=str)
def test_dotted_keys_are_a_dictionary(pairs, expected):
    assert from_dotted(pairs) == expected
    assert from_dotted(pairs[::-1]) == expected


@pytest.mark.parametrize(("pairs", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_malformed_dotted_keys_are_errors(pairs, message):
    with pytest.raises(ConfigurationError) as caught:
        from_dotted(pairs)
    assert str(caught.value) == message


def test_the_keys_that_end_a_prefix_are_those_of_a_configuration():
    assert set(_KEYS) == {*QuantizationConfig.__dataclass_fields__, "activation_scheme", *KEY_ALIASES}


def test_every_form_of_a_configuration_has_the_same_plan(tmp_path: Path):
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "up": nn.Linear(64, 64),
                "down": nn.Linear(64, 64),
                "experts": nn.ModuleList([nn.Linear(64, 64)]),
                "lm_head": nn.Linear(64, 64),
            }
        )
    given: dict[str, Any] = {
        "quantization": "fp8_per_block",
        "quantization_config": {
            "moe": {"weight": "mxfp4", "activation": None},
            "ignore": ["down"],
            "include": ["lm_head"],
            "weight_block_size": [64, 32],
            "mxfp4_scale": {"weight": "floor"},
            "skip_unprofitable": False,
        },
    }
    inner = given["quantization_config"]
    (tmp_path / "a.json").write_text(json.dumps(given))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(given))
    dotted = [
        ("--quantization", "fp8_per_block"),
        ("--quantization-config.moe.weight", "mxfp4"),
        ("--quantization-config.moe.activation", "null"),
        ("--quantization-config.ignore", "down"),
        ("--quantization-config.include", '["lm_head"]'),
        ("--quantization-config.weight-block-size", "[64, 32]"),
        ("--quantization-config.mxfp4-scale.weight", "floor"),
    ]
    forms: list[Any] = [
        given,
        {"quantization": "fp8-per-block", **inner},
        json.dumps(given),
        tmp_path / "a.json",
        str(tmp_path / "a.yaml"),
        from_dotted(dotted),
        QuantizationConfig("fp8_per_block", **inner),
        QuantizationConfig.parse("fp8_per_block", **inner),
    ]
    plans = [plan_for(form, model) for form in forms]
    assert all(plan == plans[0] for plan in plans)
    assert [row.formats for row in plans[0].rows] == [
        "fp8_per_block_static_64x32 / fp8_per_block_dynamic_1x32",
        "",
        "mxfp4 / none",
        "fp8_per_block_static_64x32 / fp8_per_block_dynamic_1x32",
    ]
