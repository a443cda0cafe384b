"""Components of a pipeline: each with a configuration of its own, found by the longest prefix of the path."""

import json
from typing import Any

import pytest

from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, OlqFxError

parse = QuantizationConfig.parse
FP8, INT8, MXFP4 = parse("fp8"), parse("int8"), parse("mxfp4")
NONE = parse(None)

# configuration -> (scheme of the rest, {prefix: configuration})
RESOLVED: list[tuple[Any, str | None, dict[str, QuantizationConfig]]] = [
    ({"components": {"transformer": "fp8"}}, None, {"transformer": FP8}),
    ({"transformer": "fp8", "vae": None}, None, {"transformer": FP8, "vae": NONE}),
    ({"transformer": {"method": "fp8"}, "vae": "none"}, None, {"transformer": FP8, "vae": NONE}),
    ({"transformer": {"quant_method": "fp8", "ignored_layers": ["a"]}}, None,
     {"transformer": parse({"quantization": "fp8", "ignore": ["a"]})}),
    ({"quantization": None, "quantization_config": {"transformer": "fp8", "vae": None}}, None,
     {"transformer": FP8, "vae": NONE}),
    ({"transformer": FP8}, None, {"transformer": FP8}),
    ({"model": "fp8"}, None, {"model": FP8}),
    ({"components": {"default": "int8", "vae": None}}, "int8", {"vae": NONE}),
    ({"default": "int8", "vae": None}, "int8", {"vae": NONE}),
    ({"default": "int8"}, "int8", {}),
    ({"quantization": "int8", "components": {"vae": None}}, "int8", {"vae": NONE}),
    ({"quantization": "int8", "components": {}}, "int8", {}),
    ({"quantization": "int8", "components": None}, "int8", {}),
    ({"components": {"a": {"b": "fp8", "default": "int8"}}}, None, {"a": INT8, "a.b": FP8}),
    ({"components": {"a": {"components": {"b": {"c": "fp8"}}}}}, None,
     {"a": NONE, "a.b": NONE, "a.b.c": FP8}),
    ({"components": {"default": {"a": "fp8", "default": "int8"}}}, "int8", {"a": FP8}),
    ({"components": {"text_encoder.model": {"targets": {"*.q": "mxfp4"}}}}, None,
     {"text_encoder.model": parse({"targets": {"*.q": "mxfp4"}})}),
    ({"components": {" a ": "fp8"}}, None, {"a": FP8}),
    ('{"transformer": "fp8", "vae": null}', None, {"transformer": FP8, "vae": NONE}),
]  # fmt: skip

