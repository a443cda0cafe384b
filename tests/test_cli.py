"""`olq-fx`: a table of commands with what they print and their exit codes, dotted keys, errors, JSON."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import olq_fx
from olq_fx import tuning, tuning_compile
from olq_fx.cli import cli
from olq_fx.cli_answers import EXIT_CODES
from olq_fx.formats import FORMATS
from olq_fx.kernels.tuned_json import load
from olq_fx.schemes import SCHEMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DENSE = str(ROOT / "tests/data/tiny-qwen3-wiki")
PLAN = ("plan", "cases:stack")
KERNELS = ("kernels", "cases:stack")
TUNE = ("tune", "--shape", "5x256x256", "--scheme", "int8", "--arch", "sm_80", "--candidates", "2")
EMITTED = (*KERNELS, "--emitted")
COMPARE = ("compare", "cases:stack", "--inputs", "cases:inputs", "--repeat", "0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--version",), olq_fx.__version__),
        (("--help",), "Exit codes"),
        (("-h",), "compare"),
        (("plan", "--help"), "--quantization-config.KEY VALUE"),
        (("schemes",), "nvfp4_per_token"),
        (("formats",), "128 x 128"),
        (("pairs",), "with none"),
        ((*PLAN, "--quantization", "fp8_per_block"), "2 of 2 weights to be quantized"),
        ((*PLAN, "-q", "FP8-per-block"), "fp8_per_block_static / fp8_per_block_dynamic"),
        ((*PLAN, "--quantization=mxfp4"), "mxfp4 / mxfp4"),
        ((*PLAN, "-c", '{"linear": "mxfp4", "ignore": ["0"]}'), "ignored by '0'"),
        ((*PLAN, "--quantization_config", '{"method": "int8"}'), "int8_per_token"),
        ((*PLAN, "-q", "int8", "-c", '{"ignore": ["0"]}'), "1 of 2 weights"),
        ((*PLAN, "-q", "int8", "--quantization-config.linear.activation", "null"), "/ none"),
        ((*PLAN, "-q", "online", "--quantization-config.targets.2", "mxfp4"), "1 of 2 weights"),
        ((*PLAN, "-q", "int8", "--device", "cuda"), "triton"),
        ((*PLAN, "-q", "int8", "--no-meta", "--dtype", "bfloat16"), "bfloat16"),
        (("plan", "cases:ready", "-q", "int8"), "2 of 2 weights"),
        ((*PLAN, "-q", "int8", "--against", "mxfp4"), "int8_per_channel_static"),
        ((*PLAN, "-q", "int8", "--against", '{"quantization": "int8", "ignore": ["0"]}'), "0.weight"),
        (("plan", "cases:Uses", "-q", "int8", "--inputs", "cases:inputs"), "4 of 4 weights"),
        ((*KERNELS, "-q", "mxfp4"), "bf16 (w4a16)"),
        ((*KERNELS, "-q", "mxfp4", "--arch", "SM100", "--m", "7"), "all layers with M = 7"),
        ((*KERNELS, "--quantization-config.linear", "fp8", "--fused", "--arch", "l40s"), "(--fused)"),
        (KERNELS, "nvfp4_weight_only"),
        (("kernels", "cases:ready", "-q", "int8", "--no-meta", "--dtype", "bfloat16"), "not measurements"),
        (("kernels", "--code", "--format", "int8_per_token", "--arch", "sm_120"), "kernels for sm_120 by triton"),
        ((*TUNE, "--out", "t.json"), "1 choices for sm_80 written to t.json"),
        ((*TUNE, "--kernel", "grouped", "--experts", "3"), "grouped int8_per_token x int8_per_channel_static, 8 x 256"),
        (("tune", "cases:stack", "-q", "mxfp8", "--m", "3", "--candidates", "1"), "nothing was measured"),
        (("quantize", DENSE, "made", "-q", "mxfp8"), "written in"),
        ((*COMPARE, "-q", "mxfp8"), "relative_l2"),
        ((*COMPARE, "-q", "mxfp8", "--fail-under", "cosine=0.9,psnr_db=20"), "all bounds hold"),
        ((*COMPARE, "-q", "none", "--fail-over", "mae=0"), "all bounds hold"),
        ((*COMPARE, "-q", "mxfp8", "--loop", "cases:loop"), "step 2: output"),
        ((*COMPARE, "-q", "mxfp8", "--no-layers"), "output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_works(olq, arguments, said):
    ended = olq(*arguments)
    assert (ended.code, ended.err) == (0, "")
    assert said in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "Missing command"),
        (("plam",), 2, "plan"),
        (("schemes", "more"), 2, "more"),
        (("plan",), 2, "MODEL"),
        ((*PLAN, "--quantisation", "fp8"), 2, "--quantization"),
        (PLAN, 2, "--quantization NAME"),
        ((*PLAN, "-q", "fp9"), 2, "did you mean 'fp8'"),
        ((*PLAN, "-q"), 2, "requires an argument"),
        ((*PLAN, "-q", "fp8", "-q", "int8"), 2, "given 2 times"),
        ((*PLAN, "-q", "online"), 2, "online"),
        ((*PLAN, "-q", "fp8", "-c", '{"quantization": "int8"}'), 2, "given twice"),
        ((*PLAN, "-q", "fp8", "-c", '{"ignroe": []}'), 2, "ignore"),
        ((*PLAN, "-c", "{"), 2, "malformed JSON"),
        ((*PLAN, "-c", "no/such/file.yaml"), 2, "no/such/file.yaml"),
        ((*PLAN, "-c", "/dev/zero"), 2, "it is a device, not a regular file"),
        ((*PLAN, "-c", os.curdir + "/"), 2, "it is a folder, not a regular file"),
        ((*PLAN, "--quantization-config.linear.activation", "mxfp8"), 2, "quantized already, and none of these is"),
        (
            (
                "plan",
                "cases:long_names",
                "-q",
                "fp8",
                "--quantization-config.ignore",
                "re:(?:a|[a-z._0-9]|[a-z]{2})+[A-Z]",
            ),
            2,
            "took more than 100 ms for the path",
        ),
        ((*PLAN, "-q", "fp8", "--quantization-config.ignore", "typo"), 2, "typo"),
        ((*PLAN, "-q", "fp8", "--quantization-config.ignroe", "0"), 2, "ignore"),
        ((*PLAN, "-q", "fp8", "--quantization-config.linear.activation"), 2, "needs a value"),
        ((*PLAN, "-q", "fp8", "--quantization-config.linear.activation", "--json"), 2, "needs a value"),
        ((*PLAN, "-q", "fp8", "--quantization-config.", "x"), 2, "empty"),
        ((*PLAN, "-q", "fp8", "--quantization-config.linear..weight", "x"), 2, "empty"),
        (
            (*PLAN, "--quantization-config.linear", "mxfp4", "--quantization-config.linear.weight", "mxfp8"),
            2,
            "whole",
        ),
        ((*PLAN, "--quantization-config.linear", "mxfp4", "--quantization-config.linear", "mxfp8"), 2, "twice"),
        ((*PLAN, "--quantization-config.mxfp4_scale", '{"weight": 1, "weight": 2}'), 2, "stands twice"),
        ((*PLAN, "-q", "fp8", "--quantization-config.per_token_activation", "yes"), 2, "per_token_activation"),
        ((*PLAN, "-q", "fp8", "--dtype", "float8"), 2, "bfloat16"),
        (("plan", "no/such/model", "-q", "fp8"), 2, "no folder here"),
        (("plan", "cases.py", "-q", "fp8"), 2, "is a file"),
        (("plan", ".", "-q", "fp8"), 2, "config.json"),
        (("plan", "", "-q", "fp8"), 2, "no folder here"),
        (("plan", "cases:stak", "-q", "fp8"), 2, "did you mean 'stack'"),
        (("plan", "no_such_module:stack", "-q", "fp8"), 2, "no module 'no_such_module'"),
        (("plan", "cases:number", "-q", "fp8"), 2, "gives int, not a"),
        (("plan", "cases:inputs", "-q", "fp8"), 2, "gives list, not a"),
        (("plan", "cases:broken", "-q", "fp8"), 4, "RuntimeError: no luck today"),
        (("plan", "cases:leaves", "-q", "fp8"), 4, "SystemExit: 7"),
        (("plan", "cases:Uses", "-q", "fp8", "--inputs", "cases:wide"), 2, "cannot be traced"),
        (("plan", "cases:Uses", "-q", "fp8", "--inputs", "inputs"), 2, "module:callable"),
        (("quantize", DENSE), 2, "OUT"),
        (("quantize", "cases:stack", "made", "-q", "int8"), 2, "needs a folder"),
        (("kernels",), 2, "MODEL"),
        ((*KERNELS, "--arch", "sm_91"), 2, "did you mean 'sm_90'"),
        ((*KERNELS, "--m", "1,0"), 2, "positive numbers of rows"),
        ((*KERNELS, "--m", "few"), 2, "not 'few'"),
        ((*KERNELS, "-q", "fp9"), 2, "did you mean 'fp8'"),
        ((*KERNELS, "-q", "fp8", "--quantization-config.ignore", "typo"), 2, "typo"),
        ((*KERNELS, "--format", "mxfp8"), 2, "--format goes with --code"),
        ((*KERNELS, "--code"), 2, "takes no MODEL"),
        ((*KERNELS, "--no-code"), 2, "--no-code goes with --emitted"),
        ((*KERNELS, "--dump", "there", "--tokens", "1x8"), 2, "--tokens, --dump goes with --emitted"),
        (("kernels", "--emitted", "-q", "fp8"), 2, "MODEL"),
        ((*EMITTED, "--inputs", "cases:inputs"), 2, "--quantization NAME"),
        ((*EMITTED, "-q", "fp9"), 2, "did you mean 'fp8'"),
        ((*EMITTED, "-q", "fp8", "--m", "1", "--fused"), 2, "does not go with --m, --fused"),
        ((*EMITTED, "-q", "fp8", "--format", "mxfp8"), 2, "does not go with --format"),
        ((*EMITTED, "-q", "fp8", "--tokens", "128"), 2, "such as 1x128, not '128'"),
        ((*EMITTED, "-q", "fp8", "--blocks", "1"), 2, "--blocks goes with a folder"),
        ((*EMITTED, "-q", "fp8", "--dump", os.curdir), 2, "is not empty"),
        ((*EMITTED, "-q", "fp8", "--dump", "cases.py"), 2, "File exists"),
        (("kernels", "--code", "-q", "fp8"), 2, "takes no MODEL"),
        (("kernels", "--code", "--format", "mxfp9"), 2, "did you mean 'mxfp8'"),
        (("kernels", "--code", "--format", "fp8_per_block_static_128x32"), 2, "no kernel knows the format"),
        (("kernels", "no/such/model"), 2, "no folder here"),
        (("tune",), 2, "either MODEL or --shape"),
        ((*TUNE, "cases:stack"), 2, "either MODEL or --shape"),
        (("tune", "cases:stack"), 2, "--quantization NAME"),
        (("tune", "cases:stack", "-q", "fp8", "--experts", "2"), 2, "go with --shape"),
        (("tune", "cases:stack", "-q", "none"), 2, "nothing to tune"),
        (("tune", "cases:stack", "-q", "fp8", "--m", "0"), 2, "positive numbers of rows"),
        ((*TUNE, "-q", "int8"), 2, "given 2 times"),
        ((*TUNE, "--m", "3"), 2, "--m goes with MODEL"),
        ((*TUNE, "--shape", "5x256"), 2, "--shape takes MxNxK"),
        ((*TUNE, "--shape", "5x0x256"), 2, "three positive numbers"),
        ((*TUNE, "--kernel", "grouped"), 2, "--experts N goes with --kernel grouped"),
        ((*TUNE, "--experts", "2"), 2, "--experts N goes with --kernel grouped"),
        ((*TUNE, "--kernel", "chain"), 2, "int8_per_token has a statistic of more than a piece of a row"),
        ((*TUNE, "--kernel", "gemm"), 2, "'product', 'chain', 'grouped'"),
        ((*TUNE, "--out", "no/such/folder.json"), 2, "no file can be written there"),
        ((*TUNE, "--out", "."), 2, "no file can be written there"),
        ((*TUNE, "--arch", "sm_91"), 2, "did you mean 'sm_90'"),
        ((*TUNE, "--candidates", "0"), 2, "--candidates"),
        (("tune", "--shape", "5x256x256", "--scheme", "fp9"), 2, "did you mean 'fp8'"),
        (("tune", "--shape", "5x256x256", "-q", "mxfp8_weight_only", "--kernel", "chain"), 2, "this scheme has none"),
        (("tune", "--shape", "5x256x256", "-q", "none"), 2, "this configuration names none"),
        (("compare", "cases:stack", "-q", "fp8"), 2, "--inputs"),
        (("compare", "cases:stack", "-q", "fp8", "--text", "cases.py"), 2, "--inputs"),
        ((*COMPARE, "-q", "fp8", "--text", "cases.py"), 2, "exclude"),
        ((*COMPARE, "-q", "fp8", "--fail-under", "psnr=20"), 2, "psnr_db"),
        ((*COMPARE, "-q", "fp8", "--fail-under", "mae=20"), 2, "--fail-over"),
        ((*COMPARE, "-q", "fp8", "--fail-over", "kl=20"), 2, "logits"),
        ((*COMPARE, "-q", "fp8", "--suggest-ignore"), 2, "bounds"),
        ((*COMPARE, "-q", "fp8", "--loop", "cases:number"), 2, "no function"),
        ((*COMPARE, "-q", "fp8", "--loop", "cases:inputs"), 4, "TypeError"),
        ((*COMPARE, "-q", "fp8", "--plot", "error.nothing"), 2, "cannot draw"),
        ((*COMPARE, "-q", "fp8", "--plot", "error.png", "--metric", "psnr"), 2, "psnr_db"),
        ((*COMPARE, "-q", "fp8", "--device", "meta"), 2, "meta"),
        ((*COMPARE, "-q", "fp8", "--device", "nowhere"), 2, "nowhere"),
        ((*COMPARE, "-q", "fp8", "--seed", "-1"), 2, "--seed"),
        ((*COMPARE, "-q", "mxfp4", "--fail-under", "psnr_db=200"), 1, "psnr_db of 'output'"),
        ((*COMPARE, "-q", "mxfp4", "--fail-over", "mae=0"), 1, "over 0"),
        (("compare", "cases:stack", "-q", "fp8", "--inputs", "cases:wide"), 4, "cannot run"),
        (("compare", "cases:Fails", "-q", "fp8", "--inputs", "cases:inputs"), 4, "ValueError: cannot do this"),
        (("compare", "cases:nan", "-q", "fp8", "--inputs", "cases:inputs"), 4, "0.weight"),
        (("run", "cases:stack", "-q", "fp8", "--prompt", "x"), 2, "tokenizer"),
        (("run", "cases:stack", "-q", "fp8"), 2, "--prompt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_does_not(olq, arguments, code, said):
    """One paragraph on the error stream; with --json an object on the standard output as well."""
    ended = olq(*arguments)
    assert ended.code == code
    if code == 1:
        assert said in ended.out
        return
    assert said in ended.err
    assert ended.err.startswith("olq-fx: error: ")
    assert ended.err.count("\n") == 1
    assert bool(ended.out) == ("--json" in arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("schemes",),
        ("formats",),
        ("pairs",),
        (*PLAN, "-q", "fp8"),
        KERNELS,
        ("kernels", "--code", "--format", "int8_per_token"),
        TUNE,
        (*COMPARE, "-q", "none"),
        (*COMPARE, "-q", "mxfp4", "--fail-under", "sqnr_db=13", "--suggest-ignore"),
    ],
    ids=" ".join,
)
def test_everything_is_strict_json(olq, arguments):
    text, ended = olq(*arguments), olq(*arguments, "--json")
    assert ended.data
    assert ended.code == text.code
    assert ended.err == ""


def test_a_tuned_table_is_written_for_others_to_follow(olq):
    ended = olq(*TUNE, "--out", "t.json", "--json")
    table = load("t.json")
    [(problem, choice)] = table.choices.items()
    assert (table.capability, table.device, table.ignored) == (80, "", ())
    assert (problem.m, problem.n, problem.k, problem.weight) == (8, 256, 256, "int8_per_channel_static")
    [said] = ended.data["problems"]
    assert said["choice"]["blocking"] == dataclasses.asdict(choice.blocking)
    assert len(said["tried"]) == 2
    assert not ended.data["measured"]


def test_where_no_candidate_can_be_used_the_exit_code_says_so(olq, monkeypatch):
    def none_compiles(candidates, **options):
        return [tuning_compile.Compiled(one, "8 bytes of stack", None) for one in candidates]

    monkeypatch.setattr(tuning, "compile_all", none_compiles)
    ended = olq(*TUNE, "--out", "t.json")
    assert ended.code == 4
    assert "8 bytes of stack" in ended.out
    assert "1 of 1 problems have no blocking that can be used" in ended.out
    assert load("t.json").choices == {}


def test_an_error_is_json_too(olq):
    ended = olq(*PLAN, "-q", "fp9", "--json")
    assert ended.data == {
        "error": {
            "type": "ConfigurationError",
            "message": ended.err.removeprefix("olq-fx: error: ").strip(),
            "exit_code": 2,
        }
    }


def test_an_interruption(olq):
    ended = olq("plan", "cases:stopped", "-q", "int8", "--json")
    assert (ended.code, ended.data["error"]["message"]) == (130, "interrupted")
    assert ended.err.strip() == "olq-fx: error: interrupted"


def test_a_traceback_is_shown_on_request_only(olq):
    ended = olq("plan", "cases:broken", "-q", "fp8", "--traceback")
    assert "Traceback" in ended.err
    assert "no luck" in ended.err.splitlines()[-1]
    assert ended.code == 4


def test_tables_are_the_tables(olq):
    listed = olq("schemes", "--json").data
    assert [row["name"] for row in listed] == list(SCHEMES)
    assert [row["linear"]["activation"] for row in listed] == [s.linear.activation for s in SCHEMES.values()]
    assert [row["name"] for row in olq("formats", "--json").data] == list(FORMATS)
    found = olq("pairs", "--json").data
    weights = [format for format in FORMATS.values() if format.weight]
    activations = [format for format in FORMATS.values() if format.activation]
    assert len(found) == len(weights) * (len(activations) + 1)
    assert all(row["works"] for row in found)
    assert {row["weight"] for row in found if row["default"]} == {format.name for format in weights}
    assert {name for row in found for name in row["schemes"]} == set(SCHEMES)


# One configuration in all its spellings


@pytest.mark.parametrize(
    "arguments",
    [
        ("-q", "int8", "-c", '{"ignore": ["0"], "linear": {"activation": null}}'),
        ("-c", '{"quantization": "int8", "quantization_config": {"ignore": "0", "linear": {"activation": null}}}'),
        ("-c", "config.yaml"),
        ("-c", "config.json"),
        ("-q", "INT8", "--quantization-config.ignore", "0", "--quantization-config.linear.activation", "null"),
        ("--quantization-config.linear.activation=null", "--quantization-config.ignored-layers+=0", "-q", "int8"),
        ("--quantization-config.method", "int8", "-c", '{"linear": {"activation": null}, "ignore": "0"}'),
        ("--quantization_config.ignore", '["0"]', "-q", "int8", "-c", '{"linear": {"activation": null}}'),
    ],
    ids=" ".join,
)
def test_every_spelling_gives_the_same_plan(olq, arguments, tmp_path):
    (tmp_path / "config.yaml").write_text("quantization: int8\nignore: ['0']\nlinear:\n  activation: null\n")
    (tmp_path / "config.json").write_text('{"method": "int8", "ignored_layers": "0", "linear": {"activation": null}}')
    expected = olq_fx.QuantizationConfig("int8", ignore="0", linear={"activation": None})
    ended = olq(*PLAN, *arguments, "--json")
    assert ended.code == 0, ended.err
    assert ended.data["config"] == expected.to_dict()
    assert [row["decision"] for row in ended.data["rows"]] == ["leave", "quantize"]


def test_a_pattern_keeps_its_dots(olq):
    data = olq(
        "plan", "cases:Routed", "-q", "online", "--quantization-config.targets.mlp.experts.1", "mxfp4", "--json"
    ).data
    assert data["config"]["targets"] == {"mlp.experts.1": {"weight": "mxfp4", "activation": "mxfp4"}}


def test_a_component_keeps_the_dots_of_its_prefix(olq):
    keys = ("--quantization-config.components.mlp.experts.quantization", "int8")
    data = olq("plan", "cases:Routed", *keys, "--quantization-config.components.default", "null", "--json").data
    formats = {row["path"]: row["slot"] and row["slot"]["weight"] for row in data["rows"] if "experts" in row["path"]}
    assert set(formats.values()) == {"int8_per_channel_static"}


def test_what_two_configurations_do_differently(olq):
    data = olq(*PLAN, "-q", "int8", "--against", '{"quantization": "int8", "ignore": ["0"]}', "--json").data
    [changed] = data["changed"]
    assert changed["before"]["decision"] == "leave"
    assert changed["after"]["path"] == "0.weight"
    assert olq(*PLAN, "-q", "int8", "--against", "INT8", "--json").data["changed"] == []
    assert olq(*PLAN, "-q", "int8", "--against", "int9").code == 2


def test_without_strict_an_unmatched_pattern_is_a_warning(olq):
    ended = olq(*PLAN, "-q", "int8", "--no-strict", "--quantization-config.ignore", "typo")
    assert ended.code == 0
    assert ended.err.startswith("olq-fx: warning: ")
    assert "typo" in ended.err


# What the model does meanwhile


def test_what_a_model_prints_does_not_spoil_the_output(olq):
    ended = olq("plan", "cases:speaks", "-q", "int8", "--json")
    assert ended.data["rows"]
    assert ended.err == "a model that prints while it is built\n"


def test_a_plan_takes_no_memory(olq, tmp_path):
    (tmp_path / "huge.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(10**6, 10**7)\n")
    data = olq("plan", "huge:make", "-q", "mxfp4", "--json").data
    assert data["bytes_before"] == 4 * 10**13
    del sys.modules["huge"]


def test_a_model_that_needs_data_says_how_to_give_it(olq, tmp_path):
    (tmp_path / "needy.py").write_text(
        "import torch\ndef make():\n    torch.ones(1).item()\n    return torch.nn.Linear(8, 8)\n"
    )
    ended = olq("plan", "needy:make", "-q", "int8")
    assert (ended.code, "--no-meta" in ended.err) == (4, True)
    assert olq("plan", "needy:make", "-q", "int8", "--no-meta").code == 0
    del sys.modules["needy"]


def test_a_module_that_cannot_be_imported(olq, tmp_path):
    (tmp_path / "half.py").write_text("import there_is_no_such_package\n")
    ended = olq("plan", "half:make", "-q", "int8")
    assert ended.code == 4
    assert "there_is_no_such_package" in ended.err


# compare


def test_compare_is_the_function(olq):
    data = olq(*COMPARE, "-q", "mxfp4", "--seed", "3", "--json").data
    module = sys.modules["cases"]
    assert data["seed"] == 3
    assert [layer["path"] for layer in data["layers"]] == ["0", "2"]
    assert data["outputs"]["output"]["count"] == 2 * 4 * 32
    assert data["config"] == {"quantization": "mxfp4"}
    found = olq_fx.compare(module.ready, "mxfp4", module.inputs(), repeat=0)
    again = olq("compare", "cases:ready", "--inputs", "cases:inputs", "-q", "mxfp4", "--repeat", "0", "--json").data
    assert again["outputs"] == json.loads(found.to_json())["outputs"]


def test_a_suggested_list_can_be_given_back(olq):
    bound = ("--fail-under", "sqnr_db=14")
    first = ("compare", "cases:ready", "--inputs", "cases:inputs", "--repeat", "0", "-q", "mxfp4", *bound)
    ended = olq(*first, "--suggest-ignore", "--json")
    assert ended.code == 1
    ignore = ended.data["suggestion"]["ignore"]
    assert ignore
    second = olq(*first, "-c", json.dumps({"ignore": ignore}))
    assert second.code == 0, second.out


def test_a_picture_is_drawn(olq, tmp_path):
    assert olq(*COMPARE, "-q", "mxfp4", "--plot", "error.png").code == 0
    assert (tmp_path / "error.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_a_picture_is_refused_before_any_work(olq, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = olq("compare", "cases:broken", "-q", "mxfp4", "--plot", "error.png")
    assert ended.code == 3
    assert "pip install 'olq-fx[plot]'" in ended.err


def test_cost_is_measured(olq):
    data = olq("compare", "cases:stack", "--inputs", "cases:inputs", "-q", "int8", "--repeat", "1", "--json").data
    assert data["latency_ms"]["ratio"] > 0
    assert data["peak_memory_bytes"]["ratio"] < 1


# The program


def processes(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "olq_fx.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_a_real_process_that_compares(olq, tmp_path):
    done = processes("compare", "cases:stack", "--inputs", "cases:inputs", "-q", "int8", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["latency_ms"]["candidate"] > 0


def test_a_real_process_that_fails(olq, tmp_path):
    done = processes("plan", "cases:stack", "-q", "fp9", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "olq-fx: error: unknown scheme 'fp9'; did you mean 'fp8'?\n"


def test_a_reader_that_leaves_is_no_error(olq, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "olq_fx.cli", "schemes"]
    pipe = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pipe.stdout.close()
    error = pipe.stderr.read()
    pipe.stderr.close()
    assert (pipe.wait(), error) == (0, b"")


def test_every_command_and_option_is_explained():
    for name, command in cli.commands.items():
        assert command.help, name
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert {"as_json", "show_traceback"} <= {option.name for option in options}
        own = [option for option in options if option.name not in ("seed", "max_new_tokens")]
        assert all(option.help for option in own), name


def test_the_script_is_installed_and_its_exit_codes_are_documented():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"olq-fx": "olq_fx.cli:entry"}
    readme = (ROOT / "README.md").read_text()
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in readme
    for command in cli.commands:
        assert f"olq-fx {command}" in readme
