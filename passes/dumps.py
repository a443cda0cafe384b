"""Numbered dumps of a graph: before the first pass and after each, with the operators that there are more and fewer.

    dumps = Dumps(folder)             a folder of None dumps nothing
    dumps.begin(gm)                   00_before.txt
    dumps.add(gm, "swap", ...)        01_swap.txt

They hold names and shapes, never values.
"""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.fx import GraphModule

from olq_fx.passes.base import Reject
from olq_fx.passes.fxtools import target_name


def operators_of(gm: GraphModule) -> collections.Counter[str]:
    """How often each operator is called in a graph."""
    return collections.Counter(target_name(node) for node in gm.graph.nodes if node.op.startswith("call_"))


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How many calls of each operator there are more, or fewer (negative); without those that stayed as many."""
    names = sorted({*before, *after})
    found = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: count for name, count in found.items() if count}


class Dumps:
    """The dumps of one graph. See the head of this file."""

    def __init__(self, folder: Path | None) -> None:
        """Write nothing yet; the folder need not be there."""
        self._folder = folder
        self._number = 0

    def __bool__(self) -> bool:
        """Whether anything is written."""
        return self._folder is not None

    def begin(self, gm: GraphModule) -> None:
        """The graph before the first pass; later ones are shorter, without shapes."""
        if self._folder is not None:
            counts = sorted(operators_of(gm).items())
            head = [f"before: {sum(count for _, count in counts)} calls", *(f"{n:5} {name}" for name, n in counts)]
            self._write("before", head, gm.print_readable(print_output=False))

    def add(
        self, gm: GraphModule, name: str, changed: int, operators: Mapping[str, int], rejects: Sequence[Reject] = ()
    ) -> None:
        """The graph after a pass.

        Args:
            gm: the graph.
            name: of the pass.
            changed: how many places it changed.
            operators: how many calls of each operator there are more than before it.
            rejects: what it refused.
        """
        if self._folder is not None:
            head = [f"{name}: {changed} places changed", *(f"{n:+5} {each}" for each, n in operators.items())]
            head += [f"refused: {reject.where}: {reject.reason}" for reject in rejects]
            self._write(name, head, str(gm.graph))

    def _write(self, name: str, head: Sequence[str], text: str) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [f"# {line}" for line in head]
        (self._folder / f"{self._number:02}_{name}.txt").write_text("\n".join([*lines, "", text, ""]))
        self._number += 1
