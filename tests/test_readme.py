"""README.md is true: its code runs, and its tables are the ones that the code and the benchmarks made.

`python tests/test_readme.py` (or `make readme`) writes the tables anew.
"""

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import olq_fx
from olq_fx.cli import cli, main
from olq_fx.cli_answers import EXIT_CODES
from olq_fx.formats import get_format
from olq_fx.numerics import quantized_bytes
from olq_fx.schemes import SCHEMES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md"]
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = {
    "demo": "A sentence encoder",
    "demo_llm": "A decoder, on text that it has not seen",
    "import_time": "What importing it adds to importing torch",
    "compile_time": "What it adds to compilation",
}
"""The results that stand in the README, with their headings."""


def scheme_table() -> str:
    """Markdown, one row a scheme: its formats, and how many bits a weight of 4096 x 4096 takes, scales included."""
    lines = ["| scheme | weight | activation | bits a weight |", "| --- | --- | --- | --- |"]
    for scheme in SCHEMES.values():
        weight, activation = scheme.linear.weight, scheme.linear.activation
        bits = 8 * quantized_bytes(get_format(weight), 4096, 4096) / 4096**2
        used = f"`{activation}`" if activation else "original precision"
        lines.append(f"| `{scheme.name}` | `{weight}` | {used} | {bits:.2f} |")
    return "\n".join(lines)


def report_block() -> str:
    """What the example of the README prints."""
    layers = torch.nn.ModuleDict({"embed": torch.nn.Embedding(100, 64), "up": torch.nn.Linear(64, 256)})
    layers["down"] = torch.nn.Linear(256, 64)
    return f"```text\n{olq_fx.quantize_(layers, {'linear': 'int8', 'ignore': ['down']})}\n```"


def command_table() -> str:
    """Markdown, one row a command of `olq-fx`."""
    rows = [f"| `olq-fx {name}` | {(command.help or '').splitlines()[0]} |" for name, command in cli.commands.items()]
    return "\n".join(["| command | what it does |", "| --- | --- |", *rows])


def exit_code_table() -> str:
    """Markdown, one row an exit code of `olq-fx`."""
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(["| exit code | meaning |", "| --- | --- |", *rows])


def results_block() -> str:
    """The saved tables of the demos and benchmarks that are short enough to show, and links to the others."""
    saved = {path.stem: path.read_text().strip() for path in sorted(RESULTS.glob("*.md"))}
    shown = [f"### {title}\n\n{saved[name]}" for name, title in SHOWN.items() if name in saved]
    links = [f"- [{name}](benchmarks/results/{name}.md)" for name in saved if name not in SHOWN]
    empty = "No table is saved yet: `make demo ARGS=--save`, `make bench ARGS=--save`, then `make readme`."
    return "\n\n".join([*shown, "\n".join(links)]).strip() or empty


def tables() -> dict[str, str]:
    """Every generated part of the README, by the name in its markers."""
    return {
        "schemes": scheme_table(),
        "report": report_block(),
        "commands": command_table(),
        "exit_codes": exit_code_table(),
        "results": results_block(),
    }


def between(name: str) -> re.Pattern[str]:
    """The text between two markers, with the end of its last line."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


def rewrite() -> None:
    """Put the generated parts into README.md."""
    text = README.read_text()
    for name, table in tables().items():
        text = between(name).sub(lambda _, table=table: f"{table}\n", text)  # type: ignore[misc]
    README.write_text(text)


@pytest.mark.parametrize("name", re.findall(r"<!-- (\w+) -->", README.read_text()))
def test_tables_are_the_generated_ones(name: str):
    [shown] = between(name).findall(README.read_text())
    assert shown == f"{tables()[name]}\n", "run `make readme`"


@pytest.mark.parametrize("name", ["schemes", "report", "commands", "exit_codes", "results"])
def test_the_table_is_shown(name: str):
    assert f"<!-- {name} -->" in README.read_text()


def code_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order and in one namespace, as a reader would type them; `>>>` blocks must also print what they show."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    runner, parser = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), doctest.DocTestParser()
    blocks = code_blocks()
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        if ">>>" in block:
            test = parser.get_doctest(block, names, f"block {number}", "README.md", 0)
            runner.run(test, clear_globs=False)
            names.update(test.globs)
        else:
            exec(compile(block, f"README.md, block {number}", "exec"), names)
    assert runner.summarize(verbose=False).failed == 0


def command_lines() -> list[list[str]]:
    """The lines of `olq-fx` that the README shows, as words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("olq-fx ")]


def test_command_lines_are_shown():
    assert {words[0] for words in command_lines()} >= {"plan", "compare", "run"}


@pytest.mark.parametrize("words", command_lines(), ids=lambda words: words[0])
def test_command_lines_run(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    assert main(words) == 0
    streams = capsys.readouterr()
    assert streams.out
    assert streams.err == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path):
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in target]
    paths = re.findall(r"`((?:olq_fx|passes|kernels|tests|benchmarks|notebooks)/[\w./-]*)`", text)
    missing = [name for name in {*links, *paths} if not (page.parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", page.read_text()))
    assert named <= targets


def test_every_target_is_in_the_help():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    assert targets == set(re.findall(r"^([a-z-]+):.* ## ", text, re.MULTILINE))
    [phony] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert targets == set(phony.split())


def test_every_benchmark_is_behind_a_target():
    programs = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if '"__main__"' in path.read_text()]
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in programs if not re.search(rf"\b{name}\b", makefile)] == []


if __name__ == "__main__":
    rewrite()
