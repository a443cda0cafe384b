"""Every test and every benchmark that needs a GPU, with one file of results.

Parts: `tests` runs pytest with the marker `gpu`; the others time our kernels against peers. Of several parts each has a
process of its own and nine minutes. The results of parts that ran before on the same GPU, versions and commit are kept
in the file. The exit code is 0 where all ran, 1 where a test failed or something of ours did not run, 2 without a GPU.
A missed target is a result, and no failure.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from demo_common import CONSOLE, RESULTS, give_up, table, version
from gpu_parts import NOTES, PARTS
from gpu_timing import COLUMNS, Figure, Measured, measure_all

from olq_fx.gpu_timing import CudaTimer, Timer

ROOT = Path(__file__).parent.parent
TESTS = "tests"
LIMIT = 540.0
"""Seconds of a part."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for."""
    options = _options().parse_args(arguments)
    if not torch.cuda.is_available():
        give_up(
            f"torch {torch.__version__} finds no CUDA device here; the kernels' values and machine code are tested "
            "without one (`make test`), their speed is not"
        )
    parts = options.part or [TESTS, *PARTS]
    if len(parts) > 1:
        return max([run_apart(name, options) for name in parts])
    [name] = parts
    started = time.monotonic()
    found = run_tests() if name == TESTS else time_part(name, CudaTimer(), options.rounds, options.limit)
    write(options.json, name, found | {"took": round(time.monotonic() - started, 1)})
    return int(bool(found["errors"]))


def run_apart(name: str, options: argparse.Namespace) -> int:
    """Run one part in a process of its own: a fault on the GPU, or too much time, costs this part only."""
    command = [sys.executable, __file__, "--part", name, "--json", str(options.json)]
    command += ["--rounds", str(options.rounds), "--limit", str(options.limit)]
    try:
        code = subprocess.run(command, timeout=LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        code, said = 1, f"ended after {LIMIT:g} s"
    else:
        said = "" if code in (0, 1) else f"ended with exit code {code}"
    if said:
        write(options.json, name, {"errors": [said]})
        CONSOLE.print(f"ERROR {name}: {said}", highlight=False)
    return int(code != 0)


def _options() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--part", action="append", choices=[TESTS, *PARTS], help="a part, or several; all by default")
    made.add_argument("--rounds", type=int, default=20, help="how often each entry is timed (default 20)")
    made.add_argument("--limit", type=float, default=LIMIT - 120, help="seconds after which a part begins nothing more")
    made.add_argument("--json", type=Path, default=RESULTS / "gpu.json", metavar="FILE", help="where results go")
    return made


def machine() -> dict[str, Any]:
    """What the figures were measured on, and what was measured."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton") or version("triton-nightly"),
        "torchao": version("torchao"),
        "gemlite": version("gemlite"),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def _output(*command: str) -> str | None:
    """The first line that a program says, or None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def write(path: Path, name: str, found: dict[str, Any]) -> None:
    """Put the results of a part into the file."""
    results = read(path, machine())
    results["parts"][name] = found
    path.write_text(json.dumps(results, indent=1) + "\n")
    CONSOLE.print(f"{name}: written to {path}", highlight=False)


def read(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Results to be added to: those in the file if they are of the same machine and commit, else none."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    fresh: dict[str, Any] = {"machine": about, "date": now, "parts": {}}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return fresh
    before = json.loads(path.read_text())
    return fresh | {"parts": before["parts"]} if before["machine"] == about else fresh


def time_part(
    name: str, timer: Timer, rounds: int, limit: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """The figures of one part as JSON values, printed as a table too."""
    found = measure_all(list(PARTS[name]()), timer, rounds, limit, clock, after=_free)
    found = dataclasses.replace(found, notes=(*NOTES.get(name, ()), *found.notes))
    show(name, found)
    return {
        "figures": [figure.to_dict() for figure in found.figures],
        "notes": list(found.notes),
        "errors": list(found.errors),
    }


def show(name: str, found: Measured) -> None:
    """Print a part: its table, what is missing, what went wrong, how many targets are reached."""
    CONSOLE.print(table(name, COLUMNS, [figure.cells() for figure in found.figures]))
    for note in found.notes:
        CONSOLE.print(f"- {note}", highlight=False, markup=False)
    for error in found.errors:
        CONSOLE.print(f"ERROR {error}", highlight=False, markup=False)
    CONSOLE.print(said_of_targets(found.figures), highlight=False)


def said_of_targets(figures: Sequence[Figure]) -> str:
    """How many targets are reached, missed and not measured."""
    wanted = [figure.reached for figure in figures if figure.target is not None]
    return (
        f"targets: {wanted.count(True)} reached, {wanted.count(False)} missed, {wanted.count(None)} not measured"
        if wanted
        else "no targets"
    )


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def run_tests() -> dict[str, Any]:
    """pytest with the marker `gpu`, in a process of its own: counts, and the names of what failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            f"--junitxml={report}",
            str(ROOT / "tests" / "gpu"),
        ]
        try:
            code = subprocess.run(command, cwd=ROOT, env=dict(os.environ), timeout=LIMIT - 30, check=False).returncode
        except subprocess.TimeoutExpired:
            return {"tests": {}, "errors": [f"the tests took longer than {LIMIT - 30:g} s"]}
        return read_report(report, code)


def read_report(report: Path, code: int) -> dict[str, Any]:
    """What pytest's report says.

    Args:
        report: a file in JUnit's form; it may be missing.
        code: the exit code of pytest.
    """
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [_name(case) for case in cases if case.find("skipped") is not None]
    errors = [f"{name} failed" for name in failed]
    if code and not failed:
        errors.append(f"pytest ended with exit code {code}")
    counts = {"ran": len(cases) - len(skipped), "failed": len(failed), "skipped": len(skipped)}
    return {"tests": counts, "skipped": skipped, "errors": errors}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


if __name__ == "__main__":
    sys.exit(main())
