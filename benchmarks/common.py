"""What the benchmarks share: interleaved measurement, what a result says of its machine, tables and files.

A machine that others use too is slower at one moment than at the next. So all entries of a comparison are measured in
turn, round by round, in one process; medians are taken, and only ratios between entries of one run mean anything.
"""

import argparse
import datetime
import json
import logging
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from demo_common import CONSOLE, RESULTS, processor, progress, table, version

ROOT = Path(__file__).parent.parent


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=7, help="how often each entry is measured (default 7)")
    made.add_argument("--threads", type=int, default=2, help="threads of torch, for all entries alike (default 2)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")
    made.add_argument("--save", action="store_true", help="write table and measurements to benchmarks/results too")
    return made


def machine() -> dict[str, Any]:
    """What the numbers were measured on, and what was measured."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "device": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: version(name) for name in ("olq-fx", "torch", "torchao")},
        "commit": commit.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "load": round(os.getloadavg()[0], 1),
    }


def quiet_torchao() -> None:
    """torchao logs at length what it lacks without a GPU."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def interleaved(
    entries: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
    budget: float = 20.0,
) -> dict[str, list[float]]:
    """The times of each entry in seconds, taken in turn, in another order each round.

    What ran before an entry decides which of its data are cached and whether threads are awake: no entry always follows
    the same one.

    Args:
        entries: what to measure, by name. Each is called once for warming up.
        rounds: how often.
        before: called before each measurement, and not measured.
        budget: seconds for one entry, after three of which it is left out of the remaining rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in entries}
    with progress() as bar:
        task = bar.add_task("", total=(rounds + 1) * len(entries))
        for turn in range(rounds + 1):
            for name, call in random.Random(turn).sample(list(entries.items()), len(entries)):
                bar.update(task, description=name, advance=1)
                if len(times[name]) >= 3 and sum(times[name]) > budget:
                    continue
                before()
                start = time.perf_counter()
                call()
                if turn:
                    times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each entry."""
    return {name: statistics.median(seen) for name, seen in times.items()}


def cold_caches(size: int = 96 << 20) -> Callable[[], object]:
    """A function that leaves nothing of what was used before in the caches."""
    filler = torch.zeros(size // 4)
    return lambda: filler.add_(1.0)


def report(
    name: str,
    arguments: argparse.Namespace,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    measured: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> None:
    """Print the table with its notes, and write it where the arguments say.

    Args:
        name: the benchmark's, and of its files in benchmarks/results.
        arguments: as `parser` parsed them.
        title: of the table.
        columns: its headings.
        rows: its cells.
        measured: what goes into the JSON file, an object for each row.
        notes: sentences below the table.
    """
    about = machine()
    versions = ", ".join(f"{package} {found}" for package, found in about["versions"].items() if found)
    line = f"{about['device']} ({about['instructions']}), {about['threads']} threads; {versions}; {about['commit']}"
    CONSOLE.print(table(title, columns, rows))
    for note in notes:
        CONSOLE.print(f"- {note}", highlight=False)
    CONSOLE.print(line, highlight=False)
    command = shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    written = json.dumps(
        {"benchmark": name, "command": command, "machine": about, "rows": list(measured), "notes": list(notes)},
        indent=1,
    )
    if arguments.json:
        arguments.json.write_text(written + "\n")
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(written + "\n")
        lines = [f"`{command}`: {title}.", "", line + ".", ""]
        lines += ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        (RESULTS / f"{name}.md").write_text("\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n")