REFUSED: list[tuple[Any, type[OlqFxError], str]] = [
    ({"components": ["a"]}, ConfigurationTypeError,
     "components is a dictionary of path prefixes, not list: ['a']"),
    ({"components": {1: "fp8"}}, ConfigurationTypeError, "a prefix in components is a string, not int: 1"),
    ({"components": {"a": 3}}, ConfigurationTypeError,
     "components['a']: a configuration is a scheme name, a dictionary, a JSON text, the path of a JSON or YAML file, a "
     "QuantizationConfig or None, not int: 3"),
    ({"components": {"a": "fp9"}}, ConfigurationError, "components['a']: unknown scheme 'fp9'; did you mean 'fp8'?"),
    ({"components": {"a": {"linear": "mxpf8"}}}, ConfigurationError,
     "components['a']: linear: unknown scheme or weight format 'mxpf8'; did you mean 'mxfp8' or 'mxfp4'?"),
    ({"components": {"a": {"b": {"c": "fp9"}}}}, ConfigurationError,
     "components['a']: components['b']: components['c']: unknown scheme 'fp9'; did you mean 'fp8'?"),
    ({"components": {"a.*": "fp8"}}, ConfigurationError,
     "components: 'a.*' is no path prefix; write a module's path as 'transformer' (patterns stand in ignore, include "
     "and targets)"),
    ({"components": {"re:a": "fp8"}}, ConfigurationError,
     "components: 're:a' is no path prefix; write a module's path as 'transformer' (patterns stand in ignore, include "
     "and targets)"),
    ({"components": {"": "fp8"}}, ConfigurationError,
     "components: '' is no path prefix; write a module's path as 'transformer' (patterns stand in ignore, include and "
     "targets)"),
    ({"components": {"a..b": "fp8"}}, ConfigurationError,
     "components: 'a..b' is no path prefix; write a module's path as 'transformer' (patterns stand in ignore, include "
     "and targets)"),
    ({"components": {"a.b": "fp8", "a": {"b": "int8"}}}, ConfigurationError,
     "components: 'a.b' is given twice, once of them within another component"),
    ({"quantization": "int8", "components": {"default": "fp8"}}, ConfigurationError,
     "components: 'default' speaks of all that lies in no component, and so do the keys beside components: "
     "quantization; write them in one of the two"),
    ({"components": {"a": "fp8"}, "ignore": ["x"], "four_over_six": False}, ConfigurationError,
     "the keys beside components speak of what lies in none of them, and that is left alone: ignore, four_over_six; "
     "write them in the configuration of a component"),
    ({"vae": None}, ConfigurationError,
     "the configuration leaves nothing to quantize; name a scheme, `linear`, `moe` or `targets` (and to leave "
     "everything alone on purpose, write None or 'none')"),
    ({"components": {"a": {}}}, ConfigurationError,
     "components['a']: the configuration leaves nothing to quantize; name a scheme, `linear`, `moe` or `targets` (and "
     "to leave everything alone on purpose, write None or 'none')"),
    ({"quantization": "fp8", "transformer": None}, ConfigurationError,
     "unknown key 'transformer' in the configuration; valid: quantization, linear, moe, ignore, targets, include, "
     "per_token_activation, mxfp4_scale, four_over_six, power_of_two_scales, allow_nonfinite, weight_block_size, "
     "num_bf16_fallback_layers, fast_accum, skip_unprofitable, linear_backend, moe_backend, packed_modules_mapping, "
     "components, activation_scheme; the configuration of a component stands under 'components'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "rest", "components"), RESOLVED, ids=lambda value: str(value)[:50])
def test_components_resolve(given, rest, components):
    config = parse(given)
    assert config.quantization == (None if rest is None else parse(rest).quantization)
    assert dict(config.components) == components
    assert QuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    hash(config)


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_mistake_is_an_error_that_names_the_component(given, kind, message):
    with pytest.raises(OlqFxError) as caught:
        parse(given)
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_components_without_an_end_are_an_error():
    loop: dict[str, Any] = {}
    loop["a"] = loop
    deep: Any = "fp8"
    for _ in range(3000):
        deep = {"a": deep}
    for given in (loop, {"components": loop}, deep):
        with pytest.raises(ConfigurationError, match="without an end"):
            parse(given)


def test_the_longest_path_prefix_wins():
    config = parse({"transformer": "fp8", "transformer.blocks": "mxfp4", "default": "int8"})
    for path, prefix in {
        "transformer": "transformer",
        "transformer.proj": "transformer",
        "transformer.blocks.0.up": "transformer.blocks",
        "transformer_2.proj": "",
        "transformer_blocks.0": "",
        "a.transformer.proj": "",
    }.items():
        found, own = config.of(path)
        assert found == prefix
        assert own == (dict(config.components)[prefix] if prefix else config)


def test_equal_components_are_equal_whatever_their_order_and_form():
    forms = [
        {"a": "fp8", "b": "mxfp4"},
        {"b": "mxfp4", "a": "FP8-per-tensor"},
        {"components": {"b": {"linear": "mxfp4", "moe": "mxfp4"}, "a": {"method": "fp8"}}},
        {"components": {"b": MXFP4, "a": FP8}},
    ]
    assert len({parse(form).of("a.x") for form in forms}) == 1
    assert parse(forms[0]) == parse(forms[1]) == parse(forms[3])
