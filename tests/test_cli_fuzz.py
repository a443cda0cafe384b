"""Whatever is typed, `olq-fx` answers with an exit code and at most one paragraph: no traceback, no hang."""

import dataclasses
import json

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from olq_fx.cli_answers import EXIT_CODES
from olq_fx.cli_options import dotted_keys
from olq_fx.comparison_bounds import HIGHER, LOWER
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import OlqFxError
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES

words = st.sampled_from(
    [*SCHEMES, *FORMATS, *HIGHER, *LOWER, "none", "online", "0", "2", "re:.*", "re:(", "*", "[", ""]
)
scalars = st.one_of(words, st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
FIELDS = [field.name for field in dataclasses.fields(QuantizationConfig)]
OTHERS = [
    "method",
    "quantization_config",
    "components",
    "activation_scheme",
    "weight",
    "activation",
    "weight_block_size",
]
KEYS = st.one_of(st.sampled_from([*FIELDS, *OTHERS]), words, st.text(max_size=8))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
texts = st.one_of(words, st.text(max_size=30), values.map(json.dumps))
quiet = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def check(ended) -> None:
    assert ended.code in EXIT_CODES
    assert "Traceback" not in ended.err + ended.out
    if ended.code in (2, 3, 4):
        errors = [line for line in ended.err.splitlines() if not line.startswith("olq-fx: warning: ")]
        assert len(errors) == 1
        assert errors[0].startswith("olq-fx: error: ")
        assert len(errors[0]) > len("olq-fx: error: ") + 5


@quiet
@given(st.dictionaries(KEYS, values, max_size=4), st.booleans())
@example({"ignore": ["re:(0|0)*$"], "quantization": "int8"}, True)
@example({"ignore": ["re:(a|a)*b"], "quantization": "int8"}, False)
def test_any_configuration(olq, config, strict):
    ended = olq("plan", "cases:stack", "-c", json.dumps(config), "--strict" if strict else "--no-strict", "--json")
    check(ended)
    assert ended.data is not None


@quiet
@given(texts)
@example("\udcff")
@example("\x00.json")
@example("/dev/null")
@example("1e999")
@example("[" * 5000)
@example("9" * 5000)
def test_any_text_as_a_configuration(olq, text):
    check(olq("plan", "cases:stack", f"--quantization-config={text}"))


@quiet
@given(st.lists(st.tuples(st.lists(KEYS, max_size=3).map(".".join), texts), max_size=3))
@example([("targets.re:(x+x+)+y", "mxfp4")])
@example([("components.a.b.c", "1"), ("components.a.b", "{}")])
@example([("ignore+", "0"), ("ignore+", "2")])
@example([("ignore+", "0"), ("ignore.x", "2")])
@example([("ignore", "true"), ("ignore+", "2")])
@example([("linear+", "mxfp4"), ("linear+", "mxfp4")])
@example([("per_token_activation", "1"), ("per_token_activation+", "2")])
@example([("per_token_activation", "[" * 5000)])
def test_any_dotted_keys(olq, keys):
    arguments = [word for key, value in keys for word in (f"--quantization-config.{key}", value)]
    check(olq("plan", "cases:stack", "-q", "int8", *arguments))


@quiet
@given(st.one_of(texts, st.text(alphabet="abc:./\\0é", max_size=12)), texts)
@example("\udcff", "\udcff")
@example("\x00", "\x00")
@example("~", "a" * 5000)
@example("cases:stack.__call__", "int8")
@example("cases:nn.Module", "int8")
@example("cases:__dict__", "int8")
@example("os:abort_", "int8")
def test_any_model_and_scheme(olq, model, scheme):
    """Nothing that is importable may come out by chance: a colon stays with what `cases` has."""
    if ":" in model and not model.startswith("cases:") and model.partition(":")[0].isidentifier():
        model = model.replace(":", "/")
    check(olq("plan", f"--quantization={scheme}", "--", model))


@quiet
@given(texts, texts)
def test_any_bounds(olq, under, over):
    check(
        olq(
            *("compare", "cases:ready", "--inputs", "cases:inputs", "-q", "int8", "--repeat", "0", "--no-layers"),
            *(f"--fail-under={under}", f"--fail-over={over}"),
        )
    )


@quiet
@given(
    st.lists(
        st.one_of(st.sampled_from(["plan", "compare", "run", "schemes", "--json", "--seed", "--"]), texts), max_size=4
    )
)
def test_any_words(olq, arguments):
    if "cases:stack" not in arguments:
        check(olq(*arguments))


@given(st.lists(st.text(max_size=40)))
def test_splitting_off_dotted_keys_loses_nothing(words):
    try:
        found, rest = dotted_keys(words)
    except OlqFxError:
        return
    assert len(rest) + len(found) <= len(words) <= len(rest) + 2 * len(found)
