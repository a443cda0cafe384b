"""What the demos share: quiet third parties, the two routes with a count of compilations, sizes, noise, time."""

import copy
import dataclasses
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # every model comes from a package or this repository; set before transformers is loaded
)

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import olq_fx
from olq_fx.errors import MissingPackageError
from olq_fx.optional_packages import load_transformers

CONSOLE = Console(width=max(104, Console().width))
RESULTS = Path(__file__).parent / "results"


def transformers_or_give_up() -> Any:
    """The module transformers, its bars and notices off."""
    try:
        return load_transformers()
    except MissingPackageError as error:
        give_up(f"{error}; `make demo` installs it")


def give_up(message: str) -> NoReturn:
    """Say in one line why the demo cannot run; exit code 2."""
    CONSOLE.print(f"[bold red]Cannot run:[/] {message}", highlight=False)
    sys.exit(2)


def environment() -> str:
    """One line: what the numbers below were measured on."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, olq_fx {olq_fx.__version__}"
    return f"{processor()}, {torch.get_num_threads()} threads; {versions}"


def processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def progress() -> Progress:
    """A bar that names what is being done."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=CONSOLE, transient=True)


class Counted:
    """A backend that counts how often torch.compile calls it: first compilations, recompilations, graph breaks."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        self.compilations = 0

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        self.compilations += 1
        compiled: Callable[..., Any] = self.backend(graph, example_inputs, **options)
        return compiled


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the quantized layers and of the whole model, before and after."""

    layers_before: int
    layers_after: int
    model_before: int
    model_after: int


def parameter_bytes(model: torch.nn.Module) -> int:
    """What the parameters of a model take, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def sizes(model: torch.nn.Module, plan: Any) -> Sizes:
    """Read the sizes off a plan; whatever is not quantized keeps its bytes."""
    rows = [row for row in plan.rows if row.decision == "quantize"]
    before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
    total = parameter_bytes(model)
    return Sizes(before, after, total, total - before + after)


def weight_sqnr(original: torch.nn.Module, quantized: torch.nn.Module, plan: Any) -> float:
    """Signal to quantization noise of all quantized weights taken together, in dB."""
    signal = noise = 0.0
    for row in plan.rows:
        if row.decision == "quantize":
            before = original.get_parameter(row.path).double()
            after: Any = quantized.get_parameter(row.path)
            signal += before.square().sum().item()
            noise += (before - after.dequantize(torch.float64)).square().sum().item()
    return float(10 * torch.tensor(signal / noise).log10())


def milliseconds(call: Callable[[], object], budget: float = 0.6, at_least: int = 3) -> float:
    """The median time of a call that is already warm: `at_least` times, more while `budget` seconds last."""
    times: list[float] = []
    while len(times) < at_least or (sum(times) < budget and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model with memory of its own."""
    return copy.deepcopy(model).eval()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A rich table, the first column to the left and numbers to the right, narrow enough for 104 characters."""
    result = Table(title=title, title_justify="left", header_style="bold underline", box=None, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        heading = column.replace(" ", "\n")
        result.add_column(heading, justify="right" if number else "left", vertical="bottom", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def save(name: str, command: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Path:
    """Write the table as Markdown to benchmarks/results, below the command and the machine that made it."""
    RESULTS.mkdir(exist_ok=True)
    lines = [f"`{command}` on {environment()}.", "", "| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join([*lines, "", *notes]) + "\n")
    return path
