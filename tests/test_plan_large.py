"""Plans of large models are made on meta, quickly, in little memory, and are short to read; so are many patterns."""

import gc
import itertools
import resource
import sys
import time
import tracemalloc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from olq_fx.candidates import Candidate
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, PlanError
from olq_fx.matching import Matcher
from olq_fx.patterns import PathIndex, compile_pattern
from olq_fx.plan import plan_for


class Experts(nn.Module):
    """Experts as three-dimensional parameters."""

    def __init__(self, hidden: int, inner: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))


class Bare(nn.Linear):
    """A linear layer that is made quickly: most of the time goes into values that nobody reads."""

    def reset_parameters(self) -> None:
        pass


def linear(inputs: int, outputs: int) -> nn.Linear:
    return Bare(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)


def mlp(hidden: int, inner: int) -> nn.Module:
    sides = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return nn.ModuleDict({name: linear(*side) for name, side in sides.items()})


def decoder(layers: int, hidden: int, inner: int, experts: int = 0, stacked: bool = False) -> nn.Module:
    """A decoder on meta."""

    def block() -> nn.Module:
        attention = nn.ModuleDict({f"{name}_proj": linear(hidden, hidden) for name in "qkvo"})
        feed: nn.Module = mlp(hidden, inner)
        if experts:
            inside = (
                Experts(hidden, inner, experts)
                if stacked
                else nn.ModuleList(mlp(hidden, inner) for _ in range(experts))
            )
            feed = nn.ModuleDict({"gate": linear(hidden, experts), "experts": inside})
        return nn.ModuleDict({"self_attn": attention, "mlp": feed, "norm": nn.RMSNorm(hidden)})

    with torch.device("meta"):
        body = nn.ModuleDict({"embed_tokens": nn.Embedding(150_000, hidden)})
        body["layers"] = nn.ModuleList(block() for _ in range(layers))
        return nn.ModuleDict({"model": body, "lm_head": linear(hidden, 150_000)}).bfloat16()


def seconds() -> Iterator[float]:
    """Time of this process since the first look."""
    start = time.process_time()
    while True:
        yield time.process_time() - start


def test_a_70b_dense_model():
    model = decoder(80, 8192, 28672)
    clock = seconds()
    next(clock)
    plan = plan_for("fp8_per_block", model)
    text, _ = str(plan), plan.to_json()
    assert next(clock) < 3
    assert len(plan.quantized) == 560
    assert len(text.splitlines()) < 20
    assert "model.layers.{0-79}.mlp.down_proj.weight" in text


def test_a_moe_model_with_stacked_experts_says_what_stays():
    model = decoder(94, 4096, 1536, experts=128, stacked=True)
    plan = plan_for("fp8_per_block", model)
    experts = [row for row in plan.rows if row.kind == "moe"]
    assert len(experts) == 188
    assert {row.decision for row in experts} == {"leave"}
    assert plan.share < 0.1
    assert "experts in original precision: 423.0 GiB" in str(plan)


def test_the_cost_of_a_plan_grows_with_the_model_only():
    """A part of the large model below, so that the default tests stay quick."""
    model = decoder(4, 4096, 1536, experts=64)
    plan_for("fp8_per_block", model)
    clock = seconds()
    next(clock)
    tracemalloc.start()
    plan = plan_for({"linear": "fp8_per_block", "moe": "mxfp4", "ignore": ["re:.*layers\\.[01]\\."]}, model)
    text = str(plan)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert next(clock) < 3  # with the tracing of memory, which takes longer than the plan
    assert len(plan.rows) == 4 * (4 + 1 + 3 * 64) + 2
    assert peak < 50 * 2**20
    assert "model.layers.{2,3}.mlp.experts.{0-63}.up_proj.weight" in text


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        plan_for("fp8", nn.Linear(8, 8))
        with pytest.raises(PlanError):
            plan_for({"quantization": "fp8", "ignore": ["typo"]}, nn.ModuleDict({"up": nn.Linear(8, 8)}))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.slow
def test_a_235b_model_of_36_000_layers():
    model = decoder(94, 4096, 1536, experts=128)
    clock = seconds()
    next(clock)
    plan = plan_for({"linear": "fp8_per_block", "moe": "mxfp4"}, model)
    assert next(clock) < 3
    assert len(plan.rows) == 94 * (4 + 1 + 3 * 128) + 2
    text = str(plan)
    assert len(text.splitlines()) < 20
    assert "12032" in text
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert peak < 2**30


@pytest.mark.parametrize(
    "form",
    [
        "model.layers.{0}.mlp.experts.{1}.up_proj",
        "*.layers.{0}.mlp.experts.{1}.up_proj",
        "model.layers.{0}.*.{1}.up_proj",
        r"re:.*\.layers\.{0}\.mlp\.experts\.{1}\.up_proj$",
        r"re:model\.layers\.{0}\.mlp\.experts\.{1}\.",
    ],
)
def test_a_thousand_targets_on_ten_thousand_modules(form):
    paths = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(100) for j in range(100)]
    found = [
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
    clock = seconds()
    next(clock)
    matches = Matcher(found).match("targets", [pattern for pattern, _ in config.targets])
    assert next(clock) < 1.5
    assert sum(map(len, matches.of_pattern.values())) == 1000


PIECES = [
    *("a", "b", "ab", ".", "\\.", "*", "?", "[ab]", "[!a]", "[", "]", "0", "1", "layers", "+", "{2}", "(a)", "(ab)*"),
    *("(a|layers)", "(?:ab)?", "(?i)", "(?=a)", "^", "$", "|", "\\d", "\\w+", ".*"),
]
PRODUCT = itertools.product(("a", "layers", "0"), ("ab", "b", "10"), ("1", "a"))
PATHS = sorted({*map(".".join, PRODUCT), "a", "layers.0", "layers.10.b", "a.b.a.b", "ab"})


@given(st.booleans(), st.lists(st.sampled_from(PIECES), min_size=1, max_size=7).map("".join))
def test_an_index_finds_what_trying_every_path_finds(is_regex, text):
    try:
        pattern = compile_pattern(f"re:{text}" if is_regex else text)
    except ConfigurationError:
        return
    assert PathIndex(PATHS).find(pattern) == [path for path in PATHS if pattern.matches(path)]


@given(st.text(max_size=12), st.booleans(), st.lists(st.text(max_size=8), max_size=4))
def test_any_text_is_a_pattern_or_a_clean_error(text, is_regex, paths):
    try:
        pattern = compile_pattern(f"re:{text}" if is_regex else text)
    except ConfigurationError:
        return
    index = PathIndex(paths)
    assert index.find(pattern) == [path for path in sorted(set(paths)) if pattern.matches(path)]
    assert index.nearest(pattern)
