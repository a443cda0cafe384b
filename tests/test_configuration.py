"""What a configuration resolves to, or the error that it is: a table of configurations as people write them."""

import dataclasses
import itertools
import json
import os
import pickle
import tracemalloc
from typing import Any

import pytest

from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_values import ScaleRules
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, OlqFxError
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES, Slot

TENSOR = "fp8_per_tensor_static / fp8_per_token"
CHANNEL = "fp8_per_channel_static / fp8_per_token"
BLOCK = "fp8_per_block_static / fp8_per_block_dynamic"
NVFP4 = "nvfp4 / nvfp4_per_token"
INT8 = "int8_per_channel_static / int8_per_token"

# configuration -> (linear, moe) as "weight / activation"; None is left alone
RESOLVED = [
    # scheme names, aliases, spelling
    ("fp8_per_tensor", TENSOR, TENSOR),
    ("fp8", TENSOR, TENSOR),
    ("FP8", TENSOR, TENSOR),
    ("Fp8-Per-Block", BLOCK, BLOCK),
    ("fp8_per_channel", CHANNEL, CHANNEL),
    ("mxfp8", "mxfp8 / mxfp8", "mxfp8 / mxfp8"),
    ("MXFP4", "mxfp4 / mxfp4", "mxfp4 / mxfp4"),
    ("mxfp4-dualscale", "mxfp4_dualscale / mxfp4_dualscale", "mxfp4_dualscale / mxfp4_dualscale"),
    ("nvfp4_per_token", NVFP4, NVFP4),
    ("int8", INT8, INT8),
    ("int8_per_channel_weight_only", "int8_per_channel_static / None", "int8_per_channel_static / None"),
    ("fp8_weight_only", "fp8_per_channel_static / None", "fp8_per_channel_static / None"),
    ("nvfp4-weight-only", "nvfp4 / None", "nvfp4 / None"),
    (" fp8 ", TENSOR, TENSOR),
    # nothing, on purpose
    (None, None, None),
    ("none", None, None),
    ("None", None, None),
    ("null", None, None),
    ({"quantization": None}, None, None),
    ({"quantization": "NONE"}, None, None),
    ({"quantization": "none", "ignore": ["a"]}, None, None),
    # rule 0: nested and flat
    ({"quantization": "fp8", "quantization_config": None}, TENSOR, TENSOR),
    ({"quantization": "fp8", "quantization_config": {}}, TENSOR, TENSOR),
    ({"quantization": "fp8", "quantization_config": {"moe": "mxfp4"}}, TENSOR, "mxfp4 / mxfp4"),
    ({"quantization": "fp8", "moe": "mxfp4"}, TENSOR, "mxfp4 / mxfp4"),
    ({"moe": "mxfp4", "quantization_config": {"moe": "MXFP4", "linear": "fp8"}}, TENSOR, "mxfp4 / mxfp4"),
    ({"quantization": None, "quantization_config": {"quantization": "fp8"}}, TENSOR, TENSOR),
    ({"quantization_config": {"method": "fp8", "ignored_layers": ["x"]}}, TENSOR, TENSOR),
    ({"quantization_config": '{"linear": "mxfp8"}'}, "mxfp8 / mxfp8", None),
    # rule 1: a bare string is a scheme first, else a weight format
    ({"linear": "fp8_per_block"}, BLOCK, None),
    ({"moe": "fp8"}, None, TENSOR),
    ({"linear": "fp8_per_block_static"}, BLOCK, None),
    ({"linear": "fp8_per_channel_static"}, CHANNEL, None),
    ({"linear": "int8_per_channel_static"}, INT8, None),
    ({"linear": "nvfp4"}, NVFP4, None),
    ({"linear": "NVFP4", "moe": "Mxfp8-Weight-Only"}, NVFP4, "mxfp8 / None"),
    ({"quantization": "online", "linear": "mxfp8"}, "mxfp8 / mxfp8", None),
    # rule 2: a slot replaces the scheme's; absent sides
    ({"quantization": "fp8", "linear": "mxfp8"}, "mxfp8 / mxfp8", TENSOR),
    ({"quantization": "fp8", "moe": {"weight": "mxfp4"}}, TENSOR, "mxfp4 / mxfp4"),
    ({"linear": {"weight": "mxfp4"}}, "mxfp4 / mxfp4", None),
    ({"linear": {"weight": "nvfp4"}}, NVFP4, None),
    ({"linear": {"weight": "fp8_per_tensor_static"}}, TENSOR, None),
    ({"linear": {"weight": "fp8_per_channel_static"}}, CHANNEL, None),
    ({"linear": {"weight": "fp8_per_block_static"}}, BLOCK, None),
    ({"linear": {"weight": "mxfp4_dualscale"}}, "mxfp4_dualscale / mxfp4_dualscale", None),
    ({"linear": {"weight": "mxfp8", "activation": "mxfp8"}}, "mxfp8 / mxfp8", None),
    ({"linear": {"weight": "mxfp8", "activation": None}}, "mxfp8 / None", None),
    ({"linear": {"weight": "mxfp8", "activation": "none"}}, "mxfp8 / None", None),
    ({"linear": {"weight": "Fp8-Per-Block-Static", "activation": "MXFP8"}}, "fp8_per_block_static / mxfp8", None),
    ({"linear": {"weight": "mxfp4", "activation": "int8_per_token"}}, "mxfp4 / int8_per_token", None),
    ({"quantization": "fp8", "linear": {"activation": None}}, "fp8_per_tensor_static / None", TENSOR),
    ({"quantization": "fp8_per_block", "moe": {"activation": "mxfp8"}}, BLOCK, "fp8_per_block_static / mxfp8"),
    ({"quantization": "fp8_weight_only", "moe": {"activation": "mxfp8"}}, "fp8_per_channel_static / None",
     "fp8_per_channel_static / mxfp8"),
    ({"quantization": "mxfp8_weight_only", "linear": {"weight": "mxfp4"}}, "mxfp4 / mxfp4", "mxfp8 / None"),
    ({"quantization": "fp8", "linear": {"weight": None, "activation": None}}, None, TENSOR),
    ({"quantization": "fp8", "linear": {"weight": None}}, None, TENSOR),
    ({"quantization": "fp8", "linear": None}, None, TENSOR),
    ({"quantization": "fp8", "moe": "none"}, TENSOR, None),
    ({"linear": None, "moe": "fp8"}, None, TENSOR),
    ({"quantization": "fp8", "linear": Slot("mxfp8", None)}, "mxfp8 / None", TENSOR),
    # rule 5: ignore
    ({"quantization": "fp8", "ignore": None}, TENSOR, TENSOR),
    ({"quantization": "fp8", "ignore": "lm_head"}, TENSOR, TENSOR),
    ({"quantization": "fp8", "ignore": []}, TENSOR, TENSOR),
    # rule 6: flat dictionaries of checkpoints
    ({"method": "fp8"}, TENSOR, TENSOR),
    ({"quant_method": "mxfp8", "ignored_layers": ["a", "b"]}, "mxfp8 / mxfp8", "mxfp8 / mxfp8"),
    ({"method": "fp8", "quant_method": "FP8-per-tensor"}, TENSOR, TENSOR),
    ({"scheme": "int8"}, INT8, INT8),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, TENSOR, TENSOR),
    # rule 8: JSON text
    ('{"quantization": "fp8", "ignore": ["lm_head"]}', TENSOR, TENSOR),
    ('  {"method": "fp8", "ignored_layers": null}', TENSOR, TENSOR),
    ('"fp8"', TENSOR, TENSOR),
    # options
    ({"quantization": "fp8", "per_token_activation": False}, "fp8_per_tensor_static / fp8_per_tensor_dynamic",
     "fp8_per_tensor_static / fp8_per_tensor_dynamic"),
    ({"linear": "fp8_per_tensor_static", "per_token_activation": False},
     "fp8_per_tensor_static / fp8_per_tensor_dynamic", None),
    ({"linear": {"weight": "fp8_per_tensor_static", "activation": "fp8_per_token"}, "per_token_activation": False},
     TENSOR, None),
    ({"quantization": "fp8_per_channel", "per_token_activation": False}, CHANNEL, CHANNEL),
    ({"quantization": "fp8", "fast_accum": False, "skip_unprofitable": False, "linear_backend": "auto",
      "moe_backend": "auto", "num_bf16_fallback_layers": 0}, TENSOR, TENSOR),
]  # fmt: skip

