"""Memory while `olq_fx.load_` loads a synthetic Llama in bfloat16, beside other ways to the same end.

The anonymous resident memory of a process of its own (`RssAnon`), read every 5 ms by this one, from after all imports
and the plan until the model is loaded. The bound is the size of the loaded model, its largest weight in float32 and 64
MiB. Mapped pages of a file are not in it: the system takes them back when it likes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import report
from loading_cases import SOURCES, Case, on_meta, run

from olq_fx.schemes import SCHEMES

MIB = 2**20
SLACK = 64 * MIB
PERIOD = 0.005


def anonymous(process: int) -> int:
    """Bytes of anonymous resident memory."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


def measured(case: Case, folder: Path, layers: int, threads: int) -> dict[str, Any]:
    """Load in a process of its own, and sample its memory."""
    here = Path(__file__).parent
    words = [case.loader, case.scheme, case.source, str(folder), str(layers), str(threads)]
    child = subprocess.Popen(
        [sys.executable, "-c", "import loading_cases; loading_cases.main()", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"{case} did not get ready")
        before = peak = anonymous(child.pid)
        os.set_blocking(child.stdout.fileno(), False)
        start = time.perf_counter()
        child.stdin.write("load\n")
        child.stdin.flush()
        while child.stdout.readline() != "loaded\n":
            peak = max(peak, anonymous(child.pid))
            if child.poll() is not None:
                raise RuntimeError(f"{case} failed")
            time.sleep(PERIOD)
        seconds = time.perf_counter() - start
        after = anonymous(child.pid)
        peak = max(peak, after)
        os.set_blocking(child.stdout.fileno(), True)
        child.stdin.write("tell\n")
        child.stdin.flush()
        sizes: dict[str, int] = json.loads(child.stdout.readline())
    bound = sizes["final"] + sizes["largest_float32"] + SLACK
    return {**vars(case), **sizes, "peak": peak - before, "after": after - before, "bound": bound, "seconds": seconds}


def memory_cases(schemes: Sequence[str], sources: Sequence[str]) -> list[Case]:
    """Every scheme from the directory, some from every source, and the peers."""
    some = [scheme for scheme in ("fp8_per_block", "nvfp4_per_token") if scheme in schemes]
    cases = [Case("olq_fx", scheme, "Hugging Face directory") for scheme in schemes]
    cases += [Case("olq_fx", scheme, source) for scheme in some for source in sources]
    peers = [("transformers", ""), ("torchao", "fp8 weight only"), ("torchao", "int8 weight only")]
    return [*dict.fromkeys(cases), *(Case(loader, scheme, "Hugging Face directory") for loader, scheme in peers)]


def memory(arguments: argparse.Namespace, folder: Path) -> int:
    """The table of peaks; how many of ours are above the bound."""
    found = []
    for case in memory_cases(arguments.schemes or [*SCHEMES, ""], SOURCES):
        found.append(measured(case, folder, arguments.layers, arguments.threads))
        print(f"{case}: {found[-1]['peak'] / MIB:.0f} of {found[-1]['bound'] / MIB:.0f} MiB", file=sys.stderr)
    size = sum(tensor.nbytes for tensor in on_meta(arguments.layers).state_dict().values())
    rows = [
        (
            row["loader"],
            row["scheme"] or "none",
            row["source"],
            *(f"{row[key] / MIB:.0f}" for key in ("final", "peak", "bound")),
            f"{(row['peak'] - row['final']) / MIB:+.0f}",
            f"{row['peak'] / size:.2f}",
            "yes" if row["peak"] <= row["bound"] else "no",
        )
        for row in found
    ]
    above = [row for row in found if row["loader"] == "olq_fx" and row["peak"] > row["bound"]]
    columns = ("loader", "scheme", "source", "final MiB", "peak MiB", "bound MiB", "above final", "of bf16", "within")
    notes = [
        "Peak of RssAnon above what there was before loading, sampled every 5 ms; final: storages of the loaded model; "
        "bound: final, the largest weight in float32 and 64 MiB; of bf16: the peak relative to the checkpoint.",
        "transformers alone keeps the files mapped as the model's storage, which is no anonymous memory.",
        f"{len(above)} of {sum(row['loader'] == 'olq_fx' for row in found)} of olq_fx are above the bound.",
    ]
    title = f"Memory while a Llama of {size / 1e9:.2f} GB in bfloat16 is loaded"
    report("loading_memory", arguments, title, columns, rows, found, notes)
    return len(above)


if __name__ == "__main__":
    sys.exit(run(memory, __doc__))
