"""A progress bar on the error stream (rich, imported on first use), or none.

with progress_bar(True) as bar:
    bar.start("load", 3)
    bar.advance()
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Bar:
    """What is being done and how far it is; one thing at a time. Without a display it does nothing."""

    def __init__(self, display: Any = None) -> None:
        """Show the bar in a `rich.progress.Progress`, or nowhere."""
        self._display = display
        self._task: Any = None

    def start(self, what: str, total: int | None) -> None:
        """Begin the next thing, of `total` parts; None where their number is not known."""
        if self._display is not None:
            if self._task is not None:
                self._display.remove_task(self._task)
            self._task = self._display.add_task(what, total=total)

    def advance(self) -> None:
        """One part is done."""
        if self._task is not None:
            self._display.advance(self._task)


@contextlib.contextmanager
def progress_bar(shown: bool) -> Iterator[Bar]:
    """A bar that is gone when the context ends; only on a terminal."""
    if not shown or not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as display:
        yield Bar(display)
