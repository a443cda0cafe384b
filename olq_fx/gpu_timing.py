"""How a call is timed on a GPU: in a CUDA graph, on one copy of its data after the other, so that the cache is cold.

API:
    Entry(name, make, work, touched)        something to time
    Timer, CudaTimer                        prepare(entry) -> a function that gives the seconds of one call
    copies_of(size, cache, most) -> int
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Something to measure.

    Attributes:
        name: unique in its comparison.
        make: from the number of a copy to a call on data of its own, which it allocates.
        work: of one call, in bytes or in operations as the unit of the comparison has it. Entries that do the same
            have the same, so that a ratio of rates is one of times.
        touched: bytes of data that one call uses, by which copies are counted.
    """

    name: str
    make: Callable[[int], Run]
    work: int
    touched: int


class Timer(Protocol):
    """Prepares an entry once and times it as often as asked."""

    def prepare(self, entry: Entry) -> Callable[[], float]:
        """A function that gives the seconds of one call."""
        ...


class CudaTimer:
    """CUDA graphs over rotated copies of the data.

    Args:
        most: copies of the data of one entry, where it is small.
    """

    def __init__(self, most: int = 64) -> None:  # noqa: D107
        self._cache: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._most = most

    def copies(self, entry: Entry) -> int:
        """How many copies of its data are three times as large as the L2 cache."""
        return copies_of(entry.touched, self._cache, self._most)

    def prepare(self, entry: Entry) -> Callable[[], float]:
        """Capture the calls on all copies, and replay them once."""
        runs = [entry.make(number) for number in range(self.copies(entry))]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # the first call compiles, or chooses an algorithm
                runs[0]()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        graph.replay()
        torch.cuda.synchronize()

        def seconds() -> float:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3 / len(runs)

        return seconds


def copies_of(size: int, cache: int, most: int) -> int:
    """How many copies of `size` bytes exceed three times the cache: at least two, at most `most`.

    >>> copies_of(10, 50, 64), copies_of(1000, 50, 64), copies_of(1, 50, 64)
    (16, 2, 64)
    """
    return max(2, min(most, 3 * cache // max(size, 1) + 1))
