"""Patterns: three forms, never a substring, bounded in time, and helpful where they match nothing."""

import itertools

import pytest

from olq_fx.errors import ConfigurationError
from olq_fx.path_filter import PathFilter
from olq_fx.patterns import PathIndex, compile_pattern

LLAMA = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]
INDEX = PathIndex([*LLAMA, *(f"{path}.weight" for path in LLAMA), "lm_head"])


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b", "x.a.b", False),
        ("a.b", "aXb", False),
        ("q_proj", "self_attn.q_proj", False),
        ("A.b", "a.b", False),
        ("*.q_proj", "layers.0.q_proj", True),
        ("*.q_proj", "q_proj", False),
        ("*.Q_proj", "layers.0.q_proj", False),
        ("*q_proj", "layers.0.q_proj", True),
        ("layers.*.q_proj", "layers.0.self_attn.q_proj", True),
        ("layers.?.q", "layers.1.q", True),
        ("layers.?.q", "layers.10.q", False),
        ("layers.[01].q", "layers.1.q", True),
        ("layers.[!01].q", "layers.1.q", False),
        ("layers.*", "layers", False),
        ("re:layers", "layers.0.q", True),
        ("re:layers$", "layers.0.q", False),
        ("re:q", "layers.0.q", False),
        ("re:.*[qkv]_proj", "a.qkv_proj", True),
        (r"re:layers\.\d+\.q$", "layers.11.q", True),
        ("re:(?i)LAYERS", "layers.0", True),
        ("re:a|b", "b.c", True),
    ],
)
def test_each_form_matches_what_it_says(pattern, path, matches):
    assert compile_pattern(pattern).matches(path) is matches
    assert PathIndex([path]).find(compile_pattern(pattern)) == ([path] if matches else [])


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.1.*", 8),
        ("model.layers.1*.mlp.*", 12),
        ("model.layers.?.mlp.gate_proj", 10),
        ("*", 97),
        ("*.weight", 48),
        ("re:model.layers.1.", 24),
        ("model.layers.1", 0),
        ("zzz*", 0),
        ("\U0010ffff*", 0),
    ],
)
def test_an_index_finds_what_trying_every_path_finds(pattern, count):
    found = INDEX.find(compile_pattern(pattern))
    assert len(found) == count
    everything = [*LLAMA, *(f"{path}.weight" for path in LLAMA), "lm_head"]
    assert found == sorted(path for path in everything if compile_pattern(pattern).matches(path))


@pytest.mark.parametrize(
    "pattern", ["", "  ", "re:", "re:(", "re:[", r"re:\L<x>", "re:" + "(" * 3000, "re:a{,99999999999}", "re:(?P<"]
)
def test_a_malformed_pattern_is_an_error_at_once(pattern):
    with pytest.raises(ConfigurationError, match="pattern"):
        compile_pattern(pattern)


@pytest.mark.parametrize("text", ["re:[[a]--[b]]", "re:a(?i)b", "re:[a||b]"])
def test_notes_of_the_regex_package_are_not_passed_on(text):
    """Warnings are errors here: future syntax must not become a warning that names a line of ours."""
    compile_pattern(text)


def test_a_catastrophic_expression_is_stopped_and_named():
    pattern = compile_pattern(r"re:(?:a|[a-z._0-9]|[a-z]{2})+[A-Z]")
    path = "model.layers.0.self_attn.q_projection.base.weight"
    with pytest.raises(ConfigurationError, match=r"more than 100 ms") as caught:
        pattern.matches(path)
    assert pattern.text in str(caught.value)
    assert path in str(caught.value)


def test_an_expression_that_is_slow_on_every_path_is_stopped_too(monkeypatch):
    monkeypatch.setattr("olq_fx.patterns.TOTAL_TIMEOUT", 0.0)
    with pytest.raises(ConfigurationError) as caught:
        INDEX.find(compile_pattern("re:(.)*"))
    assert str(caught.value) == (
        "the pattern 're:(.)*' took more than 0 s for 1 of 97 paths; write it without nested repetitions"
    )


