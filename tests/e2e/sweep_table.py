"""A plugin of pytest for `make sweep`: collects what it measures, and writes that out when it is the whole matrix.

The tests report rows as user properties, which reach the main process from all others.
"""

import itertools
import json
import pathlib
import platform
from typing import Any

import pytest
import torch

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
ROUTES = ("backend", "quantize_")
PROPERTY = "sweep"
MODELS = (
    "minilm",
    "attention",
    "trained_qwen3",
    "gpt2",
    "llama",
    "qwen3",
    "f_linear",
    "matmul_transposed",
    "einsum",
)


def short(dtype: torch.dtype) -> str:
    """Its name without the module."""
    return str(dtype).removeprefix("torch.")


_rows: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take the rows of a test that passed."""
    if report.when == "call" and report.passed:
        _rows.extend(row for name, row in report.user_properties if name == PROPERTY)  # type: ignore[misc]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table of a whole matrix, in the process that sees all reports."""
    expected = set(itertools.product(SCHEMES, ROUTES, map(short, FLOAT_DTYPES), MODELS))
    whole = {(row["scheme"], row["route"], row["dtype"], row["model"]) for row in _rows} == expected
    if whole and not hasattr(session.config, "workerinput"):
        write(sorted(_rows, key=lambda row: list(row.values())[:4]))


def write(rows: list[dict[str, Any]]) -> None:
    """Write benchmarks/results/sweep.json and sweep.md."""
    about = {
        "command": "make sweep",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "olq_fx": olq_fx.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
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
        f"`{about['command']}`, torch {about['torch']}, Python {about['python']}, olq_fx {about['olq_fx']}, "
        f"{about['machine']}: {len(rows)} combinations, all within their bounds.",
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
