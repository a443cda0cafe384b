"""Plans and reports as tables for people (rich, imported on first use).

API:
    plan_table(plan, statuses=None) -> str      one row a weight; `statuses` (path -> text) replaces the decision
"""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olq_fx.plan import Plan, PlanRow

_WIDTH = 160


def plan_table(plan: "Plan", statuses: Mapping[str, str] | None = None) -> str:
    """The plan as text: a table of its rows, the totals, and what is wrong with it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None, header_style="")
    for column in ("weight", "kind", "shape", "dtype"):
        table.add_column(column, overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("formats (weight / activation)", overflow="fold")
    table.add_column("kernel", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in plan.rows:
        status = row.decision if statuses is None else statuses.get(row.path, row.decision)
        table.add_row(*_cells(row, status))
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(table)
    return text.getvalue() + "\n".join(_totals(plan))


def _cells(row: "PlanRow", status: str) -> tuple[str, ...]:
    """One row of the table."""
    ties = f" (= {', '.join(row.names[1:])})" if row.names[1:] else ""
    size = f"{_size(row.bytes_before)} -> {_size(row.bytes_after)}" if row.slot else _size(row.bytes_before)
    why = "; ".join(part for part in (row.reason, row.warning, row.kernel_reason) if part)
    shape = " x ".join(map(str, row.shape))
    dtype = str(row.dtype).removeprefix("torch.")
    return (row.path + ties, row.kind, shape, dtype, status, row.formats, row.kernel, size, why)


def _totals(plan: "Plan") -> list[str]:
    """The lines below the table."""
    count = len(plan.quantized)
    lines = [
        f"{count} of {len(plan.rows)} weights quantized: {plan.share_of_candidates:.1%} of their bytes, "
        f"{plan.share_of_parameters:.1%} of all parameters; {_size(plan.bytes_before)} -> {_size(plan.bytes_after)}"
    ]
    left = sum(row.bytes_before for row in plan.rows if row.kind == "moe" and row.decision == "leave")
    if left:
        lines.append(
            f"experts in original precision: {_size(left)}, {left / max(plan.parameter_bytes, 1):.1%} of all parameters"
        )
    return lines + [f"warning: {problem}" for problem in plan.problems]


def _size(count: int) -> str:
    """A number of bytes for people."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