def test_many_expressions_that_are_slow_together_are_stopped(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("olq_fx.patterns.time.monotonic", lambda: next(ticks) / 100)  # ten milliseconds a look
    index = PathIndex(f"layers.{number}" for number in range(500))

    def find_all() -> None:
        for number in range(1000):
            assert index.find(compile_pattern(f"re:(l|a)+(?=y).*{number % 500}$"))

    with pytest.raises(ConfigurationError) as caught:
        find_all()
    said = " took more than 60 s together for 500 paths; write them without nested repetitions"
    assert str(caught.value).startswith("the patterns up to 're:(l|a)+(?=y).*")
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("model.layers.3.self_attn.q_porj", ["'model.layers.3.self_attn.q_proj'"]),
        ("model.layers.3.mlp.gate_prj.weight", ["'model.layers.3.mlp.gate_proj.weight'"]),
        ("model.layers.99.mlp.gate_prj", ["'model.layers.0.mlp.gate_proj'"]),
        ("*.q_porj", ["q_porj", "'q_proj'"]),
        ("re:.*gate_prj$", ["gate_prj", "'gate_proj'"]),
        ("gate_proj*x", ["model.layers.0.mlp.gate_proj"]),
        ("re:^$", ["and 94 more"]),
        ("completely.else", ["lm_head", "and 94 more"]),
    ],
)
def test_a_pattern_without_a_match_offers_what_was_perhaps_meant(pattern, said):
    words = INDEX.nearest(compile_pattern(pattern))
    for word in said:
        assert word in words


def test_an_index_of_nothing_says_so():
    assert "no linear" in PathIndex([]).nearest(compile_pattern("a"))


def test_paths_inside_a_container():
    assert INDEX.below("model.layers.11.mlp") == [
        f"model.layers.11.mlp.{name}{end}" for name in ("down_proj", "gate_proj") for end in ("", ".weight")
    ]
    assert INDEX.below("model.layers.1") == [
        path for path in INDEX.find(compile_pattern("*")) if path.startswith("model.layers.1.")
    ]


@pytest.mark.parametrize(
    ("body", "bounded"),
    [
        (r".*layers\.(3|4)\..*_proj$", True),
        ("a+b?c?", True),
        (r"(?:a|b)\.[^.]+\.x", True),
        (".*a.*b.*c", False),
        ("(a+)+b", False),
        ("(ab)*", False),
        ("(?:a)+", False),
        ("a{2,9}", False),
        ("a?b?c?d?e?", False),
        ("(?=a)b", False),
        (r"(a)\1", False),
        ("(?i)a", False),
        ("(?R)?a", False),
    ],
)
def test_only_what_is_plain_runs_without_a_clock(body, bounded):
    assert compile_pattern(f"re:{body}").bounded is bounded


def test_a_long_path_is_tried_against_the_clock(monkeypatch):
    monkeypatch.setattr("olq_fx.patterns.TOTAL_TIMEOUT", 0.0)
    assert PathIndex(["a" * 1000]).find(compile_pattern("re:.*b")) == []
    with pytest.raises(ConfigurationError, match="took more than 0 s"):
        PathIndex(["a" * 1001]).find(compile_pattern("re:.*b"))


@pytest.mark.parametrize("form", ["{0}.*", r"re:.*layers\.{0}\.", "re:(?:model|net).layers.({0}).mlp.(experts)."])
def test_the_first_patterns_are_tried_on_all_paths_and_many_on_few(form, monkeypatch):
    """An index of what is in the paths pays only when there are patterns enough."""
    made = []
    monkeypatch.setattr("olq_fx.patterns.PathFilter", lambda paths: made.append(1) or PathFilter(paths))
    index = PathIndex(f"model.layers.{layer}.mlp.experts.{number}" for layer in range(50) for number in range(4))
    for layer in range(4):
        index.find(compile_pattern(form.format(layer)))
    assert not made
    assert len(index.find(compile_pattern(form.format(30)))) in (0, 4)
    assert made


FORMS = {
    "globs": "model.layers.{0}.mlp.experts.{1}.*",
    "escaped dots": r"re:.*\.layers\.{0}\.mlp\.experts\.{1}\.",
    "unescaped dots": "re:.*.layers.{0}.mlp.experts.{1}.up_proj$",
    "groups": r"re:.*layers\.({0})\.(mlp|feed)\.experts\.(?:{1})\.up",
    "both": "re:.*layers.({0}).(mlp|feed).experts.(?:{1}).(up_proj|down_proj)",
    "sets": "*.layers.{0}.[!x]lp.experts.{1}.u?_proj",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_thousand_patterns_are_tried_on_few_of_ten_thousand_paths(form, monkeypatch):
    paths = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(100) for expert in range(100)]
    index = PathIndex(paths)
    patterns = [compile_pattern(FORMS[form].format(layer, e)) for layer in range(100) for e in range(10)]
    tried = []
    positions = PathFilter.positions

    def counting(self, alternatives):
        found = positions(self, alternatives)
        tried.append(len(found))
        return found

    monkeypatch.setattr(PathFilter, "positions", counting)
    assert sum(len(index.find(pattern)) for pattern in patterns) == 1000
    assert len(tried) > 990
    assert sum(tried) <= 4000  # of ten million pairs