# configuration -> what the message says, besides its class
REFUSED = [
    # unknown names
    ("fp8_per_blok", ConfigurationError, ["'fp8_per_blok'", "'fp8_per_block'"]),
    ("mxfp6", ConfigurationError, ["'mxfp6'", "mxfp4"]),
    ("gptq", ConfigurationError, ["'gptq'", "valid:", "fp8_per_tensor", "online", "none"]),
    ("", ConfigurationError, ["unknown scheme ''"]),
    ({"linear": "mxpf8"}, ConfigurationError, ["linear: unknown scheme or weight format 'mxpf8'", "'mxfp8'"]),
    ({"linear": {"weight": "mxpf8"}}, ConfigurationError, ["linear: unknown weight format 'mxpf8'", "'mxfp8'"]),
    ({"linear": {"weight": "mxfp8", "activation": "fp8_per_tokn"}}, ConfigurationError, ["'fp8_per_token'"]),
    # formats on the wrong side, schemes where a format stands
    ({"linear": "fp8_per_token"}, ConfigurationError, ["'fp8_per_token' is no format of weights", "mxfp8"]),
    ({"linear": {"weight": "nvfp4_per_token"}}, ConfigurationError, ["no format of weights", "nvfp4"]),
    ({"moe": {"weight": "mxfp8", "activation": "nvfp4"}}, ConfigurationError, ["moe: 'nvfp4' is no format of act"]),
    ({"linear": {"weight": "fp8"}}, ConfigurationError, ["'fp8' is a scheme", "fp8_per_tensor_static"]),
    ({"linear": {"weight": "mxfp8", "activation": "int8"}}, ConfigurationError, ["is a scheme", "int8_per_token"]),
    # slots
    ({"linear": {}}, ConfigurationError, ["linear is empty"]),
    ({"quantization": "fp8", "moe": {}}, ConfigurationError, ["moe is empty"]),
    ({"linear": {"weight": None, "activation": "mxfp8"}}, ConfigurationError, ["'mxfp8' with weight None"]),
    ({"linear": {"wieght": "mxfp8"}}, ConfigurationError, ["unknown key 'wieght'", "'weight'"]),
    ({"linear": "online"}, ConfigurationError, ["'online' is no scheme of its own"]),
    # nothing left to quantize
    ("online", ConfigurationError, ["'online': leaves nothing to quantize", "None"]),
    ({"quantization": "ONLINE"}, ConfigurationError, ["leaves nothing to quantize"]),
    ({}, ConfigurationError, ["leaves nothing to quantize"]),
    ("{}", ConfigurationError, ["leaves nothing to quantize"]),
    ({"ignore": ["a"]}, ConfigurationError, ["leaves nothing to quantize"]),
    ({"linear": None}, ConfigurationError, ["leaves nothing to quantize"]),
    ({"targets": {}}, ConfigurationError, ["leaves nothing to quantize"]),
    ({"quantization": "fp8", "linear": None, "moe": None}, ConfigurationError, ["'fp8': leaves nothing to quantize"]),
    ({"quantization_config": {}}, ConfigurationError, ["leaves nothing to quantize"]),
    # rule 0: both places, aliases
    ({"linear": "fp8", "quantization_config": {"linear": "mxfp8"}}, ConfigurationError,
     ["'linear' is given twice", "'fp8'", "'mxfp8'", "quantization_config"]),
    ({"quantization": "fp8", "quantization_config": {"method": "mxfp8"}}, ConfigurationError, ["given twice"]),
    ({"quantization": "online", "quantization_config": "fp8"}, ConfigurationError, ["'online' and 'fp8'"]),
    ({"method": "fp8", "quant_method": "mxfp8"}, ConfigurationError, ["'method' and 'quant_method'"]),
    ({"method": "fp8", "ignore": ["a"], "ignored_layers": ["b"]}, ConfigurationError, ["'ignore'", "'ignored_layers'"]),
    ({"quantization_config": {"quantization_config": {"linear": "fp8"}}}, ConfigurationError, ["lies within"]),
    # rule 3
    ({"quantization": "fp8", "targets": {"a": "fp8"}}, ConfigurationError, ["targets and the scheme fp8_per_tensor"]),
    ({"linear": "fp8", "targets": {"a": "fp8"}}, ConfigurationError, ["targets and linear exclude each other"]),
    ({"moe": "fp8", "targets": {"a": "fp8"}}, ConfigurationError, ["targets and moe exclude each other"]),
    ({"targets": {"a": "fp9"}}, ConfigurationError, ["targets['a']: unknown scheme or weight format 'fp9'", "'fp8'"]),
    ({"targets": {"a": None}}, ConfigurationError, ["targets['a'] names no format"]),
    ({"targets": {"a": "none"}}, ConfigurationError, ["targets['a'] names no format"]),
    ({"targets": {"a": {"weight": None, "activation": None}}}, ConfigurationError, ["names no format"]),
    ({"targets": {"a": {"activation": "mxfp8"}}}, ConfigurationError, ["targets['a'] has no weight format"]),
    ({"targets": {"a": "online"}}, ConfigurationError, ["no scheme of its own"]),
    ({"targets": {"re:(": "fp8"}}, ConfigurationError, ["targets: malformed regular expression", "'re:('"]),
    ({"targets": {"": "fp8"}}, ConfigurationError, ["targets: '' is no pattern"]),
    # patterns
    ({"quantization": "fp8", "ignore": ["re:["]}, ConfigurationError, ["ignore: malformed regular expression", "re:["]),
    ({"quantization": "fp8", "ignore": ["re:"]}, ConfigurationError, ["empty regular expression"]),
    ({"quantization": "fp8", "include": [""]}, ConfigurationError, ["include: '' is no pattern"]),
    # unknown keys
    ({"quantization": "fp8", "lienar": "fp8"}, ConfigurationError, ["unknown key 'lienar'", "'linear'"]),
    ({"quantization": "fp8", "ignored_layer": []}, ConfigurationError, ["'ignored_layers'"]),
    ({"quantization": "fp8", "Linear": "fp8"}, ConfigurationError, ["unknown key 'Linear'", "'linear'"]),
    ({"quantization": "fp8", "vae": None}, ConfigurationError, ["unknown key 'vae'", "'components'"]),
    ({"transformer": "fp8", "ignore": "a"}, ConfigurationError, ["unknown key 'transformer'", "'components'"]),
    ({"lienar": "fp8"}, ConfigurationError, ["unknown key 'lienar'", "'linear'"]),
    ('{"quantization": "fp8", "moee": "fp8"}', ConfigurationError, ["'moee'", "'moe'"]),
    # options
    ({"quantization": "fp8", "activation_scheme": "static"}, ConfigurationError, ["no calibration", "checkpoint"]),
    ({"quantization": "fp8", "activation_scheme": "sattic"}, ConfigurationError, ["'sattic'", "dynamic"]),
    ({"quantization": "mxfp4", "mxfp4_scale": "round"}, ConfigurationError, ["unknown rule 'round'", "floor"]),
    ({"quantization": "mxfp4", "mxfp4_scale": {"wieght": "mse"}}, ConfigurationError, ["'wieght'", "'weight'"]),
    ({"quantization": "mxfp4", "mxfp4_scale": {"weight": "even", "activation": "mes"}}, ConfigurationError, ["'mse'"]),
    # types that are never accepted
    (3, ConfigurationTypeError, ["not int: 3"]),
    (True, ConfigurationTypeError, ["not bool: True"]),
    (1.5, ConfigurationTypeError, ["float"]),
    (b"fp8", ConfigurationTypeError, ["bytes"]),
    (["fp8"], ConfigurationTypeError, ["not list"]),
    ("[1]", ConfigurationTypeError, ["not list"]),
    (Slot("mxfp8", None), ConfigurationTypeError, ["not Slot"]),
    ({1: "fp8"}, ConfigurationTypeError, ["keys of a configuration are strings", "1"]),
    ({"quantization": 8}, ConfigurationTypeError, ["quantization is a scheme name or None, not int: 8"]),
    ({"quantization": ["fp8"]}, ConfigurationTypeError, ["not list"]),
    ({"linear": 8}, ConfigurationTypeError, ["linear is a scheme name, a weight format", "not int"]),
    ({"linear": {"weight": 8}}, ConfigurationTypeError, ["linear: weight is a format name or None, not int"]),
    ({"linear": {"weight": "mxfp8", "activation": []}}, ConfigurationTypeError, ["activation", "list"]),
    ({"quantization": "fp8", "ignore": 3}, ConfigurationTypeError, ["ignore is a pattern or a list of them, not int"]),
    ({"quantization": "fp8", "ignore": {"a": 1}}, ConfigurationTypeError, ["not dict"]),
    ({"quantization": "fp8", "ignore": [None]}, ConfigurationTypeError, ["a pattern in ignore is a string"]),
    ({"targets": ["a"]}, ConfigurationTypeError, ["targets is a dictionary of patterns, not list"]),
    ({"targets": {"a": 3}}, ConfigurationTypeError, ["targets['a']", "not int"]),
    ({"quantization": "fp8", "quantization_config": 3}, ConfigurationTypeError, ["not int"]),
    ({"quantization": "fp8", "four_over_six": 1}, ConfigurationTypeError, ["four_over_six is true or false, not int"]),
    ({"quantization": "fp8", "per_token_activation": None}, ConfigurationTypeError, ["per_token_activation"]),
    ({"quantization": "fp8", "allow_nonfinite": "yes"}, ConfigurationTypeError, ["allow_nonfinite"]),
    ({"quantization": "fp8", "power_of_two_scales": "true"}, ConfigurationTypeError, ["power_of_two_scales"]),
    ({"quantization": "fp8", "mxfp4_scale": None}, ConfigurationTypeError, ["mxfp4_scale"]),
    ({"quantization": "fp8", "mxfp4_scale": {"weight": 1}}, ConfigurationTypeError, ["a rule is a string"]),
    ({"quantization": "fp8", "activation_scheme": None}, ConfigurationTypeError, ["activation_scheme"]),
    # malformed text
    ("{", ConfigurationError, ["malformed JSON"]),
    ('{"quantization": "fp8",}', ConfigurationError, ["malformed JSON", "line 1"]),
    ('{"linear": "fp8", "linear": "mxfp8"}', ConfigurationError, ["'linear' stands twice"]),
    ("[" * 100_000, ConfigurationError, ["malformed JSON"]),
    ("./missing", ConfigurationError, ["cannot read", "missing"]),
    ("missing.yaml", ConfigurationError, ["cannot read", "'missing.yaml'"]),
    ("\0.json", ConfigurationError, ["cannot read"]),
]  # fmt: skip


