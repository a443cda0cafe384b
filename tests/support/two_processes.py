"""Run a function in two processes that are connected by gloo, and hand on what went wrong in either."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2
SECONDS = 240


def in_two_processes(work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Call `work(rank, *arguments)` in each.

    Raises:
        AssertionError: it failed in one of them; the message has its traceback.
    """
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_one, args=(work, rank, str(folder), arguments), daemon=True) for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    failed = [path.read_text() for path in sorted(folder.glob("failed-*"))]
    assert not failed, "\n".join(failed)
    assert not hung, f"{len(hung)} processes still waited after {SECONDS} s"
    assert [process.exitcode for process in processes] == [0] * WORLD


def _one(work: Callable[..., None], rank: int, folder: str, arguments: tuple[Any, ...]) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        work(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # threads of gloo may outlive their group, and end the interpreter's own exit with an abort
    except BaseException:
        Path(folder, f"failed-{rank}").write_text(f"process {rank}:\n{traceback.format_exc()}")
        sys.exit(1)
