"""Tables and sizes as text for people (rich, imported on first use).

API:
    table_of(columns, rows) -> str     a table without colours
    size_of(count) -> str              a number of bytes
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

_WIDTH = 160


def table_of(columns: Mapping[str, Literal["left", "right"]], rows: Iterable[Sequence[str]]) -> str:
    """A table as text, in the order of `columns`, whose values say how each is aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="")
    for column, justify in columns.items():
        table.add_column(column, overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(
        file=text, width=_WIDTH, no_color=True, force_jupyter=False, highlight=False, markup=False, emoji=False
    ).print(table)
    return text.getvalue().rstrip()


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
