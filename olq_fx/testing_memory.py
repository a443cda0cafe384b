"""What memory tensors hold: a census of the storages that are alive, and a record of every allocation on the CPU."""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_STDERR = 2
_ANNOUNCEMENT = re.compile(rb"USDT:.* profiler_(start|stop)$")


@dataclasses.dataclass(frozen=True, slots=True)
class StorageRecord:
    """One storage that is alive.

    Attributes:
        pointer: address of its first byte.
        bytes: its size.
        device: where it lies.
        tensors: shape and dtype of each tensor that was found to look into it.
    """

    pointer: int
    bytes: int
    device: torch.device
    tensors: tuple[str, ...]


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold the data of `tensor`: itself, or the parts of a converted weight."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from plain_tensors(getattr(tensor, name))


def storage_census(of: nn.Module | None = None) -> dict[int, StorageRecord]:
    """Every storage that is alive, by its address.

    A storage that several tensors share (ties, views) is counted once, at its whole size; one without memory (meta,
    empty, fake tensors) is left out. Tensors that only C++ code holds (saved for backward by a built-in function) are
    not seen.

    Args:
        of: look only at the parameters and buffers of this module; by default at all tensors in the process, after
            `gc.collect()`.
    """
    if of is None:
        gc.collect()
        found = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor)]
    else:
        found = [*of.parameters(), *of.buffers()]
    seen: dict[int, tuple[torch.UntypedStorage, list[str]]] = {}
    for outer in found:
        for tensor in _with_memory(outer):
            storage = tensor.untyped_storage()
            about = seen.setdefault(storage.data_ptr(), (storage, []))[1]
            about.append(f"{tuple(tensor.shape)} {tensor.dtype}")
    return {
        pointer: StorageRecord(pointer, storage.nbytes(), storage.device, tuple(about))
        for pointer, (storage, about) in seen.items()
    }


def _with_memory(outer: Tensor) -> Iterator[Tensor]:
    try:
        for tensor in plain_tensors(outer):
            # A fake tensor warns when it is asked for its address.
            if hasattr(tensor, "fake_mode") or tensor.layout != torch.strided:
                continue
            if tensor.untyped_storage().data_ptr():
                yield tensor
    except (RuntimeError, NotImplementedError, AttributeError):
        # Functional and half-built tensors of a compiler refuse the question and hold no memory of their own.
        return


def live_bytes(of: nn.Module | None = None) -> int:
    """Bytes of all storages of `storage_census(of)`."""
    return sum(record.bytes for record in storage_census(of).values())


@dataclasses.dataclass(slots=True)
class Allocations:
    """The course of allocated bytes within `record_allocations`, relative to its beginning.

    Attributes:
        course: (name of the last mark, bytes allocated after the event) for each event, in order.
    """

    course: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def mark(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A context: events within it are found under `name`."""
        return torch.profiler.record_function(f"olq_fx.mark:{name}")

    def peak(self, name: str) -> int:
        """The most bytes that were allocated at once within the mark `name`."""
        return max(self._within(name))

    def at_start(self, name: str) -> int:
        """Bytes that were allocated when the mark `name` began."""
        first = next(index for index, (mark, _) in enumerate(self.course) if mark == name)
        return self.course[first - 1][1] if first else 0

    def at_end(self, name: str) -> int:
        """Bytes that were allocated when the mark `name` ended."""
        return self._within(name)[-1]

    def _within(self, name: str) -> list[int]:
        found = [allocated for mark, allocated in self.course if mark == name]
        if not found:
            raise KeyError(f"nothing was allocated within the mark {name!r}")
        return found


@contextlib.contextmanager
def record_allocations() -> Iterator[Allocations]:
    """Record every allocation and release of CPU tensors, by whatever operator, for the peak of a function.

    The result is filled when the context ends. A release counts only where the allocation happened inside the context
    too, so what is to be freed must be built inside:

        with record_allocations() as allocations:
            model = build()
            with allocations.mark("quantize"):
                olq_fx.quantize_(model, "fp8_per_block")
        extra = allocations.peak("quantize") - allocations.at_start("quantize")
    """
    result = Allocations()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _without_announcements():
        profiler.start()
    try:
        yield result
    finally:
        with _without_announcements():
            profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    result.course.extend(_course(events))


@contextlib.contextmanager
def _without_announcements() -> Iterator[None]:
    """Keep what the profiler announces of its start and stop from the standard error; all else is passed on.

    It writes to the file descriptor. Its own switch is read once, and silences its errors as well.
    """
    try:
        kept = os.dup(_STDERR)
    except OSError:  # closed: nobody reads it
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)
            written.seek(0)
            for line in written:
                if not _ANNOUNCEMENT.match(line):
                    os.write(_STDERR, line)


def _course(events: list[dict[str, object]]) -> Iterator[tuple[str, int]]:
    """Replay the memory events of a profiler's trace in order of time, under the marks that were open then."""
    marks: list[tuple[float, float, str]] = []
    changes: list[tuple[float, int, int, int]] = []
    for event in events:
        name = str(event.get("name"))
        when = float(str(event.get("ts", 0)))
        if name.startswith("olq_fx.mark:") and "dur" in event:
            marks.append((when, when + float(str(event["dur"])), name.removeprefix("olq_fx.mark:")))
        elif name == "[memory]":
            arguments = event["args"]
            assert isinstance(arguments, dict)
            changes.append((when, arguments["Ev Idx"], arguments["Addr"], arguments["Bytes"]))
    held: dict[int, int] = {}
    total = 0
    for when, _, address, size in sorted(changes):
        if size > 0:
            held[address] = size
            total += size
        else:
            total -= held.pop(address, 0)
        yield next((name for start, end, name in reversed(marks) if start <= when <= end), ""), total
