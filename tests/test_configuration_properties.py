"""Whatever is given, parsing ends in a configuration or in an error of ours; and what a plan says is what is done."""

import dataclasses
import itertools
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from olq_fx.configuration import OPTIONS, QuantizationConfig
from olq_fx.configuration_dotted import from_dotted
from olq_fx.errors import OlqFxError
from olq_fx.formats import BLOCK_COLUMNS, BLOCK_ROWS, FORMATS
from olq_fx.plan import plan_for
from olq_fx.schemes import SCHEMES
from olq_fx.weights import QuantizedWeight

KEYS = sorted(
    {*QuantizationConfig.__dataclass_fields__, "method", "quant_method", "ignored_layers", "quantization_config",
     "activation_scheme", "transformer", "default", "wieght"}
)  # fmt: skip
NAMES = ("fp8", "mxfp4", "MXFP8", "nvfp4", "online", "none", "auto", "reference", "static")
WORDS = st.sampled_from([*NAMES, "re:(", "re:.*up", "*.up", "up", "", "a.b"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | WORDS
NAMED = st.sampled_from(KEYS) | st.text(max_size=4)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMED, inner), max_leaves=8)
NEARLY = st.dictionaries(st.sampled_from(KEYS), WORDS | SCALARS | JSON, max_size=4)


def parsed(value: Any) -> QuantizationConfig | None:
    """The configuration, or None where the error is one of ours, in one short line."""
    try:
        return QuantizationConfig.parse(value)
    except OlqFxError as error:
        message = str(error)
    assert 0 < len(message) < 1500
    return None


@settings(max_examples=400)
@given(JSON | NEARLY)
def test_parsing_is_total(value):
    config = parsed(value)
    if config is not None:
        assert QuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
        hash(config)


@settings(max_examples=150)
@given(NEARLY)
def test_text_means_what_the_value_means(value):
    text = json.dumps(value)
    assert parsed(text) == parsed(json.loads(text))


@given(st.text(max_size=30) | st.lists(st.sampled_from('{}[]":,fp8 null'), max_size=20).map("".join))
def test_any_text_is_a_configuration_or_an_error(text):
    parsed(text)


@given(st.lists(st.tuples(st.text(max_size=12) | st.sampled_from(KEYS).map(lambda key: f"{key}.weight"), SCALARS)))
def test_any_dotted_keys_are_a_dictionary_or_an_error(pairs):
    try:
        found = from_dotted(pairs)
    except OlqFxError:
        return
    parsed(found)


WEIGHTS = [name for name, format in FORMATS.items() if format.weight]
ACTIVATIONS = [None, *(name for name, format in FORMATS.items() if format.activation)]
SLOTS = (
    st.sampled_from([*SCHEMES, *WEIGHTS])
    | st.builds(dict, weight=st.sampled_from(WEIGHTS), activation=st.sampled_from(ACTIVATIONS))
    | st.none()
)
PATTERNS = st.sampled_from(["up", "*.down", "re:layers", "layers.0.up", "*", "layers.1.*", "head", "layers.0.qkv_proj"])
RULES = st.sampled_from(["floor", "even", "ceil", "mse"])
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "per_token_activation": st.booleans(),
    "mxfp4_scale": RULES | st.builds(dict, weight=RULES, activation=RULES),
    "four_over_six": st.booleans(),
    "power_of_two_scales": st.booleans(),
    "allow_nonfinite": st.booleans(),
    "weight_block_size": st.tuples(st.sampled_from(BLOCK_ROWS), st.sampled_from(BLOCK_COLUMNS)).map(list),
    "num_bf16_fallback_layers": st.none() | st.integers(0, 3),
    "fast_accum": st.booleans(),
    "skip_unprofitable": st.booleans(),
    "linear_backend": st.sampled_from(["auto", "reference"]),
    "moe_backend": st.sampled_from(["auto", "reference"]),
    "packed_modules_mapping": st.just({"mine": ["up", "down"]}),
}
VALID = st.fixed_dictionaries(
    {"quantization": st.sampled_from(list(SCHEMES))},
    optional={
        "linear": SLOTS, "moe": SLOTS, "ignore": st.lists(PATTERNS, max_size=2),
        "include": st.just(["head"]), **CHOICES,
    },
)  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.experts = nn.ModuleList([nn.Linear(24, 24)])
        self.lm_head = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.lm_head(self.experts[0](x))
        return y