def written(slot: Slot | None) -> str | None:
    return None if slot is None else f"{slot.weight} / {slot.activation}"


@pytest.mark.parametrize(("given", "linear", "moe"), RESOLVED, ids=lambda value: str(value)[:60])
def test_a_configuration_resolves(given, linear, moe):
    config = QuantizationConfig.parse(given)
    assert (written(config.linear), written(config.moe)) == (linear, moe)
    assert config.nothing == (linear is None and moe is None)
    assert QuantizationConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("given", "kind", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_mistake_is_an_error_that_names_it(given, kind, said):
    with pytest.raises(OlqFxError) as caught:
        QuantizationConfig.parse(given)
    assert type(caught.value) is kind
    for words in said:
        assert words in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_type_errors_are_type_errors_and_others_value_errors():
    with pytest.raises(TypeError):
        QuantizationConfig.parse(3)
    with pytest.raises(ValueError, match="unknown scheme"):
        QuantizationConfig.parse("fp9")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_its_slots(scheme):
    config = QuantizationConfig.parse(scheme)
    assert (config.linear, config.moe) == (SCHEMES[scheme].linear, SCHEMES[scheme].moe)
    assert config.quantization == scheme


def test_no_scheme_has_two_slots():
    """A target names a scheme without saying for which kind of layer, and keeps one slot."""
    assert all(scheme.linear == scheme.moe for scheme in SCHEMES.values())


@pytest.mark.parametrize("weight", [f.name for f in FORMATS.values() if f.weight])
@pytest.mark.parametrize("activation", [None, *(f.name for f in FORMATS.values() if f.activation)])
def test_every_weight_format_goes_with_every_activation_format(weight, activation):
    config = QuantizationConfig.parse({"linear": {"weight": weight, "activation": activation}})
    assert config.linear == Slot(weight, activation)


def test_a_weight_format_alone_means_the_same_as_in_a_dictionary():
    for name in (f.name for f in FORMATS.values() if f.weight):
        spelled = [{"linear": name}, {"linear": {"weight": name}}, {"linear": name.upper().replace("_", "-")}]
        assert len({QuantizationConfig.parse(given) for given in spelled}) == 1


def test_targets():
    config = QuantizationConfig.parse(
        {"targets": {"z": "fp8", "a": {"weight": "mxfp4", "activation": None}, "*": "nvfp4"}}
    )
    assert config.targets == (
        ("*", Slot("nvfp4", "nvfp4_per_token")),
        ("a", Slot("mxfp4", None)),
        ("z", Slot("fp8_per_tensor_static", "fp8_per_token")),
    )
    assert config.linear is None
    assert config.moe is None
    assert not config.nothing
    assert QuantizationConfig.parse({"quantization": "online", "targets": {"a": "fp8"}}).targets
    assert QuantizationConfig.parse({"linear": None, "targets": {"a": "fp8"}}).targets
    per_tensor = QuantizationConfig.parse({"targets": {"a": "fp8"}, "per_token_activation": False})
    assert per_tensor.targets == (("a", Slot("fp8_per_tensor_static", "fp8_per_tensor_dynamic")),)


def test_patterns_are_kept_in_order_and_once():
    config = QuantizationConfig.parse({"quantization": "fp8", "ignore": ["b", "a", "b"], "include": "lm_head"})
    assert config.ignore == ("b", "a")
    assert config.include == ("lm_head",)


@pytest.mark.parametrize(
    ("options", "weight", "activation"),
    [
        ({}, {"mxfp4": "mse", "nvfp4": "four_over_six", "mxfp8": "ceil", "fp8_per_block_static": "amax"},
         {"mxfp4": "even", "nvfp4_per_token": "amax", "fp8_per_block_dynamic": "amax", "int8_per_token": "amax"}),
        ({"mxfp4_scale": "floor"}, {"mxfp4": "floor", "mxfp4_dualscale": "floor"}, {"mxfp4": "floor"}),
        ({"mxfp4_scale": {"weight": "CEIL"}}, {"mxfp4": "ceil"}, {"mxfp4": "even", "mxfp4_dualscale": "even"}),
        ({"mxfp4_scale": {"activation": "mse"}}, {"mxfp4_dualscale": "mse"}, {"mxfp4": "mse"}),
        ({"four_over_six": False}, {"nvfp4": "amax", "mxfp4": "mse"}, {"nvfp4_per_token": "amax"}),
        ({"power_of_two_scales": True}, {"fp8_per_block_static": "amax"},
         {"fp8_per_block_dynamic": "power_of_two", "fp8_per_token": "amax"}),
    ],
)  # fmt: skip
def test_options_choose_the_scale_rules(options, weight, activation):
    config = QuantizationConfig.parse({"quantization": "fp8", **options})
    assert {name: config.weight_rule(name) for name in weight} == weight
    assert {name: config.activation_rule(name) for name in activation} == activation
    assert QuantizationConfig.from_dict(config.to_dict()) == config


def test_every_rule_that_can_be_chosen_is_one_of_the_format():
    spaces = itertools.product(["floor", "even", "ceil", "mse"], [True, False], [True, False])
    for rule, four, power in spaces:
        config = QuantizationConfig("fp8", mxfp4_scale=rule, four_over_six=four, power_of_two_scales=power)
        for format in FORMATS.values():
            if format.weight:
                assert config.weight_rule(format.name) in format.rules
            if format.activation:
                assert config.activation_rule(format.name) in format.rules


def test_keyword_arguments_are_keys():
    both = QuantizationConfig.parse({"quantization": "fp8", "ignore": ["a"], "moe": "mxfp4"})
    assert QuantizationConfig.parse("fp8", ignore=["a"], moe="mxfp4") == both
    assert QuantizationConfig.parse({"quantization": "fp8", "ignore": "a"}, ignore=["a"], moe="mxfp4") == both
    assert QuantizationConfig.parse(quantization="fp8", ignored_layers=["a"], moe="mxfp4") == both
    assert QuantizationConfig.parse(QuantizationConfig.parse("fp8"), ignore=["a"], moe="mxfp4") == both
    assert QuantizationConfig.parse(None, quantization="fp8", ignore=["a"], moe="mxfp4") == both
    assert QuantizationConfig.parse(None, ignore=["a"]).nothing
    with pytest.raises(ConfigurationError, match=r"'ignore' is given twice.*as an argument"):
        QuantizationConfig.parse({"quantization": "fp8", "ignore": ["a"]}, ignore=["b"])
    with pytest.raises(ConfigurationError, match=r"unknown key 'ignroe'.*'ignore'"):
        QuantizationConfig.parse("fp8", ignroe=["a"])
    with pytest.raises(ConfigurationError, match="leaves nothing to quantize"):
        QuantizationConfig.parse()


def test_the_constructor_takes_what_the_dictionary_takes():
    given: dict[str, Any] = {
        "quantization": "fp8-per-block",
        "moe": {"activation": None},
        "ignore": "a",
        "mxfp4_scale": "even",
    }
    assert QuantizationConfig(**given) == QuantizationConfig.parse(given)
    assert QuantizationConfig().nothing
    assert QuantizationConfig(targets={"a": "fp8"}) == QuantizationConfig.parse({"targets": {"a": "fp8"}})
    with pytest.raises(ConfigurationError, match="nothing"):
        QuantizationConfig("online")
    with pytest.raises(ConfigurationError, match="exclude"):
        QuantizationConfig("fp8", targets={"a": "fp8"})


def test_it_is_a_value():
    config = QuantizationConfig.parse({"quantization": "fp8", "ignore": ["a"], "moe": "mxfp4"})
    assert QuantizationConfig.parse(config) is config
    assert hash(config) == hash(QuantizationConfig.parse(config.to_dict()))
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config) == config
    assert dataclasses.replace(config, ignore=("b",)).ignore == ("b",)
    targets = QuantizationConfig.parse({"targets": {"a": "fp8"}})
    assert dataclasses.replace(targets, ignore=("b",)).targets == targets.targets
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ignore = ()  # type: ignore[misc]
    assert config != QuantizationConfig.parse("fp8")


