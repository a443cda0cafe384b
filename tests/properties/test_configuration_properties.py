"""Configurations and plans under arbitrary input: a result or a clean error, and the same one whatever the order."""

import contextlib
import json
import string
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import OlqFxError, PlanError
from olq_fx.formats import FORMATS
from olq_fx.patterns import PathIndex, compile_pattern
from olq_fx.plan import plan_for
from olq_fx.schemes import ALIASES, SCHEMES, Slot

KEYS = [
    "quantization", "quantization_config", "linear", "moe", "ignore", "targets", "include", "components",
    "per_token_activation", "weight_block_size", "num_bf16_fallback_layers", "mxfp4_scale", "four_over_six",
    "power_of_two_scales", "fast_accum", "allow_nonfinite", "skip_unprofitable", "linear_backend", "moe_backend",
    "activation_scheme", "method", "quant_method", "scheme", "ignored_layers", "weight", "activation", "default",
]  # fmt: skip
WORDS = [
    *SCHEMES,
    *ALIASES,
    *FORMATS,
    "online",
    "none",
    "auto",
    "dynamic",
    "static",
    "mse",
    "floor",
    "*",
    "re:.*",
    "re:(",
]

words = st.one_of(st.sampled_from(WORDS), st.text(max_size=6))
leaves = st.one_of(words, st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=True))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), words), inner, max_size=4),
    ),
    max_leaves=12,
)
configurations_or_worse = st.one_of(
    values,
    st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
    st.fixed_dictionaries({"quantization": st.sampled_from([*SCHEMES])}, optional=dict.fromkeys(KEYS[1:], values)),
)

weights = st.sampled_from([f.name for f in FORMATS.values() if f.weight])
activations = st.sampled_from([None, *(f.name for f in FORMATS.values() if f.activation)])
slots = st.one_of(
    st.sampled_from([*SCHEMES]),
    weights,
    st.none(),
    st.fixed_dictionaries({"weight": weights}, optional={"activation": activations}),
)
options = {
    "per_token_activation": st.booleans(),
    "mxfp4_scale": st.sampled_from(["floor", "even", "ceil", "mse", {"weight": "even"}, {"activation": "mse"}]),
    "four_over_six": st.booleans(),
    "power_of_two_scales": st.booleans(),
    "allow_nonfinite": st.booleans(),
}
PATHS = ["a.q_proj", "a.k_proj", "b.q_proj", "b.0.w", "lm_head", "tok"]
patterns = st.one_of(
    st.sampled_from([*PATHS, *(f"{path}.weight" for path in PATHS)]),
    st.sampled_from(["*", "a.*", "*.q_proj", "re:.*proj", "re:[ab]", "?.q_proj", "[ab].q_proj", "tok*", "re:lm", "x"]),
)
ignores = st.lists(patterns, max_size=3)
with_slots = st.fixed_dictionaries(
    {"quantization": st.sampled_from([*SCHEMES])},
    optional={"linear": slots, "moe": slots, "ignore": ignores, "include": ignores, **options},
)
with_targets = st.fixed_dictionaries(
    {"targets": st.dictionaries(patterns, slots.filter(lambda slot: slot is not None), min_size=1, max_size=3)},
    optional={"ignore": ignores, "include": ignores, **options},
)
meaningful = st.one_of(with_slots, with_targets)


def parsed(source: Any) -> QuantizationConfig | tuple[type, str]:
    """A configuration, or the clean error that it is."""
    try:
        return QuantizationConfig.parse(source)
    except OlqFxError as error:
        return type(error), str(error)


