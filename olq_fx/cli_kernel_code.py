"""`olq-fx kernels --code`: what the Triton kernels of this library become on a GPU, compiled without one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from olq_fx.cli_answers import DONE, FAILED, Answer, paragraph
from olq_fx.cost_model import Architecture
from olq_fx.errors import ConfigurationError, nearest
from olq_fx.formats import get_format
from olq_fx.optional_packages import optional_package
from olq_fx.progress import progress_bar
from olq_fx.tables import table_of
from olq_fx.testing_kernel_table import CodeRow, code_row, faults
from olq_fx.testing_machine_code import Compiler

_COLUMNS: Mapping[str, Literal["left", "right"]] = {
    "kernel": "left",
    "formats": "left",
    "matrix instruction": "left",
    "registers": "right",
    "stack": "right",
    "spills": "right",
    "shared memory": "right",
    "limit": "right",
    "faults": "left",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """An entry of the catalogue and what became of it: its machine code, or why there is none."""

    name: str
    formats: tuple[str, ...]
    row: CodeRow | None
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """In plain JSON values."""
        found: dict[str, Any] = {"kernel": self.name, "formats": list(self.formats), "faults": list(self.problems)}
        if self.row is None:
            return found
        values = dataclasses.asdict(self.row)
        names = ("instructions", "registers", "stack", "spills", "shared_memory")
        return found | {name: values[name] for name in names} | {"limit": self.row.limit}

    def cells(self) -> tuple[str, ...]:
        """As `_COLUMNS` has them."""
        said = "; ".join(self.problems)
        if self.row is None:
            return (self.name, ", ".join(self.formats), *[""] * 6, said)
        numbers = (self.row.registers, self.row.stack, self.row.spills, self.row.shared_memory, self.row.limit)
        return (
            self.name,
            ", ".join(self.formats),
            ", ".join(self.row.instructions) or "none",
            *map(str, numbers),
            said,
        )


def code(formats: Sequence[str], architecture: Architecture) -> Answer:
    """Compile the kernels that ship, in a process of its own; the exit code is that of a failure if one is at fault.

    Args:
        formats: names of formats, of which a kernel must know one; empty for all.
        architecture: what to compile for.

    Raises:
        ConfigurationError: there is no such format, or no kernel that knows it.
        MissingPackageError: triton is not installed.
    """
    triton = optional_package("triton", "test", "compiling kernels")
    from olq_fx.kernels.triton_catalog import catalog

    wanted = {get_format(name).name for name in formats}
    everything = catalog(architecture.capability)
    chosen = [entry for entry in everything if not wanted or wanted.intersection(entry.formats)]
    lacking = wanted.difference(*(entry.formats for entry in chosen))
    if lacking:
        known = {name for entry in everything for name in entry.formats}
        raise ConfigurationError(f"no kernel knows the format {min(lacking)!r}; {nearest(min(lacking), known)}")
    found = []
    with Compiler() as compiler, progress_bar(True) as bar:
        bar.start("compile", len(chosen))
        for entry in chosen:
            found.append(_compiled(compiler, entry, architecture.capability))
            bar.advance()
    return _answer(found, architecture, triton.__version__)


def _compiled(compiler: Compiler, entry: Any, capability: int) -> Compiled:
    try:
        row = code_row(compiler, entry, capability)
    except Exception as error:  # a kernel that does not compile is a row of the table, not its end
        return Compiled(entry.name, entry.formats, None, (f"does not compile: {paragraph(error)}",))
    return Compiled(entry.name, entry.formats, row, tuple(faults(row)))


def _answer(found: Sequence[Compiled], architecture: Architecture, triton: str) -> Answer:
    at_fault = sum(bool(one.problems) for one in found)
    gpu = f"sm_{architecture.capability}"
    data = {"architecture": gpu, "triton": triton, "kernels": [one.to_dict() for one in found], "at_fault": at_fault}
    said = f"{at_fault} at fault" if at_fault else "none at fault"
    table = table_of(_COLUMNS, [one.cells() for one in found])
    text = f"{table}\n{len(found)} kernels for {gpu} by triton {triton}: {said}"
    return Answer(data, text, FAILED if at_fault else DONE)