def test_online_and_left_out_slots_change_nothing():
    assert QuantizationConfig.parse({"quantization": "online", "linear": "fp8"}) == QuantizationConfig(linear="fp8")
    assert QuantizationConfig.parse({"quantization": "fp8", "linear": "FP8"}) == QuantizationConfig("fp8")


def test_asking_for_experts_differs_from_a_scheme_that_has_them():
    assert not QuantizationConfig("fp8").asks("moe")
    assert not QuantizationConfig("fp8", moe="fp8").asks("moe")
    assert not QuantizationConfig("fp8", moe=None).asks("moe")
    assert QuantizationConfig("fp8", moe="mxfp4").asks("moe")
    assert QuantizationConfig(moe="fp8").asks("moe")


def test_the_dictionary_is_plain_json_and_short():
    config = QuantizationConfig.parse(
        {"quantization": "FP8", "moe": None, "ignore": "a", "mxfp4_scale": {"weight": "even"}, "four_over_six": False}
    )
    assert json.loads(json.dumps(config.to_dict())) == {
        "quantization": "fp8_per_tensor",
        "moe": {"weight": None, "activation": None},
        "ignore": ["a"],
        "mxfp4_scale": {"weight": "even", "activation": "even"},
        "four_over_six": False,
    }
    assert QuantizationConfig.parse("fp8").to_dict() == {"quantization": "fp8_per_tensor"}
    assert QuantizationConfig.parse(None).to_dict() == {"quantization": None}
    assert QuantizationConfig.parse({"mxfp4_scale": ScaleRules("even"), "linear": "mxfp4"}).to_dict() == {
        "linear": {"weight": "mxfp4", "activation": "mxfp4"},
        "mxfp4_scale": {"weight": "even", "activation": "even"},
    }