def test_every_option_is_chosen_from():
    assert set(CHOICES) == set(OPTIONS)


@given(VALID, st.randoms(use_true_random=False))
def test_the_order_of_keys_never_matters_and_plans_are_deterministic(given_, shuffle: random.Random):
    keys = list(given_)
    shuffle.shuffle(keys)
    config, other = parsed(given_), parsed({key: given_[key] for key in keys})
    assert config == other
    if config is None:
        return
    nested = {"quantization": given_["quantization"], "quantization_config": {**given_}}
    assert parsed(nested) == config
    with torch.device("meta"):
        model = Model()

    def planned(value: Any) -> Any:
        try:
            return plan_for(value, model)
        except OlqFxError as error:
            return str(error)

    assert planned(config) == planned(other) == planned(config.to_dict())


@given(VALID, VALID)
def test_components_keep_their_configurations(first, second):
    found = (parsed(first), parsed(second))
    config = parsed({"components": {"layers.0": first, "default": second}})
    assert (config is None) == (None in found or (found[0].nothing and found[1].nothing))
    if config is not None:
        assert QuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert config.of("layers.0.up") == ("layers.0", found[0])
        assert dataclasses.replace(config.of("layers.1.up")[1], components=()) == found[1]


EXAMPLES: list[dict[str, Any]] = [
    {"quantization": "int8"},
    {"quantization": "mxfp4", "moe": None, "ignore": ["layers.0.*"]},
    {"linear": "fp8_per_block", "weight_block_size": [32, 32], "include": ["lm_head"]},
    {"quantization": "nvfp4_per_token", "num_bf16_fallback_layers": 1, "linear_backend": "reference"},
    {"layers.0": "mxfp8", "layers.1": {"linear": "int8", "ignore": ["up"]}, "default": None},
    {"targets": {"layers.0.up": "mxfp4_dualscale", "experts.0": {"weight": "mxfp8", "activation": "int8_per_token"}}},
]


@pytest.mark.parametrize("config", EXAMPLES, ids=str)
def test_what_a_plan_says_is_what_either_route_does_and_reports(routes, config):
    x = torch.randn(3, 24)
    plan = plan_for(config, Model())
    for route in routes.values():
        quantized = route(Model(), config, x)
        report = quantized.report
        assert [dataclasses.replace(row, trainable=True) for row in report.plan.rows] == list(plan.rows)
        assert quantized.converted == tuple(row.path for row in plan.quantized)
        for row in plan.rows:
            weight: Any = quantized.model.get_parameter(row.path)
            assert isinstance(weight, QuantizedWeight) == (row.decision == "quantize")
            if row.slot is not None:
                found = (
                    weight.spec.weight,
                    weight.spec.activation or None,
                    weight.spec.weight_rule,
                    weight.stored_bytes,
                )
                assert found == (row.slot.weight, row.slot.activation, row.weight_rule, row.bytes_after)
                assert weight.spec.kernel == row.requested_kernel


def test_both_routes_agree_bit_by_bit_under_options(routes):
    from olq_fx.testing import assert_same_bits

    x = torch.randn(3, 24)
    for config in EXAMPLES:
        outputs = []
        for route in routes.values():
            torch.manual_seed(1)
            outputs.append(route(Model(), config, x)(x))
        for first, second in itertools.pairwise(outputs):
            assert_same_bits(first, second, name=str(config))