def shuffled(value: Any, random: Any) -> Any:
    """The same value with the keys of every dictionary in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(inner, random)) for key, inner in value.items()]
        random.shuffle(items)
        return dict(items)
    return [shuffled(inner, random) for inner in value] if isinstance(value, list) else value


@given(configurations_or_worse)
def test_parsing_is_total(value):
    result = parsed(value)
    assert parsed(value) == result
    if isinstance(result, QuantizationConfig):
        assert QuantizationConfig.from_dict(result.to_dict()) == result
    else:
        assert 0 < len(result[1]) < 2000


@given(st.one_of(st.text(), st.text(alphabet=string.printable), values.map(lambda value: json.dumps(value))))
def test_parsing_of_text_is_total(text):
    parsed(text)


@given(configurations_or_worse.filter(lambda value: isinstance(value, dict)))
def test_json_text_means_what_the_dictionary_means(value):
    result, from_text = parsed(value), parsed(json.dumps(value))
    assert isinstance(result, QuantizationConfig) == isinstance(from_text, QuantizationConfig)
    if isinstance(result, QuantizationConfig):
        assert from_text == result


@given(meaningful, st.randoms(use_true_random=False))
def test_round_trip_and_order_of_keys(config, random):
    result = parsed(config)
    assert parsed(shuffled(config, random)) == result
    if isinstance(result, QuantizationConfig):
        again = QuantizationConfig.from_dict(json.loads(json.dumps(result.to_dict())))
        assert again == result
        assert hash(again) == hash(result)
        assert again.to_dict() == result.to_dict()


@given(
    meaningful, st.sets(st.sampled_from(["quantization", "linear", "moe", "ignore", "targets", "include", *options]))
)
def test_nested_flat_and_keyword_arguments_mean_the_same(config, moved):
    outside = {key: value for key, value in config.items() if key not in moved}
    inside = {key: value for key, value in config.items() if key in moved}
    result = parsed(config)
    nested = parsed({**outside, "quantization_config": inside})
    assert isinstance(nested, QuantizationConfig) == isinstance(result, QuantizationConfig)
    if isinstance(result, QuantizationConfig):
        assert nested == result
        assert QuantizationConfig.parse(outside, **inside) == result


@given(st.sampled_from([*SCHEMES, *ALIASES]), st.data())
def test_spelling_of_names(name, data):
    spelled = "".join(data.draw(st.sampled_from([c.lower(), c.upper(), "-" if c == "_" else c])) for c in name)
    assert QuantizationConfig.parse(spelled) == QuantizationConfig.parse(name)
    assert QuantizationConfig.parse({"linear": spelled}) == QuantizationConfig.parse({"linear": name})


@given(weights, activations, st.sampled_from([*SCHEMES]), st.sampled_from(["linear", "moe"]))
def test_a_given_slot_is_the_slot_whatever_the_scheme(weight, activation, scheme, kind):
    config = QuantizationConfig.parse({"quantization": scheme, kind: {"weight": weight, "activation": activation}})
    other = "moe" if kind == "linear" else "linear"
    assert config.slot(kind) == Slot(weight, activation)
    assert config.slot(other) == QuantizationConfig.parse(scheme).slot(other)


# plans


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(8, 4)
        self.a = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "k_proj": nn.Linear(4, 4)})
        self.b = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "0": nn.Module()})
        self.b["0"].w = nn.Parameter(torch.zeros(4, 4))
        self.lm_head = nn.Linear(4, 8)


TINY = Tiny()


def planned(config: Any) -> Any:
    try:
        return plan_for(config, TINY)
    except OlqFxError as error:
        return type(error), str(error)


@given(meaningful, st.randoms(use_true_random=False))
def test_plans_are_deterministic_and_deaf_to_the_order_of_keys(config, random):
    assert planned(config) == planned(config) == planned(shuffled(config, random))


@given(meaningful)
def test_every_plan_says_what_it_does(config):
    plan = planned(config)
    if isinstance(plan, tuple):
        assert issubclass(plan[0], OlqFxError)
        return
    assert [row.path for row in plan.rows] == ["tok.weight", "a.q_proj.weight", "a.k_proj.weight", "b.q_proj.weight",
                                               "b.0.w", "lm_head.weight"]  # fmt: skip
    assert plan.quantized
    for row in plan.rows:
        assert (row.decision == "leave") == (row.slot is None) == bool(row.reason)
        assert row.bytes_after == row.bytes_before if row.slot is None else row.kernel
        if row.slot is not None:
            assert row.weight_rule in FORMATS[row.slot.weight].rules
            assert row.activation_rule in (FORMATS[row.slot.activation].rules if row.slot.activation else ("",))
    json.loads(plan.to_json(), parse_constant=lambda token: pytest.fail(token))
    assert plan_for(plan.config.to_dict(), TINY) == plan


@given(st.dictionaries(patterns, slots.filter(bool), min_size=1, max_size=4), ignores)
def test_targets_against_a_model_of_the_rule(targets, ignore):
    """Each layer judged on its own, by the words of the specification."""
    try:
        config = QuantizationConfig.parse({"targets": targets, "ignore": ignore})
    except OlqFxError:
        return
    plan = planned(config)
    if isinstance(plan, tuple):
        return
    asked = dict(config.targets)
    for row in plan.rows:
        spoken = [row.path, row.module_path]
        protected = row.kind == "embedding" or row.module_path == "lm_head"
        matching = {
            asked[text]
            for text in asked
            if any(compile_pattern(text).matches(path) for path in spoken) and (not protected or text in spoken)
        }
        assert len(matching) <= 1
        assert not (matching and any(compile_pattern(text).matches(path) for text in ignore for path in spoken))
        if row.path == "b.0.w":
            assert row.slot is None
        elif row.kind == "embedding":
            assert row.slot == (Slot(next(iter(matching)).weight, None) if matching else None)
        else:
            assert row.slot == next(iter(matching), None)


# patterns


paths = st.lists(st.sampled_from("abc0123"), min_size=1, max_size=4).map(".".join)
globs = st.text(alphabet="ab0.*?[]!-", min_size=1, max_size=8).filter(lambda text: text.strip())


@given(st.lists(paths, max_size=8), st.one_of(paths, globs, globs.map(lambda text: "re:" + text)))
def test_an_index_finds_what_trying_every_path_finds(given_paths, text):
    try:
        pattern = compile_pattern(text)
    except OlqFxError:
        return
    assert PathIndex(given_paths).find(pattern) == sorted({path for path in given_paths if pattern.matches(path)})
    assert isinstance(PathIndex(given_paths).nearest(pattern), str)


@given(st.text(alphabet="ab.*+?()[]{}|\\^$<>=!:PLdw0,&~-", max_size=12))
def test_any_regular_expression_is_compiled_or_refused(text):
    with contextlib.suppress(OlqFxError):
        compile_pattern("re:" + text).matches("model.layers.0.ab")


@given(st.integers(0, len(PATHS) - 1), st.integers(0, 30), st.sampled_from(string.ascii_lowercase))
def test_a_typo_offers_the_right_name(which, place, letter):
    path = f"model.{PATHS[which]}.weight"
    place %= len(path)
    typo = path[:place] + letter + path[place + 1 :]
    index = PathIndex([f"model.{name}.weight" for name in PATHS])
    if typo != path:
        assert repr(path) in index.nearest(compile_pattern(typo))


@given(st.sampled_from(PATHS[:3]), st.integers(0, 30), st.sampled_from(["ignore", "targets", "include"]))
def test_a_typo_in_a_plan_is_an_error_with_the_right_name(path, place, key):
    place %= len(path)
    typo = path[:place] + "y" + path[place + 1 :]
    config: dict[str, Any] = {"targets": {typo: "fp8"}} if key == "targets" else {"quantization": "fp8", key: [typo]}
    with pytest.raises(PlanError) as caught:
        plan_for(config, TINY)
    assert repr(typo) in str(caught.value)
    assert path in str(caught.value)
