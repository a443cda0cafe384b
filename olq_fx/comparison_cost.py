"""What a call costs: its time, and the most memory that is in use while it runs.

API:
    latency_ms(call, device, repeat) -> float
    peak_bytes(model, call, device) -> int
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from olq_fx.testing_memory import live_bytes, record_allocations


def latency_ms(call: Callable[[], object], device: torch.device, repeat: int) -> float:
    """The median time of `repeat` calls in milliseconds, after one that is not counted."""
    call()
    times = []
    for _ in range(repeat):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def peak_bytes(model: nn.Module, call: Callable[[], object], device: torch.device) -> int:
    """Bytes of the model's parameters and buffers, and the most that one call allocates beside them."""
    held = live_bytes(model)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        _wait(device)
        return held + torch.cuda.max_memory_allocated(device) - before
    with record_allocations() as allocations, allocations.mark("call"):
        call()
    course = [allocated for _, allocated in allocations.course]
    return held + max(course, default=0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
