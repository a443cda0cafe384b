"""The report: what a run did with every weight, what it refused, and what a user should know.

API:
    Report(plan)                                 statuses start as planned: "pending", "left alone", "already"
    .mark(path, status)                          one of `STATUSES` (path: any name of it)
    .refuse(what, where, reason)                 a pass or a step declined something
    .note(text)                                  one line for the user
    .status(path), .rows(status)                 of one weight; PlanRows of a status
    .converted, .pending, .overridden, .left_alone, .already, .frozen      paths
    .refusals, .notes
    .share, .share_of_parameters                 of the bytes, in original precision, that are quantized by now
    .check()                                     raises PlanError for what strict=False let pass, or for pending weights
    .to_dict(), .to_json(), str(report), .text(folded=False)
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from olq_fx.errors import PlanError
from olq_fx.plan import Plan, PlanRow, table_of_rows

Status = Literal["converted", "pending", "overridden", "left alone", "already"]
STATUSES: tuple[Status, ...] = ("converted", "pending", "overridden", "left alone", "already")

_START: dict[str, Status] = {"quantize": "pending", "leave": "left alone", "already": "already", "override": "already"}


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Something that was declined: `what` (a pass, a step) declined `where` (a layer, a node) for a reason."""

    what: str
    where: str
    reason: str


class Report:
    """What was done with every row of a plan. The one who executes the plan marks it as it goes.

    Attributes:
        plan: what was planned.
        refusals: what was declined, in the order of its happening, each once.
        notes: lines for the user, each once.
    """

    def __init__(self, plan: Plan) -> None:
        """Start a report: rows to be quantized are pending."""
        self.plan = plan
        self.refusals: list[Refusal] = []
        self.notes: list[str] = []
        self._statuses: dict[str, Status] = {row.path: _START[row.decision] for row in plan.rows}

    def mark(self, path: str, status: Status) -> None:
        """Say what happened to the weight with this path (any of its names).

        Raises:
            PlanError: the plan has no such weight.
        """
        self._statuses[self.plan.lookup(path).path] = status

    def refuse(self, what: str, where: str, reason: str) -> None:
        """Record that something was declined."""
        refusal = Refusal(what, where, reason)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def note(self, text: str) -> None:
        """Record a line for the user."""
        if text not in self.notes:
            self.notes.append(text)

    def status(self, path: str) -> Status:
        """What happened to the weight with this path (any of its names)."""
        return self._statuses[self.plan.lookup(path).path]

    def rows(self, status: Status) -> tuple[PlanRow, ...]:
        """The rows with a status, in the order of the model."""
        return tuple(row for row in self.plan.rows if self._statuses[row.path] == status)

    @property
    def converted(self) -> tuple[str, ...]:
        """Paths of the weights that this run converted."""
        return _paths(self.rows("converted"))

    @property
    def pending(self) -> tuple[str, ...]:
        """Paths of the weights that wait for their data, or for a graph that uses them as a linear layer does."""
        return _paths(self.rows("pending"))

    @property
    def overridden(self) -> tuple[str, ...]:
        """Paths of the weights, converted before, whose activations this run changed."""
        return _paths(self.rows("overridden"))

    @property
    def left_alone(self) -> tuple[str, ...]:
        """Paths of the weights that keep their original precision."""
        return _paths(self.rows("left alone"))

    @property
    def already(self) -> tuple[str, ...]:
        """Paths of the weights that were converted before this run."""
        return _paths(self.rows("already"))

    @property
    def frozen(self) -> tuple[str, ...]:
        """Paths of the weights that this run converted and that were trainable: they no longer are."""
        return _paths([row for row in self.rows("converted") if row.trainable])

    @property
    def share(self) -> float:
        """Which share of the bytes of all linear, expert and embedding weights is quantized by now.

        Counted in original precision; 0 where there are none.
        """
        return self._quantized_bytes() / max(self.plan.bytes_before, 1)

    @property
    def share_of_parameters(self) -> float:
        """The same of all parameters of the model."""
        return self._quantized_bytes() / max(self.plan.parameter_bytes, 1)

    def check(self) -> "Report":
        """The report itself, if everything that was asked for happened.

        Raises:
            PlanError: a pattern or request was without effect (`strict=False`, or code without a root module), or a
                weight still waits for its data, or for a graph that uses it as a linear layer.
        """
        found = list(self.plan.problems)
        waiting = self.rows("pending")
        found += [f"{row.path} is not converted: it {row.reason}" for row in waiting[:5] if row.reason]
        without_data = [row.path for row in waiting if not row.reason]
        if without_data:
            found.append(f"without data yet: {', '.join(without_data[:5])}")
        if found:
            raise PlanError("; ".join(found))
        return self

    def to_dict(self) -> dict[str, Any]:
        """The report in plain JSON values."""
        plan = self.plan.to_dict()
        rows = [row | {"status": self._statuses[row["path"]]} for row in plan.pop("rows")]
        return plan | {
            "rows": rows,
            "share": self.share,
            "share_of_parameters": self.share_of_parameters,
            "frozen": list(self.frozen),
            "refusals": [dataclasses.asdict(refusal) for refusal in self.refusals],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The report as strict JSON (no NaN or Infinity)."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=2)

    def __str__(self) -> str:
        """The table and the totals, repeated blocks folded."""
        return self.text()

    def text(self, *, folded: bool = True) -> str:
        """A table of all weights with their status, the totals, then what was refused and noted.

        Args:
            folded: whether equal layers of repeated blocks are one line.
        """
        counts = Counter(self._statuses.values())
        done = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        lines = [
            table_of_rows(self.plan.rows, [self._statuses[row.path] for row in self.plan.rows], folded=folded),
            f"{done or 'no weights'}; quantized by now: {self.share:.1%} of the bytes of these weights, "
            f"{self.share_of_parameters:.1%} of all parameters",
        ]
        return "\n".join([*lines, *self.plan.summary(), *self._lines()])

    def _lines(self) -> list[str]:
        lines = []
        if self.frozen:
            some = ", ".join(self.frozen[:3]) + (", ..." if self.frozen[3:] else "")
            lines.append(f"were trainable and are frozen now ({len(self.frozen)}): {some}")
        if self.already and not (self.converted or self.pending or self.overridden):
            lines.append("nothing to do: the requested layers were quantized before")
        lines += [f"refused: {r.what} at {r.where}: {r.reason}" for r in self.refusals]
        return lines + [f"note: {note}" for note in self.notes]

    def _quantized_bytes(self) -> int:
        quantized: tuple[Status, ...] = ("converted", "overridden", "already")
        return sum(row.bytes_before for row in self.plan.rows if self._statuses[row.path] in quantized)


def _paths(rows: Iterable[PlanRow]) -> tuple[str, ...]:
    return tuple(row.path for row in rows)
