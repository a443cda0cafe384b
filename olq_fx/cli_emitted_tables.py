"""What `olq-fx kernels --emitted` says: a summary of both compilations side by side, then the kernels of each."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from olq_fx.cli_answers import DONE, FAILED, Answer
from olq_fx.cost_model import Architecture
from olq_fx.folding import NUMBER, fold
from olq_fx.tables import size_of, table_of
from olq_fx.testing_emitted import EmittedCode
from olq_fx.testing_emitted_calls import BASIS, EmittedCall
from olq_fx.testing_machine_code import MachineCode

Codes = Mapping[tuple[str, str], MachineCode | str]
"""What each kernel became, by lane and name: its machine code, or why there is none."""

_COLUMNS: Mapping[str, Literal["left", "right"]] = {
    "in": "left",
    "kernel": "left",
    "launches": "right",
    "moved": "right",
    "matrix instruction": "left",
    "registers": "right",
    "spills": "right",
    "shared memory": "right",
    "fused": "left",
}
_WIDEST = 44
"""Characters of a kernel's name: Inductor's lists what is fused, which has a column of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """One compilation: its name, what was emitted, and the calls that it makes."""

    name: str
    code: EmittedCode
    calls: tuple[EmittedCall, ...]

    def count(self, chosen: Callable[[EmittedCall], bool] = lambda call: True) -> int:
        """How many calls there are, of those that are chosen."""
        return sum(chosen(call) for call in self.calls)

    @property
    def moved(self) -> int:
        """Bytes of all calls."""
        return sum(call.moved for call in self.calls)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Equal calls of one lane: how often, bytes of all of them, the machine code or why there is none."""

    lane: str
    call: EmittedCall
    launches: int
    moved: int
    code: MachineCode | str | None

    def to_dict(self) -> dict[str, Any]:
        """In plain JSON values."""
        found: dict[str, Any] = {
            "name": self.call.name,
            "kind": self.call.kind,
            "operators": list(self.call.operators),
            "launches": self.launches,
            "bytes": self.moved,
            "only_quantizes": self.call.only_quantizes,
        }
        if isinstance(self.code, str):
            return found | {"fault": self.code}
        if self.code is None:
            return found
        names = ("instructions", "registers", "stack", "spills", "shared_memory")
        return found | {name: getattr(self.code, name) for name in names}

    def cells(self) -> tuple[str, ...]:
        """As `_COLUMNS` has them."""
        head = (self.lane, short_name(self.call.name), str(self.launches), size_of(self.moved))
        if isinstance(self.code, MachineCode):
            numbers = (self.code.registers, self.code.spills, self.code.shared_memory)
            return (*head, ", ".join(self.code.instructions) or "none", *map(str, numbers), self._fused())
        return (*head, "does not compile" if self.code else "", "", "", "", self._fused())

    def _fused(self) -> str:
        names = [name.removeprefix("aten.").removeprefix("prims.") for name in self.call.computed]
        counts = {name: self.call.operators.count(name) for name in self.call.operators if name.startswith("olq_fx.")}
        return ", ".join(f"{counts[name]} x {name}" if counts.get(name, 1) > 1 else name for name in names)


def short_name(name: str) -> str:
    """A kernel's name with its middle left out where it is long; its number stays."""
    if len(name) <= _WIDEST:
        return name
    head, _, number = name.rpartition("_")
    return f"{head[: _WIDEST - len(number) - 3]}.._{number}"


def rows_of(lane: Lane, codes: Codes) -> list[Row]:
    """The calls of a lane, in the order of the first of each kind; those that compute the same are together."""
    groups: dict[tuple[str, tuple[str, ...]], list[EmittedCall]] = {}
    for call in lane.calls:
        groups.setdefault((call.name, call.operators), []).append(call)
    return [
        Row(lane.name, calls[0], len(calls), sum(call.moved for call in calls), codes.get((lane.name, name)))
        for (name, _), calls in groups.items()
    ]


OPERATORS = "operators run kernels of libraries, those of olq_fx the ones that `olq-fx kernels --code` lists"
SPILLS = "spills are accesses to local memory: for want of registers, and in sines and cosines"

SUMMARY: Mapping[str, tuple[str, Callable[[Lane], int]]] = {
    "calls": ("calls of kernels and operators", lambda lane: lane.count()),
    "templates": ("kernels of templates", lambda lane: lane.count(lambda call: call.kind == "template")),
    "loops": ("kernels of loops", lambda lane: lane.count(lambda call: call.kind == "loops")),
    "operators": ("operators", lambda lane: lane.count(lambda call: call.kind == "operator")),
    "only_quantizing": ("kernels that only quantize", lambda lane: lane.count(lambda call: call.only_quantizes)),
    "bytes": ("bytes moved", lambda lane: lane.moved),
}
"""What is compared of two lanes: its name, in words, and how it is counted."""


def answer(lanes: Sequence[Lane], codes: Codes, architecture: Architecture, notes: Sequence[str]) -> Answer:
    """What the command says.

    Args:
        lanes: both compilations.
        codes: the machine code of their kernels; empty where it was not wanted.
        architecture: the GPU.
        notes: what was compiled.
    """
    rows = {lane.name: rows_of(lane, codes) for lane in lanes}
    gpu = f"sm_{architecture.capability}"
    failed = [f"{lane}, {name}: {code}" for (lane, name), code in codes.items() if isinstance(code, str)]
    data = {
        "architecture": gpu,
        "basis": BASIS,
        "notes": list(notes),
        "lanes": {lane.name: _lane_data(lane, rows[lane.name]) for lane in lanes},
    }
    kernels = table_of(_COLUMNS, [row.cells() for found in rows.values() for row in found])
    lines = [kernels, _summary(lanes), *_choices(lanes), *_reasons(lanes)]
    lines.append(f"what Inductor emits for {gpu}, not measured; {'; '.join(notes)}")
    lines.append(f"{BASIS}; {OPERATORS}")
    if codes:
        lines.append(SPILLS)
    return Answer(data, "\n".join([*lines, *failed]), FAILED if failed else DONE)


def _lane_data(lane: Lane, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "summary": {name: count(lane) for name, (_, count) in SUMMARY.items()},
        "kernels": [row.to_dict() for row in rows],
        "calls": [call.name for call in lane.calls],
        "choices": list(lane.code.notes),
        "reasons": list(lane.code.reasons),
    }


def _summary(lanes: Sequence[Lane]) -> str:
    columns: dict[str, Literal["left", "right"]] = {"one call of the model": "left"}
    columns |= {lane.name: "right" for lane in lanes}
    rows = []
    for name, (text, count) in SUMMARY.items():
        shown: Callable[[int], str] = size_of if name == "bytes" else str
        rows.append((text, *(shown(count(lane)) for lane in lanes)))
    return table_of(columns, rows)


def _choices(lanes: Sequence[Lane]) -> list[str]:
    """What passes chose, a line for equal layers of repeated blocks."""
    alike = Counter(NUMBER.sub("N", note) for lane in lanes for note in lane.code.notes)
    first = {NUMBER.sub("N", note): note for lane in reversed(lanes) for note in reversed(lane.code.notes)}
    return [f"{text} ({count} blocks)" if count > 1 else first[text] for text, count in alike.items()]


def _reasons(lanes: Sequence[Lane]) -> list[str]:
    """What passes refused, a line for equal layers of repeated blocks."""
    parts = [reason.split(": ", 2) for lane in lanes for reason in lane.code.reasons]
    folded = fold([where for _, where, _ in parts], [(name, reason) for name, _, reason in parts])
    return [f"{one.text}: {parts[one.members[0]][2]}" for one in folded]
