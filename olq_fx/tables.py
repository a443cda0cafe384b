"""Tables and sizes as text for people (rich, imported on first use).

API:
    table_of(columns, rows) -> str     a table without colours
    size_of(count) -> str              a number of bytes
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

_LAST_COLUMN = 60
"""Characters of the last column before it wraps; the others never do, so that what they say can be copied."""


def table_of(columns: Mapping[str, Literal["left", "right"]], rows: Iterable[Sequence[str]]) -> str:
    """A table as text, in the order of `columns`, whose values say how each is aligned; only the last one wraps."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    listed = [tuple(row) for row in rows]
    table = Table(header_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    *fixed, last = columns
    for column in fixed:
        table.add_column(column, no_wrap=True, justify=columns[column])
    table.add_column(last, overflow="fold", justify=columns[last], max_width=_LAST_COLUMN)
    for row in listed:
        table.add_row(*row)
    widest = sum(max(len(cell) for cell in column) for column in zip(fixed, *listed, strict=False))
    width = widest + _LAST_COLUMN + 3 * len(columns)
    text = io.StringIO()
    Console(file=text, width=width, no_color=True, highlight=False, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def size_of(count: int) -> str:
    """A number of bytes for people.

    >>> size_of(1000), size_of(3 * 2**20)
    ('1000 B', '3.0 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