def test_from_dict_takes_dictionaries_only():
    with pytest.raises(ConfigurationTypeError, match="dictionary"):
        QuantizationConfig.from_dict("fp8")  # type: ignore[arg-type]


FILES = {
    "a.json": '{"quantization": "fp8", "quantization_config": {"moe": "mxfp4", "ignore": ["lm_head"]}}',
    "b.yaml": "quantization: fp8\nquantization_config:\n  moe: {weight: mxfp4}\n  ignore: lm_head\n",
    "c.yml": "method: FP8\nignored_layers: [lm_head]\nmoe:\n  weight: mxfp4\n  activation: mxfp4\n",
    "d.JSON": '\ufeff{"quantization": "fp8", "moe": "mxfp4", "ignore": ["lm_head"]}',
    "without-a-suffix": "quantization: fp8\nmoe: {weight: mxfp4}\nignore: [lm_head]\n",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("as_text", [True, False])
def test_files_mean_what_a_dictionary_means(tmp_path, name, as_text):
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    expected = QuantizationConfig.parse({"quantization": "fp8", "moe": "mxfp4", "ignore": ["lm_head"]})
    assert QuantizationConfig.parse(str(path) if as_text else path) == expected
    nested = {"quantization": "fp8", "quantization_config": str(path) if as_text else path}
    assert QuantizationConfig.parse(nested) == expected


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "quantization: fp8\nquantization: mxfp8\n", "'quantization' stands twice"),
        ("a.yaml", "linear: {weight: mxfp8, weight: mxfp4}", "'weight' stands twice"),
        ("a.yaml", "a: [", "malformed YAML"),
        ("a.yaml", "? [1]\n: 2", "malformed YAML"),
        ("a.yaml", "a: !!python/object:os.system {}", "malformed YAML"),
        ("a.yaml", "a: 2001-99-99", "malformed YAML"),
        ("a.yaml", "- fp8", "not list"),
        ("a.yaml", "", "is empty"),
        ("a.yaml", "other.yaml", "unknown scheme 'other.yaml'"),
        ("a.yaml", "1: fp8", "keys of a configuration are strings"),
        ("a.json", "{", "malformed JSON"),
        ("a.json", "{'a': 1}", "malformed JSON"),
        ("a.json", '{"a": NaN', "malformed JSON"),
        ("a.json", "1" * 5000, "malformed JSON"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(OlqFxError, match=said):
        QuantizationConfig.parse(path)


def test_merged_yaml_keys_are_no_repetition(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "quantization: fp8\nlinear: &slot {weight: mxfp4, activation: null}\nmoe:\n  <<: *slot\n  weight: mxfp8\n"
    )
    config = QuantizationConfig.parse(path)
    assert (written(config.linear), written(config.moe)) == ("mxfp4 / None", "mxfp8 / None")


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.json").write_bytes(b'{"quantization": "\xff"}')
    (tmp_path / "folder.json").mkdir()
    for name in ("latin.json", "folder.json", "none.json"):
        with pytest.raises(ConfigurationError, match=name):
            QuantizationConfig.parse(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "it is a folder, not a regular file"),
        (lambda path: os.mkfifo(path), "it is a pipe, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
        (lambda path: path.symlink_to("/dev/tty"), "it is a device, not a regular file"),
        (lambda path: path.symlink_to(path), "cannot read"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "utf-8"),
    ],
    ids=["folder", "pipe", "zero", "tty", "loop", "utf-16"],
)
def test_only_regular_files_are_read(tmp_path, make, said):
    """A pipe would wait for ever, and a device has no end."""
    path = tmp_path / "config.json"
    make(path)
    for source in (path, str(path)):
        with pytest.raises(ConfigurationError, match=r"cannot read the configuration file '.*config.json'") as caught:
            QuantizationConfig.parse(source)
        assert said in str(caught.value)


