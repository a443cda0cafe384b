"""The full matrix compiled by Inductor: every scheme, route, dtype and model (`make sweep`); its table is committed.

Writes benchmarks/results/sweep.json and sweep.md when all of it has run.
"""

import itertools
import json
import pathlib
import platform
import time
from typing import Any

import pytest
import torch

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, RecordingBackend, sqnr

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"

ROUTES = ("backend", "quantize_")


@pytest.fixture(scope="module")
def table(zoo_names):
    """The rows measured so far, written out if they are the whole matrix."""
    rows: list[dict[str, Any]] = []
    yield rows
    expected = set(itertools.product(SCHEMES, ROUTES, map(short, FLOAT_DTYPES), zoo_names))
    if {(row["scheme"], row["route"], row["dtype"], row["model"]) for row in rows} == expected:
        write(sorted(rows, key=lambda row: [list(row.values())[i] for i in range(4)]))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=short)
def test_every_combination_compiled(zoo_name, scheme, dtype, original, compare, table):
    case = original(zoo_name, dtype)
    unquantized = case.call(case.model)
    in_place = case.fresh()
    in_place.quantize(scheme)
    eager = in_place.call(in_place.model)
    torch.compiler.reset()
    baseline = case.call(torch.compile(case.fresh().model))
    for route in ROUTES:
        torch.compiler.reset()
        used = in_place if route == "quantize_" else case.fresh()
        recording = RecordingBackend(None if route == "quantize_" else scheme, inner="inductor")
        start = time.perf_counter()
        compiled = used.call(torch.compile(used.model, backend=recording))
        seconds = time.perf_counter() - start
        recording.assert_compilations(1)
        compare(route, (unquantized,), (eager,), (compiled,), (baseline,))
        table.append(
            {
                "scheme": scheme,
                "route": route,
                "dtype": short(dtype),
                "model": zoo_name,
                "weights": len(case.weights),
                "eager to original (dB)": round(sqnr(eager, unquantized), 2),
                "compiled to original (dB)": round(sqnr(compiled, unquantized), 2),
                "compiled to eager (dB)": round(min(sqnr(compiled, eager), 999), 2),
                "first call (s)": round(seconds, 1),
            }
        )


def write(rows: list[dict[str, Any]]) -> None:
    about = {
        "command": "make sweep",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "olq_fx": olq_fx.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "sweep.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    (RESULTS / "sweep.md").write_text(markdown(about, rows))


def markdown(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """By scheme and model: the worst over dtypes and routes, which is what a reader looks for."""
    models = sorted({row["model"] for row in rows})
    lines = [
        "# Every scheme, route, dtype and model, compiled by Inductor",
        "",
        f"`{about['command']}`, torch {about['torch']}, Python {about['python']}, olq_fx {about['olq_fx']}: "
        f"{len(rows)} compilations, all within their bounds.",
        "Each cell: dB of the compiled quantized model to the original, the least over three dtypes and two routes.",
        "",
        "| scheme | " + " | ".join(models) + " |",
        "| --- |" + " ---: |" * len(models),
    ]
    for scheme in SCHEMES:
        cells = [
            min(row["compiled to original (dB)"] for row in rows if (row["scheme"], row["model"]) == (scheme, model))
            for model in models
        ]
        lines.append(f"| {scheme} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    return "\n".join(lines) + "\n"
