"""Plans of large models are made on meta with little work and memory, and are short to read; so are many patterns.

Work is counted, not timed: `benchmarks/planning.py` measures seconds.
"""

import fnmatch
import gc
import itertools
import sys
import tracemalloc
from collections.abc import Callable
from unittest import mock

import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from olq_fx.candidates import Candidate
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError
from olq_fx.kernels import registry
from olq_fx.matching import Matcher
from olq_fx.patterns import PathIndex, Pattern, compile_pattern
from olq_fx.plan import plan_for
from olq_fx.testing import LLAMA_70B, MOE_235B, decoder_layout

MIXED = {"linear": "fp8_per_block", "moe": "mxfp4"}
CONFIGURATIONS = {
    "scheme": MIXED,
    "patterns": MIXED | {"ignore": ["re:.*layers\\.[01]\\.", "*.layers.3.*"]},
    "components": {"components": {"model": MIXED, "lm_head": None}},
    "blocks": MIXED | {"num_bf16_fallback_layers": 1},
}


def calls_in(action: Callable[[], object]) -> int:
    """How many functions an action calls, of Python and of C: the same number on every run."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def small_moe(layers: int) -> nn.Module:
    return decoder_layout(layers, 64, 32, experts=16)


def test_a_70b_dense_model():
    plan = plan_for("fp8_per_block", decoder_layout(**LLAMA_70B))
    assert len(plan.quantized) == 560
    assert len(str(plan).splitlines()) < 25
    assert "model.layers.{0-79}.mlp.down_proj.weight" in str(plan)


def test_a_moe_model_with_stacked_experts():
    model = decoder_layout(**MOE_235B, stacked=True)
    plan = plan_for("fp8_per_block", model)
    experts = [row for row in plan.rows if row.kind == "moe"]
    assert len(experts) == 188
    assert {row.decision for row in experts} == {"quantize"}
    assert plan.share > 0.99
    layers = plan_for("fp8_per_block", decoder_layout(**MOE_235B))
    assert plan.bytes_after == layers.bytes_after
    dense = plan_for({"linear": "fp8_per_block"}, model)
    assert dense.share < 0.1
    assert "experts in original precision: 423.0 GiB" in str(dense)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_work_of_a_plan_grows_with_the_model_and_no_faster(name):
    """Twice the layers are at most twice the calls, and few for each weight."""
    config = QuantizationConfig.parse(CONFIGURATIONS[name])
    small, large = small_moe(8), small_moe(16)
    plan_for(config, small_moe(4))  # what is remembered between plans
    calls = [calls_in(lambda model=model: plan_for(config, model)) for model in (small, large)]
    assert calls[1] < 2.05 * calls[0]
    assert calls[1] / len(plan_for(config, large).rows) < CALLS_OF_A_WEIGHT


CALLS_OF_A_WEIGHT = 150


def test_equal_layers_are_judged_once(monkeypatch):
    asked = []
    select = registry.select

    def counting(*key):
        asked.append(key)
        return select(*key)

    monkeypatch.setattr(registry, "select", counting)
    plan = plan_for(MIXED, small_moe(6))
    assert len(plan.quantized) == 6 * (4 + 3 * 16)
    assert len(asked) == len(set(asked)) == 3  # attention, gate and up, down


def test_a_plan_takes_little_memory():
    """A part of the large model below, so that the default tests stay quick."""
    model = decoder_layout(4, 4096, 1536, experts=64)
    config = MIXED | {"ignore": ["re:.*layers\\.[01]\\."]}
    plan_for(config, model)
    tracemalloc.start()
    try:
        plan = plan_for(config, model)
        text = str(plan)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan.rows) == 4 * (4 + 1 + 3 * 64) + 2
    assert peak < 8 * 2**20  # a plan of 36,000 layers stays far below 1 GiB
    assert "model.layers.{2,3}.mlp.experts.{0-63}.up_proj.weight" in text


def test_the_garbage_collector_is_left_alone(monkeypatch):
    """It belongs to the whole process."""
    for name in ("disable", "enable", "freeze", "set_threshold", "collect"):
        monkeypatch.setattr(gc, name, lambda *_: pytest.fail("a plan touches the garbage collector"))
    plan_for("fp8", small_moe(2))


@pytest.mark.slow
def test_a_235b_model_of_36_000_layers():
    model = decoder_layout(**MOE_235B)
    tracemalloc.start()
    try:
        plan = plan_for(MIXED, model)
        text = str(plan)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan.rows) == 94 * (4 + 1 + 3 * 128) + 2
    assert len(text.splitlines()) < 25
    assert "12032" in text
    assert peak < 2**28


@pytest.mark.parametrize(
    "form",
    [
        "model.layers.{0}.mlp.experts.{1}.up_proj",
        "*.layers.{0}.mlp.experts.{1}.up_proj",
        "model.layers.{0}.*.{1}.up_proj",
        r"re:.*\.layers\.{0}\.mlp\.experts\.{1}\.up_proj$",
        r"re:model\.layers\.{0}\.mlp\.experts\.{1}\.",
        "re:.*layers.{0}.mlp.experts.{1}.up_proj$",
        "re:.*layers.({0}).(mlp|feed).experts.(?:{1}).up_(proj)$",
    ],
)
def test_a_thousand_targets_are_tried_on_few_of_ten_thousand_modules(form, monkeypatch):
    paths = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(100) for j in range(100)]
    candidates = [
        Candidate(
            path=f"{path}.weight",
            module_path=path,
            names=(f"{path}.weight",),
            module_names=(path,),
            kind="moe",
            shape=(8, 8),
            dtype=torch.bfloat16,
            device=torch.device("meta"),
        )
        for path in paths
    ]
    config = QuantizationConfig.parse(
        {"targets": {form.format(layer, expert): "fp8" for layer in range(100) for expert in range(10)}}
    )
    tried = []
    possible = PathIndex._possible

    def counting(self, pattern):
        found = possible(self, pattern)
        tried.append(len(found))
        return found

    monkeypatch.setattr(PathIndex, "_possible", counting)
    found = Matcher(candidates).match("targets", [pattern for pattern, _ in config.targets])
    assert sum(map(len, found.of_pattern.values())) == 1000
    assert sum(tried) <= 200_000  # of twenty million pairs: the first four patterns are tried on two paths a module


PIECES = [
    *("a", "b", "ab", ".", "\\.", "*", "?", "[ab]", "[!a]", "[", "]", "0", "1", "layers", "+", "{2}", "(a)", "(ab)*"),
    *("(a|layers)", "(?:ab)?", "(?i)", "(?=a)", "^", "$", "|", "\\d", "\\w+", ".*", "(", ")", "(?P<n>", "(?<!b)"),
    *(
        "(?#x)",
        "(a(b|0)+)",
        "a{e<=1}",
        "[[:alpha:]]",
        "[^[:digit:]]",
        "\\b",
        "\\Z",
        "\\x61",
        "\\1",
        "(?>ab)",
        "(?|a|b)",
    ),
]
PRODUCT = itertools.product(("a", "layers", "0"), ("ab", "b", "10"), ("1", "a"))
PATHS = sorted({*map(".".join, PRODUCT), "a", "layers.0", "layers.10.b", "a.b.a.b", "ab", "a]", "a b"})


@settings(max_examples=600)
@given(st.booleans(), st.lists(st.sampled_from(PIECES), min_size=1, max_size=7).map("".join))
def test_an_index_finds_what_trying_every_path_finds(is_regex, text):
    try:
        pattern = compile_pattern(f"re:{text}" if is_regex else text)
    except ConfigurationError:
        return
    with mock.patch("olq_fx.patterns._UNINDEXED", 0):
        assert PathIndex(PATHS).find(pattern) == [path for path in PATHS if tried_alone(pattern, path)]


def tried_alone(pattern: Pattern, path: str) -> bool:
    """The definition: the package regex, or fnmatch."""
    if pattern.form == "regex":
        return regex.compile(pattern.text.removeprefix("re:")).match(path) is not None
    return fnmatch.fnmatchcase(path, pattern.text) if pattern.form == "glob" else path == pattern.text


@given(st.text(max_size=12), st.booleans(), st.lists(st.text(max_size=8), max_size=4))
def test_any_text_is_a_pattern_or_a_clean_error(text, is_regex, paths):
    try:
        pattern = compile_pattern(f"re:{text}" if is_regex else text)
    except ConfigurationError:
        return
    with mock.patch("olq_fx.patterns._UNINDEXED", 0):
        index = PathIndex(paths)
        assert index.find(pattern) == [path for path in sorted(set(paths)) if pattern.matches(path)]
        assert index.nearest(pattern)