@pytest.mark.parametrize("name", ["config.yaml", "config.json", "config"])
@pytest.mark.parametrize("text", ["", " \n\t\n", "# nothing yet\n"])
def test_an_empty_file_is_an_oversight_and_null_is_not(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=f"{name}' is empty; to leave everything alone on purpose, write null"):
        QuantizationConfig.parse(tmp_path / name)
    (tmp_path / name).write_text("null")
    assert QuantizationConfig.parse(tmp_path / name).nothing


def test_a_file_may_not_be_larger_than_a_configuration(tmp_path):
    path = tmp_path / "config.yaml"
    with path.open("wb") as file:
        file.truncate(5 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigurationError) as caught:
            QuantizationConfig.parse(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).endswith("it has 5368709120 bytes, more than the 16777216 that are read")
    assert peak < 3 * 16777216
    path = tmp_path / "config.json"
    path.write_bytes(b'{"quantization": "fp8"}'.ljust(16777216))
    assert QuantizationConfig.parse(path) == QuantizationConfig("fp8")


def test_values_that_are_huge_deep_or_hold_themselves_end_in_a_short_message():
    loop: dict[str, object] = {}
    loop["linear"] = loop
    deep: object = "fp8"
    for _ in range(5000):
        deep = {"weight": deep}
    nested: object = {"linear": "fp8"}
    for _ in range(5000):
        nested = {"quantization_config": nested}
    huge = {"linear": {str(n): n for n in range(100_000)}}
    twice = {"linear": deep, "quantization_config": {"linear": {"weight": deep}}}
    for given in (
        loop,
        {"linear": deep},
        nested,
        huge,
        twice,
        {"quantization": 10**5000},
        {"quantization": "x" * 10**6},
    ):
        with pytest.raises(OlqFxError) as caught:
            QuantizationConfig.parse(given)
        assert len(str(caught.value)) < 1500
