"""How kernels are compared with peers on a GPU; what may be timed is in `gpu_parts`, what times is `olq_fx.gpu_timing`.

Entries of one comparison are measured in turn, and medians are compared. What times an entry is given from outside
(`Timer`), so that all else can be tested without a GPU.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from olq_fx.gpu_timing import Entry, Timer

_SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}


@dataclasses.dataclass(frozen=True)
class Target:
    """What the first entry of a comparison is to reach.

    Attributes:
        least: of its rate over that of the peer, or of its rate.
        against: the name of the peer; "" for the rate itself, in the unit of the comparison.
    """

    least: float
    against: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An entry of ours, which is first, with peers.

    Attributes:
        title: what is done, with its shape.
        entries: ours, then peers.
        unit: of the rates: `GB/s` or `TFLOP/s`.
        targets: of the first entry.
        check: raises AssertionError where the first entry computes something wrong; called before anything is timed.
    """

    title: str
    entries: tuple[Entry, ...]
    unit: str
    targets: tuple[Target, ...] = ()
    check: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured ratio.

    Attributes:
        title, entry: what was measured.
        seconds: the median of one call.
        fastest: the least.
        rate: bytes or operations a second, in `unit`.
        peer: what it is compared with; "" for the rate by itself.
        ratio: its rate over that of the peer; None without a peer.
        target: the least that is wanted of the ratio, or of the rate; None where nothing is.
        reached: whether it is there; None without a target, and where its peer does not run here.
    """

    title: str
    entry: str
    seconds: float
    fastest: float
    rate: float
    unit: str
    peer: str = ""
    ratio: float | None = None
    target: float | None = None
    reached: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def cells(self) -> tuple[str, ...]:
        """For people, as `COLUMNS` has them."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        said = {True: "reached", False: "MISSED", None: "not measured"}[self.reached]
        wanted = "" if self.target is None else f"{said}: {self.target:g}"
        rate = f"{self.rate:.0f} {self.unit}"
        return (self.title, self.entry, f"{1e6 * self.seconds:.1f}", rate, self.peer, ratio, wanted)


COLUMNS = ("what", "entry", "us", "rate", "peer", "ratio of rates", "target")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of one comparison, why peers are missing, and what went wrong with our own entry."""

    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def measure(comparison: Comparison, timer: Timer, rounds: int) -> Measured:
    """Check ours, prepare all, time them in turn. A peer that does not run is a note, our own failure an error."""
    ours, *peers = comparison.entries
    try:
        if comparison.check is not None:
            comparison.check()
        prepared = {ours.name: timer.prepare(ours)}
    except Exception as error:  # the other comparisons are to be measured all the same
        return Measured(errors=(f"{comparison.title}: {_said(error)}",))
    notes = []
    for peer in peers:
        try:
            prepared[peer.name] = timer.prepare(peer)
        except Exception as error:  # a peer that does not run here is a finding
            notes.append(f"{comparison.title}: {peer.name} does not run here ({_said(error)})")
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(rounds):
        for name, seconds in prepared.items():
            times[name].append(seconds())
    return Measured(tuple(figures_of(comparison, times)), tuple(notes))


def figures_of(comparison: Comparison, times: dict[str, list[float]]) -> list[Figure]:
    """One figure for each target and for each other peer that ran, then one for the rate of each peer."""
    ours, *peers = (_rated(comparison, entry, times[entry.name]) for entry in comparison.entries if entry.name in times)
    by_name: dict[str, Figure | None] = {peer.entry: peer for peer in peers}
    found = [_against(ours, by_name.pop(target.against, None), target) for target in comparison.targets]
    found += [_against(ours, peer, None) for peer in by_name.values()]
    return [*(found or [ours]), *peers]


def _rated(comparison: Comparison, entry: Entry, times: Sequence[float]) -> Figure:
    seconds = statistics.median(times)
    rate = entry.work / seconds / _SCALES[comparison.unit]
    return Figure(comparison.title, entry.name, seconds, min(times), rate, comparison.unit)


def _against(ours: Figure, peer: Figure | None, target: Target | None) -> Figure:
    """`ours` beside a peer or a target; a peer that a target names and that did not run leaves both open."""
    ratio = None if peer is None else ours.rate / peer.rate
    reached = None
    if target is not None and (peer is not None or not target.against):
        reached = (ours.rate if ratio is None else ratio) >= target.least
    return dataclasses.replace(
        ours,
        peer=peer.entry if peer is not None else target.against if target is not None else "",
        ratio=ratio,
        target=None if target is None else target.least,
        reached=reached,
    )


def measure_all(
    comparisons: Sequence[Callable[[], Comparison]],
    timer: Timer,
    rounds: int,
    limit: float,
    clock: Callable[[], float] = time.monotonic,
    after: Callable[[], object] = lambda: None,
) -> Measured:
    """Measure one comparison after the other until `limit` seconds are over; what is left then is an error by name.

    Args:
        comparisons: each is made when its turn comes.
        timer: what times.
        rounds: how often each entry is timed.
        limit: seconds, after which nothing more is begun.
        clock: tells the time.
        after: called after each, to free what it held.
    """
    started = clock()
    figures: list[Figure] = []
    notes: list[str] = []
    errors: list[str] = []
    for number, make in enumerate(comparisons):
        if clock() - started > limit:
            errors.append(f"{len(comparisons) - number} of {len(comparisons)} comparisons not measured: time is up")
            break
        try:
            found = measure(make(), timer, rounds)
        except Exception as error:  # its data could not be made
            found = Measured(errors=(f"comparison {number}: {_said(error)}",))
        figures += found.figures
        notes += found.notes
        errors += found.errors
        after()
    return Measured(tuple(figures), tuple(notes), tuple(errors))


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
