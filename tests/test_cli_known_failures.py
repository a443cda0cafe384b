"""What people complain about, through the command line: what is found, what is left alone, what must not be silent.

Numbers 13 to 18 of the list that tests/test_known_failures_matching.py follows through the functions.
"""

import pytest

PLAN = ("plan", "cases:stack", "-q", "int8")


def decisions(ended) -> dict[str, str]:
    return {row["path"]: row["decision"] for row in ended.data["rows"]}


def test_13_weights_that_functions_use_are_listed_and_with_a_call_they_are_found(olq):
    unknown = olq("plan", "cases:Uses", "-q", "mxfp8", "--json")
    reasons = {row["path"]: row["reason"] for row in unknown.data["rows"] if row["decision"] == "leave"}
    assert set(reasons) == {"f_linear", "times_t", "mm"}
    assert set(reasons.values()) == {"use unknown; pass example_inputs or use backend()"}
    known = olq("plan", "cases:Uses", "-q", "mxfp8", "--inputs", "cases:inputs", "--json")
    assert set(decisions(known).values()) == {"quantize"}
    rows = {row["path"]: row for row in known.data["rows"]}
    assert [name for name, row in rows.items() if row["transposed"]] == ["mm"]
    assert rows["mm"]["shape"] == [32, 64]


def test_13_a_pattern_that_names_an_unknown_use_is_an_error_that_says_so(olq):
    ended = olq("plan", "cases:Uses", "-q", "online", "--quantization-config.targets.times_t", "mxfp8")
    assert ended.code == 2
    assert "example_inputs" in ended.err


def test_13_what_is_planned_with_a_call_is_compared_with_it(olq):
    run = ("compare", "cases:Uses", "-q", "mxfp4", "--inputs", "cases:inputs", "--repeat", "0", "--json")
    assert [layer["path"] for layer in olq(*run).data["layers"]] == ["known"]
    one, all_of_them = (olq(*run, *more).data["outputs"]["output"] for more in ((), ("--trace",)))
    assert one["sqnr_db"] > all_of_them["sqnr_db"] > 10


def test_14_shared_weights_have_one_row_with_all_their_names(olq):
    rows = {row["path"]: row for row in olq("plan", "cases:Tied", "-q", "int8", "--json").data["rows"]}
    assert rows["proj.weight"]["names"] == ["proj.weight", "twin.weight"]
    assert rows["proj.weight"]["decision"] == "quantize"
    tied = rows["embed_tokens.weight"]
    assert tied["names"] == ["embed_tokens.weight", "lm_head.weight"]
    assert (tied["decision"], bool(tied["reason"])) == ("leave", True)
    opted = olq("plan", "cases:Tied", "-q", "int8", "--quantization-config.include", '["lm_head"]', "--json")
    assert decisions(opted)["embed_tokens.weight"] == "quantize"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*PLAN, "--quantization-config.ignore", "00"), "'0'"),
        ((*PLAN, "--quantization-config.ignore", "re:nothing"), "re:nothing"),
        ((*PLAN, "--quantization-config.ignore", '["0", "2"]'), "nothing"),
        (("plan", "cases:stack", "-q", "online", "--quantization-config.moe", "int8"), "nothing"),
        (("plan", "cases:stack", "-q", "online"), "online"),
        (("plan", "cases:stack", "-c", "{}"), "nothing to quantize"),
        (("plan", "cases:stack", "-q", "int8", "--quantization-config.activation_scheme", "static"), "calibration"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_15_what_would_be_without_effect_is_an_error(olq, command, arguments, said):
    more = ("--inputs", "cases:inputs") if command == "compare" else ()
    ended = olq(command, *arguments[1:], *more)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert said in ended.err


@pytest.mark.parametrize(
    "config", ['{"targets": {"*": "mxfp4"}, "ignore": ["0"]}', '{"ignore": ["0"], "targets": {"*": "mxfp4"}}']
)
def test_16_ignored_and_targeted_at_once_is_an_error_in_either_order(olq, config):
    ended = olq("plan", "cases:stack", "-c", config)
    assert ended.code == 2
    assert "0.weight matches both ignore '0' and targets '*'" in ended.err.replace("\n", " ")


def test_17_routers_and_modulation_are_left_alone_with_a_reason(olq):
    ended = olq("plan", "cases:Routed", "-q", "mxfp4", "--json")
    rows = {row["path"]: row for row in ended.data["rows"]}
    for path in ("mlp.gate.weight", "norm1.linear.weight"):
        assert rows[path]["decision"] == "leave"
        assert rows[path]["reason"]
    assert {row["decision"] for path, row in rows.items() if "experts" in path} == {"quantize"}
    text = olq("plan", "cases:Routed", "-q", "mxfp4").out
    assert rows["mlp.gate.weight"]["reason"] in text


def test_18_the_share_of_bytes_is_said(olq):
    data = olq("plan", "cases:stack", "-q", "int8", "--quantization-config.ignore", "0", "--json").data
    assert data["share"] == pytest.approx(96 * 32 / (96 * 32 + 64 * 96))
    assert "33.3% of their bytes" in olq(*PLAN, "--quantization-config.ignore", "0").out
