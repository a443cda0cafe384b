"""The machine code of every kernel that ships, as a table: read without a GPU, compared with a table kept before.

    with Compiler() as compiler:
        rows = [code_row(compiler, entry, 90) for entry in catalog(90)]
    problems = [problem for row in rows for problem in (*faults(row), *worsened(row, golden))]

Absolute rules (`faults`): no stack, no access to local memory, the matrix instruction that the catalogue says, shared
memory within the limit of the GPU. Against a table (`worsened`): the same matrix instructions, no more registers than
before plus `SLACK`, no more stack and spills.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from olq_fx.cost_model import SHARED_MEMORY
from olq_fx.kernels.triton_entries import Entry
from olq_fx.testing_machine_code import Compiler

SLACK = 16
"""Registers of a thread that a kernel may need more than the table says, as patches of the compiler move some."""

Key = tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class CodeRow:
    """What one entry of the catalogue becomes on one GPU.

    Attributes:
        name: of the entry.
        formats: of the entry.
        capability: 90 is sm_90.
        wanted: a regular expression for its matrix instructions; "" for none.
        instructions: its matrix instructions, sorted.
        registers: of a thread.
        stack: bytes of a thread in local memory.
        spills: machine instructions that access local memory.
        shared_memory: bytes of a block of threads.
    """

    name: str
    formats: tuple[str, ...]
    capability: int
    wanted: str
    instructions: tuple[str, ...]
    registers: int
    stack: int
    spills: int
    shared_memory: int

    @property
    def key(self) -> Key:
        """By which a table finds it."""
        return self.name, self.capability

    @property
    def limit(self) -> int:
        """Bytes of shared memory that a block of threads may have."""
        return SHARED_MEMORY[self.capability]


def code_row(compiler: Compiler, entry: Entry, capability: int) -> CodeRow:
    """Compile an entry.

    Raises:
        ProcessDied: the compiler crashed or took too long.
        triton.compiler.errors.CompilationError: the kernel is wrong.
    """
    call = entry.call
    code = compiler.machine_code(call.kernel, call.args, call.constants, capability, **call.options)
    return CodeRow(
        name=entry.name,
        formats=entry.formats,
        capability=capability,
        wanted=entry.instruction,
        instructions=code.instructions,
        registers=code.registers,
        stack=code.stack,
        spills=code.spills,
        shared_memory=code.shared_memory,
    )


def faults(row: CodeRow) -> list[str]:
    """What is wrong with a kernel by itself."""
    found = []
    if row.stack or row.spills:
        found.append(f"{row.stack} bytes of stack, {row.spills} accesses to local memory")
    if row.shared_memory > row.limit:
        found.append(f"{row.shared_memory} bytes of shared memory, the limit being {row.limit}")
    if not row.wanted and row.instructions:
        found.append(f"{', '.join(row.instructions)}, and no matrix instruction is wanted")
    if row.wanted and not row.instructions:
        found.append(f"no matrix instruction, not {row.wanted}")
    wrong = [one for one in row.instructions if row.wanted and not re.search(row.wanted, one)]
    if wrong:
        found.append(f"{', '.join(wrong)}, not {row.wanted}")
    return [f"{row.name} on sm_{row.capability} has {fault}" for fault in found]


def worsened(row: CodeRow, golden: Mapping[Key, CodeRow]) -> list[str]:
    """What is worse than in a table; a kernel that the table lacks is a fault too."""
    where = f"{row.name} on sm_{row.capability}"
    before = golden.get(row.key)
    if before is None:
        return [f"{where} is not in the golden table"]
    found = []
    if row.instructions != before.instructions:
        found.append(f"matrix instructions {row.instructions}, before {before.instructions}")
    if row.registers > before.registers + SLACK:
        found.append(f"{row.registers} registers, before {before.registers}")
    for name in ("stack", "spills"):
        now, then = getattr(row, name), getattr(before, name)
        if now > then:
            found.append(f"{name} {now}, before {then}")
    return [f"{where} has {fault}" for fault in found]


def to_json(triton: str, rows: Iterable[CodeRow]) -> str:
    """A table as text, one line a kernel and GPU.

    Args:
        triton: the version that compiled it.
        rows: in any order.
    """
    fields = ("instructions", "registers", "stack", "spills", "shared_memory")
    kernels: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        kernels.setdefault(row.name, {})[f"sm_{row.capability}"] = {name: getattr(row, name) for name in fields}
    lines = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"    {json.dumps(gpu)}: {json.dumps(found)}" for gpu, found in by_gpu.items())
        + "\n  }"
        for name, by_gpu in kernels.items()
    ]
    return f'{{\n "triton": {json.dumps(triton)},\n "kernels": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def from_json(text: str) -> dict[Key, CodeRow]:
    """A table by name and capability; formats and wanted instructions are not kept in it."""
    found: dict[Key, CodeRow] = {}
    for name, by_gpu in json.loads(text)["kernels"].items():
        for gpu, values in by_gpu.items():
            capability = int(gpu.removeprefix("sm_"))
            instructions = tuple(values.pop("instructions"))
            row = CodeRow(name=name, formats=(), capability=capability, wanted="", instructions=instructions, **values)
            found[row.key] = row
    return found
