"""How long a plan takes, and how much memory, for large models on meta and for many patterns.

Each entry is a process of its own, so that its peak of resident memory is its own: torch and the model are part of it.
Seconds are of reading the configuration and making the plan, medians; the first round fills caches of torch and does
not count, patterns are compiled anew in every round. `table` is printing the plan.

Limits: 3 s and 1 GiB for a dense model of 70B parameters and for a mixture of experts of 235B whose 36,000 experts'
layers are modules of their own; 1 s for 1000 targets on 10,000 modules. Exit code 1 if one is exceeded.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from common import parser, report
from demo_common import progress
from torch import nn

from olq_fx import patterns
from olq_fx.plan import plan_for
from olq_fx.testing_layouts import LLAMA_70B, MOE_235B, decoder_layout

COLUMNS = ("entry", "weights", "plan, s", "table, s", "peak, MiB", "limits")
MIXED = {"linear": "fp8_per_block", "moe": "mxfp4"}
TEN_THOUSAND = {"layers": 34, "hidden": 64, "inner": 32, "experts": 97}
SECONDS, TARGET_SECONDS, BYTES = 3.0, 1.0, 2**30

FORMS = {
    "exact names": "model.layers.{0}.mlp.experts.{1}.up_proj",
    "globs": "*.layers.{0}.*.experts.{1}.up_proj",
    "regex, escaped dots": r"re:model\.layers\.{0}\.mlp\.experts\.{1}\.up_proj$",
    "regex, unescaped dots": "re:.*layers.{0}.mlp.experts.{1}.up_proj$",
    "regex, groups": r"re:.*layers\.({0})\.(mlp|feed)\.experts\.(?:{1})\.up_(proj)$",
    "regex, unescaped dots and groups": "re:.*layers.({0}).(mlp|feed).experts.(?:{1}).up_(proj)$",
}


def thousand(form: str) -> dict[str, Any]:
    """A configuration with a thousand targets of one form."""
    pairs = [(layer, expert) for layer in range(34) for expert in range(30)][:1000]
    return {"targets": {form.format(*pair): "fp8" for pair in pairs}}


ENTRIES: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "70B": (LLAMA_70B, {"quantization": "fp8_per_block"}),
    "235B": (MOE_235B, MIXED),
    "235B, two patterns": (MOE_235B, MIXED | {"ignore": [r"re:.*layers\.[01]\.", "*.layers.3.*"]}),
    "235B, components": (MOE_235B, {"components": {"model": MIXED, "lm_head": None}}),
    "235B, leading blocks": (MOE_235B, MIXED | {"num_bf16_fallback_layers": 5}),
    **{f"1000 targets, {name}": (TEN_THOUSAND, thousand(form)) for name, form in FORMS.items()},
}


def measured(name: str, rounds: int) -> dict[str, Any]:
    """The times of one entry, and the peak of this process."""
    layout, config = ENTRIES[name]
    plan_for("fp8", nn.Linear(8, 8, device="meta"))
    model = decoder_layout(**layout)
    plans, tables, weights = [], [], 0
    for _ in range(rounds + 1):
        patterns.forget()
        start = time.perf_counter()
        plan = plan_for(config, model)
        made = time.perf_counter()
        str(plan)
        plans.append(made - start)
        tables.append(time.perf_counter() - made)
        weights = len(plan.rows)
        del plan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"entry": name, "weights": weights, "seconds": plans[1:], "table_seconds": tables[1:], "peak_bytes": peak}


def in_its_own_process(name: str, rounds: int) -> dict[str, Any]:
    """What `measured` says in a fresh process."""
    command = [sys.executable, __file__, "--only", name, "--rounds", str(rounds)]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"{name} failed:\n{found.stderr}")
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def row_of(one: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """The cells of one entry, and what it exceeds."""
    limit = TARGET_SECONDS if one["entry"].startswith("1000 targets") else SECONDS
    seconds, peak = statistics.median(one["seconds"]), one["peak_bytes"]
    exceeded = [f"{seconds:.2f} s"] * (seconds > limit) + [f"{peak >> 20} MiB"] * (peak > BYTES)
    said = f"EXCEEDED: {', '.join(exceeded)}" if exceeded else f"within {limit:.0f} s, 1 GiB"
    table = statistics.median(one["table_seconds"])
    cells = (one["entry"], str(one["weights"]), f"{seconds:.2f}", f"{table:.2f}", str(peak >> 20), said)
    return cells, [f"{one['entry']} ({', '.join(exceeded)})"] if exceeded else []


def main() -> int:
    """Measure, print, save, say whether all is within the limits."""
    options = parser(__doc__)
    options.add_argument("--only", choices=list(ENTRIES), help="one entry in this process; prints its measurement")
    arguments = options.parse_args()
    if arguments.only:
        print(json.dumps(measured(arguments.only, arguments.rounds)))
        return 0
    found = []
    with progress() as bar:
        task = bar.add_task("", total=len(ENTRIES))
        for name in ENTRIES:
            bar.update(task, description=name, advance=1)
            found.append(in_its_own_process(name, arguments.rounds))
    rows, exceeded = [], []
    for one in found:
        cells, missed = row_of(one)
        rows.append(cells)
        exceeded += missed
    notes = [f"Exceeded: {'; '.join(exceeded)}." if exceeded else "All within the limits."]
    report("planning", arguments, "Plans of large models and of many patterns", COLUMNS, rows, found, notes)
    return int(bool(exceeded))


if __name__ == "__main__":
    sys.exit(main())
