"""How long `import olq_fx` takes, against `import torch` alone: fresh processes, taken in turn, medians.

Exit code 1 if the ratio exceeds 1.15.
"""

import argparse
import statistics
import subprocess
import sys
import time

from demo_common import CONSOLE, environment, save, table

LIMIT = 1.15
COLUMNS = ("import", "median", "fastest", "ratio of medians")


def seconds(statement: str) -> float:
    """The time from before to after a statement, in a process of its own."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def measure(repeats: int) -> dict[str, list[float]]:
    """The times of both imports; the first round, which fills the disk cache, does not count."""
    times: dict[str, list[float]] = {"torch": [], "olq_fx": []}
    for _ in range(repeats + 1):
        for name, seen in times.items():
            seen.append(seconds(f"import {name}"))
    return {name: seen[1:] for name, seen in times.items()}


def main() -> int:
    """Measure, print, say whether it is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="processes for each import (default 15)")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/import_time.md too")
    arguments = parser.parse_args()
    start = time.perf_counter()
    times = measure(arguments.repeats)
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    ratio = medians["olq_fx"] / medians["torch"]
    rows = [
        (f"`import {name}`", f"{medians[name]:.3f} s", f"{min(seen):.3f} s", f"{medians[name] / medians['torch']:.3f}")
        for name, seen in times.items()
    ]
    CONSOLE.print(table(f"Import time, {arguments.repeats} processes each (limit {LIMIT})", COLUMNS, rows))
    CONSOLE.print(f"{environment()}; {time.perf_counter() - start:.0f} s", highlight=False)
    if arguments.save:
        save("import_time", "python benchmarks/import_time.py", COLUMNS, rows, notes=())
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
